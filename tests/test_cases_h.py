"""Reported cases about the network (U083 to U088): what crosses which link, and on which fabric every number rests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from executor.compare import compare
from planner.search import SearchOptions, search
from planner.strategy import parse_strategy, plan_from_strategy
from profiler.catalogue import resolve_cluster
from simulator.network import Network
from simulator.predict import predict
from specs.cluster import ClusterSpec
from specs.measurement import Measurement, RankMeasurement
from specs.prediction import Prediction
from specs.training import TrainingSpec
from specs.units import GIB
from tests.case_models import case_graph, cluster_of, graph_file

TEN_GBIT = {"kind": "Ethernet", "bandwidth_gbit_s": 10, "latency_us": 50}


# --- U083: ZeRO-3 over a thin link ------------------------------------------------------------


def a10_nodes(nodes: int) -> ClusterSpec:
    return cluster_of("a10", 2, nodes, inter=TEN_GBIT)


def zero_3(nodes: int) -> Prediction:
    """Qwen2-1.5B; the report gives no batch: one sequence of 2,048 tokens a device."""
    cluster, workload = a10_nodes(nodes), TrainingSpec(global_batch=2 * nodes, seq_len=2048)
    graph = case_graph("qwen2-1.5b")
    return predict(graph, cluster, workload, plan_from_strategy("zero=3 recompute=full", graph, cluster, workload))


def test_u083_zero_3_moves_6_9_gb_over_the_node_link() -> None:
    """Two gathers and a reduction of 3.1 GB, 3/4 of each: 6.9 GB, at least 5.6 s at 10 Gbit/s; the extra seconds seen are 6.2."""
    one, two = zero_3(1), zero_3(2)
    assert case_graph("qwen2-1.5b").num_params() == pytest.approx(1.544e9, rel=0.02)
    assert two.link_bytes["dp"] == pytest.approx(6.9e9, rel=0.02)
    at_line_rate = two.link_bytes["dp"] / 1.25e9
    assert at_line_rate == pytest.approx(5.6, rel=0.02)
    extra = two.waterfall["dp_comm"] - one.waterfall["dp_comm"]
    assert extra > at_line_rate
    assert extra == pytest.approx(8.68 - 2.46, rel=0.20)
    # with the step on one node as the calibration point, the step on two nodes
    assert 2.46 + extra == pytest.approx(8.68, rel=0.20)
    assert two.waterfall["dp_comm"] > 0.9 * two.step_time_s  # bandwidth it is


def test_u083_the_planner_shards_states_only_or_inside_the_node() -> None:
    """On all four devices ZeRO-1 or less, or shards that stay in a node; 16 bytes a parameter do not fit an A10 whole."""
    graph, workload = case_graph("qwen2-1.5b"), TrainingSpec(global_batch=4, seq_len=2048)
    options = SearchOptions(strategy="dp=4 tp=1 pp=1", top=8)
    answer = search(graph, a10_nodes(2), workload, options=options)
    assert answer.plan is not None
    assert answer.prediction is not None
    chosen = parse_strategy(answer.plan.strategy)
    assert chosen.zero <= 1 or chosen.shard_group == 2
    assert answer.prediction.step_time_s < 0.8 * zero_3(2).step_time_s
    free = search(graph, a10_nodes(2), workload, options=SearchOptions(top=0))
    assert free.prediction is not None
    assert free.prediction.step_time_s <= answer.prediction.step_time_s


# --- U087: an NVLink bridge ------------------------------------------------------------


def all_reduce_s(group: dict[str, object]) -> float:
    cluster = resolve_cluster(ClusterSpec.parse({"name": "pair", "nodes": [{"count": 1, **group}]}))
    network = Network(cluster)
    return network.collective("all_reduce", GIB, network.shape((0, 1))).seconds


def test_u087_all_reduce_over_the_bridge() -> None:
    """1 GiB on two bridged H100 PCIe: 9.31 ms measured. The preset's rate is the same report's at 4 GiB."""
    assert all_reduce_s({"preset": "h100_pcie_nvlink_pair"}) == pytest.approx(9.31e-3, rel=0.10)


def test_u087_without_the_bridge_it_is_pcie() -> None:
    bare = {"device": "h100_pcie", "devices_per_node": 2}
    cluster = resolve_cluster(ClusterSpec.parse({"name": "pair", "nodes": [{"count": 1, **bare}]}))
    link = cluster.nodes[0].intra
    assert link is not None
    assert link.kind == "PCIe"
    assert link.bandwidth_bytes_per_s <= 64e9  # PCIe 5.0 x16
    assert all_reduce_s(bare) >= GIB / 64e9
    assert all_reduce_s(bare) > 2 * all_reduce_s({"preset": "h100_pcie_nvlink_pair"})


@pytest.mark.xfail(strict=True, reason="datasheet rate alone: 4.5 ms; 9.31 ms measured (0.39 of it)")
def test_u087_from_the_datasheet_alone() -> None:
    bridge = {"kind": "NVLink bridge", "bandwidth_gbyte_s": 300, "latency_us": 30}
    assert all_reduce_s({"device": "h100_pcie", "devices_per_node": 2, "intra": bridge}) == pytest.approx(9.31e-3, rel=0.10)


# --- U088: the fabric is part of every number ------------------------------------------------------------


@pytest.mark.parametrize("gbit_s", [200, 400])
def test_u088_the_fabric_stands_beside_the_prediction(gbit_s: int) -> None:
    inter = {"kind": "IB", "bandwidth_gbit_s": gbit_s, "latency_us": 30}
    cluster, workload = cluster_of("a100_sxm_80gb", 8, 2, inter=inter), TrainingSpec(global_batch=16, seq_len=2048)
    graph = case_graph("llama-2-7b")
    found = predict(graph, cluster, workload, plan_from_strategy("zero=3 recompute=full", graph, cluster, workload))
    links = {link.tier: link for link in found.fabric}
    assert links["inter"].bandwidth_bytes_per_s == gbit_s / 8 * 1e9
    assert links["inter"].kind == "IB"
    assert links["intra"].bandwidth_bytes_per_s == 300e9
    assert f"{gbit_s / 8:g} GB/s per node" in links["inter"].text()


def test_u088_a_slower_fabric_is_another_number() -> None:
    """The published utilisation is that of its fabric: half the links, a longer step, a lower MFU."""
    graph, workload = case_graph("llama-2-7b"), TrainingSpec(global_batch=16, seq_len=2048)

    def mfu(gbit_s: int) -> float:
        cluster = cluster_of("a100_sxm_80gb", 8, 2, inter={"kind": "IB", "bandwidth_gbit_s": gbit_s, "latency_us": 30})
        found = predict(graph, cluster, workload, plan_from_strategy("zero=3 recompute=full", graph, cluster, workload))
        assert found.mfu is not None
        return found.mfu

    assert mfu(200) < 0.8 * mfu(400)


def test_u088_every_answer_carries_it(tmp_path: Path) -> None:
    """The estimate of the command line, in both forms, the plan's answer, and the record that compares a run."""
    cluster = {"name": "two", "nodes": [{"count": 2, "device": "a100_sxm_80gb", "devices_per_node": 8, "inter": TEN_GBIT}]}
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    (tmp_path / "workload.json").write_text(json.dumps({"global_batch": 16, "seq_len": 2048}))
    given = ["--model", graph_file("llama-2-7b", tmp_path), "--cluster", str(tmp_path / "cluster.json")]
    given += ["--workload", str(tmp_path / "workload.json")]
    estimate = ["estimate", *given, "--strategy", "zero=3 recompute=full"]
    document = json.loads(CliRunner().invoke(app, [*estimate, "--json"]).stdout)
    assert [link["tier"] for link in document["prediction"]["fabric"]] == ["intra", "inter"]
    text = " ".join(CliRunner().invoke(app, estimate).stdout.split())
    assert "fabric: inter Ethernet 1.25 GB/s per node" in text
    plan = ["plan", *given, "--strategy", "zero=3 tp=1 pp=1 dp=16", "--top", "1", "--json"]
    answer = json.loads(CliRunner().invoke(app, plan).stdout)
    assert answer["prediction"]["fabric"] == document["prediction"]["fabric"]
    prediction = Prediction.parse(document["prediction"])
    run = Measurement(
        plan_hash=prediction.plan_hash, steps=1, step_time_s=1.0, peak_memory_bytes=1.0, step_times_s=(1.0,),
        ranks=(RankMeasurement(rank=0, terms={}, peak_memory_bytes=1.0),),
    )  # fmt: skip
    assert compare(prediction, run).fabric == prediction.fabric


def test_u088_published_runs_are_listed_with_theirs() -> None:
    from planner.validate_runs.runs import rows_of
    from planner.validate_runs.validate import predictions_csv, validate_rows
    from profiler.decoder_graph import decoder_graph
    from tests.test_validate_runs import GPT

    text = predictions_csv(validate_rows(rows_of([GPT]), decoder_graph))
    header, row = text.splitlines()[:2]
    assert "fabric" in header.split(",")
    assert "GB/s per node" in row
