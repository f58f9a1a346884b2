"""Prices of a model's units as arrays: what bounds and the stage split compute with.

Units of one block that are treated alike are one *kind*; a model has few. Per kind there is one number, per unit
``values[kind_of_unit]``. All seconds and bytes come from ``simulator.cost_model``; nothing is priced here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.sites import Site
from simulator.cost_model import CostModel
from simulator.network import GroupShape
from simulator.runtime_rules import memory_rules_for, rules_for
from simulator.unit_cost import RecomputeChoice, UnitCost
from specs.graph import DTYPE_BYTES, ModelGraph
from specs.plan import RecomputeMode

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class UnitPrices:
    """Per kind, on one device at one micro-batch: seconds forward and backward (recompute and tensor-parallel collectives
    inside), bytes saved, transient peaks beyond them, bytes that enter and leave, elements whose gradients are summed over tp; of
    the seconds the compute alone."""

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

    def row(self, index: int) -> UnitPrices:
        """One entry of the leading axis."""
        return UnitPrices(**{item.name: getattr(self, item.name)[index] for item in fields(self)})

    @staticmethod
    def stack(items: Sequence[UnitPrices]) -> UnitPrices:
        """Several along a new leading axis."""
        return UnitPrices(**{item.name: np.stack([getattr(one, item.name) for one in items]) for item in fields(UnitPrices)})


@dataclass(frozen=True)
class UnitSizes:
    """Per kind, on one tensor-parallel rank: parameters, trainable ones, bytes of gathered weights, of full gradients, and of
    gradients as they are sent. ``tied_*``: of a parameter that two units of the same stage use."""

    params: Floats
    trainable: Floats
    weight_bytes: Floats
    grad_bytes: Floats
    reduce_bytes: Floats
    tied_weight_bytes: float = 0.0
    tied_grad_bytes: float = 0.0


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
        self._sizes: dict[tuple[int, bool], UnitSizes] = {}
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
        self, device: str, slowdown: float, tp_shape: GroupShape, sequence_parallel: bool, batch: int, recompute: RecomputeChoice
    ) -> UnitPrices:
        """Prices per kind on ``device``, slowed down by ``slowdown``."""
        key = (device, slowdown, tp_shape, sequence_parallel, batch, recompute)
        if key not in self._units:
            costs = [
                self.model.unit(
                    block, device=device, tp_shape=tp_shape, sequence_parallel=sequence_parallel, batch=batch,
                    recompute=recompute if is_layer else RecomputeChoice(),
                )
                for block, is_layer in self.kinds
            ]  # fmt: skip
            self._units[key] = UnitPrices(
                forward_s=np.array([self._forward_s(cost, device, slowdown, tp_shape.size) for cost in costs]),
                backward_s=np.array([self._backward_s(cost, device, slowdown, tp_shape.size) for cost in costs]),
                saved_bytes=np.array([cost.saved_bytes for cost in costs]),
                forward_peak_bytes=np.array([cost.forward_peak_bytes for cost in costs]),
                backward_peak_bytes=np.array([cost.backward_peak_bytes for cost in costs]),
                input_bytes=np.array([cost.input_bytes for cost in costs]),
                output_bytes=np.array([cost.output_bytes for cost in costs]),
                partial_grad_elements=np.array([cost.partial_grad_elements for cost in costs]),
                forward_compute_s=np.array([cost.forward_s for cost in costs]) * slowdown,
                backward_compute_s=np.array([cost.backward_s + cost.recompute_s for cost in costs]) * slowdown,
            )
        return self._units[key]

    def _forward_s(self, cost: UnitCost, device: str, slowdown: float, tp: int) -> float:
        """Compute, tensor-parallel collectives, and waiting for the slowest tp rank at them."""
        wait_s = self.model.skew_wait_s(device, slowdown * cost.forward_s, tp, cost.tp_forward_calls)
        return slowdown * cost.forward_s + cost.tp_forward_s + wait_s

    def _backward_s(self, cost: UnitCost, device: str, slowdown: float, tp: int) -> float:
        """The same of backward, recompute included."""
        wait_s = self.model.skew_wait_s(device, slowdown * cost.backward_s, tp, cost.tp_backward_calls)
        return slowdown * (cost.backward_s + cost.recompute_s) + cost.tp_backward_s + cost.tp_recompute_s + wait_s

    def slowest(self, site: Site, sequence_parallel: bool, batch: int, recompute: RecomputeChoice) -> tuple[str, UnitPrices]:
        """The device type of ``site`` that takes longest over the whole model, and its prices."""
        priced = [
            (name, self.units(name, slowdown, site.tp_shape, sequence_parallel, batch, recompute))
            for name, slowdown in site.devices
        ]
        return max(priced, key=lambda item: float(self.counts @ (item[1].forward_s + item[1].backward_s)))

    def sizes(self, tp: int, *, whole: bool = False) -> UnitSizes:
        """Parameters per kind at that tp. ``whole``: one stage holds all units, and tied parameters once."""
        if (tp, whole) not in self._sizes:
            params = [self.model.params(block, tp, with_owner=whole) for block, _ in self.kinds]
            total = np.array([float(item.total) for item in params])
            trainable = np.array([float(item.trainable) for item in params])
            weight, grad, _ = self.model.state_bytes_per_param
            sent = DTYPE_BYTES[self.model.precision.reduce_dtype]
            weights = trainable * weight + (total - trainable) * self.model.frozen_bytes_per_param
            tied = sum(item.tied_alias for item in params) if whole else 0.0
            self._sizes[tp, whole] = UnitSizes(
                total, trainable, weights, trainable * grad, trainable * sent, tied * weight, tied * grad
            )
        return self._sizes[tp, whole]

    def shards(self, device: str, slowdown: float, site: Site) -> ShardPrices:
        """Data-parallel prices per kind on a stage that lies like ``site``."""
        key = (device, slowdown, site.whole, site.tp_shape.size, site.dp_shape, site.shard_shape, site.replica_shape)
        if key not in self._shards:
            sizes, model = self.sizes(site.tp_shape.size, whole=site.whole), self.model
            degree = site.shard_shape.size

            def each(function: Callable[[float], float], values: Floats) -> Floats:
                return np.array([function(float(value)) for value in values])

            def collective(op: str, shape: GroupShape) -> Callable[[float], float]:
                return lambda size: model.network.collective(op, size, shape).seconds

            def fresh_copy(size: float) -> float:
                return model.copy_s(device, size, fresh=True)

            self._shards[key] = ShardPrices(
                gather_s=each(collective("all_gather", site.shard_shape), sizes.weight_bytes),
                reduce_s=each(collective("reduce_scatter", site.shard_shape), sizes.reduce_bytes)
                + each(collective("all_reduce", site.replica_shape), sizes.reduce_bytes / degree)
                + self.rules.reduce_copies * each(fresh_copy, sizes.reduce_bytes),
                all_reduce_s=each(collective("all_reduce", site.dp_shape), sizes.reduce_bytes),
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


NO_RECOMPUTE = RecomputeChoice()
FULL_RECOMPUTE = RecomputeChoice(RecomputeMode.FULL)
