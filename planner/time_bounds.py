"""Lower bounds of the step time of all skeletons of one layout, as arrays.

One stage: the terms of all units (``planner.terms``). A pipeline: ``planner.stages.pipeline_bound_s`` on the work W of all units
and a bound on the longest stage c. Stages may be unlike: for weights l[s] that sum to 1, c >= sum over s of l[s] C_s >= sum over
units of min over s of l[s] t[u,s]; here l[s] ~ 1 / (time of the whole model on s). Also c >= the largest unit; and where all units
between the ends are alike, c is one of the few values that whole units can add up to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats, Prices, UnitPrices
from planner.sites import Site
from planner.space import Layout
from planner.stage_ends import first_stage_ends_s
from planner.stages import pipeline_bound_s
from planner.terms import PipelineTerms, pipeline_terms, single_stage_s
from simulator.network import GroupShape
from simulator.unit_cost import RecomputeChoice


@dataclass(frozen=True, slots=True)
class Place:
    """What the prices of a stage's units depend on: device type with slowdown, and how its tp group lies."""

    device: tuple[str, float]
    tp_shape: GroupShape


def place_of(prices: Prices, site: Site, batch: int) -> Place:
    """The place of a stage; of several device types the slowest one stands for the stage."""
    name, _ = prices.slowest(site, False, batch, RecomputeChoice())
    return Place((name, dict(site.devices)[name]), site.tp_shape)


def time_bounds(
    prices: Prices, layout: Layout, schedule: str, stage_sites: Sequence[Site], places: Sequence[Place],
    units: Mapping[Place, UnitPrices], *, zero: int, passes: NDArray[np.int64],
) -> Floats:  # fmt: skip
    """Least step time per combination. ``units``: prices per place, stacked [combination, kind]; ``passes``: micro-batches."""
    if layout.pp == 1:
        place = places[0]
        seconds = single_stage_s(prices, stage_sites[0], place.device, units[place], zero=zero, passes=passes)
        return np.asarray(seconds, dtype=float)
    return _Pipeline(prices, layout, schedule, stage_sites, places, units, zero, passes).bound()


