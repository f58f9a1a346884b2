"""The op calls of a model at the numbers at which they run, and the one key under which each is recorded. Torch-free.

The profiler measures :func:`op_calls`; the simulator looks an op up by :func:`record_key`. Both are built from the same placed
block (``profiler.placement``), so a local shape has one name everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from profiler.opset import OpClass, Tensor
from profiler.placed import LocalOp, PlacedBlock, numeric_tensor, static_args
from profiler.placement import place_block
from specs.expr import Expr
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.profile import op_key
from specs.training import TrainingSpec

GRAD_ADD_TARGET = "aten.add_.Tensor"
MAX_DEFAULT_MICRO_BATCH = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where an op stands: block, position in it, tensor-parallel degree, and the numbers of ``B`` and ``S``."""

    block: str
    op_index: int
    tp: int
    sequence_parallel: bool
    batch: int
    seq: int


@dataclass(frozen=True, slots=True)
class OpCall:
    """One distinct op at local shapes. In ``args`` and ``kwargs`` a tensor is ``{"ref": position in inputs}``.

    ``place`` is the first place where it was met; ``inputs`` carry the union of the gradients that any place needs.
    """

    key: str
    target: str
    op_class: OpClass
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Place

    @property
    def needs_grad(self) -> bool:
        """Whether the call has a backward: an input needs a gradient and a result can carry one."""
        return any(tensor.requires_grad for tensor in self.inputs) and any(tensor.requires_grad for tensor in self.outputs)

    @property
    def num_bytes(self) -> float:
        """Bytes of inputs and outputs."""
        return float(sum(tensor.bytes for tensor in (*self.inputs, *self.outputs)))


def record_key(local_op: LocalOp, batch: int, seq: int, dtype: str) -> str:
    """The profile key of ``local_op`` at micro-batch ``batch``, sequence length ``seq`` (global) and compute dtype ``dtype``."""
    tensors = [numeric_tensor(tensor, batch, seq, dtype) for tensor in local_op.inputs]
    return op_key(local_op.op.target, [(tensor.shape, tensor.dtype) for tensor in tensors], static_args(local_op.op, batch, seq))


def grad_add_key(num_elements: int, dtype: str) -> str:
    """The key of adding a gradient of ``num_elements`` into an accumulated one."""
    return op_key(GRAD_ADD_TARGET, [((num_elements,), dtype)] * 2, [["%", "%"], []])


def op_calls(
    graph: ModelGraph,
    workload: TrainingSpec,
    tps: Iterable[int] = (1,),
    micro_batches: Iterable[int] = (1,),
    sequence_parallel: Sequence[bool] = (False, True),
) -> list[OpCall]:
    """Every distinct op signature of the model on one device: all blocks, tp degrees, micro-batches and sequence lengths.

    Views are left out (they cost nothing). Sequence parallel is skipped where tp does not divide the sequence.
    """
    dtype = workload.precision.compute_dtype
    found: dict[str, OpCall] = {}
    for tp in sorted(set(tps)):
        for split in sorted(set(sequence_parallel)) if tp > 1 else [False]:
            for block in graph.blocks:
                placed = place_block(block, tp, split)
                for seq in sequence_lengths(workload):
                    if split and seq % tp:
                        continue
                    for batch in sorted(set(micro_batches)):
                        _add_block(found, placed, batch, seq, dtype)
    return list(found.values())


def _add_block(found: dict[str, OpCall], placed: PlacedBlock, batch: int, seq: int, dtype: str) -> None:
    for index, local_op in enumerate(placed.ops):
        if local_op.op_class == OpClass.VIEW:
            continue
        key = record_key(local_op, batch, seq, dtype)
        inputs = tuple(numeric_tensor(tensor, batch, seq, dtype) for tensor in local_op.inputs)
        known = found.get(key)
        if known is not None:
            found[key] = _with_grads_of(known, inputs)
            continue
        outputs = tuple(numeric_tensor(tensor, batch, seq, dtype) for tensor in local_op.outputs)
        args, kwargs = call_arguments(local_op, batch, seq)
        place = Place(placed.block.name, index, placed.tp, placed.sequence_parallel, batch, seq)
        found[key] = OpCall(key, local_op.op.target, local_op.op_class, inputs, outputs, args, kwargs, place)


def _with_grads_of(call: OpCall, inputs: tuple[Tensor, ...]) -> OpCall:
    merged = tuple(
        Tensor(mine.shape, mine.dtype, mine.requires_grad or other.requires_grad, mine.is_param or other.is_param)
        for mine, other in zip(call.inputs, inputs, strict=True)
    )
    if merged == call.inputs:
        return call
    outputs = tuple(Tensor(out.shape, out.dtype, out.dtype.startswith(("float", "bfloat"))) for out in call.outputs)
    return OpCall(call.key, call.target, call.op_class, merged, outputs, call.args, call.kwargs, call.place)


def call_arguments(local_op: LocalOp, batch: int, seq: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments at numbers; the n-th tensor of the op is ``{"ref": n}``. An op that only makes a tensor makes the local one."""
    counter = iter(range(len(local_op.inputs)))

    def plain(value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"ref"}:
            return {"ref": next(counter)}
        if isinstance(value, dict) and set(value) == {"expr"}:
            return round(Expr.of(value["expr"])(batch, seq))
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value

    args = [plain(value) for value in local_op.op.args]
    kwargs = {name: plain(value) for name, value in local_op.op.kwargs.items()}
    if not local_op.inputs and args and isinstance(args[0], list):
        args[0] = [max(1, round(size(batch, seq))) for size in local_op.outputs[0].shape]
    return tuple(args), kwargs


def sequence_lengths(workload: TrainingSpec) -> list[int]:
    """The sequence lengths that the workload trains on."""
    if workload.seq_len is not None:
        return [workload.seq_len]
    return sorted({item.length for item in workload.seq_len_histogram})


def default_micro_batches(workload: TrainingSpec) -> tuple[int, ...]:
    """Micro-batches to measure: the workload's own, else the powers of two up to 8 that divide the global batch."""
    if workload.micro_batches:
        return tuple(sorted(set(workload.micro_batches)))
    sizes, size = [], 1
    while size <= min(workload.global_batch, MAX_DEFAULT_MICRO_BATCH) and workload.global_batch % size == 0:
        sizes.append(size)
        size *= 2
    return tuple(sizes)


def default_tps(graph: ModelGraph, num_devices: int) -> tuple[int, ...]:
    """Tensor-parallel degrees to measure: the divisors of the device count at which some block can be split."""
    divisors = [degree for degree in range(1, num_devices + 1) if num_devices % degree == 0]
    return tuple(tp for tp in divisors if tp == 1 or any(place_block(block, tp).sharded_any() for block in graph.blocks))


def degrees_of(plans: Iterable[Plan]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]:
    """Tensor-parallel degrees, micro-batches and sequence-parallel settings that some plans use."""
    tps, batches, splits = set(), set(), {False}
    for plan in plans:
        for pipeline in plan.pipelines:
            batches.add(pipeline.micro_batch)
            for stage in pipeline.stages:
                tps.add(stage.mesh.tp)
                batches |= set(stage.batch_share or ())
                splits.add(stage.sequence_parallel and stage.mesh.tp > 1)
    return tuple(sorted(tps)), tuple(sorted(batches)), tuple(sorted(splits))
