"""The legal strategies of each op on one mesh axis: a state for every tensor that it reads and for every result.

Each rule is the algebra of its op, not of a model: a product may be split over rows, columns or the dim that it sums over; an op
that treats rows alike may be split over rows; a linear op may take a term of a sum for the sum. What no rule knows stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from planner.op_sharding.mesh import BY_EXPERT, PARTIAL, PARTIAL_GRAD, WHOLE, State, split
from profiler.opset import OpClass, base_name, op_class_of
from profiler.view_dims import ShardLost, output_dim
from specs.expr import Expr
from specs.graph import Block, Op

Shape = tuple[Expr, ...]


class AxisStrategy(NamedTuple):
    """States of an op's tensor arguments in order, and of its results."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]


class OpView(NamedTuple):
    """What a rule sees of an op: shapes, which arguments are constants (no gradient, same on every rank), parameters, whether the
    block routes tokens to experts, and the degree of the axis."""

    op: Op
    shapes: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    constant: tuple[bool, ...]
    params: tuple[bool, ...]
    expert_rows: Expr | None
    degree: int

    @property
    def name(self) -> str:
        """``linear`` of ``aten.linear.default``."""
        return base_name(self.op.target)


_UNIT = Expr.const(1)
LINEAR_IN_ALL = {"add", "sub", "neg", "to", "_to_copy", "clone", "contiguous", "cat"}  # of sums: sums; alpha is allowed


def strategies(view: OpView) -> list[AxisStrategy]:
    """All strategies of an op on an axis, replicated first."""
    whole = AxisStrategy((WHOLE,) * len(view.shapes), (WHOLE,) * len(view.outputs))
    if not view.shapes or view.degree == 1:
        return [whole]
    return list(dict.fromkeys([whole, *_rule_of(view)(view)]))


def _rule_of(view: OpView) -> Callable[[OpView], list[AxisStrategy]]:
    kind = op_class_of(view.op.target)
    if view.name in _BY_NAME:
        return _BY_NAME[view.name]
    return _BY_CLASS.get(kind, _nothing)


def _nothing(view: OpView) -> list[AxisStrategy]:
    return []


def _linear(view: OpView) -> list[AxisStrategy]:
    """Rows; columns (weight S(0)); the summed dim (weight S(1)). A bias is added once, after the sum."""
    rank, biased = len(view.shapes[0]), len(view.shapes) > 2
    rows = [AxisStrategy((split(dim), PARTIAL_GRAD, *[PARTIAL_GRAD] * biased), (split(dim),)) for dim in range(rank - 1)]
    column = AxisStrategy((PARTIAL_GRAD, split(0), *[split(0)] * biased), (split(rank - 1),))
    summed = AxisStrategy((split(rank - 1), split(1), *[WHOLE] * biased), (PARTIAL,))
    return [*rows, column, summed]


def _addmm(view: OpView) -> list[AxisStrategy]:
    """Bias plus x (m, k) times weight (k, n)."""
    return [
        AxisStrategy((PARTIAL_GRAD, split(0), PARTIAL_GRAD), (split(0),)),
        AxisStrategy((split(0), PARTIAL_GRAD, split(1)), (split(1),)),
        AxisStrategy((WHOLE, split(1), split(0)), (PARTIAL,)),
    ]


def _matmul(view: OpView) -> list[AxisStrategy]:
    """x (..., m, k) times y (..., k, n): shared leading dims, rows, columns, the summed dim."""
    x, y = len(view.shapes[0]), len(view.shapes[1])
    shared = range(x - 2) if x == y else ()
    return [
        *(AxisStrategy((split(dim), split(dim)), (split(dim),)) for dim in shared),
        *(AxisStrategy((split(dim), PARTIAL_GRAD), (split(dim),)) for dim in range(len(shared), x - 1)),
        AxisStrategy((PARTIAL_GRAD, split(y - 1)), (split(x - 1),)),
        AxisStrategy((split(x - 1), split(y - 2)), (PARTIAL,)),
    ]


def _grouped(view: OpView) -> list[AxisStrategy]:
    """Rows by expert times that expert's matrix (experts, k, n): own rows, own experts, columns, the summed dim."""
    rest = len(view.shapes) - 2
    return [
        AxisStrategy((split(0), PARTIAL_GRAD, *[PARTIAL] * rest), (split(0),)),
        AxisStrategy((BY_EXPERT, split(0), *[PARTIAL] * rest), (BY_EXPERT,)),
        AxisStrategy((BY_EXPERT, split(0), *[WHOLE] * rest), (BY_EXPERT,)),
        AxisStrategy((PARTIAL_GRAD, split(2), *[WHOLE] * rest), (split(1),)),
        AxisStrategy((split(1), split(1), *[WHOLE] * rest), (PARTIAL,)),
    ]


