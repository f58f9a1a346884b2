"""Runs a function on several ranks: forked from this (warm) process, with a hard time limit and the first failure raised here."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from profiler.worker_env import die_with_parent

COLLECTIVE_TIMEOUT_S = 20.0
CALLS_OF_A_POOL = 16


class RankFailed(AssertionError):
    """A rank raised, died, or did not finish; the message holds its number and traceback."""


def run_apart(function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> Any:
    """``function(*args)`` in a forked process without a process group: what it changes in torch's state ends with it."""
    return run_ranks(lambda _, *rest: function(*rest), 0, *args, timeout_s=timeout_s)[0]


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """``function(rank, *args)`` on each rank with a gloo process group (none with 0 ranks: one process); returns what each rank
    returned."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(max(world_size, 1)):
            receiver, sender = context.Pipe(duplex=False)
            target = (rank, world_size, Path(folder) / "store", os.getpid(), sender, function, args)
            process = context.Process(target=_rank_main, args=target, daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(pipes, time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=0.2)
                if process.is_alive():
                    process.kill()
                    process.join()


class RankPool:
    """Ranks that stay in one process group for many calls; after a failure the next call gets new ones.

    Groups that a call creates stay too: torch remembers device meshes, and looks their groups up again. Each has threads and
    sockets, so after some calls the ranks are replaced.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()
        self._starts = self._calls = 0

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """``function(rank, *args)`` on each rank; what each returned. ``function`` is found by its name in its module."""
        if self._calls == CALLS_OF_A_POOL:
            self.close()
        if not self._processes:
            self._start()
        self._calls += 1
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            return _collect(self._pipes, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes, self._calls = [], [], 0

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._starts += 1
        store = Path(self._folder.name) / f"store{self._starts}"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, os.getpid(), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, world_size: int, store: Path, parent: int, pipe: Connection) -> None:
    """Calls until the pipe closes."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    _join_group(rank, world_size, store)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            result = function(rank, *args)
            dist.barrier()
            pipe.send_bytes(pickle.dumps((True, time.time(), result)))
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, time.time(), traceback.format_exc())))


def _join_group(rank: int, world_size: int, store: Path) -> None:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)


def _collect(pipes: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    waiting = dict(enumerate(pipes))
    while waiting and not failures:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting)} did not finish within {timeout_s} s")
        time.sleep(0.05 if len(ready) < len(waiting) else 0.0)  # let the rank that failed first report, too
        for rank, pipe in list(waiting.items()):
            if pipe.poll(0):
                try:
                    ok, moment, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    ok, moment, value = False, 0.0, "the process ended without a word"
                del waiting[rank]
                if ok:
                    results[rank] = value
                else:
                    failures.append((moment, rank, value))
    if failures:
        _, rank, text = min(failures)
        raise RankFailed(f"rank {rank} failed:\n{text}")
    return [results[rank] for rank in sorted(results)]


def _rank_main(
    rank: int, world_size: int, store: Path, parent: int, sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    try:
        if world_size:
            _join_group(rank, world_size, store)
        result = function(rank, *args)
        if world_size:
            dist.barrier()
        sender.send_bytes(pickle.dumps((True, time.time(), result)))
        if world_size:
            dist.destroy_process_group()
        code = 0
    except BaseException:
        sender.send_bytes(pickle.dumps((False, time.time(), traceback.format_exc())))
        code = 1
    sender.close()
    with contextlib.suppress(OSError):
        os._exit(code)
