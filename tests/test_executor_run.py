"""Real launches: what is measured, what a failure says, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from executor.reference import reference_losses
from executor.run import run_plan
from profiler.worker_env import worker_environment
from specs.errors import ExecutionFailed, InvalidInput
from specs.measurement import Measurement
from specs.profile import DeviceProfile, Profile, Timing
from specs.progress import Progress
from specs.terms import TIME_TERMS
from tests.executor_faults import graph_with
from tests.executor_models import graph_of
from tests.executor_parity import SEQ_LEN, workload_for
from tests.plans import make_plan

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

GLOBAL_BATCH = 8
DDP = {"dp": 2, "micro_batch": 4, "seq_len": SEQ_LEN}


def workers_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def own_launches() -> list[psutil.Process]:
    return [child for child in workers_of(os.getpid()) if "executor.launch" in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def ddp_run() -> tuple[Measurement, list[Progress]]:
    """One run for several looks at it."""
    events: list[Progress] = []
    graph = graph_of("llama")
    timing = Timing(median_s=0.045, p10_s=0.045, p90_s=0.045, samples=5)
    profile = Profile(cluster="two workers", devices=(DeviceProfile(device="cpu", probe_s=timing),))
    plan = make_plan(graph, **DDP).replace(model_hash="0" * 64)
    measurement = run_plan(
        plan, graph, workload_for(GLOBAL_BATCH), steps=3, warmup_steps=2, profile=profile, progress=events.append
    )
    return measurement, events


def test_terms_of_each_rank_sum_to_its_steps(ddp_run: tuple[Measurement, list[Progress]]) -> None:
    measurement, _ = ddp_run
    for rank in measurement.ranks:
        assert set(rank.terms) == set(TIME_TERMS)
        assert min(rank.step_times_s) <= sum(rank.terms.values()) <= max(rank.step_times_s)
    assert measurement.step_time_s is not None
    assert measurement.step_time_s == pytest.approx(sum(measurement.waterfall.values()), rel=0.5)
    assert measurement.waterfall["dp_comm"] > 0
    assert measurement.waterfall["pipeline"] == measurement.waterfall["tp_comm"] == 0


def test_a_measurement_says_what_ran(ddp_run: tuple[Measurement, list[Progress]]) -> None:
    measurement, _ = ddp_run
    assert measurement.plan is not None
    assert measurement.plan.content_hash() == measurement.plan_hash
    assert measurement.model_hash == graph_of("llama").content_hash()
    assert measurement.workload == workload_for(GLOBAL_BATCH)
    assert Measurement.parse(json.loads(measurement.to_json())) == measurement
    assert measurement.cluster == "two workers"


def test_losses_are_those_of_one_process(ddp_run: tuple[Measurement, list[Progress]]) -> None:
    measurement, _ = ddp_run
    expected = reference_losses(graph_of("llama"), workload_for(GLOBAL_BATCH), 5)
    assert measurement.losses == pytest.approx(expected, rel=1e-5)


def test_memory_probe_and_traffic_are_reported(ddp_run: tuple[Measurement, list[Progress]]) -> None:
    measurement, _ = ddp_run
    assert measurement.peak_memory_bytes is not None
    grads = sum(4 * param.num_elements for block in graph_of("llama").blocks for param in block.params if not param.buffer)
    assert measurement.peak_memory_bytes > grads
    assert measurement.collectives["dp.all_reduce"]["bytes"] == graph_of("llama").num_params() * 4
    assert measurement.start_drift is not None
    starts = [rank.start_probe_s for rank in measurement.ranks if rank.start_probe_s is not None]
    assert len(starts) == 2
    assert measurement.start_drift == pytest.approx(statistics.median(starts) / 0.045)
    assert measurement.drift is not None
    assert measurement.drift == pytest.approx(measurement.ranks[0].probe_s / 0.045, rel=0.5)  # type: ignore[operator]


def test_progress_counts_steps_and_flags_another_model(ddp_run: tuple[Measurement, list[Progress]]) -> None:
    measurement, events = ddp_run
    steps = [event for event in events if "loss" in event.data]
    assert [event.done for event in steps] == [1, 2, 3, 4, 5]
    assert all(event.total == 5 for event in steps)
    assert any("another model" in event.message for event in events)
    assert any("another model" in flag for flag in measurement.environment["flags"])


def test_a_worker_that_raises_is_named_with_its_own_error() -> None:
    graph = graph_with("raising")
    with pytest.raises(ExecutionFailed, match=r"rank 1 failed in step 2: ValueError: the gradient of the second moment") as caught:
        run_plan(make_plan(graph, **DDP), graph, workload_for(GLOBAL_BATCH), steps=3, warmup_steps=1, allow_factory=True)
    assert "executor_faults.py" in str(caught.value)
    assert not own_launches()


def test_a_worker_that_is_killed_is_named() -> None:
    graph = graph_with("dying")
    with pytest.raises(ExecutionFailed, match=r"rank 1 was killed by SIGKILL in step 2"):
        run_plan(make_plan(graph, **DDP), graph, workload_for(GLOBAL_BATCH), steps=3, warmup_steps=1, allow_factory=True)
    assert not own_launches()


def test_a_worker_that_hangs_is_named_and_ended() -> None:
    graph = graph_with("hanging")
    with pytest.raises(ExecutionFailed, match=r"rank 0 waited 4 s.*\n?.*without a sign of life: rank 1 in step 2"):
        run_plan(
            make_plan(graph, **DDP), graph, workload_for(GLOBAL_BATCH), steps=3, warmup_steps=1, allow_factory=True,
            collective_timeout_s=4.0,
        )  # fmt: skip
    assert not own_launches()


def test_cancelling_ends_every_worker() -> None:
    graph = graph_with("slow")
    seen: list[Progress] = []
    with pytest.raises(ExecutionFailed, match=r"cancelled after [12] of 100 steps"):
        run_plan(
            make_plan(graph, **DDP), graph, workload_for(GLOBAL_BATCH), steps=99, warmup_steps=1, allow_factory=True,
            progress=seen.append, cancel=lambda: any("loss" in event.data for event in seen),
        )  # fmt: skip
    assert not own_launches()


def test_the_time_limit_ends_a_run() -> None:
    graph = graph_of("llama")
    with pytest.raises(ExecutionFailed, match=r"longer than its limit of 0.3 s: 0 of 2 steps"):
        run_plan(make_plan(graph, **DDP), graph, workload_for(GLOBAL_BATCH), steps=1, warmup_steps=1, timeout_s=0.3)
    assert not own_launches()


CALLER = """
import sys
from executor.run import run_plan
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.training import TrainingSpec
plan, graph, workload = Plan.load(sys.argv[1]), ModelGraph.load(sys.argv[2]), TrainingSpec.load(sys.argv[3])
run_plan(plan, graph, workload, steps=200, warmup_steps=1, allow_factory=True,
         progress=lambda event: print(event.message, flush=True))
