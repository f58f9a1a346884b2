"""Run a plan on this machine: start its workers, follow them, measure, and leave nothing behind. No torch in this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from executor.emulate.machine import Machine, NodeOfRun, emulated_machine, plain_machine
from executor.failures import failure_of
from executor.job import Job, LaunchedNode, RankResult, read_lines
from executor.results import measurement_of
from profiler.worker_env import worker_environment
from specs.cluster import ClusterSpec
from specs.errors import ExecutionFailed
from specs.graph import ModelGraph
from specs.measurement import Measurement
from specs.plan import Plan
from specs.profile import Profile
from specs.progress import Progress, ProgressSink, ignore
from specs.training import TrainingSpec

POLL_INTERVAL_S = 0.05
OTHER_NODES_S = 2.0
MEETING_PORT = 29_400  # in the first node's own namespace, where nothing else listens


def run_plan(
    plan: Plan, graph: ModelGraph, workload: TrainingSpec, *, steps: int, warmup_steps: int, profile: Profile | None = None,
    output_dir: Path | None = None, backend: str = "gloo", progress: ProgressSink = ignore,
    cancel: Callable[[], bool] | None = None, timeout_s: float = 1800.0, collective_timeout_s: float = 180.0,
    allow_factory: bool = False, pin: bool = True, cluster: ClusterSpec | None = None,
) -> Measurement:  # fmt: skip
    """Train ``warmup_steps`` + ``steps`` steps under ``plan``, one worker process per device, and return what was measured.

    ``profile``: its probe says how far the machine has drifted since. ``output_dir``: keep the run's files there (default: a
    temporary folder). ``cancel``: asked between looks at the workers. ``timeout_s``: of the whole run; ``collective_timeout_s``:
    how long a worker waits for its peers. ``allow_factory``: the graph may name code on this machine. ``pin``: one core a worker.
    ``cluster``: where it says how to emulate it, the run takes place in it, set up before and torn down after.

    Raises :class:`InvalidInput` when the plan cannot be executed, and :class:`ExecutionFailed` with the failing rank's own error
    when a worker raises, dies or hangs, at the time limit, and when cancelled. No worker outlives this call, or its process.
    """
    from executor.support import mismatches, require_supported

    require_supported(plan, graph, workload)
    flags = mismatches(plan, graph, workload)
    for flag in flags:
        progress(Progress(stage="execute", message=flag, data={"flag": flag}))
    with _folder(output_dir) as folder, _machine(plan, cluster) as machine:
        nodes = tuple(LaunchedNode(num_ranks=node.num_ranks, address=node.address) for node in machine.nodes)
        job = Job(
            plan=plan, graph=graph, workload=workload, steps=steps, warmup_steps=warmup_steps, backend=backend,
            collective_timeout_s=collective_timeout_s, allow_factory=allow_factory, pin=pin,
            nodes=nodes if len(nodes) > 1 else (), port=MEETING_PORT, dilation=machine.dilation, groups=machine.groups,
        )  # fmt: skip
        job.save(folder)
        _Run(job, machine, folder, progress, cancel, timeout_s).follow()
        results = [_result(folder, rank) for rank in range(plan.world_size)]
    measurement = measurement_of(job, results, profile, flags)
    return measurement.replace(cluster=cluster.name) if cluster is not None and not measurement.cluster else measurement


def _machine(plan: Plan, cluster: ClusterSpec | None) -> AbstractContextManager[Machine]:
    if cluster is None or cluster.emulation is None:
        return contextlib.nullcontext(plain_machine(plan))
    return emulated_machine(plan, cluster)


def _result(folder: Path, rank: int) -> RankResult:
    try:
        return RankResult.model_validate_json((folder / f"rank{rank}.result.json").read_text())
    except FileNotFoundError:
        raise ExecutionFailed(f"rank {rank} ended without an error and without a result") from None


@contextlib.contextmanager
def _folder(output_dir: Path | None) -> Iterator[Path]:
    if output_dir is None:
        with tempfile.TemporaryDirectory(prefix="meshwright-run-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    yield Path(tempfile.mkdtemp(prefix="run-", dir=output_dir))


class _Run:
    """One run: the launcher's process and what it reports."""

    def __init__(
        self, job: Job, machine: Machine, folder: Path, progress: ProgressSink, cancel: Callable[[], bool] | None, timeout_s: float
    ) -> None:
        self._job, self._machine, self._folder, self._progress, self._cancel = job, machine, folder, progress, cancel
        self._timeout_s = timeout_s
        self._total = job.warmup_steps + job.steps
        self._offset = 0
        self._done = 0
        self._started = time.monotonic()

    def follow(self) -> None:
        """Start a launcher on each node, wait for their end, report steps. On every way out all processes of the run are dead."""
        self._emit(f"starting {self._job.plan.world_size} workers")
        launchers: list[subprocess.Popen[bytes]] = []
        try:
            for number, node in enumerate(self._machine.nodes):
                launchers.append(self._start(number, node))
            while self._is_running(launchers):
                self._read_progress()
                self._check_limits()
                time.sleep(POLL_INTERVAL_S)
            self._read_progress()
        finally:
            for launcher in launchers:
                end_session(launcher)
        if any(launcher.returncode for launcher in launchers):
            raise failure_of(self._folder, self._job, next(item.returncode for item in launchers if item.returncode))

    @staticmethod
    def _is_running(launchers: Sequence[subprocess.Popen[bytes]]) -> bool:
        """Whether to wait on: some have not ended. Once one has failed the others only get the time to say what they saw."""
        codes = [launcher.poll() for launcher in launchers]
        if any(codes):
            deadline = time.monotonic() + OTHER_NODES_S
            while time.monotonic() < deadline and any(launcher.poll() is None for launcher in launchers):
                time.sleep(POLL_INTERVAL_S)
            return False
        return None in codes

    def _start(self, number: int, node: NodeOfRun) -> subprocess.Popen[bytes]:
        logs = self._folder / "logs"
        logs.mkdir(exist_ok=True)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {**worker_environment(), **node.environment, "PYTHONPATH": paths}
        with (logs / f"launcher{number}.txt").open("wb") as output:
            return subprocess.Popen(
                [*node.prefix, sys.executable, "-m", "executor.launch", str(self._folder), str(os.getpid()), str(number)],
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def _check_limits(self) -> None:
        if self._cancel is not None and self._cancel():
            raise ExecutionFailed(f"cancelled after {self._done} of {self._total} steps")
        elapsed = time.monotonic() - self._started
        if elapsed > self._timeout_s:
            raise ExecutionFailed(
                f"the run took longer than its limit of {self._timeout_s:g} s: {self._done} of {self._total} steps were done"
            )

    def _read_progress(self) -> None:
        lines, self._offset = read_lines(self._folder / "progress.jsonl", self._offset)
        for line in lines:
            self._done = line["step"] + 1
            kind = "warm-up step" if line["warmup"] else "step"
            self._emit(f"{kind} {self._done}: {line['step_time_s']:.3f} s, loss {line['loss']:.4f}", line)

    def _emit(self, message: str, data: dict[str, Any] | None = None) -> None:
        rate = (time.monotonic() - self._started) / self._done if self._done else None
        eta_s = None if rate is None else rate * (self._total - self._done)
        event = Progress(stage="execute", message=message, done=self._done, total=self._total, eta_s=eta_s, data=data or {})
        self._progress(event)


def end_session(launcher: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and every process of its session, and collect it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
