"""Bounds of all rows whose pipeline ranks are alike, gathered from tables of what few distinct values they have.

Prices of units are those of a combination, prices of states those of a variant (``planner.space``). A row looks both up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.memory_bounds import Settled, memory_fill
from planner.prices import Floats, Prices, ShardPrices, UnitPrices
from planner.rank_bounds import RankSplit, rank_split_bound
from planner.rank_split import longest_rank
from planner.row_memory import moments
from planner.schedule_path import few_micro_batches
from planner.sites import Place, Site, first_site
from planner.space import Layout, Space
from planner.stage_ends import tied_grads_s
from planner.stage_memory import settled_bytes
from planner.stages import PROGRAM_SCHEDULES
from planner.terms import (
    DataParallel,
    Overlap,
    PipelineTerms,
    StepEnds,
    ddp_buckets_s,
    optimizer_s,
    partial_grads_s,
    pipeline_terms,
    rank_waits_s,
    single_stage_s,
    skew_s,
)  # fmt: skip
from planner.time_bounds import Pipelines, messages_s
from specs.plan import CollectiveOptions

Ints = NDArray[np.int64]
NOT_PRICED = -1


@dataclass(frozen=True)
class _LayoutFacts:
    """What a layout's rows need of it. ``boundaries``: shapes of the messages between neighbour ranks, numbered."""

    site: Site
    place: int
    boundary: int
    tied_s: float


