"""Who is slow: from the ranks' timings of each phase, step by step, to slow devices, slow links, data stalls and one-offs.

A rank's times of a compute phase are compared with those of its peers in the same step, so what slows all of them alike (a longer
sequence, a warmer room) is nobody's fault. ``work`` (tokens or FLOP of each rank in the step) makes unlike loads comparable: a
rank whose experts are popular is not slow. Data stalls that hit all ranks at once are looked for against the step itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.stragglers.monitor import Monitor, Settings
from simulator.stragglers.phases import Phase, channels_of, has_peers, signal
from specs.errors import InvalidInput, Violation
from specs.straggler import Diagnosis, Finding, PhaseSpread, RankRate

Array = NDArray[np.float64]
DEFAULTS = Settings()
_NAMES = {"compute": "slow_compute", "comm": "slow_link", "data": "data_stall"}


class Detector:
    """Judges a run while it goes on. ``phases``: one for each column of the timings."""

    def __init__(self, phases: Sequence[Phase], settings: Settings = DEFAULTS) -> None:
        self.phases, self.settings = list(phases), settings
        self.steps = 0
        self._judged = [
            (index, phase, self._monitor(phase)) for index, phase in enumerate(phases) if phase.kind != "wait" and phase.groups
        ]
        self._data = [index for index, phase in enumerate(phases) if phase.kind == "data"]
        self._everyone = Monitor(
            "+".join(phases[index].name for index in self._data), "data_stall", [()], settings.data, settings, own_past=False,
            factor=_stretch,
        )  # fmt: skip

    def update(self, times_s: Array, work: Array | None = None) -> list[Finding]:
        """Take one step's exclusive seconds (ranks x phases); returns what was found, or found to be over, in this step."""
        self.steps += 1
        step_s = float(np.median(times_s.sum(axis=1)))
        found: list[Finding] = []
        for index, phase, monitor in self._judged:
            found += monitor.update(signal(phase, times_s[:, index], step_s, work))
        if self._data:
            waited = float(np.median(times_s[:, self._data].sum(axis=1))) / max(step_s, 1e-9)
            found += self._everyone.update(np.array([waited]))
        return found

    def diagnosis(self) -> Diagnosis:
        """All findings so far and every rank's rate."""
        monitors = [monitor for _, _, monitor in self._judged] + ([self._everyone] if self._data else [])
        findings = [item for monitor in monitors for item in monitor.findings()]
        rates = [
            RankRate(rank=monitor.members[channel][0], phase=phase.name, factor=factor, low=low, high=high)
            for _, phase, monitor in self._judged
            if phase.kind == "compute" and self.steps >= self.settings.warmup
            for channel, factor, low, high in monitor.rates()
        ]
        return Diagnosis(
            steps=self.steps, findings=tuple(sorted(findings, key=lambda item: item.found_step)), rates=tuple(rates),
            one_offs=tuple(sorted((item for monitor in monitors for item in monitor.one_offs), key=lambda item: item.since_step)),
        )  # fmt: skip

    def _monitor(self, phase: Phase) -> Monitor:
        least = {"compute": math.log(self.settings.compute), "comm": math.log(self.settings.link), "data": self.settings.data}
        return Monitor(
            phase.name, _NAMES[phase.kind], channels_of(phase), least[phase.kind], self.settings, own_past=not has_peers(phase),
            factor=_stretch if phase.kind == "data" else math.exp,
        )  # fmt: skip


def _stretch(share: float) -> float:
    """Step time over step time without a stall that takes ``share`` of it."""
    return 1 / (1 - min(max(share, 0.0), 0.99))


def diagnose(times_s: Array, phases: Sequence[Phase], *, work: Array | None = None, settings: Settings = DEFAULTS) -> Diagnosis:
    """The diagnosis of a whole run. ``times_s``: exclusive seconds (steps x ranks x phases); ``work``: steps x ranks."""
    _check(times_s, phases, work, settings)
    detector = Detector(phases, settings)
    for step in range(len(times_s)):
        detector.update(times_s[step], None if work is None else work[step])
    return detector.diagnosis().replace(
        phases=spreads([phase.name for phase in phases], np.median(times_s, axis=0)), load_drift=_load_drift(work)
    )


def spreads(names: Sequence[str], seconds: Array, worst: int = 3) -> tuple[PhaseSpread, ...]:
    """Least, middle and largest seconds of each phase over the ranks, with the ``worst`` ranks. ``seconds``: ranks x phases."""
    found = []
    for index, name in enumerate(names):
        values = seconds[:, index]
        order = np.argsort(-values, kind="stable")[:worst]
        found.append(
            PhaseSpread(
                phase=name, min_s=float(values.min()), median_s=float(np.median(values)), max_s=float(values.max()),
                worst_ranks=tuple(int(rank) for rank in order),
            )
        )  # fmt: skip
    return tuple(found)


def _load_drift(work: Array | None) -> float | None:
    """How much more unlike the loads of the ranks are at the end than at the beginning, by max over mean."""
    if work is None or len(work) < 8:
        return None
    imbalance = work.max(axis=1) / np.maximum(work.mean(axis=1), 1e-12)
    quarter = len(work) // 4
    return float(imbalance[-quarter:].mean() / imbalance[:quarter].mean())


def _check(times_s: Array, phases: Sequence[Phase], work: Array | None, settings: Settings) -> None:
    """Raise with everything that is wrong with the arrays."""
    broken = []
    if times_s.ndim != 3 or times_s.shape[2] != len(phases):
        message = f"timings have the shape {times_s.shape}"
        broken.append(Violation(code="bad_shape", message=message, allowed=f"(steps, ranks, {len(phases)} phases)"))
    elif times_s.shape[0] < settings.warmup:
        message = f"{times_s.shape[0]} steps are too few to tell noise from slowness"
        broken.append(Violation(code="too_few_steps", message=message, actual=times_s.shape[0], allowed=f">= {settings.warmup}"))
    if not np.isfinite(times_s).all() or (times_s < 0).any():
        broken.append(Violation(code="not_a_duration", message="timings hold values that are negative or not finite"))
    if times_s.ndim == 3:
        members = {rank for phase in phases for group in phase.groups for rank in group}
        if members and max(members) >= times_s.shape[1]:
            message = f"a phase names rank {max(members)}, but there are {times_s.shape[1]}"
            broken.append(Violation(code="no_such_rank", message=message))
        if work is not None and work.shape != times_s.shape[:2]:
            broken.append(Violation(code="bad_shape", message=f"work has the shape {work.shape}", allowed=times_s.shape[:2]))
    if broken:
        raise InvalidInput(broken, subject="timings")
