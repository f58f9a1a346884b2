"""From a skeleton to a strategy with its stage split: exact memory of every range of units, then the integer program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.layout import Pool
from planner.prices import Prices, UnitPrices
from planner.sites import Site, sites
from planner.stage_ends import first_stage_ends_s
from planner.stage_memory import RangePeaks, furthest_ends, missing_bytes, stage_peaks, unit_memory
from planner.stage_program import greedy_start, improve_split
from planner.stages import StageProblem, StageSplit, split_time_s
from planner.strategy_text import Strategy
from planner.terms import PipelineTerms, optimizer_s, pipeline_terms
from simulator.unit_cost import RecomputeChoice


@dataclass(frozen=True)
class Refined:
    """A strategy with its split. ``bound_s``: no split of the skeleton is faster (0 for one stage: nothing to split)."""

    strategy: Strategy
    bound_s: float


@dataclass(frozen=True)
class DoesNotFit:
    """No split fits: by how much every stage's budget would have to grow, and the largest budget."""

    missing_bytes: float
    budget_bytes: float


@dataclass(frozen=True)
class Prepared:
    """A skeleton that fits under some split. ``bound_s``: a first bound; ``problem``: its stage problem (``None``: one stage)."""

    strategy: Strategy
    bound_s: float
    problem: StageProblem | None = None
    start: StageSplit | None = None
    added_s: float = 0.0


class Refiner:
    """Splits skeletons; equal problems are solved once."""

    def __init__(self, prices: Prices, seed: int = 0) -> None:
        self.prices, self.seed = prices, seed
        self._solved: dict[tuple[object, ...], StageSplit] = {}

    def refine(
        self, strategy: Strategy, pool: Pool, num_micro_batches: int, *, ignore_memory: bool = False
    ) -> Refined | DoesNotFit:
        """The split of ``strategy`` (which has ``dp``) on ``pool``."""
        prepared = self.prepare(strategy, pool, num_micro_batches, ignore_memory=ignore_memory)
        return prepared if isinstance(prepared, DoesNotFit) else self.split(prepared)

    def prepare(
        self, strategy: Strategy, pool: Pool, num_micro_batches: int, *, ignore_memory: bool = False
    ) -> Prepared | DoesNotFit:
        """Exact memory of every range of units, and the greedy split: what the program starts from."""
        skeleton = _SkeletonProblem(self.prices, strategy, pool, num_micro_batches)
        tables = skeleton.memory_tables()
        units = self.prices.num_units
        if strategy.pp == 1:
            budget = skeleton.sites[0].budget_bytes
            missing = float(tables[0][0, units]) - budget
            return Prepared(strategy, 0.0) if missing <= 0 or ignore_memory else DoesNotFit(missing, budget)
        ends = np.full((strategy.pp, units), units, dtype=np.int64) if ignore_memory else furthest_ends(tables, skeleton.sites)
        problem, added = skeleton.stage_problem(ends), skeleton.added_s()
        if strategy.split is not None:
            return self._given(strategy, problem, skeleton, added)
        start = greedy_start(problem)
        if start is None:
            return DoesNotFit(missing_bytes(tables, skeleton.sites), max(site.budget_bytes for site in skeleton.sites))
        return Prepared(strategy, start.bound_s - added, problem, start, added)

    def split(self, prepared: Prepared) -> Refined:
        """The best split of a prepared skeleton."""
        if prepared.problem is None or prepared.start is None:
            return Refined(prepared.strategy, prepared.bound_s)
        key = prepared.problem.key()
        if key not in self._solved:
            self._solved[key] = improve_split(prepared.problem, prepared.start, seed=self.seed)
        split = self._solved[key]
        return Refined(replace(prepared.strategy, split=split.counts), split.bound_s - prepared.added_s)

    def _given(
        self, strategy: Strategy, problem: StageProblem, skeleton: _SkeletonProblem, added_s: float
    ) -> Prepared | DoesNotFit:
        """A split that the user gave: only its memory and its bound."""
        split = strategy.split or ()
        starts = np.cumsum((0, *split))
        if all(problem.furthest_end[stage, starts[stage]] >= starts[stage + 1] for stage in range(strategy.pp)):
            return Prepared(strategy, split_time_s(problem, split) - added_s)
        tables, budgets = skeleton.memory_tables(), [site.budget_bytes for site in skeleton.sites]
        missing = [float(tables[stage][starts[stage], starts[stage + 1]]) - budgets[stage] for stage in range(strategy.pp)]
        return DoesNotFit(max(missing), max(budgets))


