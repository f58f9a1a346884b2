"""Slow devices by dilation: after each piece of its own compute a rank sleeps in proportion to the CPU time that it took.

Needs no rights, leaves the core to the other ranks, and slows every piece alike, however short. Pieces end where a collective
begins and at the border of every unit, so that what overlaps with compute overlaps with slow compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor, nn

from executor.timers import Timers

COMPUTE_TERMS = frozenset({"forward", "backward", "recompute", "optimizer"})


class DilatedTimers(Timers):
    """Timers under which compute takes ``slowdown`` times as long."""

    def __init__(self, slowdown: float, clock: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.thread_time,
                 sleep: Callable[[float], None] = time.sleep) -> None:  # fmt: skip
        self._slowdown, self._cpu, self._sleep = slowdown, cpu, sleep
        self._cpu_last = cpu()
        super().__init__(clock)

    def start(self) -> None:
        """Forget everything and begin a step."""
        super().start()
        self._cpu_last = self._cpu()

    def catch_up(self) -> None:
        """Sleep for the compute since the last time."""
        self._charge()

    def _charge(self) -> None:
        if self._stack[-1] in COMPUTE_TERMS:
            pause = (self._slowdown - 1) * (self._cpu() - self._cpu_last)
            if pause > 0:
                self._sleep(pause)
        super()._charge()
        self._cpu_last = self._cpu()


class DilatedUnit(nn.Module):
    """A unit at whose border compute catches up, in forward and in backward."""

    def __init__(self, unit: nn.Module, timers: DilatedTimers) -> None:
        super().__init__()
        self.unit, self._timers = unit, timers

    def forward(self, *args: Tensor) -> Tensor:
        """The unit's forward."""
        output = self.unit(*args)
        self._timers.catch_up()
        if output.requires_grad:
            output.register_hook(self._border)
        return output

    def _border(self, gradient: Tensor) -> None:
        self._timers.catch_up()
