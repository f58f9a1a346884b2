"""Bounds against the simulation: never above it in time; memory of every unit range equal to the simulated walk."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.assemble import Assembler
from planner.bounds import Bounds, compute_bounds
from planner.layout import pools, whole_cluster
from planner.prices import Prices
from planner.rank_split import longest_rank as whole_unit_bottleneck
from planner.refine import DoesNotFit, Refiner
from planner.sites import Degrees, Place, first_site
from planner.space import Space, enumerate_space
from planner.stage_memory import RangePeaks, stage_peaks, unit_memory
from simulator.cost_model import CostModel
from simulator.factors import UNCALIBRATED, Factors
from simulator.memory import RankMemory
from simulator.predict import fits, predict
from simulator.runtime_rules import memory_rules_for
from simulator.stage_cost import stage_cost
from simulator.step import pipeline_rows
from simulator.unit_cost import RecomputeChoice
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.plan import RecomputeMode
from specs.profile import DeviceProfile, OverlapRecord, Profile, RankSkew
from specs.training import TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster, make_plan

BIG = {"layers": 6, "vocab": 32000, "hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 5632}


def unlike_cluster(
    *, backend: str = "nccl", nodes: tuple[int, int] = (2, 1), slow: bool = False, inter: float = 10.0
) -> ClusterSpec:
    """Nodes of 4 fast and nodes of 4 slow devices; optionally one slowed-down device."""

    def device(name: str, tflops: float, memory_gib: float) -> dict[str, object]:
        return {
            "name": name, "memory_gib": memory_gib, "memory_bandwidth_gbyte_s": 5 * tflops, "sm_count": 100, "tdp_w": 400,
            "price_usd_per_hour": 2, "peak_flop_per_s": {"bfloat16": tflops * 1e12, "float32": tflops * 1e11},
        }  # fmt: skip

    def group(name: str, count: int, intra: float, uplink: float) -> dict[str, object]:
        return {
            "count": count, "device": name, "devices_per_node": 4, "intra": {"bandwidth_gbyte_s": intra, "latency_us": 10},
            "inter": {"bandwidth_gbyte_s": uplink, "latency_us": 20},
        }  # fmt: skip

    groups = [group("fast", nodes[0], 100, inter)]
    if slow:
        groups[0]["slowdown"] = {1: 1.5}
    if nodes[1]:
        groups.append(group("slow", nodes[1], 50, inter / 2))
    types = [device("fast", 300, 40), device("slow", 100, 16)]
    return ClusterSpec.parse({"name": "unlike", "backend": backend, "nodes": groups, "device_types": types})


def profile_with_skew() -> Profile:
    """Ranks that wait for each other, and resources that slow each other down, as measured."""
    skew = (RankSkew(horizon_s=1e-3, excess=0.2, samples=5), RankSkew(horizon_s=0.1, excess=0.1, samples=5))
    overlap = (OverlapRecord(first="compute", second="all_reduce", first_slowdown=1.5, second_slowdown=1.7),)
    return Profile(devices=(DeviceProfile(device="fast", rank_skew=skew, overlap=overlap),))


def bounded(
    graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, profile: Profile | None = None, factors: Factors = UNCALIBRATED
) -> tuple[CostModel, Prices, Space, Bounds]:
    model = CostModel(graph, cluster, workload, profile, factors=factors)
    prices = Prices(model)
    space = enumerate_space(graph, workload, pools(cluster))
    return model, prices, space, compute_bounds(prices, space)


@pytest.mark.parametrize(
    ("sizes", "cluster", "global_batch", "seq_len", "profile"),
    [
        (BIG, unlike_cluster(nodes=(2, 1)), 16, 1024, None),
        (BIG, unlike_cluster(nodes=(4, 0), inter=0.5), 48, 128, None),
        (BIG, unlike_cluster(nodes=(2, 0), slow=True, inter=50), 8, 2048, None),
        (BIG, unlike_cluster(nodes=(2, 1), backend="gloo"), 8, 512, None),
        ({"layers": 10}, unlike_cluster(nodes=(1, 0), backend="gloo"), 16, 128, None),
        ({"layers": 5}, unlike_cluster(nodes=(1, 1), slow=True, inter=2), 24, 256, None),
        ({"layers": 6}, unlike_cluster(nodes=(1, 0), backend="gloo"), 16, 128, profile_with_skew()),
        (BIG, unlike_cluster(nodes=(1, 0)), 16, 1024, profile_with_skew()),
    ],
    ids=["unlike", "slow network", "straggler", "unlike gloo", "small gloo", "small unlike", "skew gloo", "skew"],
)
def test_bounds_hold_for_random_strategies(sizes, cluster, global_batch, seq_len, profile) -> None:
    graph, workload = llama_graph(**sizes), TrainingSpec(global_batch=global_batch, seq_len=seq_len)
    model, prices, space, bounds = bounded(graph, cluster, workload, profile)
    refiner, assembler = Refiner(prices), Assembler(graph, cluster, workload)
    rows = np.flatnonzero(bounds.fits).tolist()
    tightest = np.inf
    for row in random.Random(0).sample(rows, min(30, len(rows))):
        pool = space.layout(row).pool
        found = refiner.refine(space.strategy(row), pool, int(space.rows[row]["num_micro_batches"]))
        if isinstance(found, DoesNotFit):
            continue
        plan = assembler.plan(found.strategy, pool)
        predicted = predict(graph, cluster, workload, plan, cost_model=model)
        assert float(bounds.time_s[row]) <= predicted.step_time_s * (1 + 1e-6), plan.strategy
        assert found.bound_s <= predicted.step_time_s * (1 + 1e-6), plan.strategy
        assert fits(predicted), plan.strategy
        tightest = min(tightest, predicted.step_time_s / max(found.bound_s, float(bounds.time_s[row])) - 1)
    assert tightest < 0.03


def test_rows_that_memory_forbids_do_not_fit() -> None:
    """A row whose least fill is above 1 fits under no split (checked exactly), and the one below may."""
    graph = llama_graph(**{**BIG, "layers": 24})
    cluster, workload = gpu_cluster(4, memory_gib=12.0), TrainingSpec(global_batch=16, seq_len=2048)
    _, prices, space, bounds = bounded(graph, cluster, workload)
    refiner = Refiner(prices)
    forbidden = np.flatnonzero(~bounds.fits & np.isfinite(bounds.fill))
    assert len(forbidden) > 20
    assert bounds.fits.any()
    for row in random.Random(1).sample(forbidden.tolist(), 20):
        found = refiner.refine(space.strategy(row), space.layout(row).pool, int(space.rows[row]["num_micro_batches"]))
        assert isinstance(found, DoesNotFit)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("pp", "dp", "passes"), [(1, 4, 1), (1, 4, 3), (2, 2, 2), (2, 2, 5), (4, 1, 4), (4, 2, 6)])
@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_ranges_is_the_simulated_walk(schedule, zero, pp, dp, passes, tied) -> None:
    if (zero == 3 and pp > 1) or (pp == 1 and schedule == "gpipe"):
        pytest.skip("not in the space")
    graph = llama_graph(layers=6)
    if tied:
        graph = graph.replace(tied=(("tail.head.weight", "embed.weight"),))
    cluster = gpu_cluster(pp * dp)
    workload = TrainingSpec(global_batch=dp * passes * 2, seq_len=128)
    model = CostModel(graph, cluster, workload)
    prices = Prices(model)
    for mode in (RecomputeMode.NONE, RecomputeMode.FULL):
        split = {1: [8], 2: [3, 5], 4: [2, 2, 3, 1]}[pp]
        plan = make_plan(
            graph, pp=pp, dp=dp, micro_batch=2, num_micro_batches=passes, zero=zero, schedule=schedule, split=split, recompute=mode
        )
        pipeline = plan.pipelines[0]
        rows = pipeline_rows(plan, pipeline)
        units = [stage_cost(model, plan, pipeline, stage) for stage in pipeline.stages]
        peaks = RangePeaks(
            unit_memory(
                prices, _prices_of(prices, cluster, mode), first_site(model, whole_cluster(cluster), Degrees(), pp=pp), zero=zero,
                num_micro_batches=passes,
            ),
            num_micro_batches=passes, keeps_outputs=True,
        )  # fmt: skip
        tables = stage_peaks(peaks, schedule=schedule, pp=pp, num_micro_batches=passes)
        for number, stage in enumerate(pipeline.stages):
            walked = RankMemory(
                {number: units[number]}, rows[number], num_stages=pp, options=plan.collectives, rules=memory_rules_for(cluster)
            ).run()
            expected = tables[number][stage.first_unit, stage.first_unit + stage.num_units]
            assert expected == pytest.approx(walked.bytes, rel=1e-9)


def _prices_of(prices: Prices, cluster: ClusterSpec, mode: RecomputeMode):
    """Prices with every unit recomputed alike, as the plans of this test have it."""
    place = Place(("toy", 1.0), prices.model.network.shape((0,)))
    wanted = prices.units("toy", 1.0, place, False, 2, RecomputeChoice(mode))
    if mode == RecomputeMode.NONE:
        return wanted
    costs = [
        prices.model.unit(
            block, device="toy", tp_shape=place.tp_shape, sequence_parallel=False, batch=2, recompute=RecomputeChoice(mode)
        )
        for block, _ in prices.kinds
    ]
    changed = {
        name: np.array([getattr(cost, name) for cost in costs])
        for name in ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "input_bytes", "output_bytes")
    }
    return type(wanted)(**{**vars(wanted), **changed})


def test_whole_unit_bottleneck_is_the_least_longest_stage() -> None:
    """Against filling stages up to every candidate value."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, middle, last = rng.uniform(0.0, 3.0), rng.uniform(0.5, 1.5), rng.uniform(0.0, 3.0)
        layers, stages = int(rng.integers(2, 30)), int(rng.integers(2, 9))
        values = sorted({offset + count * middle for offset in (0.0, first, last) for count in range(layers + 1)} | {first, last})
        expected = next(value for value in values if _holds(value + 1e-9, first, middle, last, stages) >= layers)
        found = whole_unit_bottleneck(np.array([first]), np.array([middle]), np.array([last]), layers, stages)
        assert float(found[0]) <= expected + 1e-9
        mean = (first + layers * middle + last) / stages
        assert float(found[0]) >= mean * (1 - 1e-9)


def _holds(limit: float, first: float, middle: float, last: float, stages: int) -> int:
    if limit < max(first, last):
        return -1
    return int((limit - first) // middle) + int((limit - last) // middle) + (stages - 2) * int(limit // middle)
