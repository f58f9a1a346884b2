"""Step times on devices that jitter and straggle: the replay against the event engine, the draws against their laws."""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import pytest

from planner.strategy import plan_from_strategy
from simulator.cost_model import CostModel
from simulator.predict import simulate
from simulator.stragglers.folding import fold
from simulator.stragglers.jitter import JitterSampler
from simulator.stragglers.monte_carlo import MonteCarlo, distribution_of, ones
from simulator.stragglers.replay import COMPUTE, INTER, INTRA, Replay
from simulator.stragglers.speeds import Speeds
from specs.base import read_mapping
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.plan import Plan
from specs.straggler import Jitter, StragglerModel
from specs.training import TrainingSpec
from tests.blocks import llama_graph
from tests.case_models import case_graph, cluster_of
from tests.plans import gpu_cluster, make_plan

GRAPH = llama_graph()
SHAPES = {
    "pipeline": {"pp": 2, "dp": 4, "num_micro_batches": 4},
    "ddp": {"dp": 4, "tp": 2, "num_micro_batches": 2},
    "zero 3": {"dp": 4, "tp": 2, "zero": 3, "num_micro_batches": 2},
    "zero 1 in a pipeline": {"pp": 2, "dp": 2, "tp": 2, "zero": 1, "num_micro_batches": 4},
}


def model_of(plan: Plan, cluster: ClusterSpec | None = None) -> CostModel:
    workload = TrainingSpec(global_batch=plan.global_batch, seq_len=plan.seq_len)
    return CostModel(GRAPH, cluster or gpu_cluster(8, nodes=2), workload)


def slowed(cluster: ClusterSpec, device: int, factor: float) -> ClusterSpec:
    group = cluster.nodes[0]
    return cluster.replace(nodes=(group.replace(slowdown={device: factor}),))


@pytest.mark.parametrize("shape", SHAPES)
def test_at_nominal_speeds_the_replay_is_the_simulated_step(shape: str) -> None:
    plan = make_plan(GRAPH, **SHAPES[shape])  # type: ignore[arg-type]
    result = simulate(model_of(plan), plan)
    replay = Replay(result)
    assert replay.run(ones(replay.num_places))[0] == pytest.approx(result.step_time_s, rel=1e-12)
    assert replay.run(2 * ones(replay.num_places))[0] <= 2 * result.step_time_s * (1 + 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factor", [1.25, 3.0])
def test_a_slow_device_costs_what_the_event_engine_says(shape: str, factor: float) -> None:
    """The replay keeps how long tasks took beside collectives; the engine works that out anew: 2 % where they overlap."""
    plan = make_plan(GRAPH, **SHAPES[shape])  # type: ignore[arg-type]
    cluster = gpu_cluster(8, nodes=2)
    wanted = simulate(model_of(plan, slowed(cluster, 5, factor)), plan).step_time_s
    stragglers = StragglerModel(slowdown={5: factor})
    found = MonteCarlo(model_of(plan), plan).step_times(stragglers, steps=2)
    assert found == pytest.approx(wanted, rel=0.02)
    in_cluster = MonteCarlo(model_of(plan, slowed(cluster, 5, factor)), plan).step_times(StragglerModel(), steps=2)
    assert in_cluster == pytest.approx(found)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)])
def test_every_schedule_keeps_its_dependencies(schedule: str, chunks: int) -> None:
    graph = llama_graph(layers=6)
    plan = make_plan(graph, pp=2, num_micro_batches=4, schedule=schedule, chunks=chunks)
    workload = TrainingSpec(global_batch=plan.global_batch, seq_len=plan.seq_len)
    wanted = simulate(CostModel(graph, slowed(gpu_cluster(2), 1, 1.7), workload), plan).step_time_s
    found = MonteCarlo(CostModel(graph, gpu_cluster(2), workload), plan).step_times(StragglerModel(slowdown={1: 1.7}), steps=1)
    assert found[0] == pytest.approx(wanted, rel=1e-9)


