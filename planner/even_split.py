"""The split of a pipeline whose schedule the stage program does not know: the longest stage as short as can be.

Among those splits the one whose stages' squared times add up to least: the others are alike too. Every rank passes every
micro-batch through its stages, so the longest stage paces the step under any schedule. Memory is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.layout import Pool
from planner.prices import Floats, Prices
from planner.sites import sites
from planner.strategy_text import Strategy
from simulator.unit_cost import RecomputeChoice
from specs.schedule import stage_ranks


def even_split(prices: Prices, strategy: Strategy, pool: Pool) -> tuple[int, ...]:
    """Units of each stage of ``strategy``, which has ``dp``, on ``pool``."""
    choice = RecomputeChoice(strategy.recompute, strategy.op_classes)
    of_rank = []
    for site in sites(prices.model, pool, pp=strategy.pp, tp=strategy.tp, shard_group=strategy.shard_group):
        _, units = prices.slowest(site, strategy.sequence_parallel, strategy.micro_batch, choice)
        of_rank.append((units.forward_s + units.backward_s)[prices.kind_of_unit])
    ranks = stage_ranks(strategy.schedule, num_ranks=strategy.pp, stages_per_rank=strategy.stages_per_rank)
    return shortest_longest([of_rank[rank] for rank in ranks])


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
