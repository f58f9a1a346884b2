"""Sharded training equals single-process training: loss of two steps, every gradient, parameters after one step."""

from __future__ import annotations

from typing import Any

import pytest

from executor.support import plan_violations
from specs.plan import PipelineSchedule, Plan, RecomputeMode, RecomputeRun
from tests.executor_models import graph_of
from tests.executor_parity import SEQ_LEN, compare_with_reference
from tests.plans import make_plan

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

FULL = RecomputeMode.FULL
TWO_RANKS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2, "micro_batch": 4},
    "ddp_accumulating": {"dp": 2, "micro_batch": 2, "num_micro_batches": 2},
    "ddp_recompute": {"dp": 2, "micro_batch": 2, "num_micro_batches": 2, "recompute": FULL},
    "zero1": {"dp": 2, "micro_batch": 2, "num_micro_batches": 2, "zero": 1},
    "zero2": {"dp": 2, "micro_batch": 2, "num_micro_batches": 2, "zero": 2},
    "zero3": {"dp": 2, "micro_batch": 2, "num_micro_batches": 2, "zero": 3},
    "zero3_recompute": {"dp": 2, "micro_batch": 2, "num_micro_batches": 2, "zero": 3, "recompute": FULL},
    "tp": {"tp": 2, "micro_batch": 8},
    "tp_sequence_parallel": {"tp": 2, "micro_batch": 4, "num_micro_batches": 2, "sequence_parallel": True},
    "pp_1f1b": {"pp": 2, "micro_batch": 2, "num_micro_batches": 4},
    "pp_gpipe": {"pp": 2, "micro_batch": 2, "num_micro_batches": 4, "schedule": "gpipe"},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "dp_tp": {"dp": 2, "tp": 2, "micro_batch": 4},
    "pp_dp": {"pp": 2, "dp": 2, "micro_batch": 2, "num_micro_batches": 2},
    "pp_dp_zero1": {"pp": 2, "dp": 2, "micro_batch": 2, "num_micro_batches": 2, "zero": 1},
    "pp_dp_zero2": {"pp": 2, "dp": 2, "micro_batch": 2, "num_micro_batches": 2, "zero": 2},
    "pp_tp_recompute": {"pp": 2, "tp": 2, "micro_batch": 2, "num_micro_batches": 4, "recompute": FULL},
    "pp_tp_sequence_parallel": {"pp": 2, "tp": 2, "micro_batch": 2, "num_micro_batches": 4, "sequence_parallel": True},
    "zero3_tp_sequence_parallel": {
        "dp": 2,
        "tp": 2,
        "zero": 3,
        "micro_batch": 2,
        "num_micro_batches": 2,
        "sequence_parallel": True,
    },
}


def plan_of(model: str, **choices: Any) -> Plan:
    return make_plan(graph_of(model), seq_len=SEQ_LEN, **choices)


def with_stages(plan: Plan, **changes: Any) -> Plan:
    """The plan with some fields of every stage changed."""
    pipeline = plan.pipelines[0]
    stages = tuple(stage.replace(**changes) for stage in pipeline.stages)
    return plan.replace(pipelines=(pipeline.replace(stages=stages),))


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_train_like_one(name: str) -> None:
    compare_with_reference("llama", plan_of("llama", **TWO_RANKS[name]))


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "tp", "tp_sequence_parallel", "pp_1f1b"])
def test_biases_positions_and_tied_embeddings(name: str) -> None:
    compare_with_reference("gpt2", plan_of("gpt2", **TWO_RANKS[name]))


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_compositions_on_four_ranks(name: str) -> None:
    compare_with_reference("llama", plan_of("llama", **FOUR_RANKS[name]))


@pytest.mark.parametrize("name", ["pp_dp_zero1", "pp_tp_sequence_parallel"])
def test_tied_embeddings_across_stages_on_four_ranks(name: str) -> None:
    compare_with_reference("gpt2", plan_of("gpt2", **FOUR_RANKS[name]))


@pytest.mark.parametrize("name", ["ddp", "zero3", "tp", "pp_1f1b"])
def test_mixture_of_experts(name: str) -> None:
    compare_with_reference("mixtral", plan_of("mixtral", **TWO_RANKS[name]))


@pytest.mark.parametrize("recompute", [RecomputeMode.NONE, FULL])
def test_accumulation_on_one_rank(recompute: RecomputeMode) -> None:
    compare_with_reference("llama", plan_of("llama", micro_batch=4, num_micro_batches=2, recompute=recompute))


@pytest.mark.parametrize("classes", [("attention",), ("norm", "elementwise"), ("gemm",), ("attention", "norm", "gemm", "copy")])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_selective_recompute(classes: tuple[str, ...], model: str) -> None:
    compare_with_reference(model, selective(plan_of(model, micro_batch=4, num_micro_batches=2), classes))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_selective_recompute_under_tensor_parallel_sends_nothing_twice(sequence_parallel: bool) -> None:
    plan = plan_of("llama", tp=2, micro_batch=8, sequence_parallel=sequence_parallel)
    without = compare_with_reference("llama", plan)["record"].traffic
    recomputing = compare_with_reference("llama", selective(plan, ("attention", "norm", "elementwise")))["record"].traffic
    assert recomputing == without


