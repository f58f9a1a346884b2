"""Prices of a model's units as arrays: what bounds and the stage split compute with.

Units of one block that are treated alike are one *kind*; a model has few. Per kind there is one number, per unit
``values[kind_of_unit]``. All seconds and bytes come from ``simulator.cost_model``; nothing is priced here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.sites import Place, Site
from simulator.cost_model import CostModel
from simulator.network import GroupShape
from simulator.runtime_rules import memory_rules_for, rules_for
from simulator.unit_cost import RecomputeChoice, UnitCost
from specs.graph import DTYPE_BYTES, ModelGraph

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class UnitPrices:
    """Per kind, on one device at one micro-batch: seconds forward and backward (recompute, collectives and exchanges inside), bytes
    saved, transient peaks beyond them, bytes that enter and leave, elements whose gradients are summed over tp; of the seconds the
    compute alone. Of a split backward: seconds up to the input's gradient and of those of parameters, bytes that stay for the
    second part, transient peak of the first. ``*_exchange_s``: of the seconds, expert exchange, which another pass may hide."""

    forward_s: Floats
    backward_s: Floats
    saved_bytes: Floats
    forward_peak_bytes: Floats
    backward_peak_bytes: Floats
    input_bytes: Floats
    output_bytes: Floats
    partial_grad_elements: Floats
    forward_compute_s: Floats
    backward_compute_s: Floats
    input_backward_s: Floats
    weight_grad_s: Floats
    forward_exchange_s: Floats
    backward_exchange_s: Floats
    weight_saved_bytes: Floats
    input_backward_peak_bytes: Floats

    def row(self, index: int | NDArray[np.int64]) -> UnitPrices:
        """One entry of the leading axis, or several."""
        return UnitPrices(**{item.name: getattr(self, item.name)[index] for item in fields(self)})

    def least_bytes(self) -> float:
        """What a device needs at least for the unit that needs most, states aside."""
        return float(np.maximum(self.saved_bytes + self.forward_peak_bytes, self.backward_peak_bytes).max())

    @staticmethod
    def stack(items: Sequence[UnitPrices]) -> UnitPrices:
        """Several along a new leading axis."""
        return UnitPrices(**{item.name: np.stack([getattr(one, item.name) for one in items]) for item in fields(UnitPrices)})


@dataclass(frozen=True)
class UnitSizes:
    """Per kind, on one rank of a stage's tp and ep: parameters, trainable ones and of those the rank's own experts, bytes of
    gathered weights, of full gradients, and of gradients as they are sent. ``tied_*``: of a parameter that two units of the same
    stage use."""

    params: Floats
    trainable: Floats
    expert: Floats
    weight_bytes: Floats
    grad_bytes: Floats
    reduce_bytes: Floats
    expert_weight_bytes: Floats
    expert_reduce_bytes: Floats
    tied_weight_bytes: float = 0.0
    tied_grad_bytes: float = 0.0

    def state_share(self, site: Site, zero: int) -> Floats:
        """Share of each kind's trainable parameters whose states a rank keeps."""
        return self.share(site.shard_shape.size, site.expert_degree, zero)

    def share(self, shards: Any, expert_shards: Any, zero: int) -> Floats:
        """The same; ``shards``: ranks that states are sharded over, those of experts apart; broadcast against kinds."""
        if zero == 0:
            return np.ones_like(self.trainable) + 0.0 * np.asarray(shards)
        dense = (self.trainable - self.expert) / shards + self.expert / expert_shards
        return np.where(self.trainable > 0, dense / np.maximum(self.trainable, 1.0), 1.0 / np.asarray(shards))


@dataclass(frozen=True)
class ShardPrices:
    """Per kind, seconds of data-parallel work of one unit: all-gather of its weights, reduction of its gradients (sharded), plain
    all-reduce, unpacking gathered weights, copying gradients into a bucket, adding gradients of a later micro-batch."""

    gather_s: Floats
    reduce_s: Floats
    all_reduce_s: Floats
    unpack_s: Floats
    bucket_copy_s: Floats
    add_s: Floats

    @staticmethod
    def stack(items: Sequence[ShardPrices]) -> ShardPrices:
        """Several along a new leading axis."""
        return ShardPrices(**{item.name: np.stack([getattr(one, item.name) for one in items]) for item in fields(ShardPrices)})

    def row(self, index: NDArray[np.int64]) -> ShardPrices:
        """Entries of the leading axis."""
        return ShardPrices(**{item.name: getattr(self, item.name)[index] for item in fields(self)})


