"""ModelGraph: the ops of one training forward pass, folded into unique blocks, symbolic in batch ``B`` and sequence ``S``.

A model is a chain of *segments*. A segment repeats one *block* ``count`` times (a decoder layer 80 times); what is not
repeated is a segment of count 1 (embedding, final norm with head and loss). The instances of all segments in order are
the model's *units*, numbered from 0; plans cut the model between units.

Ops are those of ``torch.export``'s training graph (ATen overloads, composite ones kept: ``aten.linear.default``). The
backward pass is implied by each op's class (``profiler.opset``). An argument of an op is a plain JSON value, or
``{"ref": name}`` for a tensor of the block, or ``{"expr": "B*S"}`` for a size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field, model_validator

from specs.base import Document, InvalidInputValue, Provenance, Spec
from specs.expr import Expr

DTYPE_BYTES: dict[str, float] = {
    "float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float4": 0.5, "int64": 8, "int32": 4,
    "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "int4": 0.5,
}  # fmt: skip


class TensorSpec(Spec):
    """A tensor of a block. ``shape`` is global (unsharded); ``dtype`` is the capture dtype, ``float32`` for floats that
    take the workload's compute dtype."""

    name: str
    shape: tuple[Expr, ...]
    dtype: str = "float32"

    def num_elements(self) -> Expr:
        """Product of the shape."""
        total = Expr.const(1)
        for size in self.shape:
            total = total * size
        return total


class ParamSpec(Spec):
    """A parameter or buffer of a block. ``fqn`` holds ``{i}`` for the repetition index where the block repeats."""

    name: str
    fqn: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    buffer: bool = False

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        total = 1
        for size in self.shape:
            total *= size
        return total


class Op(Spec):
    """One ATen call. ``args``/``kwargs`` follow the overload's schema order; ``outputs`` are new tensors."""

    name: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    outputs: tuple[TensorSpec, ...]
    module_path: str = ""
    forward_flop: Expr = Field(default_factory=lambda: Expr.const(0))
    backward_flop: Expr = Field(default_factory=lambda: Expr.const(0))
    forward_bytes: Expr = Field(default_factory=lambda: Expr.const(0))
    backward_bytes: Expr = Field(default_factory=lambda: Expr.const(0))

    def input_refs(self) -> list[str]:
        """Names of the tensors that the op reads, in argument order, duplicates kept."""
        return list(_refs((*self.args, *self.kwargs.values())))


def _refs(values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, dict) and set(value) == {"ref"}:
            yield value["ref"]
        elif isinstance(value, (list, tuple)):
            yield from _refs(value)


class Block(Spec):
    """A unique subgraph. ``inputs`` come from before; ``outputs`` name tensors that later blocks read."""

    name: str
    inputs: tuple[TensorSpec, ...]
    params: tuple[ParamSpec, ...] = ()
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]

    def tensors(self) -> dict[str, TensorSpec | ParamSpec]:
        """Every tensor of the block by its name."""
        table: dict[str, TensorSpec | ParamSpec] = {tensor.name: tensor for tensor in self.inputs}
        table.update({param.name: param for param in self.params})
        for op in self.ops:
            table.update({tensor.name: tensor for tensor in op.outputs})
        return table

    def num_params(self) -> int:
        """Parameters (not buffers) of one instance."""
        return sum(param.num_elements for param in self.params if not param.buffer)


class Segment(Spec):
    """``count`` instances of ``block`` in a row.

    ``bind`` maps each block input to a model-wide value name: a model input, or an earlier segment's ``produces`` value.
    ``carry`` maps a block input to the block output of the previous repetition that replaces it.
    """

    block: str
    count: int = Field(default=1, ge=1)
    first_index: int = 0
    bind: dict[str, str]
    carry: dict[str, str] = {}
    produces: dict[str, str] = {}


