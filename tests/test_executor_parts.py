"""Parts of the executor that need no second process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from executor.batch import DataSource, vocabulary_size
from executor.compare import compare, difference
from executor.dry_run import DryRunReport, dry_run
from executor.layout import Layout, Place
from executor.memory import MemoryMeter
from executor.params import Placements, local_part, shard_bounds
from executor.pipeline import torch_actions
from executor.results import middle_steps, quantile
from executor.support import mismatches, require_supported
from executor.timers import Timers
from profiler.probe import run_probe
from profiler.worker_env import worker_environment
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.measurement import Measurement
from specs.plan import Mesh, PipelineSchedule, Plan, RecomputeMode, RecomputeRun
from specs.prediction import MemoryPrediction, Prediction
from specs.schedule import rows_for
from specs.terms import TIME_TERMS
from specs.training import TrainingSpec
from tests.distributed_helpers import run_apart
from tests.executor_models import graph_of
from tests.plans import make_plan

SEQ_LEN = 16


class FakeClock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def plan_of(**choices: Any) -> Plan:
    return make_plan(graph_of("llama"), seq_len=SEQ_LEN, **choices)


def workload_of(plan: Plan, **fields: Any) -> TrainingSpec:
    return TrainingSpec.parse({"global_batch": plan.global_batch, "seq_len": SEQ_LEN, "precision": "fp32", **fields})


# --- timers ---------------------------------------------------------------------------------------------------------


def test_nested_phases_are_exclusive_and_sum_to_the_step() -> None:
    clock = FakeClock()
    timers = Timers(clock)
    timers.start()
    clock.time = 1.0
    with timers.phase("backward"):
        clock.time = 3.0
        with timers.phase("recompute"):
            clock.time = 3.5
            with timers.phase("tp_comm"):
                clock.time = 7.5
            clock.time = 8.0
        clock.time = 9.0
    clock.time = 10.0
    record = timers.stop()
    assert record.step_time_s == 10.0
    assert record.terms == {**dict.fromkeys(TIME_TERMS, 0.0), "backward": 3.0, "recompute": 1.0, "tp_comm": 4.0, "other": 2.0}


def test_a_wait_found_afterwards_moves_to_its_term() -> None:
    clock = FakeClock()
    timers = Timers(clock)
    timers.start()
    with timers.phase("backward"):
        clock.time = 5.0
        timers.move("backward", "dp_comm", 2.0)
    record = timers.stop()
    assert (record.terms["backward"], record.terms["dp_comm"]) == (3.0, 2.0)


def test_a_phase_that_raises_is_left() -> None:
    clock = FakeClock()
    timers = Timers(clock)
    timers.start()
    with contextlib.suppress(ValueError), timers.phase("forward"):
        clock.time = 1.0
        raise ValueError
    clock.time = 3.0
    assert timers.stop().terms["other"] == 2.0


def test_traffic_is_counted_by_kind() -> None:
    timers = Timers()
    timers.start()
    timers.count("tp.all_reduce", 100)
    timers.count("tp.all_reduce", 50)
    traffic = timers.stop().traffic
    assert (traffic["tp.all_reduce"].calls, traffic["tp.all_reduce"].num_bytes) == (2, 150)
    timers.start()
    assert timers.stop().traffic == {}


# --- shards, layout, data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "count"), [(8, 2), (61, 2), (17, 4), (65, 4), (3, 4)])
def test_shards_follow_the_rule_of_chunk(size: int, count: int) -> None:
    whole = torch.arange(size)
    chunks = torch.chunk(whole, count)
    for index in range(count):
        expected = chunks[index] if index < len(chunks) else whole[:0]
        assert torch.equal(local_part(whole, 0, index, count), expected)
    assert [shard_bounds(size, index, count)[1] for index in range(count)][-1] == size


def test_placements_match_names_with_a_number() -> None:
    placements = Placements({"layers.{i}.mlp.up.weight": "S(0)", "embed.weight": "S(0)", "layers.{i}.norm.weight": "R"})
    assert placements.dim_of("layers.12.mlp.up.weight") == 0
    assert placements.dim_of("layers.x.mlp.up.weight") is None
    assert placements.dim_of("layers.3.norm.weight") is None
    assert placements.dim_of("embed.weight") == 0


def test_layout_numbers_the_devices_that_take_part() -> None:
    plan = plan_of(pp=2, dp=2, tp=1, micro_batch=1, num_micro_batches=2)
    first, second = plan.pipelines[0].stages
    stages = (first.replace(devices=(7, 3)), second.replace(devices=(1, 9)))
    layout = Layout(plan.replace(pipelines=(plan.pipelines[0].replace(stages=stages),)))
    assert layout.rank_of_device == {1: 0, 3: 1, 7: 2, 9: 3}
    assert layout.grid == [[[2], [1]], [[0], [3]]]
    assert layout.place(2) == Place(rank=2, device=7, pp=0, dp=0, tp=0)
    assert layout.place(3) == Place(rank=3, device=9, pp=1, dp=1, tp=0, data=1)
    assert [index for index, _ in layout.stages_of(1)] == [1]


@pytest.mark.parametrize("context_parallel", ["ring", "ulysses"])
@pytest.mark.parametrize("choices", [{"micro_batch": 4}, {"batch_share": (3, 1), "num_micro_batches": 2}])
def test_ranks_share_the_global_batch_of_a_step(choices: dict[str, Any], context_parallel: Any) -> None:
    plan = plan_of(dp=2, cp=2, context_parallel=context_parallel, **choices)
    data, layout = DataSource(workload_of(plan), vocabulary_size(graph_of("llama"))), Layout(plan)
    tokens, labels = data.global_batch(5)
    places = [layout.place(rank) for rank in range(4)]
    parts = [data.local_batch(5, place, layout, torch.device("cpu")) for place in places]
    positions = torch.cat([layout.positions(place) for place in places[:2]]).argsort()
    rows = [torch.cat([part.tokens for part in pair], dim=1)[:, positions] for pair in (parts[:2], parts[2:])]
    assert torch.equal(torch.cat(rows), tokens)
    assert sum(layout.share(place) for place in places) == pytest.approx(1)
    assert [part.tokens.shape[0] for part in parts] == [plan.pipelines[0].num_micro_batches * layout.micro_batch(p) for p in places]
    assert torch.equal(labels[:, :-1], tokens[:, 1:])
    assert not torch.equal(data.global_batch(6)[0], tokens)


def test_a_ring_gives_everyone_an_early_and_a_late_part() -> None:
    layout = Layout(plan_of(cp=4, micro_batch=1))
    assert layout.positions(layout.place(0)).tolist() == [0, 1, 14, 15]
    assert layout.positions(layout.place(3)).tolist() == [6, 7, 8, 9]


def test_experts_spread_over_neighbours_of_their_axis() -> None:
    layout = Layout(plan_of(dp=4, ep=2, micro_batch=1))
    assert [layout.ep_ranks(layout.place(rank)) for rank in (1, 2)] == [[0, 1], [2, 3]]
    assert layout.expert_grid(layout.place(3)) == [[1, 3]]
    whole = Layout(plan_of(dp=2, tp=2, ep=4, whole_experts=True, sequence_parallel=True, micro_batch=1))
    assert whole.ep_ranks(whole.place(2)) == [0, 1, 2, 3]
    assert whole.expert_grid(whole.place(2)) == [[2]]
    grouped = Layout(plan_of(dp=4, zero=1, shard_group=2, micro_batch=1))
    assert grouped.shard_grid(grouped.place(2)) == [[0, 1], [2, 3]]


def test_tokens_from_a_file_wrap_at_its_end(tmp_path: Any) -> None:
    import numpy as np

    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=np.uint16))
    plan = plan_of(micro_batch=4)
    data = DataSource(workload_of(plan, data_source=str(tmp_path / "tokens.npy")), 61)
    tokens, labels = data.global_batch(1)
    assert tokens[2, 0] == (4 + 2) * SEQ_LEN % 100 % 61
    assert labels[2, -1] == (6 * SEQ_LEN + SEQ_LEN) % 100 % 61


# --- what torch's private parts must look like ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_our_action_text_is_torchs(name: str) -> None:
    actions = torch_actions(rows_for(name, num_ranks=2, num_micro_batches=3))
    assert actions[0][0] == _Action(0, _ComputationType.FORWARD, 0, None)
    kind = _ComputationType
    backward = {kind.BACKWARD_INPUT, kind.BACKWARD_WEIGHT} if name == "zb_h1" else {kind.FULL_BACKWARD}
    found = {action.computation_type for row in actions.values() for action in row if action}
    assert found == {kind.FORWARD, *backward}
    assert [str(action) for action in actions[1]] == [str(item) for item in rows_for(name, num_ranks=2, num_micro_batches=3)[1]]


def test_the_runtime_still_has_the_parts_that_we_replace() -> None:
    names = _PipelineScheduleRuntime.__init__.__code__.co_names
    assert {"_comp_type_to_function_map", "fwd_recv_ops", "bwd_recv_ops"} <= set(names)
    assert {"RECV_F", "SEND_F", "RECV_B", "SEND_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"} <= set(_ComputationType.__members__)
    for name in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
        assert callable(getattr(FSDPParamGroup, name))


# --- refusals -------------------------------------------------------------------------------------------------------


def codes_of(plan: Plan, workload: TrainingSpec | None = None, model: str = "llama") -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        require_supported(plan, graph_of(model), workload or workload_of(plan))
    return [violation.code for violation in caught.value.violations]


def with_stages(plan: Plan, **changes: Any) -> Plan:
    pipeline = plan.pipelines[0]
    return plan.replace(pipelines=(pipeline.replace(stages=tuple(stage.replace(**changes) for stage in pipeline.stages)),))


def test_zero_3_under_a_pipeline_is_refused() -> None:
    assert codes_of(plan_of(pp=2, dp=2, zero=3, micro_batch=1, num_micro_batches=2)) == ["zero_3_with_pipeline"]


def test_all_reasons_come_at_once() -> None:
    plan = plan_of(dp=2, micro_batch=2)
    plan = with_stages(plan, state_share=(0.75, 0.25), shard_group=3, recompute=(
        RecomputeRun(first_unit=0, num_units=6, mode=RecomputeMode.SELECTIVE, op_classes=("magic",)),
    ))  # fmt: skip
    workload = workload_of(plan, seq_len=32, loss_kernel="fused", precision="fp16_mixed")
    assert codes_of(plan, workload) == [
        "not_executable", "shard_group_divides_dp", "unknown_op_class", "seq_len", "not_executable", "not_executable",
    ]  # fmt: skip


def test_meshes_that_do_not_match_are_refused() -> None:
    plan = plan_of(pp=2, micro_batch=1, num_micro_batches=2)
    first, second = plan.pipelines[0].stages
    stages = (first, second.replace(devices=(0, 1), mesh=Mesh(dp=2)))
    codes = codes_of(plan.replace(pipelines=(plan.pipelines[0].replace(stages=stages),)))
    assert codes[:2] == ["equal_stages", "disjoint_grids"]


def test_tensor_parallel_without_placements_is_refused() -> None:
    assert codes_of(with_stages(plan_of(tp=2, micro_batch=1), placements={})) == ["no_placements"]


def test_1f1b_with_too_few_micro_batches_is_refused() -> None:
    assert codes_of(plan_of(pp=2, micro_batch=1, num_micro_batches=1)) == ["micro_batches_below_stages"]


def test_stages_on_other_ranks_than_the_schedules_are_refused() -> None:
    plan = plan_of(pp=2, micro_batch=1, num_micro_batches=4, schedule="interleaved", chunks=2)
    in_a_v = plan.replace(schedule=PipelineSchedule(name="zb_v", stages_per_rank=2))
    assert codes_of(in_a_v) == ["stage_on_other_rank"]


def test_another_model_is_flagged() -> None:
    plan = plan_of(micro_batch=1).replace(model_hash="f" * 64)
    assert mismatches(plan, graph_of("llama"), workload_of(plan))[0].startswith("the plan was made for another model: hash ffffff")


# --- dry runs -------------------------------------------------------------------------------------------------------


def dry_runs(plan: Plan, graph: ModelGraph) -> list[DryRunReport]:
    return [dry_run(plan, graph, rank, workload_of(plan)) for rank in range(plan.world_size)]


@pytest.mark.parametrize("choices", [
    {"dp": 2, "micro_batch": 1}, {"dp": 4, "zero": 3, "micro_batch": 1}, {"tp": 2, "dp": 2, "zero": 1, "micro_batch": 1},
    {"pp": 2, "tp": 2, "dp": 2, "zero": 2, "micro_batch": 1, "num_micro_batches": 2},
])  # fmt: skip
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_shards_of_all_ranks_make_up_the_model(choices: dict[str, Any], model: str) -> None:
    graph = graph_of(model)
    plan = make_plan(graph, seq_len=SEQ_LEN, **choices)
    reports = run_apart(dry_runs, plan, graph)
    (unsharded,) = run_apart(dry_runs, make_plan(graph, seq_len=SEQ_LEN, micro_batch=1), graph)
    whole = unsharded.params
    for name, shape in whole.items():
        split = next(report.params[name] for report in reports if name in report.params)
        dims = [dim for dim, (own, full) in enumerate(zip(split, shape, strict=True)) if own != full]
        assert len(dims) <= 2
    assert whole.keys() == {name for report in reports for name in report.params}
    zero, tp = choices.get("zero", 0), choices.get("tp", 1)
    if zero and tp == 1:
        assert sum(report.num_params for report in reports) == graph.num_params()


def test_dry_run_of_a_thousand_ranks() -> None:
    graph = graph_of("llama")
    plan = make_plan(graph, seq_len=SEQ_LEN, dp=128, tp=2, pp=4, zero=1, micro_batch=1, num_micro_batches=4)
    report = run_apart(dry_run, plan, graph, 1023)
    assert (report.world_size, report.pp, report.dp, report.tp) == (1024, 3, 127, 1)
    assert report.units == (5,)
    assert report.actions[1:3] == ("3RECV_F0", "3F0")


# --- results --------------------------------------------------------------------------------------------------------


def test_middle_steps_leave_out_the_extremes() -> None:
    assert middle_steps([5.0, 1.0, 9.0, 4.0]) == [0, 3]
    assert middle_steps([3.0]) == [0]
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.1) == pytest.approx(1.4)


def predicted(**terms: float) -> Prediction:
    memory = MemoryPrediction(peak_bytes=120.0, capacity_bytes=1e9, terms={})
    total = sum(terms.values())
    return Prediction(
        step_time_s=total,
        step_time_low_s=0.9 * total,
        step_time_high_s=1.1 * total,
        tokens_per_s=1.0,
        waterfall=terms,
        memory=memory,
    )


def test_comparison_joins_terms_and_handles_zeros() -> None:
    measurement = Measurement(
        step_time_s=2.0,
        peak_memory_bytes=100.0,
        drift=1.25,
        waterfall={"forward": 1.5, "wait": 0.5},
        environment={"flags": ["another"]},
    )
    comparison = compare(predicted(forward=1.5, dp_comm=0.6), measurement)
    assert comparison.step_time.relative_error == pytest.approx(0.05)
    assert comparison.step_time_at_profile_speed is not None
    assert comparison.step_time_at_profile_speed.measured == pytest.approx(1.6)
    assert comparison.peak_memory.relative_error == pytest.approx(0.2)
    assert set(comparison.terms) == set(TIME_TERMS)
    assert comparison.terms["dp_comm"] == difference(0.6, 0.0)
    assert comparison.terms["dp_comm"].relative_error is None
    assert comparison.inside_interval
    assert comparison.notes[0] == "another"
    assert any("25% slower" in note for note in comparison.notes)
    assert any("'wait' took 25.0% of the step" in note for note in comparison.notes)


def test_a_failed_run_and_another_plan_are_not_compared() -> None:
    with pytest.raises(InvalidInput, match="out of memory"):
        compare(predicted(forward=1.0), Measurement(status="failed", error="out of memory"))
    with pytest.raises(InvalidInput, match="prediction is of plan aaa"):
        compare(
            predicted(forward=1.0).replace(plan_hash="aaa"), Measurement(step_time_s=1.0, peak_memory_bytes=1.0, plan_hash="bbb")
        )


# --- environment ----------------------------------------------------------------------------------------------------

MEMORY_CHECK = """
import torch
from executor.memory import MemoryMeter
from profiler.probe import run_probe
run_probe()
meter = MemoryMeter(torch.device("cpu"))
meter.reset_peak()
block = torch.ones(8 * 2**20)
del block
kept = torch.ones(2 * 2**20)
print(meter.peak_bytes(), meter.current_bytes() - meter.baseline_bytes)
"""


def test_peak_memory_follows_tensors_in_the_worker_environment() -> None:
    environment = {**worker_environment(), "PYTHONPATH": "."}
    output = subprocess.run(
        [sys.executable, "-c", MEMORY_CHECK], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    peak, kept = (float(part) / 2**20 for part in output.split())
    assert peak == pytest.approx(32, abs=1.5)
    assert kept == pytest.approx(8, abs=1.5)


def test_probe_takes_tens_of_milliseconds() -> None:
    run_probe()
    assert 0.005 < run_probe() < 2.0
    assert MemoryMeter(torch.device("cpu")).baseline_bytes > 0