class Prices:
    """Array prices of one cost model, cached."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.rules = rules_for(model.cluster, model.profile)
        self.memory_rules = memory_rules_for(model.cluster)
        self.layers = layer_range(model.graph)
        pairs = [(block, index in self.layers) for index, block in enumerate(model.unit_blocks)]
        self.kinds: list[tuple[str, bool]] = list(dict.fromkeys(pairs))
        self.kind_of_unit: NDArray[np.int64] = np.array([self.kinds.index(pair) for pair in pairs])
        self._units: dict[tuple[object, ...], UnitPrices] = {}
        self._sizes: dict[tuple[object, ...], UnitSizes] = {}
        self._shards: dict[tuple[object, ...], ShardPrices] = {}

    @property
    def num_units(self) -> int:
        """Units of the model."""
        return len(self.kind_of_unit)

    @cached_property
    def counts(self) -> Floats:
        """Units of each kind."""
        return np.bincount(self.kind_of_unit, minlength=len(self.kinds)).astype(float)

    @property
    def first_kind(self) -> int:
        """Kind of unit 0."""
        return int(self.kind_of_unit[0])

    @property
    def last_kind(self) -> int:
        """Kind of the last unit."""
        return int(self.kind_of_unit[-1])

    @cached_property
    def repeated_kind(self) -> int | None:
        """The kind of all units but the first and the last, where there is one such kind only."""
        middle = set(self.kind_of_unit[1:-1].tolist())
        ends = {self.first_kind, self.last_kind}
        return middle.pop() if len(middle) == 1 and not middle & ends else None

    def units(
        self, device: str, slowdown: float, site: Site | Place, sequence_parallel: bool, batch: int, recompute: RecomputeChoice
    ) -> UnitPrices:
        """Prices per kind on ``device``, slowed down by ``slowdown``, in the groups of ``site``."""
        tp_shape, split = site.tp_shape, site.split
        key = (device, slowdown, tp_shape, split, sequence_parallel, batch, recompute)
        if key not in self._units:
            costs = [
                self.model.unit(
                    block, device=device, tp_shape=tp_shape, sequence_parallel=sequence_parallel, batch=batch,
                    recompute=recompute if is_layer else RecomputeChoice(), split=split,
                )
                for block, is_layer in self.kinds
            ]  # fmt: skip
            self._units[key] = self._from_costs(costs, device, slowdown, tp_shape.size)
        return self._units[key]

    def _from_costs(self, costs: Sequence[UnitCost], device: str, slowdown: float, tp: int) -> UnitPrices:
        def each(value: Callable[[UnitCost], float]) -> Floats:
            return np.array([value(cost) for cost in costs])

        def first_part(cost: UnitCost) -> UnitCost:
            return replace(cost, backward_s=cost.backward_s - cost.weight_grad_s, tp_backward_s=cost.tp_split_backward_s)

        return UnitPrices(
            forward_s=each(lambda cost: self._forward_s(cost, device, slowdown, tp)),
            backward_s=each(lambda cost: self._backward_s(cost, device, slowdown, tp)),
            saved_bytes=each(lambda cost: cost.saved_bytes), forward_peak_bytes=each(lambda cost: cost.forward_peak_bytes),
            backward_peak_bytes=each(lambda cost: cost.backward_peak_bytes), input_bytes=each(lambda cost: cost.input_bytes),
            output_bytes=each(lambda cost: cost.output_bytes),
            partial_grad_elements=each(lambda cost: cost.partial_grad_elements),
            forward_compute_s=slowdown * each(lambda cost: cost.forward_s),
            backward_compute_s=slowdown * each(lambda cost: cost.backward_s + cost.recompute_s),
            input_backward_s=each(lambda cost: self._backward_s(first_part(cost), device, slowdown, tp)),
            weight_grad_s=slowdown * each(lambda cost: cost.weight_grad_s),
            forward_exchange_s=each(lambda cost: cost.exchange_forward.get("ep_comm", 0.0)),
            backward_exchange_s=each(lambda cost: cost.exchange_backward.get("ep_comm", 0.0)),
            weight_saved_bytes=each(lambda cost: cost.weight_saved_bytes),
            input_backward_peak_bytes=each(lambda cost: cost.input_backward_peak_bytes),
        )  # fmt: skip

    def _forward_s(self, cost: UnitCost, device: str, slowdown: float, tp: int) -> float:
        """Compute, collectives and exchanges, and waiting for the slowest tp rank."""
        wait_s = self.model.skew_wait_s(device, slowdown * cost.forward_s, tp, cost.tp_forward_calls)
        return slowdown * cost.forward_s + cost.tp_forward_s + sum(cost.exchange_forward.values()) + wait_s

    def _backward_s(self, cost: UnitCost, device: str, slowdown: float, tp: int) -> float:
        """The same of backward, recompute included."""
        wait_s = self.model.skew_wait_s(device, slowdown * cost.backward_s, tp, cost.tp_backward_calls)
        compute_s = slowdown * (cost.backward_s + cost.recompute_s)
        return compute_s + cost.tp_backward_s + cost.tp_recompute_s + sum(cost.exchange_backward.values()) + wait_s

    def slowest(self, site: Site, sequence_parallel: bool, batch: int, recompute: RecomputeChoice) -> tuple[str, UnitPrices]:
        """The device type of ``site`` that takes longest over the whole model, and its prices."""
        priced = [(name, self.units(name, slowdown, site, sequence_parallel, batch, recompute)) for name, slowdown in site.devices]
        return max(priced, key=lambda item: float(self.counts @ (item[1].forward_s + item[1].backward_s)))

    def sizes(self, site: Site) -> UnitSizes:
        """Parameters per kind on one rank of ``site``; a stage that is the only one holds tied parameters once."""
        tp, split, whole = site.tp_shape.size, site.split, site.whole
        key = (tp, split.ep, split.whole_experts, whole)
        if key not in self._sizes:
            params = [
                self.model.params(block, tp, split.ep, whole_experts=split.whole_experts, with_owner=whole)
                for block, _ in self.kinds
            ]
            total = np.array([float(item.total) for item in params])
            trainable, expert = (np.array([float(getattr(item, name)) for item in params]) for name in ("trainable", "expert"))
            weight, grad, _ = self.model.state_bytes_per_param
            sent = DTYPE_BYTES[self.model.precision.reduce_dtype]
            weights = trainable * weight + (total - trainable) * self.model.frozen_bytes_per_param
            tied = sum(item.tied_alias for item in params) if whole else 0.0
            self._sizes[key] = UnitSizes(
                total, trainable, expert, weights, trainable * grad, trainable * sent, expert * weight, expert * sent,
                tied * weight, tied * grad,
            )  # fmt: skip
        return self._sizes[key]

    def shards(self, device: str, slowdown: float, site: Site) -> ShardPrices:
        """Data-parallel prices per kind on a stage that lies like ``site``; experts are shared by fewer ranks than the rest."""
        key = (device, slowdown, site.whole, site.tp_shape.size, site.split, site.dp_shape, site.shard_shape, site.replica_shape)
        if key not in self._shards:
            sizes, model = self.sizes(site), self.model

            def each(function: Callable[[float], float], values: Floats) -> Floats:
                return np.array([function(float(value)) for value in values])

            def collective(op: str, shape: GroupShape | None, values: Floats) -> Floats:
                if shape is None:
                    return np.zeros_like(values)
                return each(lambda size: model.network.collective(op, size, shape).seconds, values)

            def fresh_copy(size: float) -> float:
                return model.copy_s(device, size, fresh=True)

            expert, experts_at = sizes.expert_reduce_bytes, site.expert_shape
            dense_weights, dense = sizes.weight_bytes - sizes.expert_weight_bytes, sizes.reduce_bytes - expert
            self._shards[key] = ShardPrices(
                gather_s=collective("all_gather", site.shard_shape, dense_weights)
                + collective("all_gather", experts_at, sizes.expert_weight_bytes),
                reduce_s=collective("reduce_scatter", site.shard_shape, dense)
                + collective("all_reduce", site.replica_shape, dense / site.shard_shape.size)
                + collective("reduce_scatter", experts_at, expert)
                + self.rules.reduce_copies * each(fresh_copy, sizes.reduce_bytes),
                all_reduce_s=collective("all_reduce", site.dp_shape, dense) + collective("all_reduce", experts_at, expert),
                unpack_s=self.rules.gather_copies * each(fresh_copy, sizes.weight_bytes),
                bucket_copy_s=self.rules.bucket_copies * each(lambda size: model.copy_s(device, size), sizes.grad_bytes),
                add_s=slowdown * each(lambda elements: model.grad_add_s(device, elements), sizes.trainable),
            )
        return self._shards[key]


def layer_range(graph: ModelGraph) -> range:
    """The units that recompute covers: from the first repeated block to the last. Without any, all but the last unit.

    The head gains nothing from recompute: its backward follows its forward at once.
    """
    repeated = [index for index, (segment, _) in enumerate(graph.units()) if segment.count > 1]
    return range(repeated[0], repeated[-1] + 1) if repeated else range(max(1, graph.num_units() - 1))