def _attention(view: OpView) -> list[AxisStrategy]:
    """Batch; heads; queries with all keys and values (causal work taken as balanced)."""
    if len(view.shapes) != 3:
        return []
    aligned = [AxisStrategy((split(dim),) * 3, (split(dim),)) for dim in (0, 1)]
    return [*aligned, AxisStrategy((split(2), PARTIAL_GRAD, PARTIAL_GRAD), (split(2),))]


def _scan(view: OpView) -> list[AxisStrategy]:
    """Batch; heads and groups alike."""
    wide = [len(shape) > 1 for shape in view.shapes]
    return [
        AxisStrategy(tuple(split(dim) if is_wide else other for is_wide in wide), (split(dim),) * len(view.outputs))
        for dim, other in ((0, PARTIAL_GRAD), (2, split(0)))
    ]


def _row_wise(view: OpView) -> list[AxisStrategy]:
    """Norms and softmax: any dim but the one that they go along."""
    rank, args = len(view.shapes[0]), view.op.args
    softmax = op_class_of(view.op.target) == OpClass.SOFTMAX
    along = args[1] % rank if softmax and len(args) > 1 and isinstance(args[1], int) else rank - 1
    found = [_rows(view, split(dim), split(dim)) for dim in range(rank) if dim != along]
    return [*found, *([_rows(view, BY_EXPERT, BY_EXPERT)] if _expert(view, view.shapes[0]) and along else [])]


def _rows(view: OpView, first: State, out: State) -> AxisStrategy:
    return AxisStrategy((first, *[PARTIAL_GRAD] * (len(view.shapes) - 1)), (out,) * len(view.outputs))


def _expert(view: OpView, shape: Shape) -> bool:
    return view.expert_rows is not None and bool(shape) and shape[0] == view.expert_rows


def _embedding(view: OpView) -> list[AxisStrategy]:
    """Rows of ids with a whole table; the table's rows (a sum of what each rank finds); the table's columns."""
    ids, out = len(view.shapes[1]), len(view.outputs[0])
    rows = [AxisStrategy((PARTIAL_GRAD, split(dim)), (split(dim),)) for dim in range(ids)]
    return [
        *rows, AxisStrategy((split(0), WHOLE), (PARTIAL,)), AxisStrategy((split(1), WHOLE), (split(out - 1),)),
    ]  # fmt: skip


def _loss(view: OpView) -> list[AxisStrategy]:
    """Rows of tokens, or the vocabulary (three reductions of a number per token)."""
    last = len(view.shapes[0]) - 1
    return [AxisStrategy((split(0), split(0)), (PARTIAL,)), AxisStrategy((split(last), WHOLE), (WHOLE,))]


def _view(view: OpView) -> list[AxisStrategy]:
    found = [_same(view, PARTIAL), _same(view, PARTIAL_GRAD)]
    for dim in range(len(view.shapes[0])):
        try:
            outs = tuple(split(output_dim(view.op, view.shapes[0], out, dim, view.degree)) for out in view.outputs)
        except ShardLost:
            continue
        found.append(AxisStrategy((split(dim),), outs))
        if dim == 0 and _expert(view, view.shapes[0]) and all(state.dim == 0 for state in outs):
            found.append(AxisStrategy((BY_EXPERT,), (BY_EXPERT,) * len(outs)))
    return found


def _same(view: OpView, state: State) -> AxisStrategy:
    return AxisStrategy((state,) * len(view.shapes), (state,) * len(view.outputs))


def _elementwise(view: OpView) -> list[AxisStrategy]:
    """Any dim of the result; sums where the op is linear in what is one."""
    rank = len(view.outputs[0])
    found = [strategy for dim in range(rank) if (strategy := _along(view, dim, split)) is not None]
    if _expert(view, view.outputs[0]) and (strategy := _along(view, 0, lambda _: BY_EXPERT)) is not None:
        found.append(strategy)
    if not any(view.params):
        found.append(_same(view, PARTIAL_GRAD))
    if view.name in LINEAR_IN_ALL and not any(view.constant) and len(view.shapes) <= 2:
        found.append(_same(view, PARTIAL))
    if view.name == "mul":
        found += _products_of_sums(view)
    return found


def _products_of_sums(view: OpView) -> list[AxisStrategy]:
    if len(view.shapes) != 2:
        return []
    return [AxisStrategy((PARTIAL, PARTIAL_GRAD), (PARTIAL,)), AxisStrategy((PARTIAL_GRAD, PARTIAL), (PARTIAL,))]


def _along(view: OpView, dim: int, state: Callable[[int], State]) -> AxisStrategy | None:
    """Every argument split along the dim that becomes ``dim`` of the result; one that is spread over it stays whole."""
    rank, inputs = len(view.outputs[0]), []
    for shape in view.shapes:
        own = dim - (rank - len(shape))
        inputs.append(PARTIAL_GRAD if own < 0 or shape[own] == _UNIT else state(own))
    return AxisStrategy(tuple(inputs), tuple(state(dim) for _ in view.outputs)) if view.outputs[0][dim] != _UNIT else None


