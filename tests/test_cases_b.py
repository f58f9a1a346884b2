"""Reported cases about memory estimators (U015 to U023): every byte has a name, a count, a source, and no hidden multiplier."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from torch import Tensor, nn
from typer.testing import CliRunner

from api.app import create_app
from api.cli.main import app
from api.engine import Engine
from api.settings import Settings
from planner.strategy import plan_from_strategy
from profiler.capture import capture_module, example_tokens
from profiler.decoder_graph import decoder_graph
from profiler.hf import DecoderConfig, adapt
from profiler.models import build_model
from profiler.models.mlp import MLP, MixtureOfExperts
from simulator.cost_model import CostModel
from simulator.memory_report import memory_report
from simulator.rank_memory import plan_memory
from specs.graph import ModelGraph
from specs.memory import MemoryReport
from specs.training import PRECISIONS, TrainingSpec
from specs.units import GIB
from tests.case_models import CONFIGS, case_graph, cluster_of

WORKLOAD = TrainingSpec(global_batch=8, seq_len=2048)


def memory(*args: str) -> Any:
    result = CliRunner().invoke(app, ["memory", *args, "--json"])
    assert result.exit_code == 0, (result.stdout, result.stderr)
    return json.loads(result.stdout)


# --- U015, DeepSpeed's estimator ---------------------------------------------------------------------------------------


def test_u015_all_six_figures_of_deepspeeds_estimator() -> None:
    """18 B per parameter, GiB, 1.5 x on the host. The tool printed '6805M', its figures are those of 6,805.35 M."""
    report = memory(
        "--params", "6805.35e6", "--largest-layer-params", "131.072e6", "--devices", "4", "--precision", "bf16_mixed_fp32_grad",
        "--host-buffer-factor", "1.5",
    )  # fmt: skip
    printed = {
        row["offload"]: (round(row["device_bytes"] / GIB, 2), round(row["host_bytes"] / GIB, 2)) for row in report["offload"]
    }
    assert printed == {
        "optimizer and weights": (0.49, 171.13),
        "optimizer": (3.66, 152.11),
        "none": (29.01, 2.93),
    }
    assert report["bytes_per_param"] == 18
    assert all("1.5 for buffers" in row["formula_host"] for row in report["offload"])


def test_u015_nothing_is_multiplied_unasked() -> None:
    report = memory("--params", "1e9", "--largest-layer-params", "1e8", "--devices", "4", "--precision", "bf16_mixed_fp32_grad")
    hosts = {row["offload"]: row["host_bytes"] for row in report["offload"]}
    assert hosts["optimizer and weights"] == 18e9
    assert hosts["optimizer"] == 16e9
    assert {row["host_buffer_factor"] for row in report["offload"]} == {1.0}


def test_u015_buffers_and_activations_come_on_top_of_model_states() -> None:
    """The complaint: states alone are no peak. The report of a strategy adds gathered weights, buffers and activations by name."""
    model = CostModel(case_graph("llama-1-7b"), cluster_of("a100_sxm_40gb", 4), WORKLOAD)
    plan = plan_from_strategy("zero=3 micro_batch=1", model.graph, model.cluster, model.workload, cost_model=model)
    report = memory_report(model, plan)
    (rank,) = report.ranks
    states = report.states[3].device_bytes
    held = sum(rank.terms.get(name, 0.0) for name in ("params", "grads", "optimizer"))
    assert held <= states * (1 + 1e-9)  # the last gradients are not there yet at the peak
    assert rank.peak_bytes == pytest.approx(sum(rank.terms.values()))
    assert rank.peak_bytes - held > rank.terms["activations"] > 0
    assert {"gathered", "activations"} <= set(rank.terms)


# --- U017, U018, U022: conventions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_u017_every_term_of_every_stage_and_precision(precision: str, zero: int) -> None:
    """Terms add up, name dtype, count, split and source, and equal what the simulated rank holds at the optimizer step."""
    workload = TrainingSpec(global_batch=4, seq_len=128, precision=precision)  # one micro-batch a rank
    model = CostModel(small_graph(), cluster_of("h100_sxm", 4), workload)
    states = memory_report(model).states[zero]
    assert states.zero == zero
    assert states.device_bytes == pytest.approx(sum(term.device_bytes for term in states.terms))
    for term in states.terms:
        assert term.device_bytes == pytest.approx(term.params * term.bytes_per_param / term.shards)
        assert term.dtype
        assert term.source
        assert f"ZeRO {zero}" in term.source or term.what == "own shard of weights"
    strategy = f"dp=4 micro_batch=1 zero={zero}"
    plan = plan_from_strategy(strategy, model.graph, model.cluster, workload, cost_model=model)
    assert states.device_bytes == pytest.approx(at_optimizer_step(model, plan), rel=1e-9)


@lru_cache(maxsize=1)
def small_graph() -> ModelGraph:
    return decoder_graph(adapt({**CONFIGS["llama-1-7b"], "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2816}))


def at_optimizer_step(model: CostModel, plan: Any) -> float:
    """What the walk through the rank's actions holds when the optimizer runs."""
    from simulator.memory import RankMemory
    from simulator.runtime_rules import memory_rules_for
    from simulator.stage_cost import stage_cost
    from simulator.step import pipeline_rows

    (pipeline,) = plan.pipelines
    cost = stage_cost(model, plan, pipeline, pipeline.stages[0])
    walk = RankMemory(
        {0: cost}, pipeline_rows(plan, pipeline)[0], num_stages=1, options=plan.collectives, rules=memory_rules_for(model.cluster)
    )
    walk.run()
    return walk.held_at_the_end