class _Pipeline:
    """The bound of pipelines; arrays [place, combination, kind]."""

    def __init__(
        self, prices: Prices, layout: Layout, schedule: str, stage_sites: Sequence[Site], places: Sequence[Place],
        units: Mapping[Place, UnitPrices], zero: int, passes: NDArray[np.int64],
    ) -> None:  # fmt: skip
        self.prices, self.layout, self.schedule, self.sites, self.zero = prices, layout, schedule, stage_sites, zero
        self.passes = passes.astype(float)
        self.distinct = list(dict.fromkeys(places))
        self.place_of_stage = np.array([self.distinct.index(place) for place in places])
        self.units = [units[place] for place in self.distinct]
        first_sites = [stage_sites[places.index(place)] for place in self.distinct]
        self.terms: list[PipelineTerms] = [
            pipeline_terms(prices, site, place.device, item, zero=zero, passes=passes)
            for site, place, item in zip(first_sites, self.distinct, self.units, strict=True)
        ]

    def bound(self) -> Floats:
        counts, shape = self.prices.counts, self.units[0].forward_s.shape
        cost = np.stack([item.cost_s for item in self.terms])
        added = np.stack([np.broadcast_to(item.add_s, shape) for item in self.terms]).max(axis=0) @ counts
        first = np.stack([np.broadcast_to(item.first_s, shape) for item in self.terms]).min(axis=0) @ counts
        body = pipeline_bound_s(
            cost.min(axis=0) @ counts, self._bottleneck(cost), num_stages=self.layout.pp, num_micro_batches=self.passes,
            boundary_s=self._boundary(), boundary_first_s=self._first_wait(), first_s=first, schedule=self.schedule,
        )  # fmt: skip
        bound = body - added + self._ends()
        if all(item.both_s is not None for item in self.terms):
            both = np.stack([np.broadcast_to(item.both_s, shape) for item in self.terms if item.both_s is not None])
            bound = np.maximum(bound, (self.passes - 1) * self._bottleneck(both))
        return np.asarray(bound, dtype=float)

    def _ends(self) -> Floats:
        """The ends of stage 0 with one unit only, the least; without sums over tp, which differ between combinations."""
        one = self.units[0].row(0)
        one = replace(one, partial_grad_elements=0.0 * one.partial_grad_elements)
        device = self.distinct[0].device
        terms = pipeline_terms(self.prices, self.sites[0], device, one, zero=self.zero, passes=float(self.passes[0]))
        terms = replace(terms, wait_s=0.0 * terms.wait_s)
        after = first_stage_ends_s(self.prices, self.sites, device, one, terms, zero=self.zero, most=1)[1]
        return np.asarray(self.terms[0].wait_s[:, self.prices.first_kind] + after)

    def _bottleneck(self, cost: Floats) -> Floats:
        """Bound on the longest stage per combination."""
        counts = self.prices.counts
        weights = 1.0 / (cost @ counts)
        weights = weights / weights[self.place_of_stage].sum(axis=0)
        spread = (weights[:, :, None] * cost).min(axis=0) @ counts
        bound = np.maximum(spread, cost.min(axis=0).max(axis=1))
        kind = self.prices.repeated_kind
        if len(cost) == 1 and kind is not None:
            first, last = cost[0][:, self.prices.first_kind], cost[0][:, self.prices.last_kind]
            bound = np.maximum(bound, whole_unit_bottleneck(first, cost[0][:, kind], last, int(counts[kind]), self.layout.pp))
        return bound

    def _boundary(self) -> Floats:
        """Least time of a stage boundary in both directions: two messages."""
        kinds = self.prices.kind_of_unit
        begins, ends = sorted(set(kinds[1:].tolist())), sorted(set(kinds[:-1].tolist()))
        sizes_in = np.stack([item.input_bytes for item in self.units]).min(axis=0)[:, begins].min(axis=1)
        sizes_out = np.stack([item.output_bytes for item in self.units]).min(axis=0)[:, ends].min(axis=1)
        network = self.prices.model.network
        shapes = {network.shape((low.last_device, high.last_device)) for low, high in zip(self.sites, self.sites[1:], strict=False)}
        seconds = np.full(len(sizes_in), np.inf)
        for shape in shapes:
            there = np.array([network.collective("p2p", size, shape).seconds for size in sizes_out.tolist()])
            back = np.array([network.collective("p2p", size, shape).seconds for size in sizes_in.tolist()])
            seconds = np.minimum(seconds, there + back)
        return seconds

    def _first_wait(self) -> Floats:
        """Least wait of the first micro-batch for a stage's first weights."""
        begins = sorted(set(self.prices.kind_of_unit[1:].tolist()))
        return np.stack([item.wait_s[:, begins].min(axis=1) for item in self.terms]).min(axis=0)


def whole_unit_bottleneck(first: Floats, middle: Floats, last: Floats, num_middle: int, num_stages: int) -> Floats:
    """Least longest stage when ``num_middle`` equal units stand between a first and a last one; arrays over combinations.

    The longest stage is i units, the first and i units, or i units and the last. From the mean stage up, the least such value at
    which all units find room is the answer.
    """
    mean = (first + num_middle * middle + last) / num_stages
    best = np.full(len(mean), np.inf)
    for offset in (np.zeros_like(first), first, last):
        steps = np.maximum(np.floor((mean - offset) / middle * (1 - 1e-9)), 0.0)
        for extra in range(3):
            value = offset + (steps + extra) * middle
            room = _room(value * (1 + 1e-9), first, middle, last, num_stages)
            best = np.where((room >= num_middle) & (value >= mean * (1 - 1e-9)), np.minimum(best, value), best)
    return np.where(np.isfinite(best), best, mean)


def _room(limit: Floats, first: Floats, middle: Floats, last: Floats, num_stages: int) -> Floats:
    """Middle units that stages of at most ``limit`` hold."""
    holds_ends = (limit >= first) & (limit >= last)
    room = np.floor((limit - first) / middle) + np.floor((limit - last) / middle) + (num_stages - 2) * np.floor(limit / middle)
    return np.where(holds_ends, room, -1.0)