class _SkeletonProblem:
    """Prices, sites and terms of one skeleton."""

    def __init__(self, prices: Prices, strategy: Strategy, pool: Pool, num_micro_batches: int) -> None:
        self.prices, self.strategy, self.num_micro_batches = prices, strategy, num_micro_batches
        self.choice = RecomputeChoice(strategy.recompute, strategy.op_classes)
        self.sites = sites(prices.model, pool, pp=strategy.pp, tp=strategy.tp, shard_group=strategy.shard_group)
        self.devices = [self._device(site) for site in self.sites]
        keys = [(device, site.tp_shape) for device, site in zip(self.devices, self.sites, strict=True)]
        self.distinct = list(dict.fromkeys(keys))
        self.stage_class = tuple(self.distinct.index(key) for key in keys)
        self.units: list[UnitPrices] = [
            prices.units(*device, shape, strategy.sequence_parallel, strategy.micro_batch, self.choice)
            for device, shape in self.distinct
        ]

    def _device(self, site: Site) -> tuple[str, float]:
        name, _ = self.prices.slowest(site, self.strategy.sequence_parallel, self.strategy.micro_batch, self.choice)
        return name, dict(site.devices)[name]

    def memory_tables(self) -> Sequence[np.ndarray]:
        """Peak of every range on every stage."""
        strategy, prices = self.strategy, self.prices
        memory = unit_memory(
            prices, self.units[self.stage_class[0]], prices.sizes(strategy.tp, whole=strategy.pp == 1), zero=strategy.zero,
            shard_degree=self.sites[0].shard_shape.size,
            ddp=strategy.zero == 0 and self.sites[0].dp_shape.size > 1 and strategy.pp == 1,
            num_micro_batches=self.num_micro_batches,
        )  # fmt: skip
        peaks = RangePeaks(memory, num_micro_batches=self.num_micro_batches, keeps_outputs=prices.memory_rules.keeps_stage_outputs)
        return stage_peaks(peaks, schedule=strategy.schedule, pp=strategy.pp, num_micro_batches=self.num_micro_batches)

    def _terms(self) -> list[PipelineTerms]:
        first_sites = [self.sites[self.stage_class.index(index)] for index in range(len(self.distinct))]
        return [
            pipeline_terms(self.prices, site, device, units, zero=self.strategy.zero, passes=self.num_micro_batches)
            for site, (device, _), units in zip(first_sites, self.distinct, self.units, strict=True)
        ]

    def stage_problem(self, ends: np.ndarray) -> StageProblem:
        """Data of the integer program."""
        kind, terms = self.prices.kind_of_unit, self._terms()
        first = self.stage_class[0]
        there, back = self._boundary_s()

        def per_unit(tables: Sequence[np.ndarray]) -> np.ndarray:
            return np.stack([table[kind] for table in tables])

        zero, pieces = np.zeros(len(self.prices.kinds)), range(len(terms[0].tails))
        ends_s = float(terms[first].wait_s[self.prices.first_kind]) + self._least_optimizer_s()
        return StageProblem(
            forward_s=per_unit([item.forward_s for item in terms]), backward_s=per_unit([item.backward_s for item in terms]),
            first_s=per_unit([item.first_s for item in terms]),
            both_s=per_unit([zero if item.both_s is None else item.both_s for item in terms]),
            stage_class=self.stage_class, num_micro_batches=self.num_micro_batches, schedule=self.strategy.schedule,
            boundary_s=there + back, boundary_back_s=back,
            boundary_first_s=min(float(item.wait_s[kind[1:]].min()) for item in terms), furthest_end=ends,
            first_stage_s=first_stage_ends_s(
                self.prices, self.sites, self.devices[0], self.units[first], terms[first], zero=self.strategy.zero,
                most=self.prices.num_units,
            ),
            tails_s=np.stack([per_unit([item.tails[piece][0] for item in terms]) for piece in pieces]),
            tail_constants_s=np.array([ends_s + min(item.tails[piece][1] for item in terms) for piece in pieces]),
        )  # fmt: skip

    def _least_optimizer_s(self) -> float:
        """Optimizer step of a stage with one unit, the smallest."""
        least = float(self.prices.sizes(self.strategy.tp).trainable.min())
        return min(
            optimizer_s(self.prices, site, device, least, zero=self.strategy.zero)
            for site, device in zip(self.sites, self.devices, strict=True)
        )

    def _boundary_s(self) -> tuple[float, float]:
        """Least time of a stage boundary forwards and backwards."""
        kind, network = self.prices.kind_of_unit, self.prices.model.network
        size_in = min(float(units.input_bytes[kind[1:]].min()) for units in self.units)
        size_out = min(float(units.output_bytes[kind[:-1]].min()) for units in self.units)
        shapes = {network.shape((low.last_device, high.last_device)) for low, high in zip(self.sites, self.sites[1:], strict=False)}
        there = min(network.collective("p2p", size_out, shape).seconds for shape in shapes)
        back = min(network.collective("p2p", size_in, shape).seconds for shape in shapes)
        return there, back

    def added_s(self) -> float:
        """Gradient addition that the first micro-batch does not do; the program counts it for all."""
        kind = self.prices.kind_of_unit
        return float(np.stack([np.broadcast_to(item.add_s, item.cost_s.shape)[kind] for item in self._terms()]).max(axis=0).sum())
