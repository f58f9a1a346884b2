"""Why a run failed: the first cause, in the failing rank's own words."""

from __future__ import annotations

import signal
from pathlib import Path

from executor.job import Job, LaunchReport, RankError
from specs.errors import ExecutionFailed

TRACEBACK_LINES = 25
LOG_LINES = 15
TIMEOUT_MARKS = ("timed out", "timeout")
BROKEN_CONNECTION_MARKS = ("connection reset by peer", "connection closed by peer", "broken pipe")


def is_consequence(error: str) -> bool:
    """Whether an error only says that a peer has gone."""
    return any(mark in error.lower() for mark in BROKEN_CONNECTION_MARKS)


def failure_of(folder: Path, job: Job, launcher_status: int) -> ExecutionFailed:
    """The error to raise for a run whose launcher ended with ``launcher_status``.

    First cause: a worker that a signal ended (its peers only saw the connection break), else the earliest error that a rank
    reported. When that error is a collective that ran out of time, the ranks that never came are named.
    """
    report = _launch_report(folder)
    errors = sorted(_rank_errors(folder, job.plan.world_size), key=lambda error: error.time_s)
    reported = {error.rank for error in errors}
    # SIGTERM is what the launcher ends the others with once one has failed
    killed = {
        rank: -code for rank, code in report.exit_codes.items() if code < 0 and -code != signal.SIGTERM and rank not in reported
    }
    if killed:
        rank = min(killed)
        return ExecutionFailed(_killed_text(folder, rank, killed[rank]))
    if errors:
        return ExecutionFailed(_error_text(folder, job, errors))
    if report.exit_codes:
        rank = min(report.exit_codes)
        return ExecutionFailed(
            f"rank {rank} ended with status {report.exit_codes[rank]} and no error of its own{_log(folder, rank)}"
        )
    status = report.error or f"status {launcher_status}"
    return ExecutionFailed(f"the launcher failed: {status}\n{_tail(folder / 'logs' / 'launcher0.txt')}".rstrip())


def _launch_report(folder: Path) -> LaunchReport:
    """Of all nodes together."""
    reports = [LaunchReport.model_validate_json(path.read_text()) for path in sorted(folder.glob("launch*.json"))]
    codes = {rank: code for report in reports for rank, code in report.exit_codes.items()}
    return LaunchReport(exit_codes=codes, error=next((report.error for report in reports if report.error), None))


def _rank_errors(folder: Path, world_size: int) -> list[RankError]:
    paths = [folder / f"rank{rank}.error.json" for rank in range(world_size)]
    return [RankError.model_validate_json(path.read_text()) for path in paths if path.exists()]


def _killed_text(folder: Path, rank: int, number: int) -> str:
    name = signal.Signals(number).name
    hint = "; the kernel does this when memory runs out" if number == signal.SIGKILL else ""
    return f"rank {rank} was killed by {name}{_where(folder, rank)}{hint}{_log(folder, rank)}"


def _error_text(folder: Path, job: Job, errors: list[RankError]) -> str:
    first = next((error for error in errors if not is_consequence(error.error)), errors[0])
    where = f" in step {first.step}" if first.step is not None else " before the first step"
    text = f"rank {first.rank} failed{where}: {first.error}"
    silent = sorted(set(range(job.plan.world_size)) - {error.rank for error in errors})
    named = ", ".join(f"rank {rank}{_where(folder, rank)}" for rank in silent)
    if silent and any(mark in first.error.lower() for mark in TIMEOUT_MARKS):
        text = (
            f"rank {first.rank} waited {job.collective_timeout_s:g} s in a collective that not all ranks reached; "
            f"without a sign of life: {named}\n{text}"
        )
    elif silent and is_consequence(first.error):
        text = f"a process ended without a word: {named}\n{text}"
    trace = "\n".join(first.traceback.rstrip().splitlines()[-TRACEBACK_LINES:])
    return f"{text}\n{trace}"


def _where(folder: Path, rank: int) -> str:
    try:
        step = (folder / f"rank{rank}.state").read_text().strip()
    except OSError:
        step = ""
    return f" in step {step}" if step else " before the first step"


def _log(folder: Path, rank: int) -> str:
    logs = sorted((folder / "logs").glob(f"**/{rank}/stderr.log"))
    text = _tail(logs[-1]) if logs else ""
    return f"\n{text}" if text else ""


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").rstrip().splitlines()[-LOG_LINES:])
    except OSError:
        return ""
