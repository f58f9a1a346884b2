"""Judging plans: each rule by one broken plan, all broken rules at once, and sound plans by silence."""

from __future__ import annotations

from typing import Any

import pytest

from planner.strategy import plan_from_strategy
from planner.validate import validate
from specs.errors import Violation
from specs.plan import Mesh, PipelineSchedule, Plan, RecomputeMode, RecomputeRun, Stage
from specs.schedule import rows_for, to_text
from specs.training import TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster, make_plan

GRAPH = llama_graph(layers=6)
CLUSTER = gpu_cluster(8)
WORKLOAD = TrainingSpec(global_batch=16, seq_len=128)


def sound(text: str = "pp=2 tp=2 micro_batch=2") -> Plan:
    return plan_from_strategy(text, GRAPH, CLUSTER, WORKLOAD)


def with_stage(plan: Plan, index: int, **changes: Any) -> Plan:
    pipeline = plan.pipelines[0]
    stages = list(pipeline.stages)
    stages[index] = stages[index].replace(**changes)
    return plan.replace(pipelines=(pipeline.replace(stages=tuple(stages)),))


def codes(plan: Plan, **options: Any) -> dict[str, Violation]:
    return {item.code: item for item in validate(plan, GRAPH, CLUSTER, WORKLOAD, **options)}


@pytest.mark.parametrize("text", ["", "zero=3", "pp=4 zero=2", "tp=4 sp=true recompute=full", "pp=2 schedule=gpipe", "dp=2"])
def test_sound_plans_pass(text: str) -> None:
    assert validate(sound(text), GRAPH, CLUSTER, WORKLOAD, check_memory=True) == []


def test_missing_units_would_be_dropped() -> None:
    """U042: 7 of 8 units placed is an error that says which is lost."""
    plan = sound()
    broken = with_stage(plan, 1, num_units=plan.pipelines[0].stages[1].num_units - 1)
    found = codes(broken)["units_missing"]
    assert "units 7 of 8" in found.message


def test_units_twice_unknown_and_out_of_order() -> None:
    plan = make_plan(GRAPH, pp=2, dp=4, num_micro_batches=4, split=[4, 4])
    assert "unit_on_two_stages" in codes(with_stage(plan, 1, first_unit=3))
    assert {"unknown_unit", "units_missing"} <= set(codes(with_stage(plan, 1, first_unit=5)))
    swapped = plan.replace(pipelines=(plan.pipelines[0].replace(stages=plan.pipelines[0].stages[::-1]),))
    assert "stages_out_of_order" in codes(swapped)


def test_devices() -> None:
    plan = sound()
    assert codes(with_stage(plan, 1, devices=(4, 5, 6, 9)))["unknown_device"].actual == [9]
    assert codes(with_stage(plan, 1, devices=(3, 5, 6, 7)))["device_used_twice"].actual == [3]
    assert "mesh_size" in codes(with_stage(plan, 1, devices=(4, 5, 6)))
    assert "device_listed_twice" in codes(with_stage(plan, 1, devices=(4, 4, 6, 7)))
    assert "unused_device_used" in codes(plan.replace(unused_devices=(0,)))


def test_tp_group_stays_inside_a_node() -> None:
    cluster = gpu_cluster(8, nodes=2)
    plan = make_plan(GRAPH, tp=4, dp=2, num_micro_batches=8)
    assert validate(plan, GRAPH, cluster, WORKLOAD) == []
    crossing = with_stage(plan, 0, devices=(0, 1, 2, 4, 3, 5, 6, 7))
    (found,) = [item for item in validate(crossing, GRAPH, cluster, WORKLOAD) if item.code == "tp_inside_node"]
    assert found.allowed == [1, 2, 4]


def test_global_batch_is_the_sum_of_the_sequences() -> None:
    plan = sound()
    pipeline = plan.pipelines[0].replace(num_micro_batches=5)
    found = codes(plan.replace(pipelines=(pipeline,)))["sequences_add_up"]
    assert "5 x 2 x dp 2" in found.message
    changed = codes(plan.replace(global_batch=20, pipelines=(pipeline,)))
    assert changed["global_batch_changed"].nearest == 16
    assert "sequences_add_up" not in changed


def test_several_pipelines_share_the_batch() -> None:
    """Two pipelines of one device each: 12 and 4 sequences of 16."""
    one = make_plan(GRAPH, num_micro_batches=12).pipelines[0]
    two = one.replace(num_micro_batches=4, stages=(one.stages[0].replace(devices=(1,)),))
    plan = Plan(global_batch=16, seq_len=128, pipelines=(one, two))
    assert validate(plan, GRAPH, CLUSTER, WORKLOAD) == []
    again = plan.replace(pipelines=(one, two.replace(stages=one.stages)))
    assert "device_used_twice" in codes(again)


def test_schedules() -> None:
    plan = make_plan(GRAPH, pp=4, dp=1, micro_batch=8, num_micro_batches=2)
    found = codes(plan)["micro_batches_below_stages"]
    assert "micro_batch 4 gives 4" in found.message
    assert "unknown_schedule" in codes(plan.replace(schedule=PipelineSchedule(name="zbv")))
    assert "micro_batches_below_stages" not in codes(plan.replace(schedule=PipelineSchedule(name="gpipe")))
    assert "stages_per_rank" in codes(plan.replace(schedule=PipelineSchedule(name="gpipe", stages_per_rank=2)))


