"""A plan and a model become one rank's training program.

Order (the contract of docs/architecture.md): the stage's units on ``meta``; tensor parallel; expert parallel; context parallel;
recompute; data parallel; ``to_empty``; deterministic weights; optimizer. ``DistributedDataParallel`` is the exception: it builds
its buckets on real parameters, so it comes after the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor.batch import LocalBatch
from executor.context_parallel import ContextParallelUnit
from executor.data_parallel import (
    DataParallel,
    DdpDataParallel,
    ExpertGradients,
    FlatDataParallel,
    RehearsedBuckets,
    all_reduce_gradients,
)
from executor.emulate.dilation import DilatedTimers, DilatedUnit
from executor.expert_parallel import EpContext, apply_expert_parallel
from executor.fsdp import ShardedDataParallel, UnitGroup
from executor.groups import Groups, create_groups
from executor.init import Initializer, init_local_parameters
from executor.layout import Layout, Place
from executor.optimizer import LocalOptimizer
from executor.params import MetaParameters, ParamPlace, Placements, collect_params, retie, unique_params
from executor.pipeline import BoundaryShape, LocalStage, PipelineRunner
from executor.recompute import recompute_unit
from executor.ring_attention import CpContext
from executor.stage_module import StageModule
from executor.support import require_supported
from executor.tensor_parallel import apply_tensor_parallel
from executor.tied import TiedGradients
from executor.timers import Timers
from executor.tp_functions import TpContext
from profiler.models import init_tensor, reset_buffers
from profiler.opset import OpClass, op_class_of
from profiler.placement import place_block
from specs.errors import InvalidInput
from specs.graph import Block, ModelGraph
from specs.plan import Plan, RecomputeMode, Stage
from specs.training import TrainingSpec


@dataclass
class Program:
    """One rank's part of a plan. A step is :meth:`forward_backward`, :meth:`finish_gradients`, ``optimizer.step()``,
    ``optimizer.zero_grad()``."""

    plan: Plan
    layout: Layout
    place: Place
    groups: Groups
    timers: Timers
    stages: list[LocalStage]
    params: list[ParamPlace]
    optimizer: LocalOptimizer
    tied: TiedGradients
    runner: PipelineRunner | None
    holds_loss: bool
    tensor_parallel: TpContext | None = None

    @property
    def share(self) -> float:
        """The rank's share of the step's tokens."""
        return self.layout.share(self.place)

    def forward_backward(self, batch: LocalBatch) -> Tensor | None:
        """All micro-batches; gradients accumulate. The mean loss of the rank's rows where the loss lives, else ``None``."""
        if self.runner is not None:
            return self.runner.step(batch.tokens, batch.labels)
        pipeline = self.plan.pipelines[0]
        losses = []
        size = self.layout.micro_batch(self.place)
        tokens, labels = batch.tokens.split(size), batch.labels.split(size)
        for index in range(pipeline.num_micro_batches):
            losses.append(self._micro_batch(tokens[index], labels[index], is_last=index == pipeline.num_micro_batches - 1))
        return torch.stack(losses).mean()

    def _micro_batch(self, tokens: Tensor, labels: Tensor, *, is_last: bool) -> Tensor:
        data_parallel = self.stages[0].data_parallel
        with data_parallel.micro_batch(is_last=is_last):
            with self.timers.phase("forward"):
                loss = data_parallel.module(tokens, labels)
                scaled = loss * (self.share * data_parallel.loss_factor / self.plan.pipelines[0].num_micro_batches)
            data_parallel.watch(scaled, is_last=is_last)
            with self.timers.phase("backward"):
                scaled.backward()
                data_parallel.backward_done()
        return loss.detach()

    def finish_gradients(self) -> None:
        """After the last micro-batch: reductions that do not run inside backward. Then every gradient is that of the mean loss
        over all tokens of the step."""
        for stage in self.stages:
            stage.data_parallel.finish()
        partial = [place.parameter for place in unique_params(self.params) if place.partial_grad]
        if self.tensor_parallel is not None and partial:
            with self.timers.phase("tp_comm"):
                all_reduce_gradients(partial, self.tensor_parallel.group, "tp.all_reduce", self.timers)
        self.tied.reduce(self.timers)


