"""Lower bounds of the step time of many skeletons at once, as arrays; true of every stage split.

One stage: the terms of all units (``planner.terms``). A pipeline: ``planner.stages.pipeline_bound_s`` on the work W of all units
and a bound on the longest rank c; under other schedules than those that it knows, a rank's work alone. Ranks may be unlike: for
weights l[r] that sum to 1, c >= sum over r of l[r] C_r >= sum over units of min over r of l[r] t[u,r]; here l[r] ~ 1 / (time of the
whole model on r). Also c >= the largest unit; and where all units between the ends are alike, c is one of the few values that
whole units can add up to.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats, Prices, UnitPrices
from planner.rank_split import ends_of_ranks, longest_rank
from planner.sites import Place, Site
from planner.space import Layout, Schedule
from planner.stage_ends import first_stage_ends_s
from planner.stages import PROGRAM_SCHEDULES, pipeline_bound_s
from planner.terms import PipelineTerms, data_parallel, pipeline_terms, single_stage_s, step_ends
from simulator.network import GroupShape
from specs.schedule import SCHEDULES


def place_choices(stage_sites: Sequence[Site]) -> list[list[Place]]:
    """Places of the ranks by the first device type of each, by the second, and so on: a rank is as slow as its slowest device,
    which may be another one for every micro-batch, so each choice bounds the step."""
    most = max(len(site.devices) for site in stage_sites)
    return [
        [Place(site.devices[min(index, len(site.devices) - 1)], site.tp_shape, site.split) for site in stage_sites]
        for index in range(most)
    ]


def time_bounds(
    prices: Prices, layout: Layout, schedule: Schedule, stage_sites: Sequence[Site], places: Sequence[Place],
    units: Mapping[Place, UnitPrices], *, zero: int, passes: NDArray[np.int64],
) -> Floats:  # fmt: skip
    """Least step time per combination of one layout, whose ranks may be unlike. ``units``: prices per place, stacked
    [combination, kind]; ``passes``: micro-batches."""
    if layout.pp == 1:
        site, place = stage_sites[0], places[0]
        dp, ends = (
            data_parallel(prices, site, place.device, units[place], zero=zero),
            step_ends(prices, site, place.device, units[place], zero=zero, passes=passes),
        )
        return np.asarray(single_stage_s(prices, dp, units[place], ends, zero=zero, passes=passes), dtype=float)
    distinct = list(dict.fromkeys(places))
    stacked = [units[place] for place in distinct]
    terms = [
        pipeline_terms(
            prices, data_parallel(prices, stage_sites[places.index(place)], place.device, item, zero=zero), item,
            zero=zero, passes=passes,
        )
        for place, item in zip(distinct, stacked, strict=True)
    ]  # fmt: skip
    least = Pipelines(
        prices, schedule, terms, np.array([distinct.index(place) for place in places]), ranks=layout.pp, passes=passes,
        exchange_s=[item.forward_exchange_s + item.backward_exchange_s for item in stacked],
        boundary_s=_boundary_s(prices, stage_sites, stacked),
        ends_s=_ends_s(prices, stage_sites, distinct[0].device, stacked[0], terms[0], zero=zero, passes=passes),
    )  # fmt: skip
    return least.bound()


@dataclass(frozen=True)
class Pipelines:
    """Rows that share a schedule and a zero stage. ``terms``: per distinct place of ranks, [row, kind]; ``place_of_rank``: which
    is whose. ``ranks``: a number or one a row; ``passes``: micro-batches; ``exchange_s``: expert exchange of a micro-batch, which
    pairs of passes may hide; ``boundary_s``: a stage boundary in both directions; ``ends_s``: what rank 0 does at both ends of the
    step at least."""

    prices: Prices
    schedule: Schedule
    terms: Sequence[PipelineTerms]
    place_of_rank: NDArray[np.int64]
    ranks: Any
    passes: NDArray[np.int64]
    exchange_s: Sequence[Floats]
    boundary_s: Floats
    ends_s: Floats

    def bound(self) -> Floats:
        """Least step time per row."""
        counts, shape, m = self.prices.counts, self.terms[0].forward_s.shape, self.passes.astype(float)
        cost = np.stack([np.broadcast_to(item.work_s(self.schedule.name), shape) for item in self.terms])
        added = np.stack([np.broadcast_to(item.add_s, shape) for item in self.terms]).max(axis=0) @ counts
        if self.schedule.name in PROGRAM_SCHEDULES:
            first = np.stack([np.broadcast_to(item.first_s, shape) for item in self.terms]).min(axis=0) @ counts
            bound = pipeline_bound_s(
                cost.min(axis=0) @ counts, self._longest(cost), num_stages=self.ranks, num_micro_batches=m,
                boundary_s=self.boundary_s, boundary_first_s=self._first_wait(), first_s=first, schedule=self.schedule.name,
            ) + self.ends_s  # fmt: skip
        else:
            hidden = np.stack(self.exchange_s) if SCHEDULES[self.schedule.name].overlaps else 0.0
            bound = m * self._longest(cost - hidden)
        if all(item.both_s is not None for item in self.terms):
            both = np.stack([np.broadcast_to(item.both_s, shape) for item in self.terms if item.both_s is not None])
            bound = np.maximum(bound, (m - 1) * self._longest(both) + added)
        return np.asarray(bound - added, dtype=float)

    def _longest(self, cost: Floats) -> Floats:
        """Bound on the longest rank per row."""
        counts = self.prices.counts
        weights = 1.0 / (cost @ counts)
        if len(cost) > 1:
            weights = weights / weights[self.place_of_rank].sum(axis=0)
            spread = (weights[:, :, None] * cost).min(axis=0) @ counts
        else:
            spread = (cost[0] @ counts) / self.ranks
        bound = np.maximum(spread, cost.min(axis=0).max(axis=1))
        kind = self.prices.repeated_kind
        if len(cost) == 1 and kind is not None:
            first, last = cost[0][:, self.prices.first_kind], cost[0][:, self.prices.last_kind]
            whole = longest_rank(*_between(self.schedule.name, first, cost[0][:, kind], last), int(counts[kind]), self.ranks)
            bound = np.maximum(bound, whole)
        return bound

    def _first_wait(self) -> Floats:
        """Least wait of the first micro-batch for a stage's first weights."""
        begins = sorted(set(self.prices.kind_of_unit[1:].tolist()))
        return np.stack([item.wait_s[..., begins].min(axis=-1) for item in self.terms]).min(axis=0)


