"""A bound of pipelines whose layers are shared out by the rule of ``planner.rank_split``: true of that split alone.

Rank r starts when the first micro-batch has passed the stages before its first one, and then has m micro-batches of work. Under
schedules whose last action on a rank is a full backward, the gradient then still passes the stages before; where weight gradients
come last, the rank ends by itself. After that come reductions, tied gradients and the optimizer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats, Prices
from planner.rank_split import layers_of_ranks, layers_of_stages
from planner.space import Schedule
from planner.terms import DataParallel, Overlap, PipelineTerms, gathered_first_s, optimizer_s
from specs.schedule import SCHEDULES, stage_ranks

Ints = NDArray[np.int64]


def rank_split_bound(
    prices: Prices, split: RankSplit, terms: PipelineTerms, *, ranks: int, passes: Ints, there_s: Floats, back_s: Floats,
    exchange_s: Floats, dp: DataParallel, zero: int, tied_s: Floats, local: Floats, device: tuple[str, float],
) -> Floats:  # fmt: skip
    """Least step time per row; 0 where a stage is left without a unit: the split is then another one. ``split``: theirs;
    ``terms``: [row, kind]; ``dp``: of the rows; ``local``: parameters whose states a rank keeps, per unit."""
    name, m = split.schedule.name, passes[:, None]
    apart = splits(name)
    forward, backward = split.stages(terms.forward_s), split.stages(terms.input_s if apart else terms.backward_s)
    work = split.ranks(terms.work_s(name) - (exchange_s if SCHEDULES[name].overlaps else 0.0))
    overlap = (
        Overlap(dp.overlap.hidden[:, None], dp.overlap.back[:, None]) if dp.sharded and not prices.rules.reduce_inline else None
    )
    first = _first_s(prices, split, dp, forward) if dp.sharded else 0.0 * forward
    all_reduce, hops = split.ranks(terms.reduce_s), np.arange(ranks)
    reduce = np.zeros_like(work) if overlap is not None else all_reduce
    begin = _before(forward + first)[:, :ranks] + hops * there_s[:, None]
    busy = m * work + split.sum_of_ranks(first) - split.ranks(terms.add_s)
    own, tail = begin + busy + reduce, np.zeros_like(work)
    if not apart:  # the gradient passes the stages before, down to the first rank, which ends last
        tail = _before(backward)[:, :ranks] + hops * back_s[:, None]
        own = np.maximum(own, begin + busy + tail + reduce[:, :1])
    if overlap is not None:
        beside = all_reduce * (m if zero == 2 else 1.0)
        # what runs beside a rank's own work slows it down, what does not comes after it, where at most the tail hides it
        own = np.maximum(own, begin + busy + tail + overlap.hidden * np.maximum(0.0, beside - tail))
    if name == "zb_h1":  # the first rank waits until the first gradient is back, with a forward of each stage done
        waited = (forward + first + backward).sum(axis=1) + (ranks - 1) * (there_s + back_s)
        weight = split.stages(terms.weight_s - terms.add_s)[:, 0]
        rest = (passes - ranks) * forward[:, 0] + (passes - 1) * backward[:, 0] + passes * weight
        own[:, 0] = np.maximum(own[:, 0], waited + rest + reduce[:, 0])
    if SCHEDULES[name].placement == "loop":
        own[:, [0, -1]] += tied_s[:, None]
    least = own.max(axis=1) + _optimizer_s(prices, device, split.ranks(local).min(axis=1))
    return np.where(split.complete, least, 0.0)


def splits(schedule: str) -> bool:
    """Whether the schedule's last actions on a rank are weight gradients."""
    return schedule in ("zb_h1", "zb_v", "dualpipe_v")


class RankSplit:
    """Layers of the ranks and stages of rows, and sums of per-kind values over them."""

    def __init__(self, prices: Prices, schedule: Schedule, cost_s: Floats, ranks: int) -> None:
        kind = prices.repeated_kind
        if kind is None:
            raise ValueError("the rule shares out one kind of layer")
        self.schedule = schedule
        self.first, self.kind, self.last = prices.first_kind, kind, prices.last_kind
        self.owner = np.array(stage_ranks(schedule.name, num_ranks=ranks, stages_per_rank=schedule.chunks))
        self.of_rank = layers_of_ranks(
            schedule.name, cost_s[:, self.first], cost_s[:, kind], cost_s[:, self.last], int(prices.counts[kind]), ranks
        )
        self.of_stage = layers_of_stages(schedule.name, self.of_rank, schedule.chunks)

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Rows in which every stage has a unit."""
        units = self.of_stage.copy()
        units[:, 0] += 1
        units[:, -1] += 1
        return np.asarray((units > 0).all(axis=1))

    def stages(self, values: Floats) -> Floats:
        """[row, kind] -> [row, stage]."""
        found = self.of_stage * values[:, self.kind, None]
        found[:, 0] += values[:, self.first]
        found[:, -1] += values[:, self.last]
        return np.asarray(found)

    def sum_of_ranks(self, values: Floats) -> Floats:
        """[row, stage] -> [row, rank]."""
        ranks = self.of_rank.shape[1]
        return np.stack([values[:, self.owner == rank].sum(axis=1) for rank in range(ranks)], axis=1)

    def ranks(self, values: Floats) -> Floats:
        """[row, kind] -> [row, rank]."""
        found = self.of_rank * values[:, self.kind, None]
        found[:, self.owner[0]] += values[:, self.first]
        found[:, self.owner[-1]] += values[:, self.last]
        return np.asarray(found)


def _first_s(prices: Prices, split: RankSplit, dp: DataParallel, forward: Floats) -> Floats:
    """[row, stage] -> more in a stage's first forward."""
    shards = dp.shards
    starts = np.where(split.of_stage > 0, split.kind, split.last)
    starts[:, 0] = split.first
    first = np.take_along_axis(shards.gather_s, starts, axis=1)
    overlap = Overlap(dp.overlap.hidden[:, None], dp.overlap.back[:, None])
    unpack, gather = split.stages(shards.unpack_s), split.stages(shards.gather_s)
    return np.asarray(gathered_first_s(prices.rules, overlap, forward, unpack, gather, first))


def _optimizer_s(prices: Prices, device: tuple[str, float], local: Floats) -> Floats:
    values, inverse = np.unique(local, return_inverse=True)
    return np.array([optimizer_s(prices, device, float(value)) for value in values])[inverse]


def _before(values: Floats) -> Floats:
    """Sums of the values before each one along the last axis."""
    return np.cumsum(values, axis=-1) - values
