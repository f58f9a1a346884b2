"""A skeleton priced: sites of its ranks, prices of its units there, terms, memory, and the data of its stage problem."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from planner.layout import Pool
from planner.prices import Floats, Prices, UnitPrices
from planner.rank_split import layers_of_ranks, units_of_stages
from planner.row_memory import rank_peaks, stage_needs
from planner.sites import Site, alike, sites
from planner.stage_ends import first_stage_ends_s
from planner.stage_memory import RangePeaks, in_flight, stage_peaks, unit_memory
from planner.stages import StageProblem
from planner.strategy_text import Strategy
from planner.terms import PipelineTerms, data_parallel, optimizer_s, pipeline_terms
from planner.time_bounds import messages_s
from simulator.unit_cost import RecomputeChoice


class Skeleton:
    """Prices, sites and terms of one skeleton."""

    def __init__(self, prices: Prices, strategy: Strategy, pool: Pool, num_micro_batches: int) -> None:
        self.prices, self.strategy, self.num_micro_batches = prices, strategy, num_micro_batches
        self.choice = RecomputeChoice(strategy.recompute, strategy.op_classes)
        self.sites = sites(prices.model, pool, strategy.degrees, pp=strategy.pp)
        some = self.sites[:1] if alike(pool, strategy.pp) else self.sites
        devices = [self._device(site) for site in some]
        keys = [(device, site.tp_shape, site.dp_shape) for device, site in zip(devices, some, strict=True)]
        self.distinct = list(dict.fromkeys(keys))
        numbers = [self.distinct.index(key) for key in keys]
        self.rank_class = tuple(numbers * (len(self.sites) // len(some)))
        self.devices = [device for device, *_ in self.distinct]
        self.class_sites = [self.sites[self.rank_class.index(index)] for index in range(len(self.distinct))]
        self.units: list[UnitPrices] = [
            prices.units(*device, site, strategy.sequence_parallel, strategy.micro_batch, self.choice)
            for device, site in zip(self.devices, self.class_sites, strict=True)
        ]

    def _device(self, site: Site) -> tuple[str, float]:
        name, _ = self.prices.slowest(site, self.strategy.sequence_parallel, self.strategy.micro_batch, self.choice)
        return name, dict(site.devices)[name]

    @cached_property
    def range_peaks(self) -> RangePeaks:
        """Peaks of unit ranges."""
        memory = unit_memory(
            self.prices, self.units[0], self.sites[0], zero=self.strategy.zero, num_micro_batches=self.num_micro_batches
        )
        keeps = self.prices.memory_rules.keeps_stage_outputs
        return RangePeaks(memory, num_micro_batches=self.num_micro_batches, keeps_outputs=keeps)

    def memory_tables(self) -> Sequence[np.ndarray]:
        """Peak of every range on every stage."""
        strategy = self.strategy
        return stage_peaks(self.range_peaks, schedule=strategy.schedule, pp=strategy.pp, num_micro_batches=self.num_micro_batches)

    def fits(self, split: Sequence[int]) -> bool:
        """Whether every stage of a split, one a rank, fits its memory."""
        held = in_flight(self.strategy.schedule, pp=self.strategy.pp, num_micro_batches=np.array(self.num_micro_batches))
        peaks = self.range_peaks.of_split(split, held)
        return bool((peaks <= [site.budget_bytes for site in self.sites]).all())

    def rank_peaks(self, split: Sequence[int]) -> Floats:
        """Peak bytes of each rank of a split."""
        strategy = self.strategy
        needs = stage_needs(self.prices, self.units[0], self.sites[0], split, zero=strategy.zero)
        return rank_peaks(
            strategy.schedule,
            needs,
            num_ranks=strategy.pp,
            num_micro_batches=self.num_micro_batches,
            chunks=strategy.stages_per_rank,
        )

    def missing_bytes(self, split: Sequence[int]) -> float:
        """How much more memory the fullest rank of a split needs than it has; 0 where all fit."""
        return max(0.0, float((self.rank_peaks(split) - [site.budget_bytes for site in self.sites]).max()))

    @cached_property
    def terms(self) -> list[PipelineTerms]:
        """Terms per class of ranks."""
        prices, zero = self.prices, self.strategy.zero
        return [
            pipeline_terms(
                prices, data_parallel(prices, site, device, units, zero=zero), units, zero=zero, passes=self.num_micro_batches
            )
            for site, device, units in zip(self.class_sites, self.devices, self.units, strict=True)
        ]

    def even_split(self) -> tuple[int, ...] | None:
        """The split by the rule of ``planner.rank_split`` where all layers and all ranks are alike; ``None`` elsewhere, and where
        it leaves a stage without a unit."""
        kind, strategy = self.prices.repeated_kind, self.strategy
        if kind is None or len(self.distinct) > 1:
            return None
        cost = self.terms[0].cost_s
        ends = (cost[self.prices.first_kind], cost[kind], cost[self.prices.last_kind])
        first, middle, last = (np.array([value]) for value in ends)
        of_rank = layers_of_ranks(strategy.schedule, first, middle, last, int(self.prices.counts[kind]), strategy.pp)
        counts = units_of_stages(strategy.schedule, of_rank, strategy.stages_per_rank)[0]
        return tuple(counts.tolist()) if (counts > 0).all() else None

    def stage_problem(self, ends: np.ndarray) -> StageProblem:
        """Data of the integer program."""
        kind, terms = self.prices.kind_of_unit, self.terms
        first = self.rank_class[0]
        there, back = self._boundary_s()

        def per_unit(tables: Sequence[np.ndarray]) -> np.ndarray:
            return np.stack([table[kind] for table in tables])

        zero, pieces = np.zeros(len(self.prices.kinds)), range(len(terms[0].tails))
        ends_s = float(terms[first].wait_s[self.prices.first_kind]) + self._least_optimizer_s()
        return StageProblem(
            forward_s=per_unit([item.forward_s for item in terms]), backward_s=per_unit([item.backward_s for item in terms]),
            first_s=per_unit([item.first_s for item in terms]),
            both_s=per_unit([zero if item.both_s is None else item.both_s for item in terms]),
            stage_class=self.rank_class, num_micro_batches=self.num_micro_batches, schedule=self.strategy.schedule,
            boundary_s=there + back, boundary_back_s=back,
            boundary_first_s=min(float(item.wait_s[kind[1:]].min()) for item in terms), furthest_end=ends,
            first_stage_s=first_stage_ends_s(
                self.prices, self.sites, self.devices[first], self.units[first], terms[first], zero=self.strategy.zero,
                most=self.prices.num_units,
            ),
            tails_s=np.stack([per_unit([item.tails[piece][0] for item in terms]) for piece in pieces]),
            tail_constants_s=np.array([ends_s + min(float(item.tails[piece][1]) for item in terms) for piece in pieces]),
        )  # fmt: skip

    def _least_optimizer_s(self) -> float:
        """Optimizer step of a stage with one unit, the smallest."""
        found = []
        for site, device in zip(self.class_sites, self.devices, strict=True):
            sizes = self.prices.sizes(site)
            least = float((sizes.trainable * sizes.state_share(site, self.strategy.zero)).min())
            found.append(optimizer_s(self.prices, device, least))
        return min(found)

    def _boundary_s(self) -> tuple[float, float]:
        """Least time of a stage boundary forwards and backwards."""
        network = self.prices.model.network
        shapes = {network.shape((low.last_device, high.last_device)) for low, high in zip(self.sites, self.sites[1:], strict=False)}
        pairs = [messages_s(self.prices, units, shape) for units in self.units for shape in shapes]
        return min(float(there[0]) for there, _ in pairs), min(float(back[0]) for _, back in pairs)

    def added_s(self) -> float:
        """Gradient addition that the first micro-batch does not do; the program counts it for all."""
        kind = self.prices.kind_of_unit
        return float(np.stack([np.broadcast_to(item.add_s, item.cost_s.shape)[kind] for item in self.terms]).max(axis=0).sum())