@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)])
def test_named_schedules_with_their_placement(name: str, chunks: int) -> None:
    plan = make_plan(GRAPH, pp=2, dp=2, num_micro_batches=8, schedule=name, chunks=chunks)
    assert validate(plan, GRAPH, CLUSTER, WORKLOAD, check_memory=True) == []


def test_stages_lie_where_the_schedule_runs_them() -> None:
    plan = make_plan(GRAPH, pp=2, dp=2, num_micro_batches=8, schedule="interleaved", chunks=2)
    found = codes(plan.replace(schedule=PipelineSchedule(name="zb_v", stages_per_rank=2)))["stage_on_other_rank"]
    assert (found.actual, found.allowed) == ([0, 1, 0, 1], [0, 1, 1, 0])
    rows = to_text(rows_for("zb_v", num_ranks=2, num_micro_batches=8, stages_per_rank=2))
    assert "stage_on_other_rank" in codes(plan.replace(schedule=PipelineSchedule(name="custom", rows=tuple(rows))))


def test_custom_rows_are_walked() -> None:
    plan = make_plan(GRAPH, pp=2, micro_batch=4, num_micro_batches=4)
    rows = to_text(rows_for("1f1b", num_ranks=2, num_micro_batches=4))
    assert validate(plan.replace(schedule=PipelineSchedule(name="custom", rows=tuple(rows))), GRAPH, CLUSTER, WORKLOAD) == []
    stuck = PipelineSchedule(name="custom", rows=("0B0,0F0", "1F0,1B0"))
    assert "missing_action" in codes(plan.replace(schedule=stuck))
    assert "rows_per_rank" in codes(plan.replace(schedule=PipelineSchedule(name="custom", rows=("0F0,0B0",))))


def test_strategy_rules_hold_for_plans_too() -> None:
    """U037, U051, U053: the same rules, all together, with the plan's own place."""
    plan = make_plan(GRAPH, pp=2, dp=1, tp=3, micro_batch=1, num_micro_batches=16, zero=3)
    plan = with_stage(plan, 0, shard_group=2, sequence_parallel=True)
    found = codes(plan)
    assert {
        "heads_divisible_by_tp", "kv_heads_divisible_by_tp", "ffn_divisible_by_tp", "zero_3_with_pipeline",
        "shard_group_divides_dp", "sequence_divisible_by_tp",
    } <= set(found)  # fmt: skip
    assert found["sequence_divisible_by_tp"].nearest == 129
    assert found["heads_divisible_by_tp"].loc[:5] == ("plan", "pipelines", 0, "stages", 0)


def test_micro_batch_is_one_along_a_pipeline_and_allowed() -> None:
    plan = with_stage(make_plan(GRAPH, pp=2, dp=2, micro_batch=2, num_micro_batches=4), 1, batch_share=(2, 1))
    assert "unequal_micro_batch" in codes(plan)
    wanted = TrainingSpec(global_batch=16, seq_len=128, micro_batches=(1, 4))
    found = {
        item.code: item for item in validate(make_plan(GRAPH, dp=2, micro_batch=2, num_micro_batches=4), GRAPH, CLUSTER, wanted)
    }
    assert found["micro_batch_not_allowed"].allowed == [1, 4]


def test_recompute_runs() -> None:
    outside = RecomputeRun(first_unit=0, num_units=8, mode=RecomputeMode.FULL)
    unknown = RecomputeRun(first_unit=0, num_units=1, mode=RecomputeMode.SELECTIVE, op_classes=("atention",))
    plan = with_stage(make_plan(GRAPH, pp=2, dp=4, num_micro_batches=4, split=[4, 4]), 0, recompute=(outside, unknown))
    found = codes(plan)
    assert "recompute_outside_stage" in found
    assert found["unknown_op_class"].nearest == "attention"


def test_memory_is_checked_on_demand() -> None:
    small = gpu_cluster(8, memory_gib=1.45)
    plan = plan_from_strategy("tp=2 micro_batch=4", GRAPH, small, WORKLOAD)
    assert validate(plan, GRAPH, small, WORKLOAD) == []
    (found,) = validate(plan, GRAPH, small, WORKLOAD, check_memory=True)
    assert found.code == "memory"
    assert "GiB" in found.message


def test_plan_of_another_model_is_refused() -> None:
    found = {item.code for item in validate(sound(), llama_graph(layers=7), CLUSTER, WORKLOAD)}
    assert {"other_document", "units_missing"} <= found


def test_empty_mesh_of_a_stage_is_reported_with_the_rest() -> None:
    stage = Stage(devices=(), first_unit=0, num_units=8, mesh=Mesh(dp=2))
    plan = make_plan(GRAPH, num_micro_batches=16)
    found = codes(plan.replace(pipelines=(plan.pipelines[0].replace(stages=(stage,)),)))
    assert "mesh_size" in found