class ModelGraph(Document):
    """The captured model. See the module docstring."""

    kind: ClassVar[str] = "model graph"
    name: str
    source: str = "posted"
    inputs: tuple[TensorSpec, ...]
    blocks: tuple[Block, ...]
    segments: tuple[Segment, ...]
    loss: str = Field(description="model-wide value that is the scalar loss")
    tied: tuple[tuple[str, str], ...] = Field(default=(), description="pairs (alias fqn, owner fqn) that share storage")
    attributes: dict[str, Any] = Field(default={}, description="the source's own settings, kept: heads, hidden size, ...")
    provenance: Provenance = Provenance.MEASURED

    @model_validator(mode="after")
    def _consistent(self) -> ModelGraph:
        names = {block.name for block in self.blocks}
        if len(names) != len(self.blocks):
            raise InvalidInputValue("duplicate_block", "two blocks have the same name")
        known = {tensor.name for tensor in self.inputs}
        for segment in self.segments:
            if segment.block not in names:
                raise InvalidInputValue(
                    "unknown_block", f"segment names block '{segment.block}'", actual=segment.block, allowed=sorted(names)
                )
            _check_segment(segment, self.block(segment.block), known)
            known |= set(segment.produces.values())
        if self.loss not in known:
            raise InvalidInputValue("unknown_value", f"loss '{self.loss}' is produced by no segment", allowed=sorted(known))
        for block in self.blocks:
            _check_block(block)
        return self

    def block(self, name: str) -> Block:
        """The unique block of that name."""
        return next(block for block in self.blocks if block.name == name)

    def units(self) -> list[tuple[Segment, int]]:
        """All block instances in order as ``(segment, repetition)``; the index in this list is the unit number."""
        return [(segment, index) for segment in self.segments for index in range(segment.count)]

    def num_units(self) -> int:
        """Length of :meth:`units`."""
        return sum(segment.count for segment in self.segments)

    def num_params(self, *, trainable_only: bool = False) -> int:
        """Parameters of the whole model; tied ones and those that several blocks read count once, buffers never."""
        counted = {alias for alias, _ in self.tied}
        total = 0
        for segment in self.segments:
            for param in self.block(segment.block).params:
                if param.buffer or (trainable_only and not param.trainable):
                    continue
                for index in range(segment.count) if "{i}" in param.fqn else range(1):
                    fqn = param.fqn.replace("{i}", str(segment.first_index + index))
                    total += 0 if fqn in counted else param.num_elements
                    counted.add(fqn)
        return total

    def flop(self, *, batch: int, seq: int, backward: bool = True) -> float:
        """Model FLOP of one pass over ``batch`` sequences of length ``seq`` (multiply-add = 2), without recompute."""
        total = 0.0
        for segment in self.segments:
            for op in self.block(segment.block).ops:
                total += segment.count * op.forward_flop(batch, seq)
                if backward:
                    total += segment.count * op.backward_flop(batch, seq)
        return total


def _check_segment(segment: Segment, block: Block, known: set[str]) -> None:
    inputs = {tensor.name for tensor in block.inputs}
    for name, value in segment.bind.items():
        if name not in inputs:
            raise InvalidInputValue("unknown_value", f"block '{block.name}' has no input '{name}'", allowed=sorted(inputs))
        if value not in known:
            raise InvalidInputValue("cyclic_or_unknown_value", f"'{value}' is read by '{block.name}' before anything produces it")
    missing = inputs - set(segment.bind)
    if missing:
        raise InvalidInputValue("unbound_input", f"inputs {sorted(missing)} of block '{block.name}' are bound to nothing")
    for name in [*segment.carry.values(), *segment.produces]:
        if name not in block.outputs:
            raise InvalidInputValue("unknown_value", f"block '{block.name}' has no output '{name}'", allowed=list(block.outputs))


def _check_block(block: Block) -> None:
    known = {tensor.name for tensor in block.inputs} | {param.name for param in block.params}
    later = {tensor.name for op in block.ops for tensor in op.outputs}
    for op in block.ops:
        for ref in op.input_refs():
            if ref not in known:
                code = "cyclic_graph" if ref in later else "unknown_tensor"
                why = (
                    "is produced only later: the graph is cyclic or out of order" if ref in later else "exists nowhere in the block"
                )
                raise InvalidInputValue(code, f"op '{op.name}' of block '{block.name}' reads '{ref}', which {why}", actual=ref)
        for tensor in op.outputs:
            if tensor.name in known:
                raise InvalidInputValue("duplicate_tensor", f"tensor '{tensor.name}' of block '{block.name}' is written twice")
            known.add(tensor.name)
    for name in block.outputs:
        if name not in known:
            raise InvalidInputValue("unknown_tensor", f"output '{name}' of block '{block.name}' exists nowhere in the block")
