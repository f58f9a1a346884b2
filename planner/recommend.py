"""The inverse question: how many devices does this job need, and what does each number of them give?

A cluster stands for what could be had. For each of its choices of devices (``planner.layout.pools``) the best plan among the first
few by their bounds is simulated; with it comes the bound that no plan on these devices undercuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.candidates import Confirmed
from planner.objective import price_usd_per_s
from planner.search import SearchOptions, explore
from simulator.cost_model import CostModel
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.profile import Profile
from specs.training import TrainingSpec

# Candidates simulated for each choice of devices.
TRIES = 4
# A number of devices is efficient while each of them does this share of what it does at best.
EFFICIENT = 0.8


@dataclass(frozen=True)
class CurvePoint:
    """The best plan found on so many devices. ``bound_s``: none on them is faster; ``cost_usd``: of a step, if prices are known."""

    confirmed: Confirmed
    bound_s: float
    tokens_per_s: float
    cost_usd: float | None
    usd_per_billion_tokens: float | None

    @property
    def devices(self) -> int:
        """How many."""
        return self.confirmed.pool.size

    @property
    def tokens_per_s_per_device(self) -> float:
        """Of each."""
        return self.tokens_per_s / self.devices


@dataclass(frozen=True)
class Recommendation:
    """``curve``: by number of devices, fewest first, one point each; ``fewest``: the first of them; ``efficient``: the most devices
    that still do ``EFFICIENT`` of what one does at best; ``cheapest``: by tokens a dollar. All ``None`` when nothing fits."""

    curve: tuple[CurvePoint, ...]
    fewest: CurvePoint | None
    efficient: CurvePoint | None
    cheapest: CurvePoint | None


def recommend(
    graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, profile: Profile | None = None, *,
    cost_model: CostModel | None = None,
) -> Recommendation:  # fmt: skip
    """How many devices of a resolved cluster the job needs, and the curve of time and cost over their number."""
    options = SearchOptions(top=0, explain=False, confirm_at_most=0)
    candidates = explore(graph, cluster, workload, profile, options, cost_model=cost_model).table.candidates
    space, bounds = candidates.space, candidates.bounds
    sizes = np.array([layout.pool.size for layout in space.layouts], dtype=np.int64)[space.rows["layout"]]
    tokens = workload.global_batch * workload.max_seq_len
    curve = []
    for size in np.unique(sizes).tolist():
        rows = candidates.nearest(np.flatnonzero((sizes == size) & bounds.fits), TRIES)
        found = [item for item in (candidates.confirm(row) for row in rows) if isinstance(item, Confirmed)]
        if found:
            best = min(found, key=lambda item: item.step_time_s)
            rest = float(bounds.time_s[(sizes == size) & bounds.fits].min())
            price = price_usd_per_s(cluster, best.pool)
            cost = None if price is None else price * best.step_time_s
            per_billion = None if cost is None else cost / tokens * 1e9
            curve.append(CurvePoint(best, min(rest, best.step_time_s), tokens / best.step_time_s, cost, per_billion))
    if not curve:
        return Recommendation((), None, None, None)
    most = max(point.tokens_per_s_per_device for point in curve)
    efficient = [point for point in curve if point.tokens_per_s_per_device >= EFFICIENT * most]
    priced = [point for point in curve if point.cost_usd is not None]
    cheapest = min(priced, key=lambda point: point.cost_usd or 0.0) if priced else None
    return Recommendation(tuple(curve), curve[0], efficient[-1], cheapest)
