"""The search: exhaustive agreement on small instances, certificates, infeasible answers, and the cases that people reported."""

from __future__ import annotations

import numpy as np
import pytest

from planner.assemble import Assembler
from planner.bounds import compute_bounds
from planner.layout import pools
from planner.prices import Prices
from planner.refine import Refined, Refiner
from planner.search import SearchOptions, search
from planner.space import enumerate_space
from planner.strategy import parse_strategy
from planner.validate import validate
from simulator.cost_model import CostModel
from simulator.predict import fits, predict
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.graph import ModelGraph, Segment
from specs.progress import Progress
from specs.schedule import SCHEDULES
from specs.training import Limits, Objective, TrainingSpec
from tests.blocks import embedding_block, gpt_layer, llama_graph, tail_block
from tests.plans import gpu_cluster
from tests.test_planner_bounds import BIG, unlike_cluster


def gpt_graph(layers: int, vocab: int, hidden: int, heads: int) -> ModelGraph:
    layer = gpt_layer(hidden, heads)
    embedding, tail = embedding_block(vocab, hidden), tail_block(vocab, hidden)
    return ModelGraph(
        name="gpt", inputs=(*embedding.inputs, tail.inputs[1]), blocks=(embedding, layer, tail), loss="loss",
        segments=(
            Segment(block="embedding", bind={"tokens": "tokens"}, produces={embedding.outputs[0]: "hidden0"}),
            Segment(block="layer", count=layers, bind={"x": "hidden0"}, carry={"x": layer.outputs[0]},
                    produces={layer.outputs[0]: "hidden"}),
            Segment(block="tail", bind={"x": "hidden", "labels": "labels"}, produces={tail.outputs[0]: "loss"}),
        ),
        attributes={"heads": heads, "kv_heads": heads, "ffn": 4 * hidden},
    )  # fmt: skip


def a100_nodes(count: int, *, memory_gib: float = 40.0) -> ClusterSpec:
    """Nodes of eight A100-like devices."""
    return ClusterSpec.parse(
        {
            "name": "a100",
            "nodes": [
                {
                    "count": count, "device": "a100", "devices_per_node": 8,
                    "intra": {"bandwidth_gbyte_s": 300, "latency_us": 20}, "inter": {"bandwidth_gbyte_s": 100, "latency_us": 40},
                }
            ],
            "device_types": [
                {
                    "name": "a100", "memory_gib": memory_gib, "memory_bandwidth_gbyte_s": 1555, "sm_count": 108,
                    "peak_flop_per_s": {"bfloat16": 312e12, "float32": 19.5e12}, "tdp_w": 400, "price_usd_per_hour": 2,
                }
            ],
        }
    )  # fmt: skip


# --- optimality ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "cluster", "workload"),
    [
        (llama_graph(layers=2), gpu_cluster(4), TrainingSpec(global_batch=4, seq_len=256)),
        (llama_graph(**{**BIG, "layers": 2}), unlike_cluster(nodes=(1, 1)), TrainingSpec(global_batch=4, seq_len=512)),
        (llama_graph(**{**BIG, "layers": 8}), gpu_cluster(4, memory_gib=9.0), TrainingSpec(global_batch=8, seq_len=1024)),
    ],
    ids=["small", "unlike", "tight memory"],
)
def test_best_plan_equals_exhaustive_simulation(graph, cluster, workload) -> None:
    answer = search(graph, cluster, workload, options=SearchOptions(top=3))
    model = CostModel(graph, cluster, workload)
    prices, space = Prices(model), enumerate_space(graph, workload, pools(cluster))
    refiner, assembler = Refiner(prices), Assembler(graph, cluster, workload)
    best = np.inf
    for row in range(len(space.rows)):
        pool = space.layout(row).pool
        found = refiner.refine(space.strategy(row), pool, int(space.rows[row]["num_micro_batches"]))
        if isinstance(found, Refined):
            predicted = predict(graph, cluster, workload, assembler.plan(found.strategy, pool), cost_model=model)
            best = min(best, predicted.step_time_s if fits(predicted) else np.inf)
    assert answer.status == "optimal"
    assert answer.prediction is not None
    assert answer.prediction.step_time_s == pytest.approx(best, rel=1e-9)
    assert answer.search.gap == 0.0
    assert answer.search.best_bound_s == pytest.approx(best)
    assert answer.search.candidates == len(space.rows)
    assert answer.search.confirmed < len(space.rows) / 3


