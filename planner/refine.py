"""From a skeleton to a strategy with its stage split: exact memory of every range of units, then the integer program."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.even_split import even_split
from planner.layout import Pool
from planner.prices import Prices
from planner.skeleton import Skeleton
from planner.stage_memory import furthest_ends, missing_bytes
from planner.stage_program import greedy_start, improve_split
from planner.stages import PROGRAM_SCHEDULES, StageProblem, StageSplit, split_time_s
from planner.strategy_text import Strategy


@dataclass(frozen=True)
class Refined:
    """A strategy with its split. ``bound_s``: no split of the skeleton is faster (0 for one stage: nothing to split)."""

    strategy: Strategy
    bound_s: float


@dataclass(frozen=True)
class DoesNotFit:
    """No split fits: by how much every stage's budget would have to grow, and the largest budget."""

    missing_bytes: float
    budget_bytes: float


@dataclass(frozen=True)
class Prepared:
    """A skeleton that fits under some split. ``bound_s``: a first bound; ``problem``: its stage problem; without one the strategy
    has its split, or one stage. ``skeleton``: its prices."""

    strategy: Strategy
    bound_s: float
    problem: StageProblem | None = None
    start: StageSplit | None = None
    added_s: float = 0.0
    skeleton: Skeleton | None = None


class Refiner:
    """Splits skeletons; equal problems are solved once."""

    def __init__(self, prices: Prices, seed: int = 0) -> None:
        self.prices, self.seed = prices, seed
        self._solved: dict[tuple[object, ...], StageSplit] = {}

    def refine(
        self, strategy: Strategy, pool: Pool, num_micro_batches: int, *, ignore_memory: bool = False
    ) -> Refined | DoesNotFit:
        """The split of ``strategy`` (which has ``dp``) on ``pool``."""
        prepared = self.prepare(strategy, pool, num_micro_batches, ignore_memory=ignore_memory)
        return prepared if isinstance(prepared, DoesNotFit) else self.split(prepared)

    def prepare(
        self, strategy: Strategy, pool: Pool, num_micro_batches: int, *, ignore_memory: bool = False
    ) -> Prepared | DoesNotFit:
        """The even split of alike ranks where its exact memory fits, else what the program starts from. Under schedules that the
        program does not know always an even split."""
        skeleton = Skeleton(self.prices, strategy, pool, num_micro_batches)
        if strategy.pp == 1:
            units, budget = self.prices.num_units, skeleton.sites[0].budget_bytes
            missing = float(skeleton.memory_tables()[0][0, units]) - budget
            return Prepared(strategy, 0.0) if missing <= 0 or ignore_memory else DoesNotFit(missing, budget)
        if strategy.schedule not in PROGRAM_SCHEDULES:
            counts = strategy.split or skeleton.even_split() or even_split(self.prices, strategy, skeleton)
            missing = 0.0 if ignore_memory else skeleton.missing_bytes(counts)
            if missing > 0:
                return DoesNotFit(missing, max(site.budget_bytes for site in skeleton.sites))
            return Prepared(replace(strategy, split=counts), 0.0, skeleton=skeleton)
        if strategy.split is None and not ignore_memory:
            even = skeleton.even_split()
            if even is not None and skeleton.fits(even):
                return Prepared(replace(strategy, split=even), 0.0, skeleton=skeleton)
        return self._by_program(strategy, skeleton, ignore_memory=ignore_memory)

    def _by_program(self, strategy: Strategy, skeleton: Skeleton, *, ignore_memory: bool) -> Prepared | DoesNotFit:
        """Exact memory of every range of units, and the greedy split: what the program starts from."""
        units, tables = self.prices.num_units, skeleton.memory_tables()
        ends = np.full((strategy.pp, units), units, dtype=np.int64) if ignore_memory else furthest_ends(tables, skeleton.sites)
        problem, added = skeleton.stage_problem(ends), skeleton.added_s()
        if strategy.split is not None:
            return self._given(strategy, problem, skeleton, added)
        start = greedy_start(problem)
        if start is None:
            return DoesNotFit(missing_bytes(tables, skeleton.sites), max(site.budget_bytes for site in skeleton.sites))
        return Prepared(strategy, start.bound_s - added, problem, start, added, skeleton)

    def split(self, prepared: Prepared) -> Refined:
        """The best split of a prepared skeleton."""
        if prepared.problem is None or prepared.start is None:
            return Refined(prepared.strategy, prepared.bound_s)
        key = prepared.problem.key()
        if key not in self._solved:
            self._solved[key] = improve_split(prepared.problem, prepared.start, seed=self.seed)
        split = self._solved[key]
        return Refined(replace(prepared.strategy, split=split.counts), split.bound_s - prepared.added_s)

    def _given(self, strategy: Strategy, problem: StageProblem, skeleton: Skeleton, added_s: float) -> Prepared | DoesNotFit:
        """A split that the user gave: only its memory and its bound."""
        split = strategy.split or ()
        starts = np.cumsum((0, *split))
        if all(problem.furthest_end[stage, starts[stage]] >= starts[stage + 1] for stage in range(strategy.pp)):
            return Prepared(strategy, split_time_s(problem, split) - added_s, skeleton=skeleton)
        tables, budgets = skeleton.memory_tables(), [site.budget_bytes for site in skeleton.sites]
        missing = [float(tables[stage][starts[stage], starts[stage + 1]]) - budgets[stage] for stage in range(strategy.pp)]
        return DoesNotFit(max(missing), max(budgets))
