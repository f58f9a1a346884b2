"""The search: enumerate, bound, refine best-first, confirm in the event simulation, stop with a certificate.

A *candidate* is a skeleton (``planner.space``) with its stage split: the even one of alike ranks where it fits, else the one that
the stage program gives it. Rows of the space wait in the order of their first bound; the best get their close bound, many at a
time, and go on a heap. The head of the heap goes one level up (split and exact memory, the longest path through its schedule, the
stage program), is put back with its better bound, and when it comes up again simulated. When no bound is below the best simulated
plan, no candidate is better: optimal. The same inputs and seed give the same answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.alternatives import alternatives
from planner.assemble import Assembler
from planner.assumptions import assumptions
from planner.bounds import Bounds, first_bounds
from planner.candidates import Candidates, Confirmed
from planner.explain import explain
from planner.infeasible import broken_limits, closest_notes
from planner.layout import pools
from planner.objective import ObjectiveFunction, RowValues
from planner.prices import Prices
from planner.queue import CLOSE, READY, Queue
from planner.refine import DoesNotFit
from planner.space import Space, enumerate_space
from planner.strategy_text import parse_fields
from planner.table import CandidateTable, ParetoPoint, pareto_front
from simulator.cost_model import CostModel
from specs.answer import PlanAnswer, SearchRecord, Status
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.profile import Profile
from specs.progress import Progress, ProgressSink, ignore
from specs.training import TrainingSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """How to search.

    ``time_limit_s``: wall time, ``None`` = none. ``top``: alternatives to list. ``explain``: say what each choice gains
    (simulates its neighbours). ``seed``: of the solver. ``strategy``: fields that
    the plan must have (``"pp=2 zero=1"``); the others are searched. ``confirm_at_most``: simulations before the answer is called
    feasible instead of optimal. ``tolerance``: a plan within this share of the bound is called optimal.
    """

    time_limit_s: float | None = None
    top: int = 5
    seed: int = 0
    strategy: str | None = None
    explain: bool = True
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
    return explore(graph, cluster, workload, profile, options, progress, cost_model=cost_model).answer


@dataclass(frozen=True)
class Exploration:
    """A search that has ended: its answer, and all of its candidates with what became of them."""

    answer: PlanAnswer
    table: CandidateTable

    def pareto_front(self) -> list[ParetoPoint]:
        """The best plans by time, memory, devices and cost (``planner.table.pareto_front``)."""
        return pareto_front(self.table.candidates)


def explore(
    graph: ModelGraph,
    cluster: ClusterSpec,
    workload: TrainingSpec,
    profile: Profile | None = None,
    options: SearchOptions = SearchOptions(),
    progress: ProgressSink = ignore,
    *,
    cost_model: CostModel | None = None,
) -> Exploration:
    """:func:`search`, with all candidates."""
    run = _Search(graph, cluster, workload, profile, options, progress, cost_model)
    answer = run.run()
    return Exploration(answer, CandidateTable(run.candidates, run.outcomes(answer.status in ("optimal", "infeasible"))))


class _Search:
    """One search."""

    def __init__(
        self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, profile: Profile | None, options: SearchOptions,
        progress: ProgressSink, cost_model: CostModel | None,
    ) -> None:  # fmt: skip
        self.start = time.monotonic()
        self.options, self.progress, self.workload = options, progress, workload
        self.fixed: dict[str, Any] = parse_fields(options.strategy) if options.strategy else {}
        if (
            cluster.backend == "gloo"
        ):  # plans for these are run here, and at cp or ep above 1 no prediction was compared with a run yet
            self.fixed = {"cp": 1, "ep": 1, **self.fixed}
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
        self.values = RowValues(self.objective, self.space)
        self.best: Confirmed | None = None
        self.best_value = float("inf")
        self.outcome: dict[int, str] = {}
        self.fastest_s = float("inf")

    def run(self) -> PlanAnswer:
        """Bound, search, explain."""
        self._tell("bounding", f"{len(self.space.rows)} strategies on {len(self.pools)} choices of devices")
        self.candidates.bounds = first_bounds(self.prices, self.space, stop=self._out_of_time)
        self.queue = Queue(self.candidates, self.values, self.workload.limits.max_step_time_s)
        exhausted = self._best_first()
        return self._answer(exhausted)

    def _out_of_time(self) -> bool:
        limit = self.options.time_limit_s
        return limit is not None and time.monotonic() - self.start > limit

    # --- best first --------------------------------------------------------------------------------------------

    def _best_first(self) -> bool:
        """Take the head up a level until none can be better; True when that is so, False when time or simulations ran out."""
        queue = self.queue
        while True:
            queue.advance(self.best_value)
            head = queue.head()
            if head is None or head.value * (1 + self.options.tolerance) >= self.best_value:
                return True
            if self._out_of_time() or self.candidates.num_confirmed >= self.options.confirm_at_most:
                return False
            if head.level == READY:
                queue.pop()
                self._confirm(head.row)
            elif head.level == CLOSE:
                queue.prepare(self.best_value)
            else:
                queue.refine()

    def _confirm(self, row: int) -> None:
        found = self.candidates.confirm(row)
        if isinstance(found, DoesNotFit):
            self.outcome[row] = "memory"
            return
        limit = self.workload.limits.max_step_time_s
        self.fastest_s = min(self.fastest_s, found.step_time_s)
        if limit is not None and found.step_time_s > limit:
            self.outcome[row] = "max_step_time"
            return
        value = self.values.of(found.step_time_s, row)
        self.outcome[row] = "slower"
        if value >= self.best_value:
            return
        self.best, self.best_value = found, value
        bound = min(value, self.queue.least_value())
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

    def _answer(self, exhausted: bool) -> PlanAnswer:
        if self.best is None:
            return self._without_plan(exhausted)
        bound_value = min(self.best_value, self.queue.least_value())
        gap = self.best_value / bound_value - 1 if bound_value > 0 else None
        best_bound_s = self.best.step_time_s / (1 + gap) if gap is not None else 0.0
        others = []
        if self.options.top and not self._out_of_time():
            others = alternatives(self.candidates, self.best, self.options.top, self._out_of_time)
        lines = (
            []
            if self._out_of_time() or not self.options.explain
            else explain(self.candidates, self.best, others, self.fixed, self._out_of_time)
        )
        self._tell("done", f"{self.best.step_time_s:.4f} s", strategy=self.best.plan.strategy, best_bound_s=best_bound_s, gap=gap)
        return PlanAnswer(
            status="optimal" if exhausted else "feasible", plan=self.best.plan, prediction=self.best.prediction,
            search=self._record(best_bound_s, gap), alternatives=tuple(others[: self.options.top]),
            rejected=self._rejected(exhausted),
            assumptions=tuple(assumptions(self.prices, self.best)), explanation=tuple(lines),
        )  # fmt: skip

    def outcomes(self, exhausted: bool) -> NDArray[np.str_]:
        """What became of each row."""
        return self.queue.outcomes(self.outcome, None if self.best is None else self.best.row, exhausted)

    def _rejected(self, exhausted: bool) -> dict[str, int]:
        """Counts by reason: broken rules, memory, the limit on step time, simulated and slower, bounded out."""
        counts = dict(self.space.rejected)
        for reason, count in zip(*np.unique(self.outcomes(exhausted), return_counts=True), strict=True):
            if reason not in ("", "chosen"):
                counts[str(reason)] = counts.get(str(reason), 0) + int(count)
        return counts

    def _without_plan(self, exhausted: bool) -> PlanAnswer:
        status: Status = "infeasible" if exhausted else "timed_out"
        fastest_s = min(self.fastest_s, self.queue.fastest_s)
        limits = broken_limits(self.candidates, self.fixed, fastest_s=fastest_s) if exhausted else ()
        notes = closest_notes(self.candidates) if any(item.limit == "memory" for item in limits) else ()
        self._tell("done", status)
        return PlanAnswer(
            status=status, search=self._record(None, None), rejected=self._rejected(exhausted), limits=tuple(limits),
            explanation=tuple(notes),
        )  # fmt: skip

    def _record(self, best_bound_s: float | None, gap: float | None) -> SearchRecord:
        return SearchRecord(
            candidates=len(self.space.rows), priced=int(np.isfinite(self.candidates.bounds.fill).sum()),
            confirmed=self.candidates.num_confirmed, wall_s=time.monotonic() - self.start, best_bound_s=best_bound_s, gap=gap,
            seed=self.options.seed, space=self.space.dimensions() if len(self.space.rows) else {},
        )  # fmt: skip