def test_the_named_replicas_are_the_slowest() -> None:
    """Against every replica played exactly, with far more jitter than devices have: 0.01 % on average, 1 % at worst."""
    graph = llama_graph(layers=6)
    plan = make_plan(graph, pp=4, dp=16, num_micro_batches=6)
    cluster = gpu_cluster(64, nodes=8)
    model = CostModel(graph, cluster, TrainingSpec(global_batch=plan.global_batch, seq_len=plan.seq_len))
    monte_carlo = MonteCarlo(model, plan)
    stragglers = StragglerModel(device_jitter=Jitter(cv=0.2), inter_link_jitter=Jitter(cv=0.3, shape="gamma"))
    item = monte_carlo._pipelines[0]
    assert (item.folding.replicas, item.folding.num_places) == (16, 4)
    draw = Speeds(item.folding, cluster, stragglers, item.work_s).draw(np.random.default_rng(3), 300)
    every = np.max([item.replay.run(draw.at(np.full(300, replica))) for replica in range(16)], axis=0)
    found = monte_carlo.step_times(stragglers, steps=300, seed=3)
    assert (found <= every * (1 + 1e-12)).all()
    assert found.mean() == pytest.approx(every.mean(), rel=1e-4)
    assert found == pytest.approx(every, rel=0.01)
    assert np.mean(np.isclose(found, every, rtol=1e-9)) > 0.95


@pytest.mark.parametrize("jitter", [Jitter(cv=0.05), Jitter(cv=0.5), Jitter(shape="gamma", cv=0.05), Jitter(shape="gamma", cv=0.8)])
def test_draws_follow_their_law(jitter: Jitter) -> None:
    rng = np.random.default_rng(0)
    sampler = JitterSampler(jitter)
    one = sampler.largest(rng, np.ones(1), 200_000)[0]
    assert one.mean() == pytest.approx(1, abs=0.01 * (1 + jitter.cv))
    assert one.std() == pytest.approx(jitter.cv, rel=0.03)
    largest = sampler.largest(rng, np.array([64.0]), 20_000)[0]
    by_hand = sampler.largest(rng, np.ones(64), 20_000).max(axis=0)
    for quantile in (10, 50, 90):
        assert np.percentile(largest, quantile) == pytest.approx(np.percentile(by_hand, quantile), rel=0.02)


def test_the_largest_of_many_normal_factors() -> None:
    """mu + sigma sqrt(2 ln n) bounds it from above and is near for large n."""
    cv, n = 0.01, 4096
    largest = JitterSampler(Jitter(cv=cv)).largest(np.random.default_rng(0), np.array([float(n)]), 20_000)
    bound = 1 + cv * np.sqrt(2 * np.log(n))
    assert bound - 0.006 < largest.mean() < bound


def test_jitter_costs_more_the_more_ranks_meet() -> None:
    stragglers = StragglerModel(device_jitter=Jitter(cv=0.05))

    def slower(dp: int) -> float:
        plan = make_plan(GRAPH, dp=dp, zero=3)
        model = CostModel(GRAPH, gpu_cluster(dp), TrainingSpec(global_batch=plan.global_batch, seq_len=plan.seq_len))
        found = MonteCarlo(model, plan)
        return float(found.step_times(stragglers, steps=2000).mean()) / found.nominal_s

    assert 1 < slower(2) < slower(8) < slower(64)


def test_same_seed_same_steps_and_none_without_causes() -> None:
    plan = make_plan(GRAPH, pp=2, dp=4, num_micro_batches=4)
    found = MonteCarlo(model_of(plan), plan)
    jitter = StragglerModel(device_jitter=Jitter(cv=0.05), pauses={"probability": 0.01, "mean_s": 1.0})  # type: ignore[arg-type]
    assert (found.step_times(jitter, steps=50, seed=1) == found.step_times(jitter, steps=50, seed=1)).all()
    assert (found.step_times(jitter, steps=50, seed=1) != found.step_times(jitter, steps=50, seed=2)).any()
    quiet = found.step_times(StragglerModel(), steps=20)
    assert quiet == pytest.approx(found.nominal_s)
    assert found.alone(StragglerModel()) == {}
    assert set(found.alone(jitter, steps=50)) == {"device jitter", "pauses"}


def test_slow_nodes_hit_their_devices_together() -> None:
    """Each of two nodes slow half the time: a quarter of the steps is quick, whatever the number of devices."""
    plan = make_plan(GRAPH, dp=8)
    stragglers = StragglerModel.parse({"slow_nodes": {"share": 0.5, "factor": 2}})
    found = MonteCarlo(model_of(plan), plan)
    quick = np.mean(found.step_times(stragglers, steps=4000) < 1.01 * found.nominal_s)
    assert quick == pytest.approx(0.25, abs=0.03)
    fleet = StragglerModel.parse({"slow_fleet": {"share": 0.5, "factor": 2}})
    quick = np.mean(found.step_times(fleet, steps=20000) < 1.01 * found.nominal_s)
    assert quick == pytest.approx(0.5**8, abs=0.002)


def test_pauses_add_their_seconds() -> None:
    plan = make_plan(GRAPH, dp=1)
    found = MonteCarlo(model_of(plan, gpu_cluster(1)), plan)
    stragglers = StragglerModel.parse({"pauses": {"probability": 0.1, "mean_s": 2}})
    assert found.step_times(stragglers, steps=20000).mean() == pytest.approx(found.nominal_s + 0.2, rel=0.05)


