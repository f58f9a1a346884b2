"""Bounds of the whole space: time and memory of every skeleton, priced as arrays.

In two steps. First every row gets the bound of its combination (units' work on the longest rank) and the memory of its states: a
few array operations for all rows together. Then, as far as a search asks, rows get the bounds of ``planner.time_bounds`` and
``planner.memory_bounds``. Layouts whose pipeline ranks are alike are priced together, others one by one and at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from planner.alike_rows import AlikeRows
from planner.memory_bounds import Settled, memory_fill
from planner.prices import Floats, Prices, UnitPrices
from planner.sites import Place, Site, alike, sites
from planner.space import Layout, Rows, Space
from planner.stage_memory import settled_bytes
from planner.time_bounds import place_choices, time_bounds


@dataclass
class Bounds:
    """Per row of the space: least step time (infinite where memory forbids it) and least fill of the memory budget (above 1 = fits
    under no split; infinite where a smaller micro-batch had failed already). ``is_close``: rows whose second bound is known."""

    time_s: Floats
    fill: Floats
    is_close: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    alike: AlikeRows | None = None

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Rows that memory does not forbid."""
        return self.fill <= 1.0

    def come_closer(self, rows: NDArray[np.int64]) -> None:
        """Give these rows the second bound where they lack it."""
        rows = rows[~self.is_close[rows]]
        if self.alike is None or not len(rows):
            return
        time_s, fill = self.alike.close_bounds(rows)
        self.fill[rows] = np.maximum(self.fill[rows], fill)
        self.time_s[rows] = np.where(self.fill[rows] <= 1.0, np.maximum(self.time_s[rows], time_s), np.inf)
        self.is_close[rows] = True


def first_bounds(prices: Prices, space: Space, *, stop: Callable[[], bool] = lambda: False) -> Bounds:
    """The first bound of every row. ``stop`` is asked now and then; rows not reached keep time 0 and fill 0: true, if empty."""
    bounds = Bounds(np.zeros(len(space.rows)), np.zeros(len(space.rows)), np.zeros(len(space.rows), dtype=bool))
    is_alike = np.array([alike(layout.pool, layout.pp) for layout in space.layouts], dtype=bool)
    for index, rows in _by_layout(space):
        if stop():
            return bounds
        if not is_alike[index]:
            _LayoutBounds(prices, space, space.layouts[index], rows).write(bounds)
    if is_alike.any():
        bounds.alike = AlikeRows(prices, space, is_alike)
        rows = np.flatnonzero(is_alike[space.rows["layout"]])
        bounds.time_s[rows], bounds.fill[rows] = bounds.alike.first_bounds(rows, stop)
    return bounds


def compute_bounds(prices: Prices, space: Space, *, stop: Callable[[], bool] = lambda: False) -> Bounds:
    """Both bounds of every row."""
    bounds = first_bounds(prices, space, stop=stop)
    if not stop():
        bounds.come_closer(np.flatnonzero(bounds.fits))
    return bounds


def _by_layout(space: Space) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(layout, its row numbers), in order."""
    column = space.rows["layout"]
    for rows in np.split(np.arange(len(column)), np.flatnonzero(np.diff(column)) + 1):
        if len(rows):
            yield int(column[rows[0]]), rows


class _LayoutBounds:
    """Rows of one layout whose ranks may be unlike."""

    def __init__(self, prices: Prices, space: Space, layout: Layout, row_numbers: NDArray[np.int64]) -> None:
        self.prices, self.space, self.layout, self.row_numbers = prices, space, layout, row_numbers
        self.rows: Rows = space.rows[row_numbers]
        columns = np.stack([self.rows[name] for name in ("micro_batch", "sequence_parallel", "recompute")], axis=1)
        self.combinations, self.combination_of_row = np.unique(columns.astype(np.int64), axis=0, return_inverse=True)
        sequences = int(self.rows["num_micro_batches"][0]) * int(self.rows["micro_batch"][0])
        self.passes = sequences // self.combinations[:, 0]

    def write(self, bounds: Bounds) -> None:
        """Write both bounds of these rows."""
        columns = np.stack([self.rows["zero"], self.rows["shard_group"], self.rows["schedule"]], axis=1).astype(np.int64)
        all_dp = self._sites(0)
        choices = place_choices(all_dp)
        units = self._price(all_dp, [place for places in choices for place in places])
        count = len(next(iter(units.values())).forward_s)
        for zero, group, schedule in np.unique(columns, axis=0).tolist():
            stage_sites = self._sites(group) if group else all_dp
            fill, time_s = np.full(len(self.passes), np.inf), np.full(len(self.passes), np.inf)
            fill[:count] = self._fill(stage_sites, units[choices[0][0]], zero, schedule, count)
            time_s[:count] = np.max(
                [
                    time_bounds(
                        self.prices, self.layout, self.space.schedules[schedule], stage_sites, places, units, zero=zero,
                        passes=self.passes[:count],
                    )
                    for places in choices
                ], axis=0,
            )  # fmt: skip
            chosen = (columns == (zero, group, schedule)).all(axis=1)
            picked = self.combination_of_row[chosen]
            bounds.fill[self.row_numbers[chosen]] = fill[picked]
            bounds.time_s[self.row_numbers[chosen]] = np.where(fill[picked] <= 1.0, time_s[picked], np.inf)
        bounds.is_close[self.row_numbers] = True

    def _fill(self, stage_sites: Sequence[Site], units: UnitPrices, zero: int, schedule: int, count: int) -> Floats:
        site, passes = stage_sites[0], self.passes[:count]
        sizes = self.prices.sizes(site)
        stays, kept = settled_bytes(
            self.prices, sizes, sizes.state_share(site, zero), zero=zero, num_micro_batches=passes[:, None],
            ddp=zero == 0 and site.dp_shape.size > 1 and site.whole,
        )  # fmt: skip
        shape = units.saved_bytes.shape
        settled = Settled(np.broadcast_to(stays, shape), np.broadcast_to(kept, shape))
        budgets = np.array([item.budget_bytes for item in stage_sites])
        return memory_fill(
            self.prices, settled, units, self.space.schedules[schedule], pp=self.layout.pp, passes=passes, budgets=budgets
        )

    def _sites(self, group: int) -> list[Site]:
        layout = self.layout
        return sites(self.prices.model, layout.pool, layout.degrees(group or None), pp=layout.pp)

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
                    price = self.prices.units(*place.device, place, bool(parallel), batch, choice)
                    found[place].append(price)
                    least = min(least, price.least_bytes())
            if least > budget:
                break
        return {place: UnitPrices.stack(items) for place, items in found.items()}
