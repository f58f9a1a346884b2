"""Candidates of a search: each skeleton refined and confirmed at most once, whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.assemble import Assembler
from planner.bounds import Bounds
from planner.layout import Pool
from planner.path_bound import path_bounds
from planner.prices import Prices
from planner.refine import DoesNotFit, Prepared, Refined, Refiner
from planner.space import Space
from planner.strategy_text import Strategy
from simulator.predict import fits, predict
from specs.plan import Plan
from specs.prediction import Prediction

# Rows that get their close bound when the nearest ones of many are asked for.
CLOSE_AT_ONCE = 2048


@dataclass(frozen=True)
class Confirmed:
    """A candidate that the event simulation confirmed: it fits."""

    row: int
    strategy: Strategy
    pool: Pool
    plan: Plan
    prediction: Prediction

    @property
    def step_time_s(self) -> float:
        """Predicted step time."""
        return self.prediction.step_time_s


class Candidates:
    """Refines and confirms rows of a space."""

    def __init__(
        self, prices: Prices, assembler: Assembler, space: Space, bounds: Bounds, *, split: tuple[int, ...] | None, seed: int
    ) -> None:
        self.prices, self.assembler, self.space, self.bounds, self.split = prices, assembler, space, bounds, split
        self.refiner = Refiner(prices, seed)
        self.memory_misses: dict[int, DoesNotFit] = {}
        self._prepared: dict[int, Prepared | DoesNotFit] = {}
        self._refined: dict[int, Refined | DoesNotFit] = {}
        self._paths: dict[int, float] = {}
        self._confirmed: dict[int, Confirmed | DoesNotFit] = {}

    @property
    def num_confirmed(self) -> int:
        """Candidates simulated so far."""
        return len(self._confirmed)

    def pool(self, row: int) -> Pool:
        """The devices of a row."""
        return self.space.layout(row).pool

    def prepare(self, row: int) -> Prepared | DoesNotFit:
        """Its exact memory and a first bound."""
        if row not in self._prepared:
            skeleton = self.space.strategy(row)
            if self.split is not None and skeleton.pp > 1:
                skeleton = replace(skeleton, split=self.split)
            found = self.refiner.prepare(skeleton, self.pool(row), int(self.space.rows[row]["num_micro_batches"]))
            if isinstance(found, DoesNotFit):
                self.memory_misses[row] = found
            self._prepared[row] = found
        return self._prepared[row]

    def trace(self, rows: Sequence[int]) -> None:
        """Bound by their schedule's longest path all of these rows whose split is known."""
        wanted, skeletons, counts = [], [], []
        for row in rows:
            known = self._prepared.get(row)
            if row in self._paths or not isinstance(known, Prepared) or known.skeleton is None:
                continue
            refined = self._refined.get(row)
            split = refined.strategy.split if isinstance(refined, Refined) else known.strategy.split
            if split is not None:
                wanted.append(row)
                skeletons.append(known.skeleton)
                counts.append(split)
        if wanted:
            self._paths.update(zip(wanted, path_bounds(skeletons, counts).tolist(), strict=True))

    def refine(self, row: int) -> Refined | DoesNotFit:
        """Its best split."""
        if row not in self._refined:
            prepared = self.prepare(row)
            self._refined[row] = prepared if isinstance(prepared, DoesNotFit) else self.refiner.split(prepared)
        return self._refined[row]

    def bound_s(self, row: int) -> float:
        """The best bound known of a row's step time."""
        known = [self._prepared.get(row), self._refined.get(row)]
        path_s = self._paths.get(row, 0.0)
        return max(
            float(self.bounds.time_s[row]), path_s, *(item.bound_s for item in known if isinstance(item, (Prepared, Refined))), 0.0
        )

    def simulated(self, row: int) -> Confirmed | None:
        """Its simulation, where there was one and it fits."""
        found = self._confirmed.get(row)
        return found if isinstance(found, Confirmed) else None

    def nearest(self, rows: NDArray[np.int64], count: int) -> list[int]:
        """The ``count`` best of ``rows`` by their close bounds, split and path known as far as that is cheap; those that fit."""
        rows = rows[np.argsort(self.bounds.time_s[rows], kind="stable")][:CLOSE_AT_ONCE]
        self.bounds.come_closer(np.sort(rows))
        rows = rows[self.bounds.fits[rows] & np.isfinite(self.bounds.time_s[rows])]
        ordered = rows[np.argsort(self.bounds.time_s[rows], kind="stable")][: 4 * count].tolist()
        fitting = [row for row in ordered if isinstance(self.prepare(row), Prepared)]
        self.trace(fitting)
        return sorted(fitting, key=lambda row: (self.bound_s(row), row))[:count]

    def confirm(self, row: int) -> Confirmed | DoesNotFit:
        """Its plan, simulated; :class:`DoesNotFit` when it needs more memory than there is."""
        if row not in self._confirmed:
            self._confirmed[row] = self._simulate(row)
        return self._confirmed[row]

    def _simulate(self, row: int) -> Confirmed | DoesNotFit:
        refined = self.refine(row)
        if isinstance(refined, DoesNotFit):
            return refined
        pool, model = self.pool(row), self.prices.model
        plan = self.assembler.plan(refined.strategy, pool)
        prediction = predict(model.graph, model.cluster, model.workload, plan, model.profile, cost_model=model)
        if fits(prediction):
            return Confirmed(row, refined.strategy, pool, plan, prediction)
        worst = max(prediction.ranks, key=lambda rank: (rank.memory.reserved_bytes or 0.0) / rank.memory.capacity_bytes)
        missing = DoesNotFit((worst.memory.reserved_bytes or 0.0) - worst.memory.capacity_bytes, worst.memory.capacity_bytes)
        self.memory_misses[row] = missing
        return missing
