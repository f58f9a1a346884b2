"""The bound of a candidate whose split is known: the longest path through its schedule, then what each rank does after it.

Only data-parallel collectives that run beside compute are left out, so without sharded states it is the simulated step itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.prices import Floats
from planner.schedule_path import RankTimes, StageTimes, rank_times
from planner.skeleton import Skeleton
from planner.stage_ends import tied_grads_s
from planner.terms import Overlap, gathered_first_s, optimizer_s, partial_grads_s
from simulator.exchange import exposed_s
from specs.schedule import SCHEDULES, stage_ranks


def path_bounds(skeletons: Sequence[Skeleton], counts: Sequence[tuple[int, ...]]) -> Floats:
    """Least step time of each skeleton with its split (units of each stage). Those that share rows are walked together."""
    found = np.zeros(len(skeletons))
    groups: dict[tuple[str, int, int, int, bool], list[int]] = {}
    for index, skeleton in enumerate(skeletons):
        strategy = skeleton.strategy
        key = (strategy.schedule, strategy.pp, skeleton.num_micro_batches, strategy.stages_per_rank, strategy.zero == 0)
        groups.setdefault(key, []).append(index)
    for (name, ranks, micro_batches, chunks, _), members in groups.items():
        splits_of = [_Split(skeletons[index], counts[index]) for index in members]
        times = _stack([item.times() for item in splits_of])
        walked = rank_times(name, num_ranks=ranks, num_micro_batches=micro_batches, stages_per_rank=chunks, times=times)
        found[members] = [item.step_s(walked, index) * (1 - 1e-9) for index, item in enumerate(splits_of)]
    return found


def _stack(items: Sequence[StageTimes]) -> StageTimes:
    columns: dict[str, Any] = {}
    for name in vars(items[0]):
        values = [getattr(item, name) for item in items]
        columns[name] = None if values[0] is None else np.stack(values)
    return StageTimes(**columns)


@dataclass(frozen=True)
class _Split:
    """A skeleton cut into stages."""

    skeleton: Skeleton
    counts: tuple[int, ...]

    @property
    def _owner(self) -> tuple[int, ...]:
        strategy = self.skeleton.strategy
        return stage_ranks(strategy.schedule, num_ranks=strategy.pp, stages_per_rank=strategy.stages_per_rank)

    def _sums(self, values: Sequence[Any]) -> Floats:
        """Per class of ranks an array of kinds -> sums over each stage's units."""
        kind = self.skeleton.prices.kind_of_unit
        bounds = np.cumsum((0, *self.counts))
        prefix = [
            np.concatenate([[0.0], np.cumsum(np.broadcast_to(value, len(self.skeleton.prices.kinds))[kind])]) for value in values
        ]
        classes = [self.skeleton.rank_class[rank] for rank in self._owner]
        return np.array([prefix[cls][bounds[s + 1]] - prefix[cls][bounds[s]] for s, cls in enumerate(classes)])

    def _of_ranks(self, values: Sequence[Any]) -> Floats:
        return self._by_rank(self._sums(values))

    def _by_rank(self, of_stages: Floats) -> Floats:
        return np.asarray(np.bincount(self._owner, weights=of_stages, minlength=self.skeleton.strategy.pp), dtype=float)

    def times(self) -> StageTimes:
        """Of one candidate: [stage]."""
        _skeleton, terms = self.skeleton, self.skeleton.terms
        forward, backward = self._sums([item.forward_s for item in terms]), self._sums([item.backward_s for item in terms])
        there, back = self._messages()
        pairs = self._pairs(forward, backward)
        if pairs is not None and self.skeleton.strategy.zero:  # units are then gathered and reduced one by one, forward first
            backward, pairs = pairs[::-1] - forward[::-1], None
        return StageTimes(
            forward_s=forward, backward_s=backward, input_s=self._sums([item.input_s for item in terms]),
            weight_s=self._sums([item.weight_s for item in terms]), first_s=self._first_s(forward),
            add_s=self._sums([item.add_s for item in terms]), there_s=there, back_s=back, pair_s=pairs,
        )  # fmt: skip

    def _first_s(self, forward: Floats) -> Floats:
        """More in each stage's first forward."""
        skeleton, prices = self.skeleton, self.skeleton.prices
        if not self._is_sharded:
            return np.zeros_like(forward)
        shards = [prices.shards(*device, site) for device, site in zip(skeleton.devices, skeleton.class_sites, strict=True)]
        unpack, gather = self._sums([item.unpack_s for item in shards]), self._sums([item.gather_s for item in shards])
        starts = prices.kind_of_unit[np.cumsum((0, *self.counts))[:-1]]
        classes = [skeleton.rank_class[rank] for rank in self._owner]
        first = np.array([shards[cls].gather_s[kind] for cls, kind in zip(classes, starts, strict=True)])
        return np.asarray(gathered_first_s(prices.rules, self._overlap, forward, unpack, gather, first))

    @property
    def _is_sharded(self) -> bool:
        return self.skeleton.strategy.zero > 0 and self.skeleton.sites[0].shard_shape.size > 1

    @property
    def _overlap(self) -> Overlap:
        return Overlap.of(self.skeleton.prices.rules, self.skeleton.sites[0].dp_shape.tier)

    def _pairs(self, forward: Floats, backward: Floats) -> Floats | None:
        """A stage's forward beside the backward of its rank's other stage: the exchange of each runs beside the other's work."""
        if not SCHEDULES[self.skeleton.strategy.schedule].overlaps:
            return None
        units = self.skeleton.units
        sent, returned = (
            self._sums([item.forward_exchange_s for item in units]),
            self._sums([item.backward_exchange_s for item in units]),
        )
        ahead = self._sums([item.forward_compute_s for item in units])
        behind = self._sums([item.backward_compute_s for item in units])
        added = self._sums([item.add_s for item in self.skeleton.terms])
        pairs = []
        for stage in range(len(forward)):
            other = len(forward) - 1 - stage
            exposed = exposed_s(sent[stage], behind[other] + added[other]) + exposed_s(returned[other], ahead[stage])
            pairs.append(forward[stage] + backward[other] - sent[stage] - returned[other] + exposed)
        return np.array(pairs)

    def _messages(self) -> tuple[Floats, Floats]:
        """Forwards from each stage, backwards to each stage, from the next one."""
        skeleton, owner = self.skeleton, self._owner
        network, kind = skeleton.prices.model.network, skeleton.prices.kind_of_unit
        ends = np.cumsum(self.counts)
        there, back = np.zeros(len(owner)), np.zeros(len(owner))
        for stage in range(len(owner) - 1):
            low, high = owner[stage], owner[stage + 1]
            if low != high:
                shape = network.shape((skeleton.sites[low].last_device, skeleton.sites[high].last_device))
                of_low, of_high = (skeleton.units[skeleton.rank_class[rank]] for rank in (low, high))
                there[stage] = network.collective("p2p", float(of_low.output_bytes[kind[ends[stage] - 1]]), shape).seconds
                back[stage] = network.collective("p2p", float(of_high.input_bytes[kind[ends[stage]]]), shape).seconds
        return there, back

    def step_s(self, walked: RankTimes, index: int) -> float:
        """Least step time. ``index``: this candidate's among those walked."""
        skeleton = self.skeleton
        after, end = self._inline_s(), walked.end_s[index]
        optimizer = self._optimizer_s()
        if skeleton.strategy.zero == 0:
            return float((end + after + optimizer).max())
        reduce = self._of_ranks([item.reduce_s for item in skeleton.terms])
        if skeleton.prices.rules.reduce_inline:
            return float((end + after + optimizer).max())
        overlap = self._overlap
        last = walked.last_gradients_s[index] + overlap.least_s(walked.from_last_s[index], reduce)
        step = np.maximum(end + after, last)
        return float((step + optimizer).max())

    def _inline_s(self) -> Floats:
        """Per rank, one after another when its row has run: reductions of replicated gradients, sums over tp, tied gradients."""
        skeleton, prices = self.skeleton, self.skeleton.prices
        elements = self._of_ranks([units.partial_grad_elements for units in skeleton.units])
        after = np.zeros(skeleton.strategy.pp)
        for cls, site in enumerate(skeleton.class_sites):
            ranks = np.flatnonzero(np.array(skeleton.rank_class) == cls)
            after[ranks] = [float(partial_grads_s(prices, site, value)) for value in elements[ranks].tolist()]
        first, last = self._owner[0], self._owner[-1]
        if first != last:
            after[[first, last]] += tied_grads_s(prices, skeleton.sites[first], skeleton.sites[last].first_device)
        if skeleton.strategy.zero == 0:
            after += self._of_ranks([item.reduce_s for item in skeleton.terms])
        return after

    def _optimizer_s(self) -> Floats:
        """Per rank."""
        skeleton, prices, zero = self.skeleton, self.skeleton.prices, self.skeleton.strategy.zero
        sizes = [prices.sizes(site) for site in skeleton.class_sites]
        shares = [item.trainable * item.state_share(site, zero) for item, site in zip(sizes, skeleton.class_sites, strict=True)]
        local = self._of_ranks(shares)
        return np.array([
            optimizer_s(prices, skeleton.devices[cls], float(value))
            for cls, value in zip(skeleton.rank_class, local.tolist(), strict=True)
        ])  # fmt: skip