def _between(schedule: str, first: Floats, middle: Floats, last: Floats) -> tuple[Floats, Floats, Floats]:
    on_first, on_last = ends_of_ranks(schedule, first, last)
    return on_first, middle, on_last


def _ends_s(
    prices: Prices, stage_sites: Sequence[Site], device: tuple[str, float], units: UnitPrices, terms: PipelineTerms, *,
    zero: int, passes: NDArray[np.int64],
) -> Floats:  # fmt: skip
    """The ends of stage 0 with one unit only, the least; without sums over tp, which differ between combinations."""
    one = units.row(0)
    one = replace(one, partial_grad_elements=0.0 * one.partial_grad_elements)
    dp = data_parallel(prices, stage_sites[0], device, one, zero=zero)
    of_one = pipeline_terms(prices, dp, one, zero=zero, passes=float(passes[0]))
    of_one = replace(of_one, wait_s=0.0 * of_one.wait_s)
    after = first_stage_ends_s(prices, stage_sites, device, one, of_one, zero=zero, most=1)[1]
    return np.asarray(terms.wait_s[..., prices.first_kind] + after)


def _boundary_s(prices: Prices, stage_sites: Sequence[Site], units: Sequence[UnitPrices]) -> Floats:
    """Least time of a stage boundary in both directions: two messages."""
    network = prices.model.network
    shapes = {network.shape((low.last_device, high.last_device)) for low, high in itertools.pairwise(stage_sites)}
    return np.stack([sum(messages_s(prices, item, shape)) for item in units for shape in shapes]).min(axis=0)


def messages_s(prices: Prices, units: UnitPrices, shape: GroupShape) -> tuple[Floats, Floats]:
    """Least time of a message to the next stage, and of one back, between devices that lie like ``shape``."""
    kinds = prices.kind_of_unit
    begins, ends = sorted(set(kinds[1:].tolist())), sorted(set(kinds[:-1].tolist()))
    sizes_in, sizes_out = units.input_bytes[..., begins].min(axis=-1), units.output_bytes[..., ends].min(axis=-1)

    def each(sizes: Floats) -> Floats:
        return np.array([prices.model.network.collective("p2p", size, shape).seconds for size in np.atleast_1d(sizes).tolist()])

    return each(sizes_out), each(sizes_in)
