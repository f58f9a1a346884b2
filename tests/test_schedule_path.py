"""The longest path through a schedule, and memory of its ranks: against the event simulation and the walk of the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.assemble import Assembler
from planner.layout import whole_cluster
from planner.path_bound import path_bounds
from planner.prices import Prices
from planner.refine import Prepared, Refiner
from planner.schedule_path import StageTimes, few_micro_batches, rank_times
from planner.strategy_text import parse_strategy
from simulator.cost_model import CostModel
from simulator.predict import simulate
from simulator.rank_memory import plan_memory
from specs.schedule import SCHEDULES, stage_ranks
from specs.training import TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster

CHUNKED = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)]


def _times(schedule: str, ranks: int, chunks: int, *, seed: int, spread: float) -> StageTimes:
    rng, stages = np.random.default_rng(seed), ranks * chunks
    owner = stage_ranks(schedule, num_ranks=ranks, stages_per_rank=chunks)
    forward, backward = rng.uniform(1, 1 + spread, (8, stages)), rng.uniform(2, 2 + 2 * spread, (8, stages))
    moves = np.array([float(stage + 1 < stages and owner[stage] != owner[stage + 1]) for stage in range(stages)])
    message = rng.uniform(0, 0.2, (8, 1)) * moves
    pairs = forward + backward[:, ::-1] - 0.2 if SCHEDULES[schedule].overlaps else None
    part = backward / 2
    return StageTimes(forward, backward, part, part, 0.1 * forward, 0.05 * part, message, message, pairs)


@pytest.mark.parametrize(("schedule", "chunks"), CHUNKED)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("spread", [0.02, 1.0])
def test_a_continued_walk_is_never_longer_than_the_whole_one(schedule, chunks, ranks, spread, monkeypatch) -> None:
    times = _times(schedule, ranks, chunks, seed=ranks, spread=spread)
    few = few_micro_batches(schedule, ranks, 10**6)
    for more in (ranks, 5 * ranks, 20 * ranks):
        monkeypatch.setattr("planner.schedule_path.MOST_WALKED", 10**9)
        whole = rank_times(schedule, num_ranks=ranks, num_micro_batches=few + more, stages_per_rank=chunks, times=times)
        monkeypatch.setattr("planner.schedule_path.MOST_WALKED", 0)
        continued = rank_times(schedule, num_ranks=ranks, num_micro_batches=few + more, stages_per_rank=chunks, times=times)
        assert (continued.end_s <= whole.end_s * (1 + 1e-9)).all()
        if spread < 0.1:
            assert continued.end_s.max() > 0.95 * whole.end_s.max()


@pytest.mark.parametrize(("schedule", "chunks"), CHUNKED)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_path_is_a_bound_and_memory_the_simulated_walk(schedule, chunks, zero) -> None:
    graph, cluster = llama_graph(layers=13, vocab=4000), gpu_cluster(8)
    for pp, passes in ((2, 4), (4, 8), (4, 12)):
        dp = 8 // pp
        workload = TrainingSpec(global_batch=2 * dp * passes, seq_len=256)
        model = CostModel(graph, cluster, workload)
        prices, assembler = Prices(model), Assembler(graph, cluster, workload)
        text = f"pp={pp} micro_batch=2 zero={zero} schedule={schedule}" + (f" chunks={chunks}" if schedule == "interleaved" else "")
        strategy = replace(parse_strategy(text), dp=dp)
        if strategy.num_stages > graph.num_units():
            continue
        prepared = Refiner(prices).prepare(strategy, whole_cluster(cluster), passes)
        assert isinstance(prepared, Prepared)
        assert prepared.skeleton is not None
        assert prepared.strategy.split is not None
        plan = assembler.plan(prepared.strategy, whole_cluster(cluster))
        simulated = simulate(model, plan).step_time_s
        (bound,) = path_bounds([prepared.skeleton], [prepared.strategy.split])
        assert bound <= simulated
        assert bound >= simulated * ((1 - 1e-6) if zero == 0 else 0.85)
        walked = [memory.peak_bytes for memory in plan_memory(model, plan)]
        assert prepared.skeleton.rank_peaks(prepared.strategy.split) == pytest.approx(walked, rel=1e-9)


def test_random_rows_of_unlike_sizes() -> None:
    """Sizes that no formula expects: every schedule that runs them."""
    rng = random.Random(0)
    for _ in range(20):
        schedule, chunks = rng.choice(CHUNKED)
        ranks, passes = rng.randint(2, 5), rng.randint(2, 24)
        if not SCHEDULES[schedule].allows(passes, ranks):
            continue
        times = _times(schedule, ranks, chunks, seed=passes, spread=0.5)
        found = rank_times(schedule, num_ranks=ranks, num_micro_batches=passes, stages_per_rank=chunks, times=times)
        assert (found.end_s.max(axis=1) >= passes * (times.forward_s + times.weight_s).sum(axis=1) / ranks).all()
