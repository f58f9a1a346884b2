"""Slow devices by CPU quota: each rank in a control group of its own (version 1, ``cpu``), with a share of its core.

Ranks on one core do not disturb each other while their shares leave some of it free. A rank that has waited runs its next
milliseconds at full speed, so quotas are right for long steps, and dilation is for pipelines.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from specs.errors import ExecutionFailed, InvalidInput

ROOT = Path("/sys/fs/cgroup/cpu")
NAME = "meshwright"
PERIOD_US = 20_000
SMALLEST_QUOTA_US = 1_000  # the kernel refuses less
USED_SHARE_OF_CORE = 0.9
_REMOVAL_TRIES = 50


def core_shares(slowdowns: Sequence[float], num_cores: int) -> list[float]:
    """Share of its core for each rank, rank ``r`` on core ``r`` modulo ``num_cores``: in the ratio of the speeds, and as much as
    the fullest core allows."""
    load = [0.0] * num_cores
    for rank, slowdown in enumerate(slowdowns):
        load[rank % num_cores] += 1 / slowdown
    base = USED_SHARE_OF_CORE / max(load)
    return [base / slowdown for slowdown in slowdowns]


class Quotas:
    """The control groups of a run's ranks; a context manager. ``groups``: one directory for each rank."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = list(shares)
        self._folder = ROOT / f"{NAME}-{os.getpid()}-{time.monotonic_ns()}"
        self.groups = [self._folder / f"rank{rank}" for rank in range(len(self._shares))]

    def __enter__(self) -> Quotas:
        if not os.access(ROOT, os.W_OK) or not (ROOT / "cpu.shares").exists():
            message = f"CPU quotas need root and control groups of version 1 at {ROOT}; slow_by 'dilation' needs neither"
            raise InvalidInput.single("no_quotas", message, subject="emulation")
        remove_left_over()
        try:
            for group, share in zip(self.groups, self._shares, strict=True):
                self._make(group, share)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the groups; their processes must have ended. May be called again."""
        _remove(self._folder)

    def _make(self, group: Path, share: float) -> None:
        quota = max(SMALLEST_QUOTA_US, round(share * PERIOD_US))
        try:
            group.mkdir(parents=True)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            raise ExecutionFailed(f"no CPU quota of {quota} us at {group}: {error}") from error


def join_group(group: str) -> None:
    """Move this process, with all its threads, into a control group."""
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))


def remove_left_over() -> None:
    """Groups of runs that were killed before they could remove theirs."""
    for folder in ROOT.glob(f"{NAME}-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(folder)


def _remove(folder: Path) -> None:
    for _ in range(_REMOVAL_TRIES):
        if not folder.exists():
            return
        for group in folder.glob("rank*"):
            with contextlib.suppress(OSError):  # a process that was killed a moment ago may still be in it
                group.rmdir()
        with contextlib.suppress(OSError):
            folder.rmdir()
        time.sleep(0.02)
