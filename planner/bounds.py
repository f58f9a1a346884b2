"""Bounds of the whole space: time and memory of every skeleton, priced as arrays layout by layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from planner.memory_bounds import memory_fill
from planner.prices import Floats, Prices, UnitPrices
from planner.sites import Site, sites
from planner.space import Layout, Rows, Space
from planner.time_bounds import Place, place_of, time_bounds


@dataclass
class Bounds:
    """Per row of the space: least step time (infinite where memory forbids it) and least fill of the memory budget (above 1 = fits
    under no split; infinite where a smaller micro-batch had failed already)."""

    time_s: Floats
    fill: Floats

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Rows that memory does not forbid."""
        return self.fill <= 1.0


def compute_bounds(prices: Prices, space: Space, *, stop: Callable[[], bool] = lambda: False) -> Bounds:
    """Bounds of every row. ``stop`` is asked between layouts; rows not reached keep time 0 and fill 0 (true bounds, if empty)."""
    bounds = Bounds(np.zeros(len(space.rows)), np.zeros(len(space.rows)))
    for index, rows in _by_layout(space):
        if stop():
            break
        _LayoutBounds(prices, space, space.layouts[index], rows).write(bounds)
    return bounds


def _by_layout(space: Space) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(layout, its row numbers), in order."""
    column = space.rows["layout"]
    for rows in np.split(np.arange(len(column)), np.flatnonzero(np.diff(column)) + 1):
        if len(rows):
            yield int(column[rows[0]]), rows


class _LayoutBounds:
    """Rows of one layout. A *combination* is (micro-batch, sequence parallel, recompute); it decides the units' prices."""

    def __init__(self, prices: Prices, space: Space, layout: Layout, row_numbers: NDArray[np.int64]) -> None:
        self.prices, self.space, self.layout, self.row_numbers = prices, space, layout, row_numbers
        self.rows: Rows = space.rows[row_numbers]
        columns = np.stack([self.rows[name] for name in ("micro_batch", "sequence_parallel", "recompute")], axis=1)
        self.combinations, self.combination_of_row = np.unique(columns.astype(np.int64), axis=0, return_inverse=True)
        sequences = int(self.rows["num_micro_batches"][0]) * int(self.rows["micro_batch"][0])
        self.passes = sequences // self.combinations[:, 0]
        self.schedule = space.schedules[int(self.rows["schedule"][0])]

    def write(self, bounds: Bounds) -> None:
        """Write the bounds of these rows."""
        variants = np.stack([self.rows["zero"], self.rows["shard_group"]], axis=1).astype(np.int64)
        all_dp = self._sites(0)
        places = [place_of(self.prices, site, int(self.combinations[0, 0])) for site in _alike(all_dp)]
        places = [places[0]] * len(all_dp) if len(places) == 1 else places
        units = self._price(all_dp, places)
        count = len(next(iter(units.values())).forward_s)
        passes = self.passes[:count]
        for zero, group in np.unique(variants, axis=0).tolist():
            stage_sites = self._sites(group) if group else all_dp
            fill, time_s = np.full(len(self.passes), np.inf), np.full(len(self.passes), np.inf)
            fill[:count] = memory_fill(
                self.prices, self.layout, self.schedule, stage_sites, units[places[0]], zero=zero, passes=passes
            )
            time_s[:count] = time_bounds(
                self.prices, self.layout, self.schedule, stage_sites, places, units, zero=zero, passes=passes
            )
            chosen = (variants[:, 0] == zero) & (variants[:, 1] == group)
            picked = self.combination_of_row[chosen]
            bounds.fill[self.row_numbers[chosen]] = fill[picked]
            bounds.time_s[self.row_numbers[chosen]] = np.where(fill[picked] <= 1.0, time_s[picked], np.inf)

    def _sites(self, group: int) -> list[Site]:
        layout = self.layout
        return sites(self.prices.model, layout.pool, pp=layout.pp, tp=layout.tp, shard_group=group or None)

    def _price(self, stage_sites: Sequence[Site], places: Sequence[Place]) -> dict[Place, UnitPrices]:
        """Prices of the leading combinations at each distinct place, stacked [combination, kind]. Combinations come by ascending
        micro-batch; once no combination of a micro-batch fits anywhere, larger ones are not priced."""
        distinct = list(dict.fromkeys(places))
        budget = max(site.budget_bytes for site in stage_sites)
        found: dict[Place, list[UnitPrices]] = {place: [] for place in distinct}
        for _, group in groupby(self.combinations.tolist(), key=lambda item: item[0]):
            least = np.inf
            for batch, parallel, recompute in group:
                choice = self.space.recomputes[recompute]
                for place in distinct:
                    price = self.prices.units(*place.device, place.tp_shape, bool(parallel), batch, choice)
                    found[place].append(price)
                    need = np.maximum(price.saved_bytes + price.forward_peak_bytes, price.backward_peak_bytes)
                    least = min(least, float(need.max()))
            if least > budget:
                break
        return {place: UnitPrices.stack(items) for place, items in found.items()}


def _alike(stage_sites: Sequence[Site]) -> Sequence[Site]:
    """One site where all have the same devices and tp group, else all."""
    same = all(site.devices == stage_sites[0].devices and site.tp_shape == stage_sites[0].tp_shape for site in stage_sites)
    return stage_sites[:1] if same else stage_sites
