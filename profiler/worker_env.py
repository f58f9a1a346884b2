"""The environment that every measured process runs in: profiler workers and training workers alike. No torch here.

A number measured under one setting of threads, allocator and cores says nothing about a run under another, so both ask
this module. Start a process with :func:`worker_environment`, then call :func:`prepare_worker` first thing in it, before
torch is imported.

* One compute thread per worker: ranks share the cores, and a thread pool per rank would have them fight for them.
* Each worker is pinned to one core (local rank modulo cores); its communication threads inherit the core. Without that the
  kernel moves workers about and the same step varies more from run to run.
* glibc hands blocks of 64 KiB and more back to the system as soon as they are freed, so resident memory follows the tensors
  that are alive instead of the allocator's habits.
* gloo talks over the loopback device, whatever the host's name resolves to.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

MALLOC_THRESHOLD_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1


def worker_environment(*, threads: int = 1, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables of a worker (or of the launcher that forks it): ``base`` (default: ours) with ours set over it.

    The allocator settings act at process start only, so they must be there before the interpreter starts.
    """
    return {
        **(os.environ if base is None else base),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": str(MALLOC_THRESHOLD_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(MALLOC_THRESHOLD_BYTES),
        "MALLOC_ARENA_MAX": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }


def prepare_worker(local_rank: int, *, parent_pid: int | None = None, pin: bool = True) -> None:
    """First call of a worker: die with the parent (when ``parent_pid`` is given) and stay on one core (when ``pin``)."""
    if parent_pid is not None:
        die_with_parent(parent_pid)
    if pin:
        pin_to_core(local_rank)


def pin_to_core(local_rank: int) -> None:
    """Bind the process (and the threads it will start) to one of the cores it may use. No effect where it is unsupported."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = allowed_cores()
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


def allowed_cores() -> list[int]:
    """Cores that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as its parent ends, however the parent ends (Linux; elsewhere no effect).

    ``parent_pid`` is who the parent should be: when it has gone already, the process ends at once.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent_pid:
        os._exit(1)