"""


def test_killing_the_caller_leaves_no_worker(tmp_path: Path) -> None:
    graph = graph_with("slow")
    documents = {"plan": make_plan(graph, **DDP), "graph": graph, "workload": workload_for(GLOBAL_BATCH)}
    for name, document in documents.items():
        document.save(tmp_path / f"{name}.json")
    files = [str(tmp_path / f"{name}.json") for name in documents]
    environment = {**worker_environment(), "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, "-c", CALLER, *files], env=environment, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        while "step 1" not in caller.stdout.readline():
            assert caller.poll() is None
        descendants = workers_of(caller.pid)
        assert len(descendants) >= 3  # launcher and two ranks
        caller.kill()
        _, alive = psutil.wait_procs(descendants, timeout=5)
        for process in alive:
            process.kill()
    assert not alive


def test_a_plan_for_another_job_is_refused_before_anything_starts() -> None:
    graph = graph_of("llama")
    with pytest.raises(InvalidInput) as caught:
        run_plan(make_plan(graph, **DDP), graph_of("mixtral"), workload_for(16), steps=1, warmup_steps=0)
    codes = [violation.code for violation in caught.value.violations]
    assert codes == ["units_cover_model", "global_batch"]


def test_the_calling_process_needs_no_torch() -> None:
    code = "import sys, json, executor.run, executor.compare; print(json.dumps('torch' in sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(output.stdout) is False


def test_steps_are_timed_between_barriers(ddp_run: tuple[Measurement, list[Progress]]) -> None:
    """All ranks see steps of about the same length, whatever each of them does inside."""
    measurement, _ = ddp_run
    first, second = (rank.step_times_s for rank in measurement.ranks)
    assert first == pytest.approx(second, rel=0.5)