def selective(plan: Plan, classes: tuple[str, ...]) -> Plan:
    units = graph_of("llama").num_units()
    run = RecomputeRun(first_unit=0, num_units=units, mode=RecomputeMode.SELECTIVE, op_classes=classes)
    return with_stages(plan, recompute=(run,))


def test_shards_by_groups_smaller_than_dp() -> None:
    plan = plan_of("llama", dp=4, micro_batch=1, num_micro_batches=2, zero=3)
    compare_with_reference("llama", with_stages(plan, shard_group=2))


@pytest.mark.parametrize(("zero", "gathers", "reductions"), [(1, 1, 1), (2, 1, 2), (3, 4, 2)])
def test_collectives_of_each_zero_stage(zero: int, gathers: int, reductions: int) -> None:
    """Per unit and step with two micro-batches; with zero 3 the last unit's backward finds what its forward gathered."""
    units = graph_of("llama").num_units()
    plan = plan_of("llama", dp=2, micro_batch=2, num_micro_batches=2, zero=zero)
    traffic = compare_with_reference("llama", plan)["record"].traffic
    assert traffic["dp.all_gather"].calls == gathers * units - (2 if zero == 3 else 0)
    assert traffic["dp.reduce_scatter"].calls == reductions * units


@pytest.mark.parametrize("prefetch_units", [0, 2])
def test_prefetch_distance_of_zero3(prefetch_units: int) -> None:
    plan = plan_of("llama", dp=2, micro_batch=4, zero=3)
    plan = plan.replace(collectives=plan.collectives.replace(prefetch_units=prefetch_units))
    traffic = compare_with_reference("llama", plan)["record"].traffic
    assert traffic["dp.all_gather"].calls == 2 * graph_of("llama").num_units() - 1


def test_small_buckets_and_no_overlap() -> None:
    plan = plan_of("llama", dp=2, micro_batch=4)
    small = plan.replace(collectives=plan.collectives.replace(bucket_bytes=40_000.0))
    assert compare_with_reference("llama", small)["record"].traffic["dp.all_reduce"].calls > 2
    after = plan.replace(collectives=plan.collectives.replace(overlap_grad_reduce=False))
    assert compare_with_reference("llama", after)["record"].traffic["dp.all_reduce"].calls == graph_of("llama").num_units()


def test_custom_rows_with_two_stages_on_a_rank_and_split_backward() -> None:
    """Three stages on two ranks, the backward of the last one in its two parts."""
    plan = plan_of("llama", pp=3, micro_batch=4, num_micro_batches=2, split=[2, 2, 2])
    first, second, third = plan.pipelines[0].stages
    stages = (first, second.replace(devices=(1,)), third.replace(devices=(0,)))
    rows = ("0F0,0F1,2F0,2I0,2F1,2I1,2W0,2W1,0B0,0B1", "1F0,1F1,1B0,1B1")
    plan = plan.replace(pipelines=(plan.pipelines[0].replace(stages=stages),), schedule=PipelineSchedule(name="custom", rows=rows))
    compare_with_reference("llama", plan)


@pytest.mark.parametrize(("model", "name", "chunks"), [
    ("llama", "interleaved", 2), ("llama", "zb_h1", 1), ("gpt2", "zb_v", 2), ("llama", "dualpipe_v", 2),
])  # fmt: skip
def test_schedules_with_chunks_and_split_backward(model: str, name: str, chunks: int) -> None:
    """gpt2 ties its embedding and head, which a V has on one rank."""
    compare_with_reference(model, plan_of(model, pp=2, micro_batch=2, num_micro_batches=4, schedule=name, chunks=chunks))


def test_tied_parameters_on_two_stages_of_a_rank_are_reduced_once() -> None:
    """The V has gpt2's embedding and head on one rank; sharded they are refused."""
    plan = plan_of("gpt2", pp=2, dp=2, micro_batch=1, num_micro_batches=4, schedule="zb_v", chunks=2)
    compare_with_reference("gpt2", plan)
    sharded = plan_of("gpt2", pp=2, dp=2, micro_batch=1, num_micro_batches=4, schedule="zb_v", chunks=2, zero=1)
    assert [item.code for item in plan_violations(sharded, graph_of("gpt2"))] == ["tied_over_stages_of_a_rank"]


def test_split_backward_with_sharded_gradients_on_four_ranks() -> None:
    plan = plan_of("llama", pp=2, dp=2, micro_batch=1, num_micro_batches=4, zero=2, schedule="zb_v", chunks=2)
    compare_with_reference("llama", plan)


@pytest.mark.parametrize("name", ["ddp_accumulating", "zero2", "tp"])
def test_bfloat16_with_master_weights(name: str) -> None:
    compare_with_reference("llama", plan_of("llama", **TWO_RANKS[name]), precision="bf16_mixed")
