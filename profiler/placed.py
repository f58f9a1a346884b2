"""A block on one tensor-parallel rank: local tensors, local ops and the collectives between them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from profiler.opset import OpClass, Tensor
from specs.expr import Expr
from specs.graph import Block, Op

Placement = int | None  # None = replicated, d = split along dim d


def placement_text(placement: Placement) -> str:
    """``R`` or ``S(d)``, as plans write it."""
    return "R" if placement is None else f"S({placement})"


def parse_placement(text: str) -> Placement:
    """Inverse of :func:`placement_text`."""
    return None if text == "R" else int(text.removeprefix("S(").removesuffix(")"))


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor on one rank. ``root``: the tensor whose storage it shares (itself when it has its own)."""

    name: str
    shape: tuple[Expr, ...]
    dtype: str
    placement: Placement
    root: str
    requires_grad: bool
    kind: str  # input | param | buffer | activation


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of the tp group before (or after) an op. Sizes are those of the full, unsharded tensor in elements.

    ``forward`` / ``backward``: all_reduce | all_gather | reduce_scatter | None (nothing to send in that direction).
    """

    tensor: str
    forward: str | None
    backward: str | None
    num_elements: Expr
    dtype: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class LocalOp:
    """An op at local shapes, with the collectives that must run before it (on its inputs) and after (on its result)."""

    op: Op
    op_class: OpClass
    inputs: tuple[LocalTensor, ...]
    outputs: tuple[LocalTensor, ...]
    before: tuple[Collective, ...] = ()
    after: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class PlacedBlock:
    """A block placed at ``tp``. ``placements``: parameter name -> placement. ``partial_grad_params``: replicated parameters
    whose gradients are partial over tp and must be summed (norm weights under sequence parallel)."""

    block: Block
    tp: int
    sequence_parallel: bool
    ops: tuple[LocalOp, ...]
    params: Mapping[str, LocalTensor]
    placements: Mapping[str, Placement]
    partial_grad_params: tuple[str, ...]
    inputs: tuple[LocalTensor, ...]
    outputs: tuple[LocalTensor, ...] = ()

    def sharded_any(self) -> bool:
        """Whether tp splits anything in this block."""
        return any(placement is not None for placement in self.placements.values())

    def plan_placements(self) -> dict[str, str]:
        """fqn -> placement text, as ``Stage.placements`` holds it."""
        by_name = {param.name: param for param in self.block.params}
        return {by_name[name].fqn: placement_text(value) for name, value in self.placements.items() if value is not None}


def local_shape(shape: tuple[Expr, ...], placement: Placement, degree: int) -> tuple[Expr, ...]:
    """Shape on one rank: a constant dim is rounded up, a symbolic one divided."""
    if placement is None or degree == 1:
        return shape
    size = shape[placement]
    part = Expr.const(-(-int(size(1, 1)) // degree)) if size.is_const else size * (1.0 / degree)
    return (*shape[:placement], part, *shape[placement + 1 :])


def numeric_tensor(tensor: LocalTensor, batch: int, seq: int, compute_dtype: str) -> Tensor:
    """The local tensor at numbers; float32 of the capture stands for the workload's compute dtype."""
    shape = tuple(max(1, round(size(batch, seq))) for size in tensor.shape)
    dtype = compute_dtype if tensor.dtype == "float32" else tensor.dtype
    return Tensor(shape, dtype, tensor.requires_grad, tensor.kind == "param")


def static_args(op: Op, batch: int, seq: int) -> list[Any]:
    """The op's non-tensor arguments at numbers, keyword ones as pairs; part of its profile key."""
    plain = [_plain(value, batch, seq) for value in op.args]
    return [plain, sorted((key, _plain(value, batch, seq)) for key, value in op.kwargs.items())]


def _plain(value: Any, batch: int, seq: int) -> Any:
    if isinstance(value, dict) and set(value) == {"ref"}:
        return "%"
    if isinstance(value, dict) and set(value) == {"expr"}:
        return round(Expr.of(value["expr"])(batch, seq))
    if isinstance(value, (list, tuple)):
        return [_plain(item, batch, seq) for item in value]
    return value
