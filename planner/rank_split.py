"""Equal layers over equal pipeline ranks: how many each rank, and each of its stages, takes; for many candidates at once.

Of the model's units the first (embedding) costs a, the last (head) b, the layers between them c each. A rank passes every micro-
batch through all its stages, so the longest rank paces the step. Rule: the least length x at which all layers find room, (x -
ends) / c layers a rank rounded down; where that is more room than there are layers, the first ranks, which hold most micro-
batches, take one fewer. A rank's layers are shared out over its stages evenly, one more on the later ones; on the last rank,
whose last stage has the head, and where first and last stage lie together, on the earlier ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats
from specs.schedule import SCHEDULES, stage_ranks

Ints = NDArray[np.int64]


def longest_rank(first: Floats, middle: Floats, last: Floats, num_middle: int, num_ranks: Ints | int) -> Floats:
    """Least longest rank when ``num_middle`` equal units stand between a first and a last one; arrays over candidates.

    The longest rank is i units, the first and i units, or i units and the last. From the mean rank up, the least such value at
    which all units find room is the answer.
    """
    mean = (first + num_middle * middle + last) / num_ranks
    best = np.full(len(mean), np.inf)
    for offset in (np.zeros_like(first), first, last):
        steps = np.maximum(np.floor((mean - offset) / middle * (1 - 1e-9)), 0.0)
        for extra in range(3):
            value = offset + (steps + extra) * middle
            room = _room(value * (1 + 1e-9), first, middle, last, num_ranks)
            best = np.where((room >= num_middle) & (value >= mean * (1 - 1e-9)), np.minimum(best, value), best)
    return np.where(np.isfinite(best), best, mean)


def _room(limit: Floats, first: Floats, middle: Floats, last: Floats, num_ranks: Ints | int) -> Floats:
    """Middle units that ranks of at most ``limit`` hold."""
    holds_ends = (limit >= first) & (limit >= last)
    room = np.floor((limit - first) / middle) + np.floor((limit - last) / middle) + (num_ranks - 2) * np.floor(limit / middle)
    return np.where(holds_ends, room, -1.0)


def ends_of_ranks(schedule: str, first: Floats, last: Floats) -> tuple[Floats, Floats]:
    """What the first and the last rank hold besides layers: in a V the first rank holds both ends."""
    together = SCHEDULES[schedule].placement == "v"
    return (first + last, np.zeros_like(last)) if together else (first, last)


def layers_of_ranks(schedule: str, first: Floats, middle: Floats, last: Floats, num_middle: int, num_ranks: int) -> Ints:
    """[candidate, rank] -> layers."""
    first, last = ends_of_ranks(schedule, first, last)
    limit = longest_rank(first, middle, last, num_middle, num_ranks) * (1 + 1e-9)
    layers = np.repeat(np.floor(limit / middle)[:, None], num_ranks, axis=1)
    layers[:, 0] = np.floor((limit - first) / middle)
    layers[:, -1] = np.floor((limit - last) / middle)
    counts = layers.astype(np.int64)
    surplus = counts.sum(axis=1) - num_middle
    while (surplus > 0).any():
        take = (np.cumsum(counts > 0, axis=1) <= surplus[:, None]) & (counts > 0)
        counts = counts - take
        surplus = counts.sum(axis=1) - num_middle
    return counts


def layers_of_stages(schedule: str, of_rank: Ints, chunks: int) -> Ints:
    """[candidate, stage] -> layers, from those of the ranks."""
    num_ranks = of_rank.shape[1]
    owner = np.array(stage_ranks(schedule, num_ranks=num_ranks, stages_per_rank=chunks))
    chunk = np.arange(num_ranks * chunks) // num_ranks
    base, extra = of_rank // chunks, of_rank % chunks
    with_head = owner == owner[-1]
    before = np.where(with_head, chunk, chunks - 1 - chunk)
    return np.asarray(base[:, owner] + (before[None, :] < extra[:, owner]))


def units_of_stages(schedule: str, of_rank: Ints, chunks: int) -> Ints:
    """[candidate, stage] -> units, the two at the ends included; some stage has none where there are too few layers."""
    units = layers_of_stages(schedule, of_rank, chunks)
    units[:, 0] += 1
    units[:, -1] += 1
    return units