class AlikeRows:
    """See the module docstring. ``chosen``: the layouts whose ranks are alike."""

    def __init__(self, prices: Prices, space: Space, chosen: NDArray[np.bool_]) -> None:
        self.prices, self.space = prices, space
        self.places: list[Place] = []
        self.boundaries: list[tuple[Any, ...]] = []
        self.facts: dict[int, _LayoutFacts] = {int(index): self._facts(space.layouts[index]) for index in np.flatnonzero(chosen)}
        some = np.zeros(len(space.layouts), dtype=np.int64)

        def of_layout(value: Callable[[int], Any]) -> NDArray[Any]:
            found = some.astype(float)
            for index in self.facts:
                found[index] = value(index)
            return found

        self.place_of_layout = of_layout(lambda index: self.facts[index].place).astype(np.int64)
        self.pp_of_layout = np.array([layout.pp for layout in space.layouts], dtype=np.int64)
        self.budget_of_layout = of_layout(lambda index: self.facts[index].site.budget_bytes)
        self.unit_of_combination = np.full(len(space.combination_rows), NOT_PRICED, dtype=np.int64)
        self._unit_number: dict[tuple[int, int, bool, int], int] = {}
        self._units: list[UnitPrices] = []
        self._places_of_units: list[int] = []
        self.variants = _Variants(self)
        self._messages: dict[tuple[int, int], tuple[float, float]] = {}

    def _facts(self, layout: Layout) -> _LayoutFacts:
        model, pool = self.prices.model, layout.pool
        site = first_site(model, pool, layout.degrees(), pp=layout.pp)
        place = Place(site.devices[0], site.tp_shape, site.split)
        size = pool.size // layout.pp
        ends = [pool.devices[(rank + 1) * size - 1] for rank in range(layout.pp)]
        shapes = tuple(dict.fromkeys(model.network.shape(pair) for pair in itertools.pairwise(ends)))
        last = pool.devices[(layout.pp - 1) * size]
        tied_s = tied_grads_s(self.prices, site, last) if layout.pp > 1 else 0.0
        return _LayoutFacts(site, _number(self.places, place), _number(self.boundaries, shapes), tied_s)

    # --- first bounds ------------------------------------------------------------------------------------------

    def first_bounds(self, rows: Ints, stop: Callable[[], bool]) -> tuple[Floats, Floats]:
        """(time, fill) of ``rows``: work of the longest rank, states over the memory."""
        table = self.space.rows
        states = self.variants.states_fill()[table["variant"][rows]]
        alive = np.zeros(len(self.unit_of_combination), dtype=bool)
        alive[table["combination"][rows[states <= 1.0]]] = True
        self._price(np.flatnonzero(alive), stop)
        time_s, held = self._combination_bounds()
        combination = table["combination"][rows]
        fill = np.maximum(states, held[combination])
        return np.where(fill <= 1.0, time_s[combination], np.inf), fill

    def _price(self, combinations: Ints, stop: Callable[[], bool]) -> None:
        """Prices of units. Combinations come by ascending micro-batch; once none of a place's fits its largest budget, larger ones
        are not priced."""
        rows = self.space.rows[self.space.combination_rows[combinations]]
        place = self.place_of_layout[rows["layout"]]
        columns = (place, rows["micro_batch"], rows["sequence_parallel"], rows["recompute"])
        keys, inverse = np.unique(np.stack(columns, axis=1).astype(np.int64), axis=0, return_inverse=True)
        least: dict[tuple[int, int], float] = {}
        budgets = np.zeros(len(self.places))
        np.maximum.at(budgets, place, self.budget_of_layout[rows["layout"]])
        numbers = np.full(len(keys), NOT_PRICED, dtype=np.int64)
        before: dict[int, list[int]] = {}
        for index, (at, batch, parallel, recompute) in enumerate(keys.tolist()):
            sizes = before.setdefault(at, [])
            if not sizes or sizes[-1] != batch:
                sizes.append(batch)
            if stop() or (len(sizes) > 1 and least[at, sizes[-2]] > budgets[at]):
                least[at, batch] = np.inf
                continue
            where, choice = self.places[at], self.space.recomputes[recompute]
            device, slowdown = where.device
            price = self.prices.units(device, slowdown, where, bool(parallel), batch, choice)
            least[at, batch] = min(least.get((at, batch), np.inf), price.least_bytes())
            numbers[index] = len(self._units)
            self._units.append(price)
            self._places_of_units.append(at)
        self.unit_of_combination[combinations] = numbers[inverse]

    def _combination_bounds(self) -> tuple[Floats, Floats]:
        """Per combination (time, fill); time infinite and fill infinite where it was not priced."""
        time_s = np.full(len(self.unit_of_combination), np.inf)
        fill = np.full(len(self.unit_of_combination), np.inf)
        priced = np.flatnonzero(self.unit_of_combination != NOT_PRICED)
        if not len(priced):
            return time_s, fill
        rows = self.space.rows[self.space.combination_rows[priced]]
        number, ranks = self.unit_of_combination[priced], self.pp_of_layout[rows["layout"]]
        units, counts, kind = self.units, self.prices.counts, self.prices.repeated_kind
        cost = units.forward_s + units.backward_s
        cost = cost - np.where(ranks.max(initial=1) > 1, units.forward_exchange_s + units.backward_exchange_s, 0.0)
        work, largest = (cost @ counts)[number], cost.max(axis=1)[number]
        longest = np.where(ranks > 1, np.maximum(work / ranks, largest), work)
        if kind is not None:
            first, middle, last = (cost[number, index] for index in (self.prices.first_kind, kind, self.prices.last_kind))
            apart = longest_rank(first, middle, last, int(counts[kind]), np.maximum(ranks, 2))
            together = longest_rank(first + last, middle, 0.0 * last, int(counts[kind]), np.maximum(ranks, 2))
            longest = np.where(ranks > 1, np.maximum(longest, np.minimum(apart, together)), longest)
        time_s[priced] = rows["num_micro_batches"] * longest
        need = np.maximum(units.saved_bytes + units.forward_peak_bytes, units.backward_peak_bytes).max(axis=1)[number]
        fill[priced] = need / self.budget_of_layout[rows["layout"]]
        return time_s, fill

    @cached_property
    def units(self) -> UnitPrices:
        """All priced combinations' units, [number, kind]."""
        return UnitPrices.stack(self._units)

    # --- close bounds ------------------------------------------------------------------------------------------

    def close_bounds(self, rows: Ints) -> tuple[Floats, Floats]:
        """(time, fill) of ``rows`` by all terms."""
        table = self.space.rows[rows]
        number = self.unit_of_combination[table["combination"]]
        time_s, fill = np.full(len(rows), np.inf), np.full(len(rows), np.inf)
        variant = self.variants.number(table["variant"])
        single = self.pp_of_layout[table["layout"]] == 1
        key = ((table["schedule"].astype(np.int64) * 4 + table["zero"]) * 2 + single) * 4 + self.variants.kind[variant]
        for _, members in _groups(key):
            part = members[number[members] != NOT_PRICED]
            if len(part):
                group = _Group(self, rows[part], number[part], variant[part])
                time_s[part], fill[part] = group.bounds()
        return time_s, fill

    def messages(self, number: Ints, boundary: Ints) -> tuple[Floats, Floats]:
        """Least time of messages between neighbour ranks forwards and backwards, per row."""
        pairs, inverse = np.unique(np.stack([number, boundary], axis=1), axis=0, return_inverse=True)
        for unit, shapes in pairs.tolist():
            if (unit, shapes) not in self._messages:
                found = [messages_s(self.prices, self._units[unit], shape) for shape in self.boundaries[shapes]]
                self._messages[unit, shapes] = (min(float(a[0]) for a, _ in found), min(float(b[0]) for _, b in found))
        values = np.array([self._messages[pair] for pair in map(tuple, pairs.tolist())])[inverse.ravel()]
        return values[:, 0], values[:, 1]

    @cached_property
    def partial_s(self) -> Floats:
        """Per priced units: summing all partial gradients over tp."""
        elements = self.units.partial_grad_elements @ self.prices.counts
        by_place = {index: next(f.site for f in self.facts.values() if f.place == index) for index in set(self._places_of_units)}
        return np.array([
            float(partial_grads_s(self.prices, by_place[place], value))
            for place, value in zip(self._places_of_units, elements.tolist(), strict=True)
        ])  # fmt: skip

    @cached_property
    def waits_s(self) -> tuple[Floats, Floats]:
        """Per priced units and kind: waits of several dp ranks at a gather, at a reduction."""
        found = [
            rank_waits_s(self.prices, self.places[place].device, units, replicas=2)
            for place, units in zip(self._places_of_units, self._units, strict=True)
        ]
        return np.stack([gather for gather, _ in found]), np.stack([reduce for _, reduce in found])


