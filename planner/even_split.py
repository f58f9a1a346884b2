"""The split of a pipeline whose schedule the stage program does not know: ranks, then stages, as alike as can be.

Every rank passes every micro-batch through its stages, so the rank whose stages take longest together paces the step, and the
longest stage its fill. A dynamic program finds the split whose longest stage is shortest (of those, the one whose squared times
add up to least); with several stages a rank, units then move from the longest rank to others while that helps. Memory is not looked
at.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from planner.prices import Floats, Prices
from planner.strategy_text import Strategy
from specs.schedule import stage_ranks

if TYPE_CHECKING:
    from planner.skeleton import Skeleton


def even_split(prices: Prices, strategy: Strategy, skeleton: Skeleton) -> tuple[int, ...]:
    """Units of each stage of ``strategy``."""
    costs = [(units.forward_s + units.backward_s)[prices.kind_of_unit] for units in skeleton.units]
    ranks = stage_ranks(strategy.schedule, num_ranks=strategy.pp, stages_per_rank=strategy.stages_per_rank)
    seconds = [costs[skeleton.rank_class[rank]] for rank in ranks]
    return level_ranks(seconds, ranks, shortest_longest(seconds))


def shortest_longest(seconds: Sequence[Floats]) -> tuple[int, ...]:
    """Counts of consecutive units, at least one a stage. ``seconds``: per stage, of each unit there."""
    tables = [_ranges(item) for item in seconds]
    longest = float(_best(tables, np.maximum)[0])
    limit = longest * (1 + 1e-12)
    squared = [np.where(table <= limit, table**2, np.inf) for table in tables]
    return _best(squared, np.add)[1]


def _ranges(seconds: Floats) -> Floats:
    """[a, b] -> seconds of units [a, b), infinite where empty. (U+1 x U+1)"""
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    table = total[None, :] - total[:, None]
    return np.where(np.tri(len(total), dtype=bool), np.inf, table)


def _best(tables: Sequence[Floats], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """Least joined value over all splits, and its counts: dynamic program over the stages."""
    reached = np.full(len(tables[0]), np.inf)
    reached[0] = 0.0
    starts = []
    for table in tables:
        options = join(reached[:, None], table)
        starts.append(options.argmin(axis=0))
        reached = options.min(axis=0)
    ends = [len(reached) - 1]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    ends.reverse()
    return float(reached[-1]), tuple(high - low for low, high in pairwise(ends))


def level_ranks(seconds: Sequence[Floats], ranks: Sequence[int], counts: tuple[int, ...]) -> tuple[int, ...]:
    """``counts`` after moving units from stages of the longest rank to other stages as long as the longest rank gets shorter, or
    stays and the longest stage or the squares get less. ``ranks``: of each stage."""
    totals = [np.concatenate([[0.0], np.cumsum(item)]) for item in seconds]

    def measure(split: Sequence[int]) -> tuple[tuple[float, float, float], int]:
        ends = np.cumsum((0, *split))
        stages = [float(total[high] - total[low]) for total, (low, high) in zip(totals, pairwise(ends), strict=True)]
        of_rank = [0.0] * (max(ranks) + 1)
        for rank, stage_s in zip(ranks, stages, strict=True):
            of_rank[rank] += stage_s
        longest = max(of_rank)
        return (longest, max(stages), sum(item * item for item in stages)), of_rank.index(longest)

    value, longest = measure(counts)
    while True:
        moved = [
            tuple(count - (stage == source) + (stage == target) for stage, count in enumerate(counts))
            for source in range(len(counts))
            for target in range(len(counts))
            if ranks[source] == longest and source != target and counts[source] > 1
        ]
        best = min(moved, key=lambda split: measure(split)[0], default=counts)
        better, next_longest = measure(best)
        if not _less(better, value):
            return counts
        counts, value, longest = best, better, next_longest


def _less(first: Sequence[float], second: Sequence[float]) -> bool:
    """Lexicographic, differences of rounding left out."""
    for a, b in zip(first, second, strict=True):
        if abs(a - b) > 1e-12 * max(a, b):
            return a < b
    return False