def test_folding_ties_what_waits_in_every_layer() -> None:
    experts = make_plan(GRAPH, pp=2, dp=4, ep=2)
    model = model_of(experts)
    assert fold(model, experts.pipelines[0]).replicas == 2
    sharded = make_plan(GRAPH, dp=4, tp=2, zero=3)
    assert fold(model, sharded.pipelines[0]).replicas == 1
    assert "move in step" in fold(model, sharded.pipelines[0]).text()


def test_messages_between_nodes_take_the_links_factor() -> None:
    plan = make_plan(GRAPH, pp=2, dp=4, num_micro_batches=4)
    result = simulate(model_of(plan), plan)
    factors = ones(2)
    factors[INTER] = 3
    assert Replay(result, messages=INTER).run(factors)[0] > result.step_time_s
    assert Replay(result, messages=INTRA).run(factors)[0] == pytest.approx(result.step_time_s)
    assert Replay(result).seconds(COMPUTE, 0) > 0


@cache
def large() -> MonteCarlo:
    graph, inter = case_graph("llama-3.1-70b"), {"kind": "IB", "bandwidth_gbit_s": 3200, "latency_us": 20}
    cluster, workload = cluster_of("h100_sxm", 8, 512, inter=inter), TrainingSpec(global_batch=1024, seq_len=4096)
    plan = plan_from_strategy("tp=8 pp=8 dp=64 micro_batch=1 zero=1 recompute=full", graph, cluster, workload)
    return MonteCarlo(CostModel(graph, cluster, workload), plan)


def test_ten_thousand_steps_of_4096_devices() -> None:
    """Under 5 s of CPU; the processor's own time, which others on the machine do not stretch as much."""
    stragglers = StragglerModel.parse(
        {
            "device_jitter": {"cv": 0.02}, "inter_link_jitter": {"cv": 0.05}, "slow_fleet": {"share": 0.005, "factor": 1.1},
            "slow_nodes": {"share": 0.001, "factor": 1.2}, "pauses": {"probability": 1e-6, "mean_s": 1},
        }
    )  # fmt: skip
    found = large()
    start = time.process_time()
    times = found.step_times(stragglers, steps=10_000)
    assert time.process_time() - start < 5
    spread = distribution_of(times, 0)
    assert found.nominal_s < spread.min_s < spread.p50_s < spread.p95_s < spread.p99_s < spread.max_s


def test_of_64_replicas_the_slowest_is_played() -> None:
    """A few slow devices on any of eight stages: the mean is that of all replicas played exactly, to 0.01 %."""
    stragglers = StragglerModel.parse({"device_jitter": {"cv": 0.02}, "slow_fleet": {"share": 0.0005, "factor": 1.1}})
    found = large()
    item = found._pipelines[0]
    draw = Speeds(item.folding, found.cluster, stragglers, item.work_s).draw(np.random.default_rng(5), 200)
    every = np.max([item.replay.run(draw.at(np.full(200, replica))) for replica in range(64)], axis=0)
    assert found.step_times(stragglers, steps=200, seed=5).mean() == pytest.approx(every.mean(), rel=1e-4)


def test_every_violation_of_a_straggler_model_at_once() -> None:
    with pytest.raises(InvalidInput) as error:
        StragglerModel.parse(
            {"device_jitter": {"cv": -1}, "failures": {"device_mtbf_hours": 0}, "slow_nodes": {"share": 2}, "slowdwon": {}}
        )
    codes = {violation.loc[0]: violation for violation in error.value.violations}
    assert set(codes) == {"device_jitter", "failures", "slow_nodes", "slowdwon"}
    assert codes["slowdwon"].nearest == "slowdown"
    with pytest.raises(InvalidInput, match="2 violations"):
        StragglerModel.parse({"slowdown": {-1: 2.0, 3: 0.5}})
    with pytest.raises(InvalidInput, match="2 violations"):
        StragglerModel.parse({"slowdown": {8: 1.5}, "node_slowdown": {2: 1.1}}).check(gpu_cluster(8, nodes=2))


def test_units_of_a_straggler_model(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "s.yaml").write_text("failures: {device_mtbf_hours: 50000, restart_minutes: 10}\ncheckpoints: {save_s: 30}\n")
    model = StragglerModel.parse(read_mapping(tmp_path / "s.yaml"))
    assert (model.failures.device_mtbf_s, model.failures.restart_s) == (1.8e8, 600)
