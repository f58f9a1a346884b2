"""Lower bounds of memory of many skeletons at once, as arrays; true of every stage split.

For any weights l[r] of the ranks, sum over units of min over stages of l[r] need[u,s] must not exceed sum of l[r] budget[r]; here
l[r] ~ 1 / (need of the whole model on r). And no single unit may exceed the largest budget. What fails here fits under no split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats, Prices, UnitPrices
from planner.space import Schedule
from planner.stage_memory import in_flight
from specs.schedule import stage_ranks

# Entries of one array of rows x stages x kinds.
CHUNK = 2_000_000


@dataclass(frozen=True)
class Settled:
    """Per row and kind: states and weights that stay, and what gradients add for the rest of the step."""

    stays: Floats
    grads: Floats

    def total(self, prices: Prices) -> Floats:
        """Of the whole model."""
        return np.asarray((self.stays + self.grads) @ prices.counts)


def memory_fill(
    prices: Prices, settled: Settled, units: UnitPrices, schedule: Schedule, *, pp: int, passes: NDArray[np.int64], budgets: Floats
) -> Floats:
    """Least share of the memory budget that each row needs (> 1: fits under no split). ``units``, ``settled``: [row, kind];
    ``budgets``: of each rank."""
    work = np.maximum(units.forward_peak_bytes + units.saved_bytes, units.backward_peak_bytes)
    one_unit = ((settled.stays + work) / budgets.max()).max(axis=1)
    fill = np.maximum(one_unit, settled.total(prices) / budgets.sum())
    step = max(1, CHUNK // (pp * schedule.chunks * len(prices.kinds)))
    for low in range(0, len(fill), step):
        rows = slice(low, low + step)
        part = Settled(settled.stays[rows], settled.grads[rows])
        fill[rows] = np.maximum(fill[rows], _spread(prices, part, units.saved_bytes[rows], schedule, pp, passes[rows], budgets))
    return fill


def _spread(
    prices: Prices, settled: Settled, saved: Floats, schedule: Schedule, pp: int, passes: NDArray[np.int64], budgets: Floats
) -> Floats:
    """All units spread over the stages as well as can be, over the budgets."""
    held = in_flight(schedule.name, pp=pp, chunks=schedule.chunks, num_micro_batches=passes)
    steady = (passes[:, None] > held).astype(float) if schedule.chunks == 1 else np.zeros(held.shape)
    need = settled.stays[:, None, :] + steady[:, :, None] * settled.grads[:, None, :] + held[:, :, None] * saved[:, None, :]
    whole = need @ prices.counts
    owner = np.array(stage_ranks(schedule.name, num_ranks=pp, stages_per_rank=schedule.chunks)) if pp > 1 else np.zeros(1, int)
    weights = 1.0 / np.maximum(whole[:, [int(np.flatnonzero(owner == rank)[0]) for rank in range(pp)]], 1.0)
    return np.asarray((weights[:, owner, None] * need).min(axis=1) @ prices.counts / (weights @ budgets))
