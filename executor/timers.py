"""Exclusive timers of one rank by the terms of ``specs.terms``, and counts of what it sent.

Phases nest: entering one stops the clock of the phase around it, so every moment belongs to exactly one term and the terms
of a step sum to its duration. Cost: two clock readings and two list operations per phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from specs.terms import TIME_TERMS

ROOT_TERM = "other"


@dataclass
class Traffic:
    """Calls and bytes of one kind of communication (bytes of the full, unsharded tensor of each call)."""

    calls: int = 0
    num_bytes: int = 0


@dataclass
class StepRecord:
    """One step: exclusive seconds by term (they sum to ``step_time_s``) and traffic by ``axis.op``."""

    step_time_s: float
    terms: dict[str, float]
    traffic: dict[str, Traffic] = field(default_factory=dict)


class Phase:
    """Context manager of one term; the same object may be entered again while it is open."""

    __slots__ = ("_term", "_timers")

    def __init__(self, timers: Timers, term: str) -> None:
        self._timers, self._term = timers, term

    def __enter__(self) -> None:
        self._timers._enter(self._term)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timers._leave()


class Timers:
    """Times between :meth:`start` and :meth:`stop`; what no phase names goes to ``other``."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(TIME_TERMS, 0.0)
        self._stack = [ROOT_TERM]
        self._started = self._last = clock()
        self._traffic: dict[str, Traffic] = {}
        self._phases = {term: Phase(self, term) for term in TIME_TERMS}

    def phase(self, term: str) -> Phase:
        """The context manager that charges its duration, inner phases excluded, to ``term``."""
        return self._phases[term]

    @property
    def current(self) -> str:
        """The term that is charged now."""
        return self._stack[-1]

    def start(self) -> None:
        """Forget everything and begin a step."""
        self._seconds = dict.fromkeys(TIME_TERMS, 0.0)
        self._stack = [ROOT_TERM]
        self._traffic = {}
        self._started = self._last = self._clock()

    def stop(self) -> StepRecord:
        """End the step and return what it took."""
        self._charge()
        return StepRecord(self._last - self._started, dict(self._seconds), dict(self._traffic))

    def count(self, kind: str, num_bytes: int) -> None:
        """Note one call of ``kind`` (``tp.all_reduce``)."""
        traffic = self._traffic.get(kind)
        if traffic is None:
            traffic = self._traffic[kind] = Traffic()
        traffic.calls += 1
        traffic.num_bytes += num_bytes

    def move(self, source: str, target: str, seconds: float) -> None:
        """Charge ``seconds`` that ran under ``source`` to ``target`` (for waits that only show once they are over)."""
        self._charge()
        seconds = min(max(seconds, 0.0), self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def now(self) -> float:
        """The clock's reading."""
        return self._clock()

    def _charge(self) -> None:
        now = self._clock()
        self._seconds[self._stack[-1]] += now - self._last
        self._last = now

    def _enter(self, term: str) -> None:
        self._charge()
        self._stack.append(term)

    def _leave(self) -> None:
        self._charge()
        self._stack.pop()