def test_u017_gradients_are_split_from_stage_2_on_and_stage_1_is_there() -> None:
    report = memory_report(CostModel(case_graph("llama-1-7b"), cluster_of("a100_sxm_80gb", 8), WORKLOAD))
    shards = {(states.zero, term.what): term.shards for states in report.states for term in states.terms}
    assert [shards[zero, "gradients"] for zero in range(4)] == [1, 1, 8, 8]
    assert [shards[zero, "optimizer states"] for zero in range(4)] == [1, 8, 8, 8]
    assert [shards[zero, "weights"] for zero in range(4)] == [1, 1, 1, 8]


@pytest.mark.parametrize(
    ("precision", "total"), [("bf16_mixed", 16), ("bf16_mixed_fp32_grad", 18), ("bf16_mixed_fp32_accumulation", 20), ("fp32", 16)]
)
def test_u018_the_convention_is_an_input_and_is_printed(precision: str, total: int) -> None:
    """16, 18 or 20 B per parameter: which dtypes make it is said in the report."""
    report = memory("--params", "1e9", "--precision", precision)
    assert report["bytes_per_param"] == total
    assert report["recipe"].startswith(f"{total} bytes per parameter")
    assert report["states"][0]["device_bytes"] == total * 1e9
    text = CliRunner().invoke(app, ["memory", "--params", "1e9", "--precision", precision]).stdout
    assert f"{total} bytes per parameter" in " ".join(text.split())


def test_u018_accumulation_buffer_reaches_the_peak() -> None:
    """The 20 B recipe is no label: the simulated rank holds 4 B more for every parameter."""
    graph, cluster = small_graph(), cluster_of("h100_sxm", 1)
    peaks = []
    for precision in ("bf16_mixed", "bf16_mixed_fp32_accumulation"):
        workload = TrainingSpec(global_batch=8, seq_len=128, precision=precision)
        model = CostModel(graph, cluster, workload)
        plan = plan_from_strategy("micro_batch=1", graph, cluster, workload, cost_model=model)
        peaks.append(at_optimizer_step(model, plan))
    assert peaks[1] - peaks[0] == pytest.approx(4 * graph.num_params())


def test_u022_recipe_of_a_70b_fine_tune() -> None:
    """Pure bf16 AdamW 8 B = 564 GB (525 GiB), mixed 16 B = 1,129 GB, weights alone 141 GB."""
    cluster = cluster_of("h100_sxm", 8)

    def report(**fields: Any) -> MemoryReport:
        workload = TrainingSpec(global_batch=8, seq_len=2048, **fields)
        return memory_report(CostModel(case_graph("llama-3.1-70b"), cluster, workload))

    pure, mixed = report(precision="bf16_pure", optimizer={"state_dtype": "bfloat16"}), report(precision="bf16_mixed")
    whole = [states.states[0].device_bytes for states in (pure, mixed)]
    assert pure.bytes_per_param == 8
    assert whole[0] == pytest.approx(564e9, rel=0.02)
    assert whole[0] / GIB == pytest.approx(525, rel=0.02)
    assert whole[1] == pytest.approx(1129e9, rel=0.02)
    weights = next(term for term in pure.states[0].terms if term.what == "weights")
    assert weights.device_bytes == pytest.approx(141e9, rel=0.02)
    assert "optimizer states 4 (bfloat16)" in pure.recipe


# --- U021: mixtures of experts ----------------------------------------------------------------------------------------------


def moe_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, **changes,
    }  # fmt: skip


def layer_activations(graph: ModelGraph) -> dict[str, dict[str, float]]:
    model = CostModel(graph, cluster_of("h100_sxm", 1), TrainingSpec(global_batch=1, seq_len=1024))
    return {unit.block: unit.saved_by_class for unit in memory_report(model).units}