def test_same_inputs_and_seed_give_the_same_answer() -> None:
    graph, cluster, workload = llama_graph(layers=6), unlike_cluster(nodes=(1, 1)), TrainingSpec(global_batch=16, seq_len=256)
    first, second = (search(graph, cluster, workload, options=SearchOptions(seed=7)) for _ in range(2))
    assert first.plan == second.plan
    assert [item.strategy for item in first.alternatives] == [item.strategy for item in second.alternatives]
    assert first.rejected == second.rejected


@pytest.mark.parametrize("global_batch", [8, 12, 30])
def test_the_plan_is_valid_fits_and_keeps_the_global_batch(global_batch: int) -> None:
    """U057: the global batch is given and kept; accumulation follows."""
    graph, cluster = llama_graph(**BIG), unlike_cluster(nodes=(2, 1))
    workload = TrainingSpec(global_batch=global_batch, seq_len=512)
    answer = search(graph, cluster, workload, options=SearchOptions(top=4))
    assert answer.plan is not None
    for plan in [answer.plan, *(item.plan for item in answer.alternatives if item.plan is not None)]:
        assert validate(plan, graph, cluster, workload, check_memory=True) == []
        assert sum(pipeline.sequences() for pipeline in plan.pipelines) == global_batch
        assert set(plan.unused_devices) | {d for s in plan.pipelines[0].stages for d in s.devices} == set(
            range(cluster.num_devices)
        )


def test_answer_tells_what_was_rejected_and_what_each_choice_gains() -> None:
    graph, cluster = llama_graph(**BIG), gpu_cluster(8)
    workload = TrainingSpec(global_batch=16, seq_len=2048)
    events: list[Progress] = []
    answer = search(graph, cluster, workload, options=SearchOptions(top=6), progress=events.append)
    assert answer.rejected["bound_above_best"] > 0
    assert answer.rejected["kv_heads_divisible_by_tp"] > 0
    assert {"tp", "pp", "zero", "recompute", "micro_batch"} <= {line.split("=")[0] for line in answer.explanation}
    times = [item.step_time_s for item in answer.alternatives]
    assert times == sorted(times)
    assert answer.prediction is not None
    assert min(times) >= answer.prediction.step_time_s
    assert all("%" in item.why_not for item in answer.alternatives)
    improved = [event for event in events if event.stage == "improved"]
    assert improved
    assert all({"incumbent_s", "best_bound_s", "gap", "elapsed_s"} <= set(event.data) for event in improved)
    assert any("efficiency model" in item.what for item in answer.assumptions)


# --- options ----------------------------------------------------------------------------------------------------------


def test_fixed_fields_are_kept_and_the_rest_is_searched() -> None:
    graph, cluster, workload = llama_graph(**BIG), gpu_cluster(8), TrainingSpec(global_batch=16, seq_len=1024)
    answer = search(graph, cluster, workload, options=SearchOptions(strategy="pp=2 zero=1 ac=full"))
    assert answer.plan is not None
    strategy = parse_strategy(answer.plan.strategy)
    assert (strategy.pp, strategy.zero, strategy.recompute.value) == (2, 1, "full")
    free = search(graph, cluster, workload)
    assert free.prediction is not None
    assert answer.prediction is not None
    assert free.prediction.step_time_s <= answer.prediction.step_time_s


def test_a_given_split_is_used() -> None:
    graph, cluster, workload = llama_graph(**BIG), gpu_cluster(4), TrainingSpec(global_batch=8, seq_len=512)
    answer = search(graph, cluster, workload, options=SearchOptions(strategy="pp=2 split=2,6"))
    assert answer.plan is not None
    assert [stage.num_units for stage in answer.plan.pipelines[0].stages] == [2, 6]


def test_out_of_time_is_an_answer() -> None:
    graph, cluster = llama_graph(**BIG), gpu_cluster(8)
    answer = search(graph, cluster, TrainingSpec(global_batch=16, seq_len=1024), options=SearchOptions(time_limit_s=0.0))
    assert answer.status == "timed_out"
    assert answer.plan is None


def test_simulation_limit_gives_a_feasible_answer_with_its_gap() -> None:
    graph, cluster = llama_graph(**BIG), gpu_cluster(8)
    workload = TrainingSpec(global_batch=16, seq_len=1024)
    answer = search(graph, cluster, workload, options=SearchOptions(confirm_at_most=1, top=0))
    assert answer.status == "feasible"
    assert answer.search.gap is not None
    assert answer.search.gap > 0
    assert answer.prediction is not None
    assert answer.search.best_bound_s == pytest.approx(answer.prediction.step_time_s / (1 + answer.search.gap))


