"""What a measuring task knows of its worker, and how the workers keep in step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from profiler.measure.clock import Clock, clock_of

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16, "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8,
    "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip

TELLING_FRACTION = 0.2  # from here on the pace so far says when a task will end


@dataclass
class Worker:
    """One rank of the measurement. ``report(elapsed_s, total_s, message)`` reaches the caller's progress (rank 0's does)."""

    rank: int
    world_size: int
    device: torch.device
    report: Callable[[float, float, str], None]
    baseline_bytes: float = 0.0
    groups: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)

    @property
    def clock(self) -> Clock:
        """The clock of the device."""
        return clock_of(self.device)

    def agree(self, *values: float) -> list[float]:
        """The largest of each value over all ranks; also a meeting point: no rank leaves before all have come."""
        if self.world_size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return [float(value) for value in shared]

    def meet(self) -> None:
        """Wait for all ranks."""
        self.agree(0.0)

    def repeats(self, pilot_s: float, wanted_s: float, least: int, most: int) -> int:
        """How often to repeat something that took ``pilot_s`` on the slowest rank so as to fill ``wanted_s``; all ranks agree."""
        (slowest,) = self.agree(pilot_s)
        return max(least, min(most, int(wanted_s / max(slowest, 1e-7))))

    def group(self, size: int) -> dist.ProcessGroup | None:
        """The group of ``size`` neighbouring ranks that this rank is in; ``None`` when it is left over. Collective call."""
        if size not in self.groups:
            self.groups[size] = None
            for first in range(0, self.world_size - size + 1, size):
                ranks = list(range(first, first + size))
                made = dist.new_group(ranks)
                if self.rank in ranks:
                    self.groups[size] = made
        return self.groups[size]


class Deadline:
    """A time budget that all ranks see end at the same moment of their program (rank-agreed)."""

    def __init__(self, worker: Worker, budget_s: float) -> None:
        self._worker, self._budget_s = worker, budget_s
        self._started = time.perf_counter()

    def elapsed_s(self) -> float:
        """Seconds since the start, on this rank."""
        return time.perf_counter() - self._started

    def report(self, fraction: float, message: str) -> None:
        """Tell how far the task is: ``fraction`` of what it must do at least; it ends with its budget, or later if need be."""
        elapsed = self.elapsed_s()
        pace_s = elapsed / fraction if fraction >= TELLING_FRACTION else 0.0  # the first bit includes what happens only once
        self._worker.report(elapsed, max(self._budget_s, pace_s, elapsed), message)

    def passed(self) -> bool:
        """Whether the budget is used up on some rank. Collective call."""
        (used,) = self._worker.agree(self.elapsed_s())
        return used >= self._budget_s


def pilot(work: Callable[[], object], calls: int = 2) -> float:
    """Shortest host seconds of a few calls; the first ones warm up."""
    best = float("inf")
    for _ in range(calls):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def samples_of(worker: Worker, work: Callable[[], object], repeats: int) -> Sequence[float]:
    """Seconds of ``repeats`` calls by the device's clock."""
    clock = worker.clock
    clock.run_ahead()
    marks = []
    for _ in range(repeats):
        start = clock.mark()
        work()
        marks.append((start, clock.mark()))
    clock.settle()
    return [clock.seconds(start, end) for start, end in marks]
