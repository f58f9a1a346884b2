"""The search: enumerate, bound, refine best-first, confirm in the event simulation, stop with a certificate.

A *candidate* is a skeleton (``planner.space``) with the stage split that the stage program gives it. Candidates wait in a heap by
the best lower bound known of their objective. The head of the heap goes one level up (exact memory and greedy split, then the stage
program), is put back with its better bound, and when it comes up again simulated. When the head's bound is not below the best
simulated plan, no candidate is better: optimal. The same inputs and seed give the same answer.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner import rules
from planner.alternatives import alternatives
from planner.assemble import Assembler
from planner.assumptions import assumptions
from planner.bounds import Bounds, compute_bounds
from planner.candidates import Candidates, Confirmed
from planner.explain import explain
from planner.infeasible import broken_limits, closest_notes
from planner.layout import pools
from planner.objective import ObjectiveFunction
from planner.prices import Prices
from planner.refine import DoesNotFit
from planner.space import Space, enumerate_space
from planner.strategy_text import parse_fields
from simulator.cost_model import CostModel
from specs.answer import PlanAnswer, SearchRecord, Status
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.profile import Profile
from specs.progress import Progress, ProgressSink, ignore
from specs.training import TrainingSpec

Heap = list[tuple[float, int, int]]
# Levels of a candidate in the heap.
BOUNDED, PREPARED, REFINED = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """How to search.

    ``time_limit_s``: wall time, ``None`` = none. ``top``: alternatives to list. ``seed``: of the solver. ``strategy``: fields that
    the plan must have (``"pp=2 zero=1"``); the others are searched. ``confirm_at_most``: simulations before the answer is called
    feasible instead of optimal. ``tolerance``: a plan within this share of the bound is called optimal.
    """

    time_limit_s: float | None = None
    top: int = 5
    seed: int = 0
    strategy: str | None = None
    confirm_at_most: int = 500
    tolerance: float = 0.0


def search(
    graph: ModelGraph,
    cluster: ClusterSpec,
    workload: TrainingSpec,
    profile: Profile | None = None,
    options: SearchOptions = SearchOptions(),
    progress: ProgressSink = ignore,
    *,
    cost_model: CostModel | None = None,
) -> PlanAnswer:
    """The best plan of the strategy space on a resolved cluster, with its certificate.

    Infeasible is an answer that names the limit and what would lift it. Raises :class:`InvalidInput` when ``options.strategy``
    does not read or the search does not know its schedule, or the objective needs a price or power that the cluster does not give.
    """
    return _Search(graph, cluster, workload, profile, options, progress, cost_model).run()


class _Search:
    """One search."""

    def __init__(
        self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, profile: Profile | None, options: SearchOptions,
        progress: ProgressSink, cost_model: CostModel | None,
    ) -> None:  # fmt: skip
        self.start = time.monotonic()
        self.options, self.progress, self.workload = options, progress, workload
        self.fixed: dict[str, Any] = parse_fields(options.strategy) if options.strategy else {}
        violations = rules.schedule_is_searched(self.fixed.get("schedule", "1f1b"), self.fixed.get("chunks", 1), "strategy")
        if violations:
            raise InvalidInput(violations, subject=f"strategy '{options.strategy}'")
        self.objective = ObjectiveFunction(cluster, workload)
        loss: str | None = self.fixed.get("loss")
        self.model = (cost_model or CostModel(graph, cluster, workload, profile)).with_loss(loss or workload.loss_kernel)
        self.prices = Prices(self.model)
        self.pools = pools(cluster, workload.limits.max_devices)
        self.space: Space = enumerate_space(graph, workload, self.pools, self.fixed)
        self.candidates = Candidates(
            self.prices, Assembler(graph, cluster, workload, loss), self.space, Bounds(np.zeros(0), np.zeros(0)),
            split=self.fixed.get("split"), seed=options.seed,
        )  # fmt: skip
        self.best: Confirmed | None = None
        self.best_value = float("inf")
        self.rejected = dict(self.space.rejected)
        self.fastest_s = float("inf")

    def run(self) -> PlanAnswer:
        """Bound, search, explain."""
        self._tell("bounding", f"{len(self.space.rows)} strategies on {len(self.pools)} choices of devices")
        self.candidates.bounds = bounds = compute_bounds(self.prices, self.space, stop=self._out_of_time)
        self._reject("memory", int((~bounds.fits).sum()))
        heap = self._heap(bounds)
        exhausted = self._best_first(heap)
        return self._answer(heap, exhausted)

    def _out_of_time(self) -> bool:
        limit = self.options.time_limit_s
        return limit is not None and time.monotonic() - self.start > limit

    def _reject(self, reason: str, count: int = 1) -> None:
        if count:
            self.rejected[reason] = self.rejected.get(reason, 0) + count

    # --- best first --------------------------------------------------------------------------------------------

    def _heap(self, bounds: Bounds) -> Heap:
        """(bound of the objective, row, level), least first; rows beyond the step time limit are dropped."""
        limit = self.workload.limits.max_step_time_s
        rows = np.flatnonzero(bounds.fits)
        if limit is not None:
            late = bounds.time_s[rows] > limit
            self._reject("max_step_time", int(late.sum()))
            self.fastest_s = min(self.fastest_s, float(bounds.time_s[rows].min(initial=np.inf)))
            rows = rows[~late]
        heap = [(self._value(float(bounds.time_s[row]), row), row, BOUNDED) for row in rows.tolist()]
        heapq.heapify(heap)
        return heap

    def _value(self, seconds: float, row: int) -> float:
        return self.objective.value(seconds, self.candidates.pool(row))

    def _best_first(self, heap: Heap) -> bool:
        """Take the head up a level until none can be better; True when that is so, False when time or simulations ran out."""
        while heap:
            value, row, level = heap[0]
            if value * (1 + self.options.tolerance) >= self.best_value:
                return True
            if self._out_of_time() or self.candidates.num_confirmed >= self.options.confirm_at_most:
                return False
            heapq.heappop(heap)
            if level == REFINED:
                self._confirm(row, heap)
                continue
            found = self.candidates.prepare(row) if level == BOUNDED else self.candidates.refine(row)
            if isinstance(found, DoesNotFit):
                self._reject("memory")
            else:
                heapq.heappush(heap, (max(value, self._value(self.candidates.bound_s(row), row)), row, level + 1))
        return True

    def _confirm(self, row: int, heap: Heap) -> None:
        found = self.candidates.confirm(row)
        if isinstance(found, DoesNotFit):
            self._reject("memory")
            return
        limit = self.workload.limits.max_step_time_s
        self.fastest_s = min(self.fastest_s, found.step_time_s)
        if limit is not None and found.step_time_s > limit:
            self._reject("max_step_time")
            return
        value = self._value(found.step_time_s, row)
        if value >= self.best_value:
            self._reject("slower")
            return
        if self.best is not None:
            self._reject("slower")
        self.best, self.best_value = found, value
        bound = min(value, heap[0][0]) if heap else value
        self._tell(
            "improved", f"{found.step_time_s:.4f} s, {found.plan.strategy}", incumbent_s=found.step_time_s,
            best_bound_s=found.step_time_s * bound / value, gap=value / bound - 1 if bound > 0 else None,
            strategy=found.plan.strategy,
        )  # fmt: skip

    def _tell(self, stage: str, message: str, **data: Any) -> None:
        elapsed = time.monotonic() - self.start
        self.progress(
            Progress(
                stage=stage, message=message, done=self.candidates.num_confirmed, data={"elapsed_s": round(elapsed, 3), **data}
            )
        )

    # --- the answer --------------------------------------------------------------------------------------------

    def _answer(self, heap: Heap, exhausted: bool) -> PlanAnswer:
        if self.best is None:
            return self._without_plan(exhausted)
        self._reject("bound_above_best", len(heap) if exhausted else 0)
        bound_value = self.best_value if not heap else min(self.best_value, heap[0][0])
        gap = self.best_value / bound_value - 1 if bound_value > 0 else None
        best_bound_s = self.best.step_time_s / (1 + gap) if gap is not None else 0.0
        others = [] if self._out_of_time() else alternatives(self.candidates, self.best, self.options.top, self._out_of_time)
        lines = [] if self._out_of_time() else explain(self.candidates, self.best, others, self.fixed, self._out_of_time)
        self._tell("done", f"{self.best.step_time_s:.4f} s", strategy=self.best.plan.strategy, best_bound_s=best_bound_s, gap=gap)
        return PlanAnswer(
            status="optimal" if exhausted else "feasible", plan=self.best.plan, prediction=self.best.prediction,
            search=self._record(best_bound_s, gap), alternatives=tuple(others[: self.options.top]), rejected=self.rejected,
            assumptions=tuple(assumptions(self.prices, self.best)), explanation=tuple(lines),
        )  # fmt: skip

    def _without_plan(self, exhausted: bool) -> PlanAnswer:
        status: Status = "infeasible" if exhausted else "timed_out"
        limits = broken_limits(self.candidates, self.fixed, fastest_s=self.fastest_s) if exhausted else ()
        notes = closest_notes(self.candidates) if any(item.limit == "memory" for item in limits) else ()
        self._tell("done", status)
        return PlanAnswer(
            status=status, search=self._record(None, None), rejected=self.rejected, limits=tuple(limits), explanation=tuple(notes)
        )

    def _record(self, best_bound_s: float | None, gap: float | None) -> SearchRecord:
        return SearchRecord(
            candidates=len(self.space.rows), priced=int(np.isfinite(self.candidates.bounds.fill).sum()),
            confirmed=self.candidates.num_confirmed, wall_s=time.monotonic() - self.start, best_bound_s=best_bound_s, gap=gap,
            seed=self.options.seed, space=self.space.dimensions() if len(self.space.rows) else {},
        )  # fmt: skip
