"""The candidates of a search in the order of their bounds, each as far refined as it had to be."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.candidates import Candidates
from planner.objective import RowValues
from planner.refine import DoesNotFit, Prepared

# Levels of a candidate on the heap: close bound known, split to be found by the stage program, split known and its path walked.
CLOSE, PREPARED, READY = range(3)
# Rows that get their close bound, and candidates that get their split, at a time.
CLOSE_AT_ONCE = 16384
PREPARE_AT_ONCE = 32


class Head(NamedTuple):
    """The best open candidate: bound of its objective, row, level."""

    value: float
    row: int
    level: int


@dataclass
class Queue:
    """See the module docstring. ``limit_s``: rows whose bound is beyond it are dropped."""

    candidates: Candidates
    values: RowValues
    limit_s: float | None

    def __post_init__(self) -> None:
        bounds = self.candidates.bounds
        rows = np.flatnonzero(bounds.fits)
        self.fastest_s = float(bounds.time_s[rows].min(initial=np.inf))
        value = self.values.of_rows(bounds.time_s[rows], rows)
        order = np.lexsort((rows, value))
        self._waiting, self._waiting_value = rows[order], value[order]
        self._next = 0
        self._heap: list[Head] = []
        self._at_once = CLOSE_AT_ONCE

    # --- the order ---------------------------------------------------------------------------------------------

    def head(self) -> Head | None:
        """The best open candidate that has its close bound."""
        return self._heap[0] if self._heap else None

    def least_value(self) -> float:
        """No open candidate is better."""
        first = float(self._waiting_value[self._next]) if self._next < len(self._waiting) else np.inf
        return min(first, self._heap[0].value if self._heap else np.inf)

    def pop(self) -> Head:
        """Take the head away."""
        return heapq.heappop(self._heap)

    def advance(self, best_value: float) -> None:
        """Give rows their close bound until none that waits may be better than the head, or than the best plan."""
        while self._next < len(self._waiting):
            first = float(self._waiting_value[self._next])
            if first >= best_value or (self._heap and first > self._heap[0].value):
                return
            stop = int(np.searchsorted(self._waiting_value, best_value))
            rows = self._waiting[self._next : min(stop, self._next + self._at_once)]
            self._next += len(rows)
            self._at_once *= 2
            self._push(rows, best_value)

    def _push(self, rows: NDArray[np.int64], best_value: float) -> None:
        bounds = self.candidates.bounds
        bounds.come_closer(np.sort(rows))
        rows = np.sort(rows[bounds.fits[rows] & np.isfinite(bounds.time_s[rows])])
        if self.limit_s is not None:
            rows = rows[bounds.time_s[rows] <= self.limit_s]
        value = self.values.of_rows(bounds.time_s[rows], rows)
        better = value < best_value
        self._heap += [Head(*item, CLOSE) for item in zip(value[better].tolist(), rows[better].tolist(), strict=True)]
        heapq.heapify(self._heap)

    # --- levels ------------------------------------------------------------------------------------------------

    def prepare(self, best_value: float) -> None:
        """Splits and paths of the best candidates that lack them."""
        taken: list[Head] = []
        while self._heap and len(taken) < PREPARE_AT_ONCE and self._heap[0].level == CLOSE and self._heap[0].value < best_value:
            taken.append(self.pop())
        rows = [head.row for head in taken]
        found = {row: self.candidates.prepare(row) for row in rows}
        self.candidates.trace(rows)
        for head in taken:
            prepared = found[head.row]
            if isinstance(prepared, Prepared):
                self._put_back(head, READY if prepared.problem is None else PREPARED)

    def refine(self) -> None:
        """The head's split by the stage program, and its path."""
        head = self.pop()
        if not isinstance(self.candidates.refine(head.row), DoesNotFit):
            self.candidates.trace([head.row])
            self._put_back(head, READY)

    def _put_back(self, head: Head, level: int) -> None:
        value = max(head.value, self.values.of(self.candidates.bound_s(head.row), head.row))
        heapq.heappush(self._heap, Head(value, head.row, level))

    # --- what became of them -----------------------------------------------------------------------------------

    def outcomes(self, simulated: dict[int, str], chosen: int | None, exhausted: bool) -> NDArray[np.str_]:
        """Per row: chosen, why it was rejected, or empty where the search ended before it was judged."""
        bounds = self.candidates.bounds
        found = np.full(len(bounds.fill), "bound_above_best" if exhausted and chosen is not None else "", dtype="U20")
        if self.limit_s is not None:
            found[bounds.time_s > self.limit_s] = "max_step_time"
        found[~bounds.fits] = "memory"
        found[list(self.candidates.memory_misses)] = "memory"
        incomplete = bounds.fits & ~np.isfinite(bounds.time_s)
        found[incomplete] = "more_stages_than_units"
        for row, reason in simulated.items():
            found[row] = reason
        if chosen is not None:
            found[chosen] = "chosen"
        return found