def materialize(
    plan: Plan, model: nn.Module, graph: ModelGraph, workload: TrainingSpec, rank: int, *, device: torch.device | None = None,
    timers: Timers | None = None, draw: Initializer | None = init_tensor, allocation: AbstractContextManager[Any] | None = None,
    timeout_s: float = 60.0, groups: Groups | None = None,
) -> Program:  # fmt: skip
    """Build the program of ``rank``. A collective call: the default process group must exist, with the plan's world size.

    ``model``: on ``meta``, with ``unit_modules()``; it is taken apart. ``draw``: initial values by (name, shape, seed);
    ``None`` builds everything but leaves the parameters on ``meta`` (a dry run: the program cannot train), or without values in
    what ``allocation`` makes of memory (a rehearsal on fake tensors).
    ``timeout_s``: how long a collective waits for its peers. ``groups``: the process groups, if they were created before.
    Raises :class:`InvalidInput` when the plan cannot be executed.
    """
    require_supported(plan, graph, workload)
    layout = Layout(plan)
    builder = _Builder(
        plan, model, graph, workload, layout, layout.place(rank), device or torch.device("cpu"), timers or Timers(), timeout_s,
        groups,
    )  # fmt: skip
    return builder.build(draw, allocation)


class _Builder:
    """The steps of :func:`materialize`."""

    def __init__(
        self, plan: Plan, model: nn.Module, graph: ModelGraph, workload: TrainingSpec, layout: Layout, place: Place,
        device: torch.device, timers: Timers, timeout_s: float, groups: Groups | None,
    ) -> None:  # fmt: skip
        self.plan, self.model, self.graph, self.workload = plan, model, graph, workload
        self.layout, self.place, self.device, self.timers, self.timeout_s = layout, place, device, timers, timeout_s
        first = layout.pipeline.stages[0]
        self.zero = first.zero if layout.data > 1 else 0
        self.groups = groups or create_groups(layout, place, device_type=device.type, zero=self.zero, timeout_s=timeout_s)
        self.dtype: torch.dtype = getattr(torch, workload.precision.param_dtype)
        self.tensor_parallel = None
        if self.groups.tp is not None:
            self.tensor_parallel = TpContext(self.groups.tp, place.tp, layout.tp, first.sequence_parallel, timers)
        self.params: list[ParamPlace] = []
        self.experts: dict[int, list[nn.Module]] = {}
        self.dry = False
        self.allocation: AbstractContextManager[Any] | None = None

    def build(self, draw: Initializer | None, allocation: AbstractContextManager[Any] | None) -> Program:
        """All steps in order."""
        stages = self.layout.stages_of(self.place.pp)
        units = {number: unit for _, stage in stages for number, unit in self._units(stage)}
        self.params = collect_params(self.model, list(units.items()), dict(self.graph.tied))
        meta = MetaParameters()
        self._tensor_parallel(stages, units, meta)
        self._expert_parallel(stages, units, meta)
        self._context_parallel(units)
        for _, stage in stages:
            for number in range(stage.first_unit, stage.first_unit + stage.num_units):
                units[number] = recompute_unit(units[number], stage.recompute_of(number), self.timers)
        if isinstance(self.timers, DilatedTimers):
            units = {number: DilatedUnit(unit, self.timers) for number, unit in units.items()}
        modules = {index: self._module(stage, units) for index, stage in stages}
        sharded = {index: self._shard(stage, modules[index]) for index, stage in stages} if self.zero else {}
        self.dry, self.allocation = draw is None and allocation is None, allocation
        for module in modules.values():
            _require_buffers_can_be_rebuilt(module)
            module.to(self.dtype)
        if not self.dry:
            with allocation or contextlib.nullcontext():
                self._allocate(modules.values())
        if draw is not None:
            init_local_parameters(self.params, self.place, self.layout, self.workload.seed, draw)
        local: list[LocalStage] = []
        reduced: set[int] = set()
        for index, stage in stages:
            parallel = sharded.get(index) or self._replicate(stage, modules[index], frozenset(reduced))
            local.append(LocalStage(index, parallel, self._boundary(stage)))
            reduced |= {id(parameter) for parameter in modules[index].parameters()}
        return Program(
            plan=self.plan, layout=self.layout, place=self.place, groups=self.groups, timers=self.timers, stages=local,
            params=self.params, optimizer=LocalOptimizer(self.params, self.workload.optimizer, self.workload.precision),
            tied=TiedGradients(self.graph, self.layout, self.place, self.params, self.timeout_s),
            runner=self._runner(local), holds_loss=any(module.has_loss for module in modules.values()),
            tensor_parallel=self.tensor_parallel,
        )  # fmt: skip

    def _units(self, stage: Stage) -> list[tuple[int, nn.Module]]:
        modules = self.model.unit_modules()  # type: ignore[operator]
        if len(modules) != self.graph.num_units():
            raise InvalidInput.single(
                "units_of_model", f"the module has {len(modules)} units, its graph {self.graph.num_units()}", subject="model"
            )
        return [(number, modules[number]) for number in range(stage.first_unit, stage.first_unit + stage.num_units)]

    # --- tensor parallel ---------------------------------------------------------------------------------------

    def _tensor_parallel(self, stages: Sequence[tuple[int, Stage]], units: dict[int, nn.Module], meta: MetaParameters) -> None:
        if self.tensor_parallel is None:
            return
        functional: set[int] = set()
        token_wise: set[str] = set()
        for _, stage in stages:
            placements = Placements(stage.placements)
            partial = _partial_gradients(self.graph, stage)
            for place in self.params:
                if stage.first_unit <= place.unit < stage.first_unit + stage.num_units:
                    place.tp_dim = placements.dim_of(place.fqn)
                    whole = place.tp_dim is None
                    place.partial_grad = whole and (stage.sequence_parallel or place.fqn in partial)
            token_wise |= partial if stage.mesh.whole_experts else set()
            for number in range(stage.first_unit, stage.first_unit + stage.num_units):
                run = stage.recompute_of(number)
                if run is not None and run.mode is RecomputeMode.SELECTIVE:
                    functional.add(number)
        apply_tensor_parallel(
            units, self.params, self.tensor_parallel, meta, functional_units=functional, token_wise=token_wise
        )  # fmt: skip

    # --- expert and context parallel ---------------------------------------------------------------------------

    def _expert_parallel(self, stages: Sequence[tuple[int, Stage]], units: dict[int, nn.Module], meta: MetaParameters) -> None:
        if self.groups.ep is None:
            return
        context = EpContext(self.groups.ep, self.place.ep, self.layout.ep, self.timers)
        names = {name for _, stage in stages for name in _expert_params(self.graph, stage)}
        self.experts = apply_expert_parallel(units, self.params, names, context, meta)
        for place in self.params:
            place.partial_grad = place.partial_grad and not place.expert

    def _context_parallel(self, units: dict[int, nn.Module]) -> None:
        layout = self.layout
        if self.groups.cp is None:
            return
        positions = layout.positions(self.place)
        context = CpContext(
            self.groups.cp, self.place.cp, layout.cp, layout.seq_len // layout.cp, positions, layout.ring, self.timers
        )
        for number, unit in units.items():
            units[number] = ContextParallelUnit(unit, context)

    # --- data parallel -----------------------------------------------------------------------------------------

    def _module(self, stage: Stage, units: Mapping[int, nn.Module]) -> StageModule:
        end = stage.first_unit + stage.num_units
        return StageModule(
            {number: units[number] for number in range(stage.first_unit, end)}, has_loss=end == self.graph.num_units()
        )

    def _shard(self, stage: Stage, module: StageModule) -> ShardedDataParallel:
        if self.groups.shard_mesh is None:
            raise RuntimeError("zero without a data-parallel mesh")
        precision = self.workload.precision
        reduce_dtype = getattr(torch, precision.reduce_dtype) if precision.reduce_dtype != precision.param_dtype else None
        return ShardedDataParallel(
            module.to(self.dtype), self._unit_groups(module), self.groups.shard_mesh, self.groups.expert_mesh, zero=self.zero,
            prefetch_units=self.plan.collectives.prefetch_units, reduce_dtype=reduce_dtype, under_pipeline=self.layout.pp > 1,
            timers=self.timers,
        )  # fmt: skip

    def _replicate(self, stage: Stage, module: StageModule, elsewhere: Set[int]) -> DataParallel:
        groups, timers = self.groups, self.timers
        units = range(stage.first_unit, stage.first_unit + stage.num_units)
        experts = [part for unit in units for part in self.experts.get(unit, ())]
        if self.dry or (groups.data is None and not experts):
            return DataParallel(module)
        expert_gradients = ExpertGradients(experts, groups.expert_replicas, timers) if experts else None
        if groups.data is None or self.layout.pp > 1 or not self.plan.collectives.overlap_grad_reduce:
            return FlatDataParallel(
                module, list(module.units.values()), groups.data, timers, experts=expert_gradients, elsewhere=elsewhere
            )
        if self.allocation is not None:
            with self.allocation:
                return RehearsedBuckets(module)
        return DdpDataParallel(module, groups.data, self.plan.collectives.bucket_bytes, timers, experts=expert_gradients)

    def _unit_groups(self, module: StageModule) -> list[UnitGroup]:
        """Units to gather one by one; units that share a parameter together (in the place of the first)."""
        groups: list[tuple[list[nn.Module], list[nn.Module]]] = []
        owners: dict[int, tuple[list[nn.Module], list[nn.Module]]] = {}
        for name, unit in module.units.items():
            ids = {id(parameter) for parameter in unit.parameters()}
            if not ids:
                continue
            group = next((owners[key] for key in ids if key in owners), None)
            if group is None:
                group = ([], [])
                groups.append(group)
            group[0].append(unit)
            group[1].extend(self.experts.get(int(name), ()))
            owners.update(dict.fromkeys(ids, group))
        return [UnitGroup(tuple(units), tuple(experts)) for units, experts in groups]

    # --- weights -----------------------------------------------------------------------------------------------

    def _allocate(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            module.to_empty(device=self.device)
        retie(self.params)
        for module in modules:
            reset_buffers(module)

    # --- pipeline ----------------------------------------------------------------------------------------------

    def _boundary(self, stage: Stage) -> BoundaryShape:
        end = stage.first_unit + stage.num_units
        received = None if stage.first_unit == 0 else self._hidden_shape(stage.first_unit)
        return BoundaryShape(received, None if end == self.graph.num_units() else self._hidden_shape(end), self.dtype)

    def _hidden_shape(self, unit: int) -> tuple[int, ...]:
        """Local shape of what ``unit`` reads from the unit before it."""
        layout = self.layout
        inputs = [tensor for tensor in self._block(unit).inputs if tensor.dtype.startswith("float")]
        if len(inputs) != 1:
            raise InvalidInput.single(
                "one_hidden_state", f"unit {unit} reads {len(inputs)} tensors from before; a pipeline can be cut where there is one"
            )
        local = self.plan.seq_len // layout.cp
        batch, seq, *rest = (int(size(layout.micro_batch(self.place), local)) for size in inputs[0].shape)
        split = layout.tp if layout.pipeline.stages[0].sequence_parallel else 1
        return (batch, seq // split, *rest)

    def _block(self, unit: int) -> Block:
        return self.graph.block(self.graph.units()[unit][0].block)

    def _runner(self, stages: Sequence[LocalStage]) -> PipelineRunner | None:
        pipeline = self.layout.pipeline
        if self.groups.pp is None:
            return None
        rows = self.plan.schedule.actions(num_ranks=self.layout.pp, num_micro_batches=pipeline.num_micro_batches)
        return PipelineRunner(
            stages, rows, num_stages=len(pipeline.stages), num_micro_batches=pipeline.num_micro_batches,
            tokens_shape=(self.layout.micro_batch(self.place), self.plan.seq_len // self.layout.cp),
            share=self.layout.share(self.place), group=self.groups.pp, device=self.device, timers=self.timers,
        )  # fmt: skip


def _require_buffers_can_be_rebuilt(module: nn.Module) -> None:
    """A buffer has no initial value by name, so whoever owns one must be able to fill it again."""
    for name, part in module.named_modules():
        if part._buffers and not callable(getattr(part, "reset_buffers", None)):
            raise InvalidInput.single(
                "buffers_without_reset", f"module '{name}' has buffers ({', '.join(part._buffers)}) but no reset_buffers()",
                subject="model",
            )  # fmt: skip


def _partial_gradients(graph: ModelGraph, stage: Stage) -> set[str]:
    """Names of whole parameters whose gradient is a sum over tp ranks (a norm over the heads of each rank)."""
    names = set()
    units = graph.units()
    for number in range(stage.first_unit, stage.first_unit + stage.num_units):
        segment, repetition = units[number]
        block = graph.block(segment.block)
        placed = place_block(block, stage.mesh.tp, stage.sequence_parallel, whole_experts=stage.mesh.whole_experts)
        partial = placed.partial_grad_params
        names |= {
            param.fqn.replace("{i}", str(segment.first_index + repetition)) for param in block.params if param.name in partial
        }
    return names


def _expert_params(graph: ModelGraph, stage: Stage) -> set[str]:
    """Names of the stage's stacked expert weights: those that a grouped product reads."""
    names = set()
    units = graph.units()
    for number in range(stage.first_unit, stage.first_unit + stage.num_units):
        segment, repetition = units[number]
        block = graph.block(segment.block)
        read = {op.input_refs()[1] for op in block.ops if op_class_of(op.target) == OpClass.GROUPED_GEMM}
        names |= {param.fqn.replace("{i}", str(segment.first_index + repetition)) for param in block.params if param.name in read}
    return names
