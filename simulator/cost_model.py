"""CostModel: prices of one model on one cluster for one workload, cached. What planner and step simulation both ask."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from profiler.adapters import with_adapters
from profiler.interpolate import curve
from profiler.opset import Kernels
from profiler.placement import place_block
from simulator.efficiency import optimizer_time_s
from simulator.exchange import WHOLE, Split, expert_params, with_local_experts
from simulator.factors import UNCALIBRATED, Factors
from simulator.network import GroupShape, Network
from simulator.pricing import OpPricer
from simulator.software import NATIVE, Software
from simulator.unit_cost import RecomputeChoice, UnitCost, unit_cost
from specs.cluster import ClusterSpec, DeviceType
from specs.graph import DTYPE_BYTES, Block, ModelGraph
from specs.plan import Plan
from specs.profile import DeviceProfile, Profile
from specs.training import TrainingSpec


@dataclass(frozen=True, slots=True)
class UnitParams:
    """Parameters of one unit on one tensor-parallel rank. ``expert``: the trainable ones of its own experts, which its
    expert-parallel neighbours do not hold."""

    trainable: float
    frozen: float
    num_tensors: int
    tied_alias: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """All elements."""
        return self.trainable + self.frozen


class CostModel:
    """Prices units, collectives and optimizer steps. ``cluster`` must be resolved (``profiler.catalogue``)."""

    def __init__(
        self,
        graph: ModelGraph,
        cluster: ClusterSpec,
        workload: TrainingSpec,
        profile: Profile | None = None,
        *,
        software: Software = NATIVE,
        factors: Factors = UNCALIBRATED,
    ) -> None:
        self.graph = graph if workload.adapters is None else with_adapters(graph, workload.adapters)
        self.cluster, self.workload, self.profile, self.software = cluster, workload, profile, software
        self.factors = factors
        self.network = Network(cluster, profile, factors)
        self.seq = workload.max_seq_len
        self.precision = workload.precision
        self.unit_blocks: list[str] = [segment.block for segment, _ in self.graph.units()]
        self._blocks: dict[str, Block] = {block.name: block for block in self.graph.blocks}
        self._pricers: dict[str, OpPricer] = {}
        self._units: dict[tuple[object, ...], UnitCost] = {}
        self._params: dict[tuple[str, int, int, bool, bool], UnitParams] = {}

    def for_plan(self, plan: Plan) -> CostModel:
        """These prices with the loss kernel that the plan names; itself where that is the workload's."""
        return self.with_loss(plan.loss_kernel or self.workload.loss_kernel)

    def with_loss(self, kernel: str) -> CostModel:
        """These prices with that loss kernel; itself where it is the workload's."""
        if kernel == self.workload.loss_kernel:
            return self
        workload = self.workload.replace(loss_kernel=kernel)
        return CostModel(self.graph, self.cluster, workload, self.profile, software=self.software, factors=self.factors)

    @property
    def num_units(self) -> int:
        """Units of the model."""
        return len(self.unit_blocks)

    def device(self, name: str) -> DeviceType:
        """The described device type."""
        return self.cluster.device_type(name)

    def pricer(self, device: str) -> OpPricer:
        """The op pricer of a device type."""
        if device not in self._pricers:
            kernels = Kernels(
                self.workload.attention_kernel, self.workload.loss_kernel,
                softmax_passes=4 if self.software.fused_attention_softmax else 8, dropout=self.software.dropout,
                composed_norms=self.software.composed_norms and self.software.fusion != "compiler",
            )  # fmt: skip
            self._pricers[device] = OpPricer(
                self.device(device),
                self.precision.compute_dtype,
                self._device_profile(device),
                kernels,
                self.software,
                self.factors,
            )
        return self._pricers[device]

    def unit(
        self,
        block: str,
        *,
        device: str,
        tp_shape: GroupShape,
        sequence_parallel: bool,
        batch: int,
        recompute: RecomputeChoice = RecomputeChoice(),  # noqa: B008  (frozen)
        split: Split = WHOLE,
    ) -> UnitCost:
        """Cost of one instance of ``block`` at micro-batch ``batch`` on one rank of a tp group of that shape."""
        key = (block, device, tp_shape, sequence_parallel and tp_shape.size > 1, batch, recompute, split)
        if key not in self._units:
            placed = place_block(self._blocks[block], tp_shape.size, sequence_parallel, whole_experts=split.whole_experts)
            self._units[key] = unit_cost(
                placed, self.pricer(device), self.network, tp_shape, batch=batch, seq=self.seq, recompute=recompute,
                matmul_dtype=self.precision.matmul_dtype, split=split,
            )  # fmt: skip
        return self._units[key]

    def params(self, block: str, tp: int, ep: int = 1, *, whole_experts: bool = False, with_owner: bool = False) -> UnitParams:
        """Parameters of one instance of ``block`` on one of ``tp`` ranks that holds 1/``ep`` of its experts, split over tp as well
        or not. ``with_owner``: the owners of its tied parameters are on the same rank, which then holds them once.
        """
        key = (block, tp, ep, whole_experts, with_owner)
        if key not in self._params:
            placed = with_local_experts(place_block(self._blocks[block], tp, whole_experts, whole_experts=whole_experts), ep)
            experts = expert_params(placed) if ep > 1 else set()
            specs = {param.name: param for param in self._blocks[block].params if not param.buffer}
            sizes = {name: _elements(placed.params[name].shape) for name in specs}
            aliases = {alias for alias, _ in self.graph.tied}
            own = {name: param for name, param in specs.items() if not (with_owner and param.fqn in aliases)}
            self._params[key] = UnitParams(
                trainable=sum(sizes[name] for name, param in own.items() if param.trainable),
                frozen=sum(sizes[name] for name, param in own.items() if not param.trainable),
                num_tensors=len(own),
                tied_alias=sum(sizes[name] for name, param in specs.items() if param.fqn in aliases),
                expert=sum(sizes[name] for name, param in own.items() if name in experts and param.trainable),
            )
        return self._params[key]

    @cached_property
    def tied_owner_unit(self) -> int | None:
        """The unit that owns the tied parameters (the embedding of most models), ``None`` where nothing is tied."""
        owners = {owner for _, owner in self.graph.tied}
        blocks = {block.name for block in self.graph.blocks if any(param.fqn in owners for param in block.params)}
        return next((index for index, block in enumerate(self.unit_blocks) if block in blocks), None)

    @cached_property
    def state_bytes_per_param(self) -> tuple[float, float, float]:
        """(weight, gradient with its accumulation buffer, optimizer state with master weight) bytes of one trainable parameter,
        unsharded."""
        precision, optimizer = self.precision, self.workload.optimizer
        master = DTYPE_BYTES[precision.master_dtype] if precision.master_dtype is not None else 0.0
        states = optimizer.states_per_param * DTYPE_BYTES[optimizer.state_dtype] + master
        grad = DTYPE_BYTES[precision.grad_dtype]
        if precision.accumulate_dtype is not None:
            grad += DTYPE_BYTES[precision.accumulate_dtype]
        return DTYPE_BYTES[precision.param_dtype], grad, states

    @property
    def frozen_bytes_per_param(self) -> float:
        """Bytes of the weight of a parameter that is not trained."""
        return DTYPE_BYTES[self.precision.frozen_dtype or self.precision.param_dtype]

    def optimizer_s(self, device: str, num_params: float) -> float:
        """Seconds of one optimizer step on ``num_params`` local parameters."""
        if num_params <= 0:
            return 0.0
        measured, factor = self._device_profile(device), self.factors.optimizer
        records = [item for item in measured.optimizers if item.name == self.workload.optimizer.name] if measured else []
        if records:
            return factor * curve(records[0].num_params, [timing.median_s for timing in records[0].times])(num_params)[0]
        weight, grad, states = self.state_bytes_per_param
        traffic = 2 * states + 2 * weight + grad  # states and weight read and written, gradient read
        return factor * optimizer_time_s(num_params, traffic, self.device(device))

    def copy_s(self, device: str, num_bytes: float, *, fresh: bool = False) -> float:
        """Seconds to copy ``num_bytes`` within device memory (read and write); ``fresh``: into memory allocated for it."""
        if num_bytes <= 0:
            return 0.0
        measured, factor = self._device_profile(device), self.factors.memory_bound
        records = {item.direction: item for item in measured.copies} if measured else {}
        record = records.get("local_fresh" if fresh else "local") or records.get("local")
        if record is not None:
            return factor * curve(record.sizes_bytes, [timing.median_s for timing in record.times])(num_bytes)[0]
        return factor * 2 * num_bytes / (0.8 * self.device(device).memory_bandwidth_bytes_per_s)

    def skew_wait_s(self, device: str, work_s: float, group_size: int, rounds: int = 1) -> float:
        """Seconds that a rank waits, on average, for the slowest of its group at each of ``rounds`` synchronisations that split
        ``work_s`` of equal work. Measured skew between its points in log time, the nearest one outside; none where not measured."""
        measured = self._device_profile(device)
        if group_size < 2 or rounds < 1 or work_s <= 0 or measured is None or not measured.rank_skew:
            return 0.0
        points = sorted(measured.rank_skew, key=lambda point: point.horizon_s)
        logs = [math.log(point.horizon_s) for point in points]
        excess = float(np.interp(math.log(work_s / rounds), logs, [point.excess for point in points]))
        return work_s * excess

    def grad_add_s(self, device: str, num_elements: float) -> float:
        """Seconds to add a gradient of ``num_elements`` into an accumulated one."""
        table = self.pricer(device).table
        found = table.grad_add(round(num_elements), self.precision.grad_dtype) if table is not None and num_elements >= 1 else None
        if found is not None:
            return self.factors.memory_bound * found[0]
        return self.copy_s(device, 1.5 * num_elements * self.state_bytes_per_param[1])

    @property
    def reserve_factor(self) -> float:
        """Memory that the allocator needs over the peak of the job's tensors: the workload's margin and the calibrated share."""
        return self.factors.memory * (1 + self.workload.limits.memory_margin_fraction)

    def _device_profile(self, device: str) -> DeviceProfile | None:
        return self.profile.device(device) if self.profile is not None else None


def _elements(shape: tuple[object, ...]) -> float:
    total = 1.0
    for size in shape:
        total *= size(1, 1)  # type: ignore[operator]
    return total
