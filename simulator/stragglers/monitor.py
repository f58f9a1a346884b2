"""Sequential detection of lasting shifts in the channels of one phase: CUSUM with clipped steps (Page 1954), robust to one-offs.

For each channel S <- max(0, S + clip((y - a) / sigma, -3, 3)); above ``threshold`` a shift is confirmed, which began when S last
was 0. The allowance ``a`` is half the smallest shift of interest, at least 0.75 sigma; sigma is the noise of all channels together
(median absolute deviation), widened for its correlation from step to step. A clip at 3 lets no single step raise an alarm,
however long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specs.straggler import Finding

Array = NDArray[np.float64]

CLIP = 3.0
NORMAL_P90 = 1.2816
_MAD_TO_STD = 1.4826
_KEPT = 1000  # steps of history for estimates
_NOISE_STEPS = 200  # of it for the noise


@dataclass(frozen=True, slots=True)
class Settings:
    """``least``: smallest factor of interest by kind of phase (of data: seconds per second of step). ``warmup``: steps from which
    noise and, without peers, a channel's usual level are taken. ``one_off_sigmas``: what counts as a one-off."""

    compute: float = 1.05
    link: float = 1.2
    data: float = 0.03
    threshold: float = 15.0
    warmup: int = 20
    one_off_sigmas: float = 8.0
    memory_steps: float = 30.0


@dataclass(slots=True)
class _Shift:
    """A confirmed shift of a channel. ``level``: its size when found."""

    since: int
    found: int
    level: float
    until: int | None = None


