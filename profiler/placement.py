"""Placing a block on the tensor-parallel axis: the one way to do it, for profiler, simulator, planner and executor.

Given a block and a degree ``tp``, every tensor gets a placement on the tp axis, ``R`` (replicated) or ``S(d)`` (split along
dim ``d``); global shapes become local ones; collectives follow from placement changes. Nothing here knows transformers:

* A product with a weight takes a replicated input to an output split along its last dim (column-parallel, weight ``S(0)``),
  and an input split along its last dim to a partial sum (row-parallel, weight ``S(1)``) that is reduced at once.
* Column-parallel is tried first and withdrawn where a later op can't take the split (a router's top-k): a fixed-point search.
* With sequence parallel the residual stream is split along the sequence between the products.

The result is Megatron's pattern on a decoder layer (arXiv 1909.08053 §3, sequence parallel arXiv 2205.05198 §4.2.2), which a
test asserts. Collectives of the backward pass mirror those of forward (all-gather <-> reduce-scatter, all-reduce <-> identity).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from profiler.opset import OpClass, base_name, op_class_of
from profiler.placed import Collective, LocalOp, LocalTensor, PlacedBlock, Placement, local_shape
from profiler.view_dims import ShardLost, output_dim
from specs.expr import Expr
from specs.graph import Block, Op, TensorSpec

# Part of the full name of an adapter's first matrix (``profiler.adapters``).
ADAPTER_DOWN = ".lora_a."


@lru_cache(maxsize=4096)
def _place_cached(key: str, tp: int, sequence_parallel: bool) -> PlacedBlock:
    return _Placer(_BLOCKS[key], tp, sequence_parallel).run()


_BLOCKS: dict[str, Block] = {}


def place_block(block: Block, tp: int = 1, sequence_parallel: bool = False) -> PlacedBlock:
    """Place ``block`` on ``tp`` ranks. Results are cached by the block's content."""
    key = _block_key(block)
    _BLOCKS.setdefault(key, block)
    return _place_cached(key, tp, sequence_parallel and tp > 1)


_KEYS: dict[int, tuple[Block, str]] = {}


def _block_key(block: Block) -> str:
    known = _KEYS.get(id(block))
    if known is None or known[0] is not block:
        known = (block, block.model_dump_json())
        _KEYS[id(block)] = known
    return known[1]


class _Conflict(Exception):
    """An op can't take an input split like this; ``tensor`` names it."""

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor)
        self.tensor = tensor


@dataclass
class _State:
    """Placement and descent of one tensor while walking: ``column`` = the column-parallel products that made its split."""

    placement: Placement
    column: frozenset[str] = frozenset()


@dataclass
class _Walk:
    """What one walk over the ops finds."""

    states: dict[str, _State]
    placements: dict[str, Placement]
    before: dict[str, list[Collective]] = field(default_factory=dict)
    after: dict[str, list[Collective]] = field(default_factory=dict)
    gathered: dict[str, Placement] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    reads: dict[str, dict[int, Placement]] = field(default_factory=dict)


