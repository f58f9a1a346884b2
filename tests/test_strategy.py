"""The short form: read, written, checked, made a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.even_split import level_ranks, shortest_longest
from planner.search import SearchOptions, search
from planner.strategy import Strategy, check_strategy, parse_strategy, plan_from_strategy
from planner.strategy_text import parse_fields
from planner.validate import validate
from specs.errors import InvalidInput
from specs.plan import RecomputeMode
from specs.training import Limits, TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster
from tests.test_planner_bounds import unlike_cluster

WORKLOAD = TrainingSpec(global_batch=16, seq_len=128)


def codes(error: InvalidInput) -> set[str]:
    return {violation.code for violation in error.violations}


def test_reads_the_documented_form() -> None:
    strategy = parse_strategy("pp=2 dp=4 tp=8 micro_batch=1 zero=1 sequence_parallel=true recompute=full schedule=1f1b split=10,11")
    assert strategy == Strategy(
        pp=2,
        dp=4,
        tp=8,
        micro_batch=1,
        zero=1,
        sequence_parallel=True,
        recompute=RecomputeMode.FULL,
        schedule="1f1b",
        split=(10, 11),
    )


def test_aliases_separators_and_case() -> None:
    strategy = parse_strategy("TP=2;mbs=4 zero_stage=2  sp=on ac=selective:attention+norm cp=1 ep=1")
    assert (strategy.tp, strategy.micro_batch, strategy.zero, strategy.sequence_parallel) == (2, 4, 2, True)
    assert (strategy.recompute, strategy.op_classes) == (RecomputeMode.SELECTIVE, ("attention", "norm"))
    assert strategy.dp is None


@given(
    st.integers(1, 64), st.one_of(st.none(), st.integers(1, 64)), st.integers(1, 8), st.integers(1, 16), st.integers(0, 3),
    st.booleans(), st.sampled_from(["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"]), st.sampled_from([None, 2, 3]),
)  # fmt: skip
def test_text_reads_back(pp, dp, tp, micro_batch, zero, parallel, schedule, chunks) -> None:
    strategy = Strategy(
        pp=pp, dp=dp, tp=tp, micro_batch=micro_batch, zero=zero, sequence_parallel=parallel and tp > 1,
        chunks=chunks if pp > 1 else None,
        shard_group=2 if zero else None, schedule=schedule if pp > 1 else "1f1b", split=tuple(range(1, pp + 1)) if pp > 1 else None,
    )  # fmt: skip
    assert parse_strategy(strategy.text()) == strategy


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_strategy("pp=0 tp=two micro_bach=1 zero=4 sp=maybe recompute=ful schedule=1f1 split=a,b tp=2 dp cp=0")
    assert codes(caught.value) == {
        "not_a_positive_number", "unknown_key", "zero_stage", "not_a_boolean", "unknown_recompute", "unknown_schedule",
        "not_a_split", "key_given_twice", "not_key_value",
    }  # fmt: skip
    nearest = {violation.code: violation.nearest for violation in caught.value.violations}
    assert nearest["unknown_key"] == "micro_batch"
    assert nearest["unknown_recompute"] == "full"
    assert nearest["unknown_schedule"] == "1f1b"


def test_selective_needs_known_classes() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_strategy("recompute=selective:atention")
    assert caught.value.violations[0].nearest == "attention"
    with pytest.raises(InvalidInput):
        parse_strategy("recompute=selective")


def test_only_given_fields() -> None:
    assert parse_fields("pp=2 sp=false") == {"pp": 2, "sequence_parallel": False}
    assert parse_fields("") == {}


# --- to a plan ---------------------------------------------------------------------------------------------------------


def test_plan_is_explicit_and_valid() -> None:
    graph, cluster = llama_graph(layers=6), gpu_cluster(8)
    plan = plan_from_strategy("tp=2 pp=2 micro_batch=2 zero=1 recompute=full sp=true", graph, cluster, WORKLOAD)
    assert validate(plan, graph, cluster, WORKLOAD, check_memory=True) == []
    (pipeline,) = plan.pipelines
    assert (pipeline.micro_batch, pipeline.num_micro_batches) == (2, 4)
    assert [stage.devices for stage in pipeline.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [stage.mesh.dp for stage in pipeline.stages] == [2, 2]
    first, last = pipeline.stages
    assert first.placements["embed.weight"] == "S(0)"
    assert first.placements["layers.{i}.q"] == "S(0)"
    assert first.placements["layers.{i}.down"] == "S(1)"
    assert "tail.head.weight" not in first.placements
    assert last.placements["tail.head.weight"] == "S(0)"
    assert (first.recompute[0].first_unit, first.recompute[0].num_units) == (1, first.num_units - 1)  # not the embedding
    assert last.recompute[0].num_units == last.num_units - 1  # not the head
    assert plan.model_hash == graph.content_hash()
    assert parse_strategy(plan.strategy).split == (first.num_units, last.num_units)
    assert parse_strategy(plan.strategy).dp == 2


def test_given_dp_leaves_devices_unused() -> None:
    graph = llama_graph(layers=6)
    plan = plan_from_strategy("tp=2 dp=2", graph, gpu_cluster(8), WORKLOAD)
    assert plan.unused_devices == (4, 5, 6, 7)
    assert plan.world_size == 4


def test_groups_of_unlike_devices_are_stages_of_one_type() -> None:
    graph, cluster = llama_graph(layers=10), unlike_cluster(nodes=(1, 1))
    plan = plan_from_strategy("pp=2 micro_batch=1", graph, cluster, WORKLOAD)
    table = cluster.device_table()
    for stage in plan.pipelines[0].stages:
        assert len({table[device].device for device in stage.devices}) == 1


def test_nodes_that_tp_does_not_divide_are_left_out() -> None:
    cluster = unlike_cluster(nodes=(1, 1))
    mixed = cluster.replace(nodes=(cluster.nodes[0], cluster.nodes[1].replace(devices_per_node=3)))
    plan = plan_from_strategy("tp=4", llama_graph(), mixed, WORKLOAD)
    assert plan.unused_devices == (4, 5, 6)


def test_devices_must_divide_unless_dp_is_given() -> None:
    graph, cluster = llama_graph(layers=10), gpu_cluster(8)
    with pytest.raises(InvalidInput) as caught:
        plan_from_strategy("pp=3", graph, cluster, WORKLOAD)
    (violation,) = caught.value.violations
    assert violation.code == "devices_divisible"
    assert "dp=2" in violation.message
    assert plan_from_strategy("pp=3 dp=2", graph, cluster, WORKLOAD).unused_devices == (6, 7)


def test_workload_limit_on_devices() -> None:
    workload = TrainingSpec(global_batch=16, seq_len=128, limits=Limits(max_devices=4))
    assert plan_from_strategy("tp=2", llama_graph(), gpu_cluster(8), workload).world_size == 4
    with pytest.raises(InvalidInput, match="the workload allows 4"):
        plan_from_strategy("dp=8", llama_graph(), gpu_cluster(8), workload)


# --- reported cases ----------------------------------------------------------------------------------------------------


def test_28_heads_on_tp_8_names_the_allowed_degrees() -> None:
    """U037: 28 heads and 4 key/value heads: tp 8 breaks both rules, the nearest that keeps all is 4."""
    graph = llama_graph(hidden=448, heads=28, kv_heads=4, head_dim=16, ffn=1344)
    found = {item.code: item for item in check_strategy(Strategy(tp=8), graph, gpu_cluster(8), WORKLOAD)}
    assert found["heads_divisible_by_tp"].allowed == [1, 2, 4, 7, 14, 28]
    assert found["kv_heads_divisible_by_tp"].allowed == [1, 2, 4]
    assert found["heads_divisible_by_tp"].nearest == 4
    assert "28 is not a multiple of tp 8" in found["heads_divisible_by_tp"].message


def test_all_broken_rules_come_together() -> None:
    """U051: users chased one constraint at a time."""
    graph = llama_graph(layers=4)
    strategy = Strategy(tp=3, pp=9, dp=5, micro_batch=7, zero=3, shard_group=2, split=(3, 4))
    found = {item.code for item in check_strategy(strategy, graph, gpu_cluster(8), WORKLOAD)}
    assert {
        "heads_divisible_by_tp", "kv_heads_divisible_by_tp", "ffn_divisible_by_tp", "tp_inside_node", "more_stages_than_units",
        "zero_3_with_pipeline", "devices_enough", "shard_group_divides_dp", "batch_divisible_by_dp", "split_per_stage",
        "split_covers_units",
    } <= found  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code"), [("pp=4 micro_batch=8", "micro_batches_below_stages"), ("dp=3", "batch_divisible_by_dp")]
)
def test_batch_rules_name_what_works(text: str, code: str) -> None:
    """U047, U049, U057: too few micro-batches name a micro-batch that gives enough; the global batch is never bent."""
    found = check_strategy(parse_strategy(text), llama_graph(layers=6), gpu_cluster(8), WORKLOAD)
    (violation,) = [item for item in found if item.code == code]
    if code == "micro_batches_below_stages":
        assert "micro_batch 2 gives 4" in violation.message
    else:
        assert violation.allowed == [1, 2, 4, 8, 16]
        assert violation.nearest == 2


def test_too_few_micro_batches_for_a_pipeline_of_8() -> None:
    """U047: refused before anything hangs, with the micro-batch and the global batch that would do."""
    found = check_strategy(parse_strategy("pp=8 micro_batch=4"), llama_graph(layers=6), gpu_cluster(8), WORKLOAD)
    assert [item.message for item in found] == [
        "1f1b needs at least as many micro-batches as stages: 4 < 8; micro_batch 2 gives 8; "
        "with micro_batch 4 a global batch of 32 would do"
    ]


def test_too_few_micro_batches_for_virtual_stages() -> None:
    """U049: PP 6 with virtual stages and 3 micro-batches: at least 6, multiples of 6."""
    workload = TrainingSpec(global_batch=12, seq_len=128)
    strategy = parse_strategy("pp=6 schedule=interleaved chunks=2 micro_batch=4")
    (found,) = check_strategy(strategy, llama_graph(layers=10), gpu_cluster(6), workload)
    assert (found.code, found.actual, found.allowed, found.nearest) == ("micro_batches_below_stages", 3, ">= 6, multiples of 6", 6)
    assert found.message == (
        "interleaved needs at least as many micro-batches as pipeline ranks, in multiples of them: 3 < 6; micro_batch 2 gives 6; "
        "with micro_batch 4 a global batch of 24 would do"
    )
    uneven = check_strategy(
        replace(strategy, micro_batch=1), llama_graph(layers=10), gpu_cluster(6), workload.replace(global_batch=16)
    )
    assert (
        "16 is no multiple of 6; no micro_batch makes enough of 16 sequences a rank; with micro_batch 1 a global batch of 18"
        in (uneven[0].message)
    )


@pytest.mark.parametrize(("text", "ranks"), [
    ("schedule=interleaved chunks=3", [0, 1, 0, 1, 0, 1]), ("schedule=zb_h1", [0, 1]), ("schedule=zb_v", [0, 1, 1, 0]),
    ("schedule=dualpipe_v", [0, 1, 1, 0]), ("schedule=interleaved vpp=2 split=1,3,2,2", [0, 1, 0, 1]),
])  # fmt: skip
def test_schedules_with_chunks(text: str, ranks: list[int]) -> None:
    graph, cluster = llama_graph(layers=6), gpu_cluster(8)
    plan = plan_from_strategy(f"pp=2 {text}", graph, cluster, WORKLOAD)
    assert validate(plan, graph, cluster, WORKLOAD) == []
    stages = plan.pipelines[0].stages
    assert [plan.pipelines[0].ranks().index(stage.devices) for stage in stages] == ranks
    again = parse_strategy(plan.strategy)
    assert again.split == tuple(stage.num_units for stage in stages)
    assert plan_from_strategy(again, graph, cluster, WORKLOAD).pipelines == plan.pipelines


@pytest.mark.parametrize(("text", "code"), [
    ("pp=2 schedule=interleaved", "stages_per_rank"), ("pp=2 chunks=2", "stages_per_rank"),
    ("pp=2 schedule=zb_v chunks=3", "stages_per_rank"),
    ("pp=4 schedule=interleaved chunks=3", "more_stages_than_units"), ("pp=2 schedule=zb_v split=4,4", "split_per_stage"),
])  # fmt: skip
def test_chunks_that_a_schedule_cannot_have(text: str, code: str) -> None:
    found = check_strategy(parse_strategy(text), llama_graph(layers=6), gpu_cluster(8), WORKLOAD)
    assert code in {item.code for item in found}


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=8), st.integers(1, 4))
def test_longest_stage_is_shortest(seconds: list[float], num_stages: int) -> None:
    """Against every split; the second stage's devices are twice as slow."""
    per_stage = [np.array(seconds) * (2.0 if stage == 1 else 1.0) for stage in range(num_stages)]

    def times(counts: Sequence[int]) -> list[float]:
        starts = np.cumsum((0, *counts))
        return [
            float(per_stage[stage][low : low + count].sum()) for stage, (low, count) in enumerate(zip(starts, counts, strict=False))
        ]

    every = [counts for counts in product(range(1, len(seconds) + 1), repeat=num_stages) if sum(counts) == len(seconds)]
    least = min(max(times(counts)) for counts in every)
    alike = min(sum(item**2 for item in times(counts)) for counts in every if max(times(counts)) <= least * (1 + 1e-9))
    found = shortest_longest(per_stage)
    assert min(found) >= 1
    assert max(times(found)) == pytest.approx(least)
    assert sum(item**2 for item in times(found)) == pytest.approx(alike)


