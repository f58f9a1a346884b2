"""Worker processes of one measurement: started together, called together, and gone together.

A worker is a fresh interpreter (its allocator settings act at start only) that talks to us over a socket pair. When one
dies or fails, the error names it and its own words, and every other worker is killed. Workers die with this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from profiler.worker_env import worker_environment
from specs.errors import ExecutionFailed

START_TIMEOUT_S = 120.0
SILENCE_TIMEOUT_S = 300.0
_EXIT_GRACE_S = 10.0

TaskProgress = Callable[[float, float, str], None]  # done, total, message


def no_progress(done: float, total: float, message: str) -> None:
    """Watches nothing."""


class WorkerPool:
    """``num_workers`` processes in one process group; a context manager. ``device_type``: cpu | cuda."""

    def __init__(self, num_workers: int, *, device_type: str = "cpu", silence_timeout_s: float = SILENCE_TIMEOUT_S) -> None:
        self.num_workers, self.device_type, self.silence_timeout_s = num_workers, device_type, silence_timeout_s
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> WorkerPool:
        self._directory = tempfile.TemporaryDirectory(prefix="meshwright-profile-")
        try:
            for rank in range(self.num_workers):
                self._start(rank)
            self._collect(no_progress, START_TIMEOUT_S)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._close()
        self._kill()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self.processes]

    def call(self, task: str, job: Any = None, on_progress: TaskProgress = no_progress) -> list[Any]:
        """Run a task of ``profiler.measure.worker`` on every worker at once; results by rank.

        Raises :class:`ExecutionFailed` when a worker fails, dies or falls silent; the pool is then of no more use.
        """
        try:
            for rank, connection in enumerate(self._connections):
                self._send(rank, connection, (task, job))
            return self._collect(on_progress, self.silence_timeout_s)
        except BaseException:
            self._kill()
            raise

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        settings = {
            "rank": rank,
            "world_size": self.num_workers,
            "device_type": self.device_type,
            "store": str(self._path("store")),
            "parent_pid": os.getpid(),
            "socket": theirs.fileno(),
        }
        with self._path(f"stderr-{rank}").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "profiler.measure.worker", json.dumps(settings)],
                env={**worker_environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        theirs.close()
        self.processes.append(process)
        self._connections.append(ours)

    def _send(self, rank: int, connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except OSError:
            raise ExecutionFailed(self._death(rank)) from None

    def _collect(self, on_progress: TaskProgress, silence_timeout_s: float) -> list[Any]:
        """One result of each worker; progress is rank 0's."""
        results: dict[int, Any] = {}
        while len(results) < self.num_workers:
            ready = wait(self._connections, timeout=silence_timeout_s)
            if not ready:
                silent = sorted(set(range(self.num_workers)) - set(results))
                raise ExecutionFailed(f"profiling workers {silent} said nothing for {silence_timeout_s:.0f} s")
            for rank, connection in enumerate(self._connections):
                if connection not in ready:
                    continue
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError):
                    raise ExecutionFailed(self._death(rank)) from None
                if kind == "error":
                    raise ExecutionFailed(f"profiling worker {rank} failed: {content}")
                if kind == "result":
                    results[rank] = content
                elif rank == 0:
                    on_progress(*content)
        return [results[rank] for rank in range(self.num_workers)]

    def _death(self, rank: int) -> str:
        try:
            code = self.processes[rank].wait(timeout=_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            return f"profiling worker {rank} closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        lines = self._path(f"stderr-{rank}").read_text(errors="replace").splitlines()
        words = [line.strip() for line in lines if line.strip() and not line.startswith("USDT:")]  # the profiler's own chatter
        return f"profiling worker {rank} {how}" + (f": {words[-1]}" if words else "")

    def _path(self, name: str) -> Path:
        if self._directory is None:
            raise RuntimeError("the pool is not open")
        return Path(self._directory.name) / name

    def _close(self) -> None:
        """Ask all workers to end and give them time for it."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _EXIT_GRACE_S
        for process in self.processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