def test_u021_activations_follow_expert_width_and_top_k() -> None:
    """Expert products keep tokens x top_k x (input h + three of the expert's width), whatever the number of experts."""
    tokens, hidden = 1024, 1024

    def kept(**changes: Any) -> float:
        found = layer_activations(decoder_graph(adapt(moe_config(**changes))))["layers"]
        return sum(found.values())

    base = kept()
    assert kept(num_local_experts=16) - base == pytest.approx(0, abs=0.02 * base)
    wider = kept(intermediate_size=4096) - base
    per_width = wider / (2048 * tokens * 2)  # bytes per unit of width, token and chosen expert
    assert per_width == pytest.approx(2 * round(per_width / 2), rel=1e-6)  # whole bf16 tensors of the expert's width
    assert 6 <= per_width <= 8  # gate, up and their product, and the activation where it is kept apart
    more = kept(num_experts_per_tok=4) - base
    assert more == pytest.approx(2 * tokens * (2048 * per_width + 2 * 2 * hidden), rel=0.10)


class WithSharedExpert(nn.Module):
    """Routed experts and one that every token passes."""

    def __init__(self, settings: DecoderConfig, width: int) -> None:
        super().__init__()
        self.routed, self.shared = MixtureOfExperts(settings), MLP(settings.replace(ffn=width, experts=0, top_k=0))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.routed(hidden) + self.shared(hidden)


def patterned(dense: int, moe: int, shared_width: int | None) -> ModelGraph:
    """A decoder whose first layers are dense and whose others hold experts, captured as a user's own module."""
    settings = adapt(moe_config(num_hidden_layers=dense + moe))
    with torch.device("meta"):
        model = build_model(settings)
        for index in range(dense + moe):
            layer = model.layers[str(index)]
            if index < dense:
                layer.mlp = MLP(settings.replace(ffn=4096, experts=0, top_k=0))
            elif shared_width is not None:
                layer.mlp = WithSharedExpert(settings, shared_width)
    return capture_module(model, example_tokens(), name="patterned")


def test_u021_dense_layers_experts_and_shared_experts_are_each_their_own() -> None:
    """Not one dense MLP for all: dense layers as dense ones, the shared expert by its own width on top of the routed ones."""
    tokens = 1024

    def by_kind(graph: ModelGraph) -> dict[bool, float]:
        """Kept bytes of a layer, by whether it has experts."""
        found = layer_activations(graph)
        layers = {name: classes for name, classes in found.items() if "attention" in classes}
        return {("grouped_gemm" in classes): sum(classes.values()) for classes in layers.values()}

    plain, small, large = (by_kind(patterned(1, 2, width)) for width in (None, 512, 1024))
    assert set(plain) == {False, True}
    llama = {**moe_config(), "model_type": "llama", "intermediate_size": 4096}
    dense, routed = (sum(layer_activations(decoder_graph(adapt(config)))["layers"].values()) for config in (llama, moe_config()))
    assert plain[False] == dense
    assert plain[True] == pytest.approx(routed)
    assert plain[True] < small[True] < large[True]
    assert small[False] == large[False] == dense
    per_width = (large[True] - small[True]) / (512 * tokens * 2)
    assert per_width in (3, 4)  # gate, up, their product, and the activation where it is kept apart


# --- U023: before anything runs ------------------------------------------------------------------------------------------------


def test_u023_memory_over_http_without_a_device(tmp_path: Path) -> None:
    body = {
        "model": small_graph().to_dict(), "cluster": {"name": "one", "nodes": [{"preset": "dgx_h100", "count": 1}]},
        "workload": {"global_batch": 8, "seq_len": 1024}, "strategy": "zero=3 micro_batch=1 recompute=full",
    }  # fmt: skip
    settings = Settings(database_url=f"sqlite:///{tmp_path}/db.sqlite", local_devices=0)
    with TestClient(create_app(settings, Engine()), base_url="http://127.0.0.1") as client:
        answer = client.post("/v1/memory", json=body)
        assert answer.status_code == 200, answer.text
        report = answer.json()
        assert report["fits"] is True
        assert [states["zero"] for states in report["states"]] == [0, 1, 2, 3]
        assert report["ranks"][0]["reserved_bytes"] > report["ranks"][0]["peak_bytes"]
        wrong = client.post("/v1/memory", json={**body, "strategy": "tp=3"})
        assert wrong.status_code == 422
        assert {error["code"] for error in wrong.json()["errors"]} >= {"heads_divisible_by_tp", "tp_inside_node"}


def test_u023_the_memory_answer_is_that_of_the_full_estimate() -> None:
    model = CostModel(case_graph("llama-1-7b"), cluster_of("a100_sxm_80gb", 8), WORKLOAD)
    for strategy in ("zero=3 micro_batch=1", "pp=4 tp=2 micro_batch=1", "tp=8 sequence_parallel=true recompute=full"):
        plan = plan_from_strategy(strategy, model.graph, model.cluster, WORKLOAD, cost_model=model)
        prediction = Engine().estimate(model.graph, model.cluster, WORKLOAD, plan, None)
        assert plan_memory(model, plan) == [rank.memory for rank in prediction.ranks]
