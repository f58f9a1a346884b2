"""Plan: what its helpers derive, and JSON there and back."""

import json

import pytest
from pydantic import ValidationError

from specs.errors import InvalidInput
from specs.plan import Mesh, Pipeline, PipelineSchedule, Plan, RecomputeMode, RecomputeRun, Stage, Tier, TierRun
from specs.schedule import Action


def stage(devices, first, num, **fields):
    return Stage(devices=devices, first_unit=first, num_units=num, **fields)


def two_stage_plan():
    first = stage(
        (0, 1, 2, 3),
        0,
        3,
        mesh=Mesh(dp=2, tp=2),
        zero=1,
        placements={"layers.{i}.attn.q.weight": "S(0)"},
        recompute=(RecomputeRun(first_unit=1, num_units=2, mode=RecomputeMode.SELECTIVE, op_classes=("attention",)),),
        tiers=(TierRun(tensor_class="optimizer", tier=Tier.HOST, first_unit=0, num_units=3, fraction=0.5),),
    )
    second = stage((4, 5, 6, 7), 3, 3, mesh=Mesh(dp=2, tp=2), zero=1)
    pipeline = Pipeline(stages=(first, second), micro_batch=2, num_micro_batches=8)
    return Plan(global_batch=32, seq_len=2048, pipelines=(pipeline,), unused_devices=(8,))


def test_sequences_of_a_pipeline():
    assert two_stage_plan().pipelines[0].sequences() == 2 * 2 * 8
    uneven = Pipeline(
        stages=(stage((0, 1), 0, 1, mesh=Mesh(dp=2), batch_share=(3, 1)),), micro_batch=3, num_micro_batches=5
    )  # 3 on the fast device, 1 on the slow one
    assert uneven.sequences() == 20


def test_ranks_and_world_size():
    plan = two_stage_plan()
    assert plan.pipelines[0].ranks() == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert plan.pipelines[0].pp == 2
    assert plan.world_size == 8


def test_virtual_stages_share_a_rank():
    stages = tuple(stage((index % 2,), index, 1) for index in range(4))
    pipeline = Pipeline(stages=stages, micro_batch=1, num_micro_batches=4)
    assert pipeline.ranks() == [(0,), (1,)]
    assert pipeline.pp == 2
    assert Plan(global_batch=4, seq_len=1, pipelines=(pipeline,)).world_size == 2


def test_mesh_size():
    assert Mesh(dp=4, cp=2, tp=8).size == 64
    assert Mesh(dp=4, ep=4).size == 4  # ep takes its ranks from dp x cp
    with pytest.raises(ValidationError):
        Mesh(tp=0)


def test_recompute_of_a_unit():
    first = two_stage_plan().pipelines[0].stages[0]
    assert first.recompute_of(0) is None
    assert first.recompute_of(1).mode is RecomputeMode.SELECTIVE
    assert first.recompute_of(2) is first.recompute[0]
    assert first.recompute_of(3) is None


def test_json_there_and_back(tmp_path):
    plan = two_stage_plan()
    again = Plan.parse(json.loads(plan.to_json()))
    assert again == plan
    assert again.content_hash() == plan.content_hash()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(tmp_path / "plan.json").pipelines[0].stages[0].tiers[0].tier is Tier.HOST


def test_bad_plans_are_refused():
    with pytest.raises(InvalidInput) as caught:
        Plan.parse({"global_batch": 1, "seq_len": 1, "pipelines": [{"stages": [], "micro_batch": 1, "num_micro_batches": 0}]})
    assert {violation.loc for violation in caught.value.violations} == {
        ("pipelines", 0, "stages"),
        ("pipelines", 0, "num_micro_batches"),
    }
    with pytest.raises(InvalidInput) as caught:
        Plan.parse(
            {
                "global_batch": 1,
                "seq_len": 1,
                "pipelines": [{"stages": [{"devices": [0], "first_unit": 0, "num_units": 1, "zero": 4}]}],
            }
        )
    assert ("pipelines", 0, "stages", 0, "zero") in {violation.loc for violation in caught.value.violations}


def test_schedule_actions_of_a_plan():
    named = PipelineSchedule(name="gpipe")
    assert named.actions(num_ranks=2, num_micro_batches=1) == (
        (Action(0, "F", 0), Action(0, "B", 0)),
        (Action(1, "F", 0), Action(1, "B", 0)),
    )
    custom = PipelineSchedule(name="custom", rows=("0F0,,0B0", "1F0,1B0"))
    assert custom.actions(num_ranks=2, num_micro_batches=1) == named.actions(num_ranks=2, num_micro_batches=1)