class _Placer:
    """Fixed-point search over which products are column-parallel; see the module docstring."""

    def __init__(self, block: Block, tp: int, sequence_parallel: bool) -> None:
        self.block, self.tp, self.sequence_parallel = block, tp, sequence_parallel
        self.tensors = block.tensors()
        self.params = {param.name for param in block.params if not param.buffer}
        self.requires_grad = _grad_flow(block)
        # the narrow product of an adapter stays whole: splitting it would save nothing and cost a sum of its wide result
        narrow = {param.name for param in block.params if ADAPTER_DOWN in param.fqn}
        self.not_column: set[str] = {op.name for op in block.ops if narrow & set(op.input_refs())}

    def run(self) -> PlacedBlock:
        for _ in range(len(self.block.ops) + 1):
            try:
                return self._result(self._walk())
            except _Conflict as conflict:
                self.not_column |= {conflict.tensor}
        raise RuntimeError(f"placement of block '{self.block.name}' does not settle")  # each round excludes one more product

    # --- one walk over the ops ---------------------------------------------------------------------------------

    def _walk(self) -> _Walk:
        walk = _Walk({}, {})
        for tensor in self.block.inputs:
            walk.states[tensor.name] = _State(self._stream_dim(tensor))
        for param in self.block.params:
            walk.states[param.name] = _State(None)
        if self.tp > 1:
            for op in self.block.ops:
                self._step(op, walk)
            self._settle_outputs(walk)
        else:
            for op in self.block.ops:
                for tensor in op.outputs:
                    walk.states[tensor.name] = _State(None)
        return walk

    def _stream_dim(self, tensor: TensorSpec) -> Placement:
        """Sequence dim of a residual-stream tensor under sequence parallel (integer inputs such as tokens stay whole)."""
        if not self.sequence_parallel or not tensor.dtype.startswith(("float", "bfloat")):
            return None
        sequence = Expr({(0, 1): 1.0})
        dims = [index for index, size in enumerate(tensor.shape) if size == sequence]
        return dims[0] if dims and len(tensor.shape) >= 3 else None

    def _step(self, op: Op, walk: _Walk) -> None:
        refs = op.input_refs()
        kind, name = op_class_of(op.target), base_name(op.target)
        if kind in (OpClass.GEMM, OpClass.GROUPED_GEMM) and len(refs) > 1 and refs[-1 if name == "addmm" else 1] in self.params:
            self._product(op, refs, walk)
        elif kind == OpClass.EMBEDDING and refs[0] in self.params:
            self._embedding(op, refs, walk)
        elif kind == OpClass.LOSS:
            self._loss(op, refs, walk)
        elif kind == OpClass.ATTENTION:
            self._aligned(op, refs, walk, allowed=(0, 1))
        elif kind in (OpClass.NORM, OpClass.SOFTMAX):
            self._row_wise(op, refs, walk)
        elif kind == OpClass.VIEW:
            self._view(op, refs, walk)
        elif kind == OpClass.ELEMENTWISE or (kind == OpClass.COPY and name in ("clone", "contiguous")):
            self._elementwise(op, refs, walk)
        elif kind == OpClass.COPY and name == "cat":
            self._cat(op, refs, walk)
        else:
            self._replicated(op, refs, walk)

    def _emit(self, op: Op, walk: _Walk, placement: Placement, column: frozenset[str] = frozenset()) -> None:
        for tensor in op.outputs:
            walk.states[tensor.name] = _State(placement, column if placement is not None else frozenset())

    def _product(self, op: Op, refs: list[str], walk: _Walk) -> None:
        offset = 1 if base_name(op.target) == "addmm" else 0
        x, weight = refs[offset], refs[offset + 1]
        bias = refs[0] if offset else (refs[2] if len(refs) > 2 and refs[2] in self.params else None)
        grouped = op_class_of(op.target) == OpClass.GROUPED_GEMM
        is_linear = base_name(op.target) == "linear"
        out_dim, in_dim = (0, 1) if is_linear else ((2, 1) if grouped else (1, 0))
        last = len(self._shape(x)) - 1
        state = walk.states[x]
        if state.placement == last:
            walk.placements[weight] = in_dim
            self._emit(op, walk, None)
            self._reduce(op, walk, bias)
            return
        divisible = self._const(weight, out_dim) % self.tp == 0 or self._is_last_product(op)
        if op.name in self.not_column or not divisible:
            if state.placement is not None:  # token-split product with a whole weight: its gradient is partial
                walk.partial |= {weight} | ({bias} if bias else set())
            self._emit(op, walk, state.placement, state.column)
            return
        self._gather(op, x, walk, enters_column=True)
        walk.placements[weight] = out_dim
        if bias:
            walk.placements[bias] = 0
        self._emit(op, walk, len(op.outputs[0].shape) - 1, frozenset({op.name}))

    def _is_last_product(self, op: Op) -> bool:
        """The output head may be split unevenly (the vocabulary is padded)."""
        later = self.block.ops[self.block.ops.index(op) + 1 :]
        return any(op_class_of(item.target) == OpClass.LOSS for item in later) and not any(
            op_class_of(item.target) == OpClass.GEMM for item in later
        )

    def _embedding(self, op: Op, refs: list[str], walk: _Walk) -> None:
        """Vocabulary-parallel when ids are looked up; small tables of positions stay whole."""
        ids = self.tensors[refs[1]]
        batched = len(ids.shape) > 1 and isinstance(ids, TensorSpec) and refs[1] in {tensor.name for tensor in self.block.inputs}
        if not batched:
            self._emit(op, walk, None)
            return
        walk.placements[refs[0]] = 0
        self._emit(op, walk, None)
        self._reduce(op, walk, None)

    def _loss(self, op: Op, refs: list[str], walk: _Walk) -> None:
        state = walk.states[refs[0]]
        shape = self._shape(refs[0])
        if state.placement is not None and state.placement != len(shape) - 1:
            self._gather(op, refs[0], walk)
        elif state.placement is not None:  # vocabulary-parallel: max, sum of exponentials, target logit; one float per token each
            tokens = Expr.const(1)
            for size in shape[:-1]:
                tokens = tokens * size
            walk.before.setdefault(op.name, []).append(Collective(refs[0], "all_reduce", None, tokens, "float32", count=3))
            walk.reads.setdefault(op.name, {})[0] = state.placement
        self._emit(op, walk, None)

    def _aligned(self, op: Op, refs: list[str], walk: _Walk, allowed: tuple[int, ...]) -> None:
        """All tensor inputs split alike along an allowed dim, else gathered."""
        found = {walk.states[ref].placement for ref in refs}
        if len(found) == 1 and next(iter(found)) in (None, *allowed):
            columns = frozenset().union(*(walk.states[ref].column for ref in refs))
            self._emit(op, walk, next(iter(found)), columns)
            return
        self._replicated(op, refs, walk)

    def _row_wise(self, op: Op, refs: list[str], walk: _Walk) -> None:
        x = refs[0]
        placement, rank = walk.states[x].placement, len(self._shape(x))
        dim = op.args[1] if op_class_of(op.target) == OpClass.SOFTMAX and len(op.args) > 1 else rank - 1
        normalized = (dim % rank) if isinstance(dim, int) else rank - 1
        if placement == normalized:
            self._gather(op, x, walk)
            placement = None
        if placement is not None:
            walk.partial |= {ref for ref in refs[1:] if ref in self.params}
        self._emit(op, walk, placement, walk.states[x].column)

    def _view(self, op: Op, refs: list[str], walk: _Walk) -> None:
        state = walk.states[refs[0]]
        if state.placement is None:
            self._emit(op, walk, None)
            return
        try:
            for tensor in op.outputs:
                dim = output_dim(op, self._shape(refs[0]), tensor.shape, state.placement, self.tp)
                walk.states[tensor.name] = _State(dim, state.column)
        except ShardLost:
            self._gather(op, refs[0], walk)
            self._emit(op, walk, None)

    def _elementwise(self, op: Op, refs: list[str], walk: _Walk) -> None:
        if not refs:
            self._emit(op, walk, None)
            return
        out_rank = len(op.outputs[0].shape)
        wanted = {_from_right(walk.states[ref].placement, len(self._shape(ref)), out_rank) for ref in refs} - {None}
        if len(wanted) > 1:
            self._replicated(op, refs, walk)
            return
        placement = wanted.pop() if wanted else None
        columns = frozenset().union(*(walk.states[ref].column for ref in refs))
        for position, ref in enumerate(refs):
            if placement is None or walk.states[ref].placement is not None:
                continue
            own_dim = placement - (out_rank - len(self._shape(ref)))
            if own_dim >= 0 and self._shape(ref)[own_dim] != Expr.const(1):
                walk.reads.setdefault(op.name, {})[position] = own_dim  # each rank takes its own slice, nothing is sent
            if ref in self.params and self._stream_split(ref, own_dim):
                walk.partial.add(ref)
        self._emit(op, walk, placement, columns)

    def _stream_split(self, param: str, own_dim: int) -> bool:
        """A whole parameter read by a tensor that is split over tokens: each rank holds a part of its gradient."""
        return own_dim < 0 or self._shape(param)[own_dim] == Expr.const(1)

    def _cat(self, op: Op, refs: list[str], walk: _Walk) -> None:
        rank = len(op.outputs[0].shape)
        dim = int(op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % rank
        found = {walk.states[ref].placement for ref in refs}
        if len(found) == 1 and next(iter(found)) != dim:
            self._emit(op, walk, next(iter(found)), frozenset().union(*(walk.states[ref].column for ref in refs)))
        else:
            self._replicated(op, refs, walk)

    def _replicated(self, op: Op, refs: list[str], walk: _Walk) -> None:
        for ref in refs:
            self._gather(op, ref, walk)
        self._emit(op, walk, None)

    # --- collectives -------------------------------------------------------------------------------------------

    def _gather(self, op: Op, name: str, walk: _Walk, *, enters_column: bool = False) -> None:
        """Make ``name`` whole before ``op``. A split made by a column-parallel product is undone at its origin instead."""
        state = walk.states[name]
        if state.placement is None:
            if enters_column and self.requires_grad[name] and walk.gathered.get(name, -1) == -1:
                walk.gathered[name] = None
                walk.before.setdefault(op.name, []).append(self._collective(name, None, "all_reduce"))
            return
        if state.column:
            raise _Conflict(next(iter(state.column)))
        refs = op.input_refs()
        reads = walk.reads.setdefault(op.name, {})
        reads.update({position: None for position, ref in enumerate(refs) if ref == name})
        if name not in walk.gathered:
            walk.gathered[name] = None
            walk.before.setdefault(op.name, []).append(self._collective(name, "all_gather", "reduce_scatter"))

    def _reduce(self, op: Op, walk: _Walk, bias: str | None) -> None:
        """A partial sum becomes whole, or split along the sequence under sequence parallel."""
        out = op.outputs[0]
        dim = self._stream_dim(out)
        kind = ("all_reduce", None) if dim is None else ("reduce_scatter", "all_gather")
        walk.after.setdefault(op.name, []).append(self._collective(out.name, *kind))
        walk.states[out.name] = _State(dim)
        if bias is not None and dim is not None:
            walk.partial.add(bias)

    def _collective(self, name: str, forward: str | None, backward: str | None) -> Collective:
        total = Expr.const(1)
        for size in self._shape(name):
            total = total * size
        return Collective(name, forward, backward if self.requires_grad[name] else None, total, self.tensors[name].dtype)

    def _settle_outputs(self, walk: _Walk) -> None:
        """What leaves the block is the residual stream: whole, or split along the sequence."""
        for name in self.block.outputs:
            tensor, state = self.tensors[name], walk.states[name]
            wanted = self._stream_dim(tensor) if isinstance(tensor, TensorSpec) else None
            if state.placement == wanted:
                continue
            if state.column:
                raise _Conflict(next(iter(state.column)))
            last = self.block.ops[-1].name
            if state.placement is not None:
                walk.after.setdefault(last, []).append(self._collective(name, "all_gather", "reduce_scatter"))
            elif self.requires_grad[name]:  # whole to split: a slice; its gradient is gathered
                walk.after.setdefault(last, []).append(self._collective(name, None, "all_gather"))
            walk.states[name] = _State(wanted)

    # --- result ------------------------------------------------------------------------------------------------

    def _shape(self, name: str) -> tuple[Expr, ...]:
        return tuple(Expr.of(size) for size in self.tensors[name].shape)

    def _const(self, name: str, dim: int) -> int:
        return int(self._shape(name)[dim](1, 1))

    def _result(self, walk: _Walk) -> PlacedBlock:
        roots = _storage_roots(self.block)
        for name, placement in walk.placements.items():
            walk.states[name] = _State(placement)
        kinds = {tensor.name: "input" for tensor in self.block.inputs}
        kinds.update({param.name: "buffer" if param.buffer else "param" for param in self.block.params})

        def local(name: str, placement: Placement) -> LocalTensor:
            return LocalTensor(
                name, local_shape(self._shape(name), placement, self.tp), self.tensors[name].dtype, placement, roots[name],
                self.requires_grad[name], kinds.get(name, "activation"),
            )  # fmt: skip

        def reads(op: Op) -> tuple[LocalTensor, ...]:
            changed = walk.reads.get(op.name, {})
            return tuple(
                local(ref, changed[position] if position in changed else walk.states[ref].placement)
                for position, ref in enumerate(op.input_refs())
            )

        ops = tuple(
            LocalOp(
                op, op_class_of(op.target), reads(op), tuple(local(t.name, walk.states[t.name].placement) for t in op.outputs),
                tuple(walk.before.get(op.name, ())), tuple(walk.after.get(op.name, ())),
            )
            for op in self.block.ops
        )  # fmt: skip
        params = {param.name: local(param.name, walk.states[param.name].placement) for param in self.block.params}
        return PlacedBlock(
            self.block, self.tp, self.sequence_parallel, ops, params, {name: tensor.placement for name, tensor in params.items()},
            tuple(sorted(walk.partial)), tuple(local(t.name, walk.states[t.name].placement) for t in self.block.inputs),
            tuple(local(name, walk.states[name].placement) for name in self.block.outputs),
        )  # fmt: skip


def _from_right(placement: Placement, rank: int, out_rank: int) -> Placement:
    return None if placement is None else placement + out_rank - rank


def _grad_flow(block: Block) -> dict[str, bool]:
    """Which tensors need a gradient: float inputs, trainable parameters and what is computed from them."""
    flow = {tensor.name: tensor.dtype.startswith(("float", "bfloat")) for tensor in block.inputs}
    flow.update({param.name: param.trainable and not param.buffer for param in block.params})
    for op in block.ops:
        needs = any(flow[ref] for ref in op.input_refs())
        flow.update({t.name: needs and t.dtype.startswith(("float", "bfloat")) for t in op.outputs})
    return flow


def _storage_roots(block: Block) -> dict[str, str]:
    roots = {name: name for name in (*(t.name for t in block.inputs), *(p.name for p in block.params))}
    for op in block.ops:
        aliases = op_class_of(op.target) == OpClass.VIEW and op.input_refs()
        for tensor in op.outputs:
            roots[tensor.name] = roots[op.input_refs()[0]] if aliases else tensor.name
    return roots