class _Variants:
    """Prices of states by variant; those that close bounds ask for are numbered as they come."""

    def __init__(self, owner: AlikeRows) -> None:
        self.owner, self.prices, self.space = owner, owner.prices, owner.space
        self._number = np.full(len(self.space.variant_rows), -1, dtype=np.int64)
        self.sites: list[Site] = []
        self._tables: dict[str, list[Any]] = {}

    def states_fill(self) -> Floats:
        """Per variant: states and gradients of the whole model over the memory of its ranks."""
        rows = self.space.rows[self.space.variant_rows]
        fill = np.zeros(len(rows))
        by_sizes: dict[tuple[int, int], list[int]] = {}
        for index, (layout, zero) in enumerate(zip(rows["layout"].tolist(), rows["zero"].tolist(), strict=True)):
            if layout in self.owner.facts:
                site = self.owner.facts[layout].site
                by_sizes.setdefault((id(self.prices.sizes(site)), zero), []).append(index)
        for (_, zero), members in by_sizes.items():
            layouts = [self.space.layouts[layout] for layout in rows["layout"][members].tolist()]
            sites = [self.owner.facts[layout].site for layout in rows["layout"][members].tolist()]
            sizes = self.prices.sizes(sites[0])
            cp = np.array([layout.cp for layout in layouts])
            dp = np.array([layout.dp for layout in layouts])
            group = np.where(rows["shard_group"][members] > 0, rows["shard_group"][members], dp) * cp
            experts = np.array([site.expert_shape.size if site.expert_shape else 10**9 for site in sites])
            share = sizes.share(group[:, None], np.maximum(1, np.minimum(experts, group))[:, None], zero)
            ddp = (np.array([site.dp_shape.size > 1 and site.whole for site in sites]) & (zero == 0))[:, None]
            stays, kept = settled_bytes(self.prices, sizes, share, zero=zero, ddp=ddp, num_micro_batches=1)
            ranks = np.array([layout.pp for layout in layouts])
            fill[members] = ((stays + kept) @ self.prices.counts) / (ranks * self.owner.budget_of_layout[rows["layout"][members]])
        return fill

    def number(self, variants: NDArray[np.int32]) -> Ints:
        """Their numbers in the tables, which grow by those not seen before."""
        wanted = np.unique(variants)
        for variant in wanted[self._number[wanted] < 0].tolist():
            self._number[variant] = len(self.sites)
            self._add(self.space.rows[self.space.variant_rows[variant]])
        return self._number[variants]

    def _add(self, row: np.void) -> None:
        layout, zero, group = int(row["layout"]), int(row["zero"]), int(row["shard_group"])
        shape, facts, prices = self.space.layouts[layout], self.owner.facts[layout], self.prices
        site = first_site(prices.model, shape.pool, shape.degrees(group), pp=shape.pp) if group else facts.site
        device, sizes = site.devices[0], prices.sizes(site)
        local = sizes.trainable * sizes.state_share(site, zero)
        stays, kept = settled_bytes(
            prices, sizes, sizes.state_share(site, zero), zero=zero, num_micro_batches=2,
            ddp=zero == 0 and site.dp_shape.size > 1 and site.whole,
        )  # fmt: skip
        overlap, whole = Overlap.of(prices.rules, site.dp_shape.tier), shape.pp == 1
        one = local @ prices.counts if whole else local[prices.first_kind]
        ddp = whole and zero == 0 and site.dp_shape.size > 1
        self.sites.append(site)
        self.__dict__.pop("shards", None)
        for name, value in {
            "shards": prices.shards(*device, site), "hidden": overlap.hidden, "back": overlap.back, "local": local,
            "sharded": zero > 0 and site.shard_shape.size > 1, "replicas": site.dp_shape.size > 1, "stays": stays, "kept": kept,
            "optimizer": optimizer_s(prices, device, float(one)), "tied": facts.tied_s, "boundary": facts.boundary,
            "buckets": ddp_buckets_s(prices, site, CollectiveOptions().bucket_bytes) if ddp else (0.0, 0.0),
        }.items():  # fmt: skip
            self._tables.setdefault(name, []).append(value)

    def column(self, name: str, numbers: Ints) -> NDArray[Any]:
        """A table's entries."""
        return np.array([self._tables[name][index] for index in np.unique(numbers)])[np.unique(numbers, return_inverse=True)[1]]

    def shard_prices(self, numbers: Ints) -> ShardPrices:
        """Prices of shards, [row, kind]."""
        used, inverse = np.unique(numbers, return_inverse=True)
        return ShardPrices.stack([self._tables["shards"][index] for index in used]).row(inverse)

    @property
    def kind(self) -> Ints:
        """Per number: whether states are sharded, and whether gradients are summed, as one number."""
        sharded, replicas = np.array(self._tables["sharded"], dtype=np.int64), np.array(self._tables["replicas"], dtype=np.int64)
        return 2 * sharded + replicas