def _cat(view: OpView) -> list[AxisStrategy]:
    rank = len(view.outputs[0])
    dim = int(view.op.args[1] if len(view.op.args) > 1 else view.op.kwargs.get("dim", 0)) % rank
    return [*(_same(view, split(other)) for other in range(rank) if other != dim), _same(view, PARTIAL), _same(view, PARTIAL_GRAD)]


def _select(view: OpView) -> list[AxisStrategy]:
    """Rows by index: every rank its own indices of a whole source, or columns. Routed tokens pick among their own rows."""
    columns = [AxisStrategy((split(dim), WHOLE), (split(dim),)) for dim in range(1, len(view.shapes[0]))]
    own = [AxisStrategy((split(0), split(0)), (split(0),))] if view.expert_rows is not None else []
    return [
        *own,
        AxisStrategy((PARTIAL_GRAD, split(0)), (split(0),)),
        AxisStrategy((PARTIAL_GRAD, WHOLE), (PARTIAL_GRAD,)),
        *columns,
    ]


def _index_add(view: OpView) -> list[AxisStrategy]:
    """Rows added by index: to a rank's own tokens, columns, or what each rank has as a term of the sum."""
    if len(view.shapes) != 3:
        return []
    own = [AxisStrategy((split(0), split(0), split(0)), (split(0),))] if view.expert_rows is not None else []
    base = WHOLE if view.constant[0] else PARTIAL  # zeros are a term of every sum
    rows = [split(0), *([BY_EXPERT] if _expert(view, view.shapes[2]) else [])]
    terms = [AxisStrategy((base, WHOLE, row), (PARTIAL,)) for row in (PARTIAL, *rows)]
    columns = [AxisStrategy((split(dim), WHOLE, split(dim)), (split(dim),)) for dim in range(1, len(view.shapes[0]))]
    return [*own, *terms, *columns]


def _sorting(view: OpView) -> list[AxisStrategy]:
    """Rows of a top-k; the sort of routed tokens puts each rank's own in order."""
    rank = len(view.shapes[0])
    if rank == 1:
        return [_same(view, split(0))] if view.expert_rows is not None else []
    return [_same(view, split(dim)) for dim in range(rank - 1)]


def _reduction(view: OpView) -> list[AxisStrategy]:
    """A sum over a split dim is a sum of terms; over others rows stay rows."""
    rank, out_rank = len(view.shapes[0]), len(view.outputs[0])
    dims = view.op.args[1] if len(view.op.args) > 1 else None
    if view.name != "sum" or not isinstance(dims, (list, tuple)) or len(view.shapes) != 1:
        return []
    gone = {dim % rank for dim in dims if isinstance(dim, int)}
    kept = [dim for dim in range(rank) if dim not in gone]
    found = [AxisStrategy((split(dim),), (PARTIAL,)) for dim in sorted(gone)]
    return [*found, *(AxisStrategy((split(dim),), (split(kept.index(dim)),)) for dim in kept if out_rank == len(kept))]


_BY_NAME: dict[str, Callable[[OpView], list[AxisStrategy]]] = {
    "linear": _linear, "addmm": _addmm, "mm": _matmul, "bmm": _matmul, "matmul": _matmul, "cat": _cat, "index_select": _select,
    "index_add": _index_add, "topk": _sorting, "sort": _sorting, "clone": _elementwise, "contiguous": _elementwise,
}  # fmt: skip
_BY_CLASS: dict[OpClass, Callable[[OpView], list[AxisStrategy]]] = {
    OpClass.GROUPED_GEMM: _grouped, OpClass.ATTENTION: _attention, OpClass.SCAN: _scan, OpClass.NORM: _row_wise,
    OpClass.SOFTMAX: _row_wise, OpClass.EMBEDDING: _embedding, OpClass.LOSS: _loss, OpClass.VIEW: _view,
    OpClass.ELEMENTWISE: _elementwise, OpClass.REDUCTION: _reduction,
}  # fmt: skip


def expert_rows(block: Block) -> Expr | None:
    """Rows that experts work on, ``None`` in a block without experts."""
    tensors = block.tensors()
    grouped = [op for op in block.ops if op_class_of(op.target) == OpClass.GROUPED_GEMM]
    return Expr.of(tensors[grouped[0].input_refs()[0]].shape[0]) if grouped else None


def constants(block: Block) -> set[str]:
    """Tensors that depend on no input and no parameter (positions, tables of angles, zeros): every rank makes what it needs."""
    found = {param.name for param in block.params if param.buffer}
    for op in block.ops:
        refs: Sequence[str] = op.input_refs()
        if all(ref in found for ref in refs) or base_name(op.target) in ("zeros_like", "ones_like"):
            found |= {tensor.name for tensor in op.outputs}
    return found


BY_RULE = frozenset([*_BY_NAME, *_BY_CLASS])
