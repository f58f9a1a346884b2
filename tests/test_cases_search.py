"""Reported cases of themes C, D and E that the search and its rules answer."""

from __future__ import annotations

import numpy as np
import pytest

from planner import rules
from planner.layout import whole_cluster
from planner.prices import Prices
from planner.rank_split import units_of_stages
from planner.refine import Refined, Refiner
from planner.search import SearchOptions, search
from planner.strategy import check_strategy, plan_from_strategy
from planner.strategy_text import Strategy
from simulator.cost_model import CostModel
from simulator.predict import predict
from specs.training import TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster

# --- C: which parallelism, and why is it slow? -----------------------------------------------------------------------


@pytest.mark.parametrize(("micro_batches", "bubble"), [(8, 7 / 15), (64, 7 / 71)])
def test_u025_the_bubble_of_pp_8_depends_on_the_micro_batches(micro_batches: int, bubble: float) -> None:
    """46.7 % at 8 micro-batches, 9.9 % at 64: what decides between tp 8 and pp 8."""
    graph, workload = llama_graph(layers=62, vocab=1000), TrainingSpec(global_batch=micro_batches, seq_len=1024)
    plan = plan_from_strategy(f"pp=8 split={','.join(['8'] * 8)} schedule=1f1b", graph, gpu_cluster(8), workload)
    predicted = predict(graph, gpu_cluster(8), workload, plan)
    idle_s = predicted.waterfall["pipeline"] + predicted.waterfall.get("wait", 0.0)
    assert idle_s / predicted.step_time_s == pytest.approx(bubble, abs=0.05)


def test_u028_a_small_model_is_not_sharded_where_it_need_not_be() -> None:
    """Replicated or with a sharded optimizer: parameters are not gathered again and again."""
    workload = TrainingSpec(global_batch=32, seq_len=1024)
    answer = search(llama_graph(layers=8), gpu_cluster(4), workload, options=SearchOptions(top=0, explain=False))
    assert answer.plan is not None
    assert answer.plan.pipelines[0].stages[0].zero < 3


# --- D: combinations rejected only at run time -----------------------------------------------------------------------


def test_u037_heads_name_the_allowed_tp() -> None:
    graph = llama_graph().replace(attributes={"heads": 28, "kv_heads": 28, "ffn": 28 * 64})
    (found,) = rules.tp_divides_sizes(graph.replace(attributes={"heads": 28}), 8, ("tp",))
    assert found.allowed == [1, 2, 4, 7, 14, 28]
    few = graph.replace(attributes={"heads": 28, "kv_heads": 4})
    assert {item.nearest for item in rules.tp_divides_sizes(few, 8, ("tp",))} == {4}


@pytest.mark.parametrize(("layers", "pp"), [(30, 4), (40, 16)])
def test_u042_u044_every_layer_is_placed_once(layers: int, pp: int) -> None:
    graph, cluster = llama_graph(layers=layers), gpu_cluster(pp)
    workload = TrainingSpec(global_batch=2 * pp, seq_len=256)
    found = Refiner(Prices(CostModel(graph, cluster, workload))).refine(Strategy(pp=pp, dp=1), whole_cluster(cluster), 2 * pp)
    assert isinstance(found, Refined)
    assert found.strategy.split is not None
    assert sum(found.strategy.split) == layers + 2
    assert min(found.strategy.split) >= 1
    assert max(found.strategy.split[1:-1]) - min(found.strategy.split[1:-1]) <= 1


def test_u046_no_stage_is_empty() -> None:
    """Five equal parts over four: 2, 1, 1, 1 and never 2, 2, 1, 0."""
    units = units_of_stages("1f1b", np.array([[1, 1, 1, 0]]), 1)
    assert (units > 0).all()


def test_u049_interleaving_names_the_micro_batches_that_work() -> None:
    (found,) = rules.schedule_rules(
        "interleaved", pp=6, num_micro_batches=3, stages_per_rank=2, loc=("micro_batch",), micro_batch=2, dp=1
    )
    assert found.nearest == 6
    assert "global batch of 12 would do" in found.message


def test_u051_all_broken_rules_at_once() -> None:
    graph = llama_graph().replace(attributes={"heads": 64, "kv_heads": 64})
    strategy = Strategy(tp=3, ep=3, pp=1)
    found = {item.code for item in check_strategy(strategy, graph, gpu_cluster(9), TrainingSpec(global_batch=6, seq_len=128))}
    assert {"heads_divisible_by_tp", "kv_heads_divisible_by_tp", "experts_divisible_by_ep"} <= found


@pytest.mark.parametrize(("cp", "tp", "step"), [(2, 4, 8), (4, 1, 8), (2, 3, 12), (8, 8, 64)])
def test_u052_the_divisor_of_the_sequence(cp: int, tp: int, step: int) -> None:
    assert rules.sequence_divisible_by_cp(step * 5, cp, tp, tp > 1, ()) == []
    (found,) = rules.sequence_divisible_by_cp(step * 5 + 1, cp, tp, tp > 1, ())
    assert found.nearest == step * 6


def test_u053_sharded_parameters_under_a_pipeline_are_refused_with_the_reason() -> None:
    (found,) = rules.zero_with_pipeline(3, 4, ("zero",))
    assert found.allowed == [0, 1, 2]
    assert "every micro-batch" in found.message


# --- E: pipeline balance ---------------------------------------------------------------------------------------------


def test_u062_the_head_counts_as_work_and_the_embedding_does_not() -> None:
    """Of a large vocabulary the last stage takes fewer layers, the first does not."""
    graph, cluster = llama_graph(layers=22, vocab=200_000), gpu_cluster(4)
    workload = TrainingSpec(global_batch=32, seq_len=1024)
    plan = plan_from_strategy("pp=4", graph, cluster, workload)
    counts = [stage.num_units for stage in plan.pipelines[0].stages]
    assert counts[-1] < counts[0]
    assert sum(counts) == 24