class _Group:
    """Rows with one schedule, zero stage, and kind of variant; pipelines or none."""

    def __init__(self, owner: AlikeRows, rows: Ints, number: Ints, variant: Ints) -> None:
        self.owner, self.prices, self.number, self.variant = owner, owner.prices, number, variant
        self.rows = owner.space.rows[rows]
        self._splits: dict[int, RankSplit] = {}
        self.zero, self.schedule = int(self.rows["zero"][0]), owner.space.schedules[int(self.rows["schedule"][0])]
        self.ranks = owner.pp_of_layout[self.rows["layout"]]
        self.passes = self.rows["num_micro_batches"].astype(np.int64)
        self.units = owner.units.row(number)
        variants = owner.variants
        sharded, replicas = (bool(variants.column(name, variant[:1])[0]) for name in ("sharded", "replicas"))
        overlap = Overlap(variants.column("hidden", variant), variants.column("back", variant))
        gather, reduce = (table[number] if replicas else 0.0 * table[number] for table in owner.waits_s)
        self.dp = DataParallel(variants.shard_prices(variant), overlap, sharded, replicas, gather, reduce)

    def bounds(self) -> tuple[Floats, Floats]:
        """(time, fill) per row."""
        fill = self._fill()
        return (self._single() if self.ranks[0] == 1 else self._pipelines()), fill

    def _fill(self) -> Floats:
        variants, fill = self.owner.variants, np.zeros(len(self.rows))
        settled = Settled(variants.column("stays", self.variant), variants.column("kept", self.variant))
        if self.zero == 0 and self.dp.replicas and self.ranks[0] == 1:  # buckets hold the gradients of a single micro-batch
            settled = Settled(settled.stays, np.where(self.passes[:, None] > 1, settled.grads, 0.0))
        budgets = self.owner.budget_of_layout[self.rows["layout"]]
        for pp, members in _groups(self.ranks):
            for budget, rows in ((value, members[budgets[members] == value]) for value in set(budgets[members].tolist())):
                fill[rows] = memory_fill(
                    self.prices, Settled(settled.stays[rows], settled.grads[rows]), self.units.row(rows), self.schedule, pp=pp,
                    passes=self.passes[rows], budgets=np.full(pp, budget),
                )  # fmt: skip
            if pp > 1 and self.prices.repeated_kind is not None and self.schedule.name not in PROGRAM_SCHEDULES:
                part = Settled(settled.stays[members], settled.grads[members])
                fill[members] = np.maximum(fill[members], self._even_fill(part, pp, members) / budgets[members])
        return fill

    def _even_fill(self, settled: Settled, pp: int, members: Ints) -> Floats:
        """Bytes of the fullest rank of the even split, at the moments when it holds most."""
        units, schedule, passes = self.units.row(members), self.schedule, self.passes[members]
        split = self._split(pp, members)
        saved, waiting = split.stages(units.saved_bytes), split.stages(units.weight_saved_bytes)
        states = split.ranks(settled.stays)
        full, least = states + split.ranks(settled.grads), np.zeros(len(members))
        for m, rows in _groups(np.minimum(passes, few_micro_batches(schedule.name, pp, 10**9))):
            found = moments(schedule.name, pp, m, schedule.chunks)
            for index, base in enumerate((states, full)):
                held = found.held[index] * saved[rows] + found.waiting[index] * waiting[rows]
                of_rank = np.stack([held[:, split.owner == rank].sum(axis=1) for rank in range(pp)], axis=1)
                least[rows] = np.maximum(least[rows], np.where(of_rank > 0, base[rows] + of_rank, 0.0).max(axis=1))
        return np.where(split.complete, least, 0.0)

    @cached_property
    def _terms(self) -> PipelineTerms:
        return pipeline_terms(self.prices, self.dp, self.units, zero=self.zero, passes=self.passes)

    def _split(self, pp: int, rows: Ints) -> RankSplit:
        """The even split of the group's rows with ``pp`` ranks."""
        if pp not in self._splits:
            self._splits[pp] = RankSplit(self.prices, self.schedule, self._terms.cost_s[rows], pp)
        return self._splits[pp]

    def _single(self) -> Floats:
        owner, counts = self.owner, self.prices.counts
        after = owner.partial_s[self.number]
        if self.zero == 0 and self.dp.replicas:
            work = self.passes * ((self.units.forward_compute_s + self.units.backward_compute_s) @ counts)
            device = owner.places[int(owner.place_of_layout[self.rows["layout"][0]])].device
            after = after + skew_s(self.prices, device, work, 2)
        buckets = owner.variants.column("buckets", self.variant)
        ends = StepEnds(after, owner.variants.column("optimizer", self.variant), (buckets[:, 0], buckets[:, 1]))
        return np.asarray(single_stage_s(self.prices, self.dp, self.units, ends, zero=self.zero, passes=self.passes), dtype=float)

    def _pipelines(self) -> Floats:
        owner, variants = self.owner, self.owner.variants
        terms = self._terms
        there, back = owner.messages(self.number, variants.column("boundary", self.variant).astype(np.int64))
        tied = variants.column("tied", self.variant)
        exchange = self.units.forward_exchange_s + self.units.backward_exchange_s
        least = Pipelines(
            self.prices, self.schedule, [terms], np.zeros(1, dtype=np.int64), ranks=self.ranks, passes=self.passes,
            exchange_s=[exchange], boundary_s=there + back, ends_s=self._ends(terms, tied),
        ).bound()  # fmt: skip
        if self.prices.repeated_kind is None:
            return least
        local, device = variants.column("local", self.variant), owner.places[0].device
        for pp, rows in _groups(self.ranks):
            least[rows] = np.maximum(least[rows], rank_split_bound(
                self.prices, self._split(pp, rows), terms.row(rows), ranks=pp, passes=self.passes[rows], there_s=there[rows],
                back_s=back[rows],
                exchange_s=exchange[rows], dp=self.dp.row(rows), zero=self.zero, tied_s=tied[rows], local=local[rows],
                device=device,
            ))  # fmt: skip
        return least

    def _ends(self, terms: PipelineTerms, tied: Floats) -> Floats:
        """What rank 0 does at both ends with one unit only."""
        first = self.prices.first_kind
        reduce = terms.reduce_s[:, first]
        after = reduce + tied if self.zero == 0 or self.prices.rules.reduce_inline else np.maximum(reduce, tied)
        return np.asarray(terms.wait_s[:, first] + after + self.owner.variants.column("optimizer", self.variant))


def _groups(key: NDArray[Any]) -> Iterator[tuple[int, Ints]]:
    """(value, positions) of each value of ``key``."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    for part in np.split(order, np.flatnonzero(np.diff(ordered)) + 1):
        if len(part):
            yield int(key[part[0]]), part


def _number(known: list[Any], value: Any) -> int:
    """Position of ``value`` in ``known``, added if it is new."""
    if value not in known:
        known.append(value)
    return known.index(value)