def test_relaxing_memory_never_costs_time() -> None:
    graph, workload = llama_graph(**{**BIG, "layers": 10}), TrainingSpec(global_batch=8, seq_len=1024)
    times = []
    for memory_gib in (8.0, 12.0, 80.0):
        answer = search(graph, gpu_cluster(4, memory_gib=memory_gib), workload, options=SearchOptions(top=0))
        assert answer.prediction is not None
        times.append(answer.prediction.step_time_s)
    assert times[0] >= times[1] >= times[2]


def test_objectives() -> None:
    graph, cluster = llama_graph(**BIG), gpu_cluster(8)

    def run(objective: Objective, limits: Limits | None = None):
        workload = TrainingSpec(global_batch=16, seq_len=512, objective=objective, limits=limits or Limits())
        return search(graph, cluster, workload, options=SearchOptions(top=0))

    fast, cheap, few = run(Objective.STEP_TIME), run(Objective.COST), run(Objective.FEWEST_DEVICES)
    assert fast.plan is not None
    assert cheap.plan is not None
    assert few.plan is not None
    assert few.plan.world_size <= cheap.plan.world_size <= fast.plan.world_size
    assert few.prediction is not None
    limit = few.prediction.step_time_s / 2
    hurried = run(Objective.FEWEST_DEVICES, Limits(max_step_time_s=limit))
    assert hurried.plan is not None
    assert hurried.prediction is not None
    assert hurried.plan.world_size > few.plan.world_size
    assert hurried.prediction.step_time_s <= limit


def test_objective_without_prices_says_so() -> None:
    cluster = gpu_cluster(4)
    free = cluster.replace(device_types=(cluster.device_types[0].replace(price_usd_per_hour=None),))
    with pytest.raises(InvalidInput, match="price_usd_per_hour"):
        search(llama_graph(), free, TrainingSpec(global_batch=8, seq_len=128, objective=Objective.COST))


# --- infeasible -------------------------------------------------------------------------------------------------------


def test_too_little_memory_names_the_limit_and_what_lifts_it() -> None:
    """States of 16 bytes a parameter on 8 devices do not fit: by how much, and how many devices would do (as U001)."""
    graph = gpt_graph(layers=80, vocab=32000, hidden=8192, heads=64)
    answer = search(graph, a100_nodes(1), TrainingSpec(global_batch=64, seq_len=2048))
    assert answer.status == "infeasible"
    assert answer.plan is None
    (limit,) = answer.limits
    assert limit.limit == "memory"
    assert limit.needed is not None
    assert limit.available is not None
    assert limit.needed > limit.available
    least = 16 * graph.num_params() / 8
    assert limit.needed > least
    assert any("devices of this kind" in text for text in limit.relaxations)
    assert answer.rejected["memory"] > 0


