"""Long work in a process of its own: it cannot block the service, it can be stopped, and it dies with the service.

The child is spawned, so a call and its arguments must pickle. Progress and the result come back through a pipe. On Linux
the kernel kills the child when the thread that started it ends (``PR_SET_PDEATHSIG``); executors start their workers the
same way, so a killed service leaves nothing behind. Elsewhere the child notices at its next progress report.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from specs.errors import ExecutionFailed, Infeasible, InvalidInput, MeshwrightError, NoAnswerInTime
from specs.progress import Progress, ProgressSink, ignore

POLL_S = 0.1
GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception of the child in a form that pickles (exceptions with their own ``__init__`` do not)."""

    kind: str
    message: str
    violations: tuple[Any, ...] = ()
    subject: str = "input"
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        return cls(
            kind=type(error).__name__,
            message=str(error),
            violations=tuple(getattr(error, "violations", ())),
            subject=getattr(error, "subject", "input"),
            trace=traceback.format_exc(),
        )

    def exception(self) -> MeshwrightError:
        if self.kind == InvalidInput.__name__:
            return InvalidInput(self.violations, subject=self.subject)
        if self.kind == Infeasible.__name__:
            return Infeasible(self.message.split("\n  - ")[0], self.violations)
        if self.kind == NoAnswerInTime.__name__:
            return NoAnswerInTime(self.message)
        if self.kind == ExecutionFailed.__name__:
            return ExecutionFailed(self.message)
        return UnexpectedError(f"{self.kind}: {self.message}", trace=self.trace)


class UnexpectedError(MeshwrightError):
    """A defect of ours, raised in a child process; ``trace`` is its traceback."""

    def __init__(self, message: str, *, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


def isolated(
    call: Callable[..., Any],
    *args: Any,
    progress: ProgressSink = ignore,
    stop: Callable[[], BaseException | None] = lambda: None,
    time_limit_s: float | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``call(*args, progress=..., **kwargs)`` in a child process and return its result.

    ``stop`` is asked ten times a second; an exception that it returns ends the child and is raised. Raises the child's own
    error, :class:`NoAnswerInTime` after ``time_limit_s``, :class:`ExecutionFailed` when the child dies.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, os.getpid(), call, args, kwargs), name="meshwright-job")
    child.start()
    sender.close()
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    try:
        return _receive(receiver, child, progress, stop, deadline, time_limit_s)
    finally:
        receiver.close()
        _end(child)


def _receive(
    receiver: Connection, child: Any, progress: ProgressSink, stop: Any, deadline: float | None, limit_s: float | None
) -> Any:
    while True:
        reason = stop()
        if reason is not None:
            raise reason
        if deadline is not None and time.monotonic() > deadline:
            raise NoAnswerInTime(f"no answer within {limit_s:g} s")
        if not receiver.poll(POLL_S):
            continue
        try:
            kind, value = receiver.recv()
        except EOFError:
            child.join(GRACE_S)
            raise ExecutionFailed(f"the job's process ended without an answer ({_exit_text(child.exitcode)})") from None
        if kind == "progress":
            progress(value)
        elif kind == "result":
            return value
        else:
            raise value.exception()


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}, out of memory?" if name == "SIGKILL" else name
    return f"exit code {code}"


def _end(child: Any) -> None:
    """Let a finished child go; stop one that still runs: politely, then for good."""
    child.join(0.2)
    if child.is_alive():
        child.terminate()
        child.join(GRACE_S)
    if child.is_alive():
        child.kill()
        child.join()
    child.close()


def _child(sender: Connection, parent: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the service, which ends its jobs in order
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # lets 'finally' blocks end workers

    def report(event: Progress) -> None:
        try:
            sender.send(("progress", event))
        except OSError:
            sys.exit(143)

    try:
        message = ("result", call(*args, progress=report, **kwargs))
    except Exception as error:
        message = ("error", _Failure.of(error))
    with contextlib.suppress(OSError):
        sender.send(message)
    sender.close()


def set_parent_death_signal(number: int) -> None:
    """Ask the kernel to send ``number`` to this process when the thread that started it ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _die_with_parent(parent: int) -> None:
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(143)