def test_a_long_head_leaves_its_rank_fewer_layers() -> None:
    """Two ranks in a V: the head takes as long as 4 of the 12 layers, so both ranks do 8 when the first has 4 layers."""
    seconds = [np.array([*[1.0] * 12, 4.0])] * 4
    longest_stage = shortest_longest(seconds)
    found = level_ranks(seconds, (0, 1, 1, 0), longest_stage)
    assert sum(found) == 13
    assert found[1] + found[2] == 8
    assert found[0] + found[3] == 5
    assert max(found[1], found[2]) == 4  # the longest stage stays as short as it can be
    assert level_ranks(seconds, (0, 1, 2, 3), longest_stage) == longest_stage


@pytest.mark.parametrize(
    ("text", "schedules"), [("schedule=zb_h1", {"zb_h1"}), ("chunks=2", {"interleaved x2", "zb_v x2", "dualpipe_v x2"})]
)
def test_a_given_schedule_or_chunk_count_is_searched_alone(text: str, schedules: set[str]) -> None:
    answer = search(llama_graph(layers=6), gpu_cluster(8), WORKLOAD, options=SearchOptions(strategy=f"pp=2 {text}", top=0))
    assert set(answer.search.space["schedule"]) <= schedules
    assert answer.plan is not None


def test_context_and_expert_parallel_are_read_judged_and_planned() -> None:
    strategy = parse_strategy("pp=2 dp=2 cp=2 tp=1 ep=4 micro_batch=1")
    assert parse_strategy(strategy.text()) == strategy
    found = {item.code for item in check_strategy(strategy, llama_graph(layers=6), gpu_cluster(8), WORKLOAD)}
    assert found == {"experts_divisible_by_ep"}
    plan = plan_from_strategy("pp=2 cp=2 tp=1 micro_batch=1", llama_graph(layers=6), gpu_cluster(8), WORKLOAD)
    assert (plan.pipelines[0].stages[0].mesh.cp, plan.pipelines[0].stages[0].mesh.dp) == (2, 2)


def test_vocabulary_need_not_divide() -> None:
    """U054: 151,669 words on tp 4: the shards are padded, nothing is refused."""
    graph = llama_graph(vocab=151669)
    assert check_strategy(Strategy(tp=4), graph, gpu_cluster(8), WORKLOAD) == []
    assert plan_from_strategy("tp=4", graph, gpu_cluster(8), WORKLOAD).pipelines[0].stages[0].placements["embed.weight"] == "S(0)"


def test_model_without_head_counts_is_judged_by_what_tp_splits() -> None:
    graph = llama_graph().replace(attributes={})
    assert check_strategy(Strategy(tp=4), graph, gpu_cluster(8), WORKLOAD) == []
