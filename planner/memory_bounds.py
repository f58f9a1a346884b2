"""Lower bounds of memory of all skeletons of one layout, as arrays.

For any weights l[s], sum over units of min over stages of l[s] need[u,s] must not exceed sum of l[s] budget[s]; here l[s] ~ 1 /
(need of the whole model on s). And no single unit may exceed the largest budget. What fails here fits under no split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats, Prices, UnitPrices
from planner.sites import Site
from planner.space import Layout
from planner.stage_memory import in_flight, unit_memory


def memory_fill(
    prices: Prices,
    layout: Layout,
    schedule: str,
    stage_sites: Sequence[Site],
    units: UnitPrices,
    *,
    zero: int,
    passes: NDArray[np.int64],
) -> Floats:
    """Least share of the memory budget that each combination needs (> 1: fits under no split). ``units``: [combination, kind]."""
    budgets = np.array([site.budget_bytes for site in stage_sites])
    one_of_kind = [int(np.flatnonzero(prices.kind_of_unit == kind)[0]) for kind in range(len(prices.kinds))]
    fill = np.zeros(len(passes))
    for many in (False, True):
        rows = np.flatnonzero((passes > 1) == many)
        if not len(rows):
            continue
        some = units.row(int(rows[0]))
        table = unit_memory(
            prices, some, prices.sizes(layout.tp, whole=layout.pp == 1), zero=zero, shard_degree=stage_sites[0].shard_shape.size,
            ddp=zero == 0 and layout.dp > 1 and layout.pp == 1, num_micro_batches=2 if many else 1,
        )  # fmt: skip
        stays, grads = table.stays[one_of_kind], table.kept_grad[one_of_kind]
        saved = units.saved_bytes[rows]
        work = np.maximum(units.forward_peak_bytes[rows] + saved, units.backward_peak_bytes[rows])
        one_unit = ((stays + work) / budgets.max()).max(axis=1)
        settled = float((stays + grads) @ prices.counts) / budgets.sum()
        spread = _spread(layout, schedule, passes[rows], stays, grads, saved, budgets, prices.counts)
        fill[rows] = np.maximum(np.maximum(one_unit, settled), spread)
    return fill


def _spread(
    layout: Layout,
    schedule: str,
    passes: NDArray[np.int64],
    stays: Floats,
    grads: Floats,
    saved: Floats,
    budgets: Floats,
    counts: Floats,
) -> Floats:
    """All units spread over the stages as well as can be, over the budgets."""
    held = in_flight(schedule, pp=layout.pp, num_micro_batches=passes)
    steady = (passes[:, None] > held).astype(float)
    need = stays[None, None, :] + steady[:, :, None] * grads + held[:, :, None] * saved[:, None, :]
    weights = 1.0 / np.maximum(need @ counts, 1.0)
    return np.asarray((weights[:, :, None] * need).min(axis=1) @ counts / (weights @ budgets))