class Monitor:
    """The channels of one phase. ``kind``: what a shift is called; ``factor``: a factor on time from the size of a shift."""

    def __init__(
        self, phase: str, kind: str, members: Sequence[tuple[int, ...]], least: float, settings: Settings, *,
        own_past: bool, factor: Callable[[float], float] = math.exp,
    ) -> None:  # fmt: skip
        self.phase, self.kind, self.members, self.least, self.settings = phase, kind, list(members), least, settings
        self.factor, self.own_past = factor, own_past
        count = len(self.members)
        self.step = 0
        self.usual = np.zeros(count)
        self.level, self.seen = np.zeros(count), np.zeros(count)
        self.sigma, self.correlation = math.nan, 0.0
        self._history: deque[Array] = deque(maxlen=_KEPT)
        self._up, self._down = np.zeros(count), np.zeros(count)
        self._up_since, self._down_since = np.zeros(count, dtype=int), np.zeros(count, dtype=int)
        self._peak = np.zeros(count)
        self._open: dict[int, _Shift] = {}
        self._closed: list[tuple[int, _Shift]] = []
        self.one_offs: list[Finding] = []

    def update(self, values: Array) -> list[Finding]:
        """Take a step's values; returns shifts that were found or ended in it."""
        self._history.append(values)
        self.step += 1
        if self.step < self.settings.warmup:
            return []
        if self.step > self.settings.warmup:
            if self.step % 10 == 0:
                self._learn_noise()
            return self._judge(self.step - 1, values)
        if self.own_past:
            self.usual = np.median(np.array(self._history), axis=0)
        self._learn_noise()
        return [found for step, past in enumerate(list(self._history)) for found in self._judge(step, past)]

    def findings(self) -> list[Finding]:
        """All shifts, with the factor that their steps show by now."""
        shifts = [*self._closed, *self._open.items()]
        return sorted((self._finding(channel, shift) for channel, shift in shifts), key=lambda item: item.since_step)

    def rates(self) -> list[tuple[int, float, float, float]]:
        """(channel, factor, low, high) of every channel now, with an 80 % interval."""
        steps = np.minimum(np.maximum(self.seen, 1), 2 * self.settings.memory_steps)
        width = NORMAL_P90 * self._wide_sigma() / np.sqrt(steps)
        found = []
        for channel, (level, half) in enumerate(zip(self.level, width, strict=True)):
            found.append((channel, self.factor(level), self.factor(level - half), self.factor(level + half)))
        return found

    # --- noise ----------------------------------------------------------------------------------------------------

    def _learn_noise(self) -> None:
        """Scale and step-to-step correlation of all channels together, each around its own median."""
        recent = np.array(list(self._history)[-_NOISE_STEPS:])
        rest = recent - np.median(recent, axis=0)
        self.sigma = max(_MAD_TO_STD * float(np.median(np.abs(rest))), 0.02 * self.least, 1e-6)
        clipped = np.clip(rest, -CLIP * self.sigma, CLIP * self.sigma)
        variance = float((clipped**2).mean())
        lagged = float((clipped[1:] * clipped[:-1]).mean()) / variance if variance > 0 else 0.0
        self.correlation = min(max(lagged, 0.0), 0.95)

    def _wide_sigma(self) -> float:
        """Noise of a mean over n steps, times sqrt(n): wider where steps are correlated."""
        return self.sigma * math.sqrt((1 + self.correlation) / (1 - self.correlation))

    # --- judging --------------------------------------------------------------------------------------------------

    def _judge(self, step: int, values: Array) -> list[Finding]:
        values = values - self.usual
        sigma = self._wide_sigma()
        allowance = max(self.least / 2, 0.75 * sigma)
        calm = self._up == 0
        self._up_since[calm], self._peak[calm] = step, 0.0
        self._up = np.maximum(0.0, self._up + np.clip((values - allowance) / sigma, -CLIP, CLIP))
        self._peak = np.maximum(self._peak, values)
        self._follow(values)
        found = [self._confirm(int(channel), step) for channel in np.flatnonzero(self._up > self.settings.threshold)]
        found += [self._recover(channel, step, values[channel], sigma) for channel in list(self._open)]
        self._note_one_offs(step, calm)
        return [item for item in found if item is not None]

    def _follow(self, values: Array) -> None:
        """Each channel's level: a mean that forgets, in which a one-off counts as three sigma."""
        self.seen += 1
        weight = 1 / np.minimum(self.seen, self.settings.memory_steps)
        self.level += weight * np.clip(values - self.level, -CLIP * self.sigma, CLIP * self.sigma)

    def _confirm(self, channel: int, step: int) -> Finding | None:
        """A shift above the threshold, if it is as large as one of interest."""
        self._up[channel] = self.settings.threshold
        if channel in self._open:
            return None
        shift = _Shift(int(self._up_since[channel]), step, 0.0)
        shift.level = self._estimate(channel, shift)[0]
        if shift.level < 0.8 * self.least:
            return None
        self._open[channel] = shift
        self._down[channel], self._peak[channel] = 0.0, 0.0
        self.level[channel], self.seen[channel] = shift.level, step + 1 - shift.since
        return self._finding(channel, shift)

    def _recover(self, channel: int, step: int, value: float, sigma: float) -> Finding | None:
        """The same the other way round: nearer to usual than to the shift."""
        shift = self._open[channel]
        if self._down[channel] == 0:
            self._down_since[channel] = step
        moved = float(np.clip((shift.level / 2 - value) / sigma, -CLIP, CLIP))
        self._down[channel] = max(0.0, self._down[channel] + moved)
        if self._down[channel] <= self.settings.threshold:
            return None
        shift.until = int(self._down_since[channel])
        del self._open[channel]
        self._closed.append((channel, shift))
        self._up[channel] = self._peak[channel] = 0.0
        self.level[channel], self.seen[channel] = 0.0, step + 1 - shift.until
        return self._finding(channel, shift)

    def _note_one_offs(self, step: int, was_calm: NDArray[np.bool_]) -> None:
        """Peaks that were over before they could be confirmed."""
        least = max(self.settings.one_off_sigmas * self.sigma, self.least)
        over = (self._up == 0) & ~was_calm & (self._peak > least)
        for channel in np.flatnonzero(over):
            if channel not in self._open:
                since, factor = int(self._up_since[channel]), self.factor(float(self._peak[channel]))
                self.one_offs.append(
                    Finding(
                        kind="one_off", phase=self.phase, ranks=self.members[channel], since_step=since, found_step=step,
                        until_step=since + 1, factor=factor, low=factor, high=factor,
                    )
                )  # fmt: skip
            self._peak[channel] = 0.0

    # --- estimates ------------------------------------------------------------------------------------------------

    def _estimate(self, channel: int, shift: _Shift) -> tuple[float, float]:
        """(level, half width of its 80 % interval) from the steps of the shift, each at most three sigma from their median."""
        first = self.step - len(self._history)
        stop = shift.until if shift.until is not None else max(shift.found + 1, self.step)
        values = np.array([past[channel] for past in list(self._history)[max(0, shift.since - first) : max(1, stop - first)]])
        values = values - self.usual[channel]
        middle = float(np.median(values))
        mean = float(np.clip(values, middle - CLIP * self.sigma, middle + CLIP * self.sigma).mean())
        return mean, NORMAL_P90 * self._wide_sigma() / math.sqrt(len(values))

    def _finding(self, channel: int, shift: _Shift) -> Finding:
        level, half = self._estimate(channel, shift)
        return Finding(
            kind=self.kind, phase=self.phase, ranks=self.members[channel], since_step=shift.since, found_step=shift.found,  # type: ignore[arg-type]
            until_step=shift.until, factor=self.factor(level), low=self.factor(level - half), high=self.factor(level + half),
        )  # fmt: skip
