"""Reading time on a device, and what many readings say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specs.profile import Timing

# GPU clock cycles that a queue is held so that the host can launch ahead of the device (about 1 ms).
RUN_AHEAD_CYCLES = 2_000_000


class Clock:
    """Marks in the order of execution and the seconds between them. On a CPU the host's clock is the device's."""

    def mark(self) -> Any:
        """The present moment."""
        return time.perf_counter()

    def run_ahead(self) -> None:
        """Before a batch of marks: let launches run ahead of the device, so that marks measure the device alone."""

    def settle(self) -> None:
        """Wait until all marked work is done."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another, after :meth:`settle`."""
        return float(end - start)


class CudaClock(Clock):
    """Marks are events in the current stream. Not yet seen on a GPU."""

    def mark(self) -> Any:
        """An event recorded now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def run_ahead(self) -> None:
        """Hold the queue for about a millisecond."""
        torch.cuda._sleep(RUN_AHEAD_CYCLES)

    def settle(self) -> None:
        """Synchronise with the device."""
        torch.cuda.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Device seconds between two events."""
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else Clock()


def timing(samples: Sequence[float]) -> Timing:
    """Median, 10th and 90th percentile of some seconds (at least one)."""
    low, middle, high = np.percentile(np.asarray(samples, dtype=np.float64), [10, 50, 90])
    return Timing(median_s=float(middle), p10_s=float(low), p90_s=float(high), samples=len(samples))