def test_relaxed_device_count_is_enough() -> None:
    graph = gpt_graph(layers=80, vocab=32000, hidden=8192, heads=64)
    workload = TrainingSpec(global_batch=64, seq_len=2048)
    answer = search(graph, a100_nodes(1), workload)
    text = next(text for text in answer.limits[0].relaxations if "devices of this kind" in text)
    devices = int(text.split()[2])
    enough = search(graph, a100_nodes(devices // 8), workload, options=SearchOptions(top=0))
    assert enough.plan is not None
    assert search(graph, a100_nodes(devices // 8 - 1), workload, options=SearchOptions(top=0)).status == "infeasible"


def test_fixed_strategy_that_cannot_be_names_the_rule() -> None:
    answer = search(
        llama_graph(), gpu_cluster(8), TrainingSpec(global_batch=8, seq_len=128), options=SearchOptions(strategy="tp=8")
    )
    assert answer.status == "infeasible"
    assert "kv_heads_divisible_by_tp" in {limit.limit for limit in answer.limits}
    assert any("tp=4" in text for limit in answer.limits for text in limit.relaxations)


def test_step_time_limit_that_nothing_keeps() -> None:
    workload = TrainingSpec(global_batch=64, seq_len=512, limits=Limits(max_step_time_s=1e-6))
    answer = search(llama_graph(), gpu_cluster(2), workload)
    assert answer.status == "infeasible"
    assert answer.limits[0].limit == "max_step_time_s"


# --- reported cases ----------------------------------------------------------------------------------------------------


def test_neox_20b_on_24_a100_40g_is_feasible() -> None:
    """U007: PP 6 x TP 4 starts there where others run out of memory; the search finds it or a faster plan."""
    graph = gpt_graph(layers=44, vocab=50432, hidden=6144, heads=64)
    cluster, workload = a100_nodes(3), TrainingSpec(global_batch=96, seq_len=2048)
    answer = search(graph, cluster, workload, options=SearchOptions(top=0))
    forced = search(graph, cluster, workload, options=SearchOptions(strategy="pp=6 tp=4", top=0))
    assert answer.prediction is not None
    assert forced.prediction is not None
    assert forced.plan is not None
    assert answer.prediction.step_time_s <= forced.prediction.step_time_s
    assert sum(stage.num_units for stage in forced.plan.pipelines[0].stages) == 46
    ddp = search(graph, cluster, workload, options=SearchOptions(strategy="pp=1 tp=1 zero=0", top=0))
    assert ddp.status == "infeasible"


def test_fewer_micro_batches_than_stages_are_never_planned() -> None:
    """U047: pp 8 with fewer than 8 micro-batches hangs elsewhere; here it is counted as rejected."""
    graph, cluster = llama_graph(layers=14), gpu_cluster(8)
    answer = search(graph, cluster, TrainingSpec(global_batch=4, seq_len=128), options=SearchOptions(top=8))
    assert answer.rejected["micro_batches_below_stages"] > 0
    for plan in [answer.plan, *(item.plan for item in answer.alternatives)]:
        assert plan is not None
        pipeline = plan.pipelines[0]
        assert pipeline.pp == 1 or SCHEDULES[plan.schedule.name].allows(pipeline.num_micro_batches, pipeline.pp)


def test_mixed_generations_use_both_by_speed_when_it_pays() -> None:
    """Fast devices take more layers than slow ones in a pipeline over types, and leaving the slow group out is a plan as well."""
    graph = llama_graph(**{**BIG, "layers": 20})
    workload = TrainingSpec(global_batch=32, seq_len=1024)
    cluster = unlike_cluster(nodes=(1, 1), inter=100)
    forced = search(graph, cluster, workload, options=SearchOptions(strategy="pp=2 tp=1 dp=4", top=0))
    assert forced.plan is not None
    table = cluster.device_table()
    by_type = {table[stage.devices[0]].device: stage.num_units for stage in forced.plan.pipelines[0].stages}
    assert by_type["fast"] > by_type["slow"]
    best = search(graph, cluster, workload, options=SearchOptions(top=8))
    only_fast = search(graph, unlike_cluster(nodes=(1, 0), inter=100), workload, options=SearchOptions(top=0))
    assert best.prediction is not None
    assert only_fast.prediction is not None
    assert best.prediction.step_time_s <= only_fast.prediction.step_time_s * (1 + 1e-9)


def test_slow_devices_are_left_out_when_they_do_not_help() -> None:
    """A second group that is far slower behind a thin link: 'do not use these cards' is the plan."""
    graph, workload = llama_graph(**BIG), TrainingSpec(global_batch=16, seq_len=1024)
    answer = search(graph, unlike_cluster(nodes=(1, 1), inter=0.05), workload, options=SearchOptions(top=0))
    assert answer.plan is not None
    assert set(answer.plan.unused_devices) == {4, 5, 6, 7}


def test_straggler_can_be_left_out() -> None:
    graph, workload = llama_graph(**BIG), TrainingSpec(global_batch=24, seq_len=1024)
    cluster = unlike_cluster(nodes=(1, 0))
    slow = cluster.replace(nodes=(cluster.nodes[0].replace(slowdown={3: 20.0}),))
    answer = search(graph, slow, workload, options=SearchOptions(top=0))
    assert answer.plan is not None
    assert 3 in answer.plan.unused_devices


def test_bounds_can_be_cut_short() -> None:
    graph, cluster, workload = llama_graph(), gpu_cluster(4), TrainingSpec(global_batch=8, seq_len=128)
    space = enumerate_space(graph, workload, pools(cluster))
    bounds = compute_bounds(Prices(CostModel(graph, cluster, workload)), space, stop=lambda: True)
    assert not bounds.time_s.any()
    assert bounds.fits.all()


def test_a_dp_that_the_batch_forbids_names_that_rule_alone() -> None:
    workload = TrainingSpec(global_batch=16, seq_len=128)
    answer = search(llama_graph(), gpu_cluster(8), workload, options=SearchOptions(strategy="dp=3"))
    (limit,) = answer.limits
    assert limit.limit == "batch_divisible_by_dp"
    assert "a global batch that is a multiple of 3" in limit.relaxations
