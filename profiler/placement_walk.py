"""The walk over the ops of a block that places its tensors on the tp axis; the rules: ``profiler.placement``. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from profiler.opset import PRODUCTS, OpClass, base_name, op_class_of
from profiler.placed import Collective, LocalOp, LocalTensor, PlacedBlock, Placement, local_shape
from profiler.placement_flow import before_expand, from_right, grad_flow, is_bottleneck, storage_roots
from profiler.view_dims import ShardLost, output_dim
from specs.expr import Expr
from specs.graph import Block, Op, TensorSpec


class Conflict(Exception):
    """An op can't take an input split like this; ``tensor`` names it."""

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor)
        self.tensor = tensor


@dataclass
class State:
    """Placement and descent of one tensor while walking: ``column`` = the column-parallel products that made its split."""

    placement: Placement
    column: frozenset[str] = frozenset()


@dataclass
class Walk:
    """What one walk over the ops finds."""

    states: dict[str, State]
    placements: dict[str, Placement]
    before: dict[str, list[Collective]] = field(default_factory=dict)
    after: dict[str, list[Collective]] = field(default_factory=dict)
    gathered: dict[str, Placement] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    reads: dict[str, dict[int, Placement]] = field(default_factory=dict)


class Placer:
    """Fixed-point search over which products are column-parallel; see the module docstring."""

    def __init__(self, block: Block, tp: int, sequence_parallel: bool) -> None:
        self.block, self.tp, self.sequence_parallel = block, tp, sequence_parallel
        self.tensors = block.tensors()
        self.params = {param.name for param in block.params if not param.buffer}
        self.requires_grad = grad_flow(block)
        self.not_column: set[str] = set()

    def run(self) -> PlacedBlock:
        """The placed block: walks until no product has to be withdrawn any more."""
        for _ in range(len(self.block.ops) + 1):
            try:
                return self._result(self._walk())
            except Conflict as conflict:
                self.not_column |= {conflict.tensor}
        raise RuntimeError(f"placement of block '{self.block.name}' does not settle")  # each round excludes one more product

    # --- one walk over the ops ---------------------------------------------------------------------------------

    def _walk(self) -> Walk:
        walk = Walk({}, {})
        for tensor in self.block.inputs:
            walk.states[tensor.name] = State(self._stream_dim(tensor))
        for param in self.block.params:
            walk.states[param.name] = State(None)
        if self.tp > 1:
            for op in self.block.ops:
                self._step(op, walk)
            self._settle_outputs(walk)
        else:
            for op in self.block.ops:
                for tensor in op.outputs:
                    walk.states[tensor.name] = State(None)
        return walk

    def _stream_dim(self, tensor: TensorSpec) -> Placement:
        """Sequence dim of a residual-stream tensor under sequence parallel (integer inputs such as tokens stay whole)."""
        if not self.sequence_parallel or not tensor.dtype.startswith(("float", "bfloat")):
            return None
        sequence = Expr({(0, 1): 1.0})
        dims = [index for index, size in enumerate(tensor.shape) if size == sequence]
        return dims[0] if dims and len(tensor.shape) >= 3 else None

    def _step(self, op: Op, walk: Walk) -> None:
        refs = op.input_refs()
        kind, name = op_class_of(op.target), base_name(op.target)
        if kind in PRODUCTS and len(refs) > 1 and refs[-1 if name == "addmm" else 1] in self.params:
            self._product(op, refs, walk)
        elif kind == OpClass.EMBEDDING and refs[0] in self.params:
            self._embedding(op, refs, walk)
        elif kind == OpClass.LOSS:
            self._loss(op, refs, walk)
        elif kind == OpClass.ATTENTION:
            self._aligned(op, refs, walk, allowed=(0, 1))
        elif kind == OpClass.SCAN:
            self._scan(op, refs, walk)
        elif name == "conv1d":
            self._channels(op, refs, walk)
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

    def _emit(self, op: Op, walk: Walk, placement: Placement, column: frozenset[str] = frozenset()) -> None:
        for tensor in op.outputs:
            walk.states[tensor.name] = State(placement, column if placement is not None else frozenset())

    def _product(self, op: Op, refs: list[str], walk: Walk) -> None:
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
        narrow = is_bottleneck(self.block, op, self._const(weight, out_dim), self._const(weight, in_dim))
        if op.name in self.not_column or not divisible or narrow:
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

    def _embedding(self, op: Op, refs: list[str], walk: Walk) -> None:
        """Vocabulary-parallel when ids are looked up; small tables of positions stay whole."""
        ids = self.tensors[refs[1]]
        batched = len(ids.shape) > 1 and isinstance(ids, TensorSpec) and refs[1] in {tensor.name for tensor in self.block.inputs}
        if not batched:
            self._emit(op, walk, None)
            return
        walk.placements[refs[0]] = 0
        self._emit(op, walk, None)
        self._reduce(op, walk, None)

    def _loss(self, op: Op, refs: list[str], walk: Walk) -> None:
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

    def _aligned(self, op: Op, refs: list[str], walk: Walk, allowed: tuple[int, ...]) -> None:
        """All tensor inputs split alike along an allowed dim, else gathered."""
        found = {walk.states[ref].placement for ref in refs}
        if len(found) == 1 and next(iter(found)) in (None, *allowed):
            columns = frozenset().union(*(walk.states[ref].column for ref in refs))
            self._emit(op, walk, next(iter(found)), columns)
            return
        self._replicated(op, refs, walk)

    def _scan(self, op: Op, refs: list[str], walk: Walk) -> None:
        """Split over heads and groups alike (dim 2); what is one number per head is read in slices."""
        wide = [ref for ref in refs if len(self._shape(ref)) > 1]
        self._aligned(op, wide, walk, allowed=(0, 2))
        if walk.states[op.outputs[0].name].placement == 2:
            walk.reads.setdefault(op.name, {}).update({position: 0 for position, ref in enumerate(refs) if ref not in wide})

    def _channels(self, op: Op, refs: list[str], walk: Walk) -> None:
        """A convolution of each channel by itself: split over channels, its weight and bias with them; over the batch, whole."""
        x = refs[0]
        depthwise = len(op.args) > 6 and op.args[6] == self._const(refs[1], 0)
        if not depthwise or walk.states[x].placement not in (None, 1):
            self._replicated(op, refs[:1], walk)
            return
        if walk.states[x].placement == 1:
            walk.placements.update(dict.fromkeys(refs[1:], 0))
        self._emit(op, walk, walk.states[x].placement, walk.states[x].column)

    def _row_wise(self, op: Op, refs: list[str], walk: Walk) -> None:
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

    def _view(self, op: Op, refs: list[str], walk: Walk) -> None:
        state = walk.states[refs[0]]
        if state.placement is None:
            self._emit(op, walk, None)
            return
        try:
            for tensor in op.outputs:
                dim = output_dim(op, self._shape(refs[0]), tensor.shape, state.placement, self.tp)
                walk.states[tensor.name] = State(dim, state.column)
        except ShardLost:
            self._gather(op, refs[0], walk)
            self._emit(op, walk, None)

    def _elementwise(self, op: Op, refs: list[str], walk: Walk) -> None:
        if not refs:
            self._emit(op, walk, None)
            return
        out_rank = len(op.outputs[0].shape)
        wanted = {from_right(walk.states[ref].placement, len(self._shape(ref)), out_rank) for ref in refs} - {None}
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

    def _cat(self, op: Op, refs: list[str], walk: Walk) -> None:
        rank = len(op.outputs[0].shape)
        dim = int(op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % rank
        found = {walk.states[ref].placement for ref in refs}
        wanted = {walk.states[ref].placement for ref in refs if walk.states[ref].column} or found
        if len(wanted) > 1 or dim in wanted:
            self._replicated(op, refs, walk)
            return
        placement = next(iter(wanted))
        for position, ref in enumerate(refs):
            if walk.states[ref].placement != placement:
                self._slice(op, position, ref, placement, walk)
        self._emit(op, walk, placement, frozenset().union(*(walk.states[ref].column for ref in refs)))

    def _slice(self, op: Op, position: int, name: str, dim: Placement, walk: Walk) -> None:
        """Each rank takes its own slice of a tensor that is whole, or gathered first where it is split over tokens. The gradients
        of the slices are summed (of what was expanded, before that)."""
        walk.reads.setdefault(op.name, {})[position] = dim
        kinds = (None, "all_reduce") if walk.states[name].placement is None else ("all_gather", "reduce_scatter")
        if kinds[0] or self.requires_grad[name]:
            walk.before.setdefault(op.name, []).append(self._collective(before_expand(self.block, name), *kinds))

    def _replicated(self, op: Op, refs: list[str], walk: Walk) -> None:
        for ref in refs:
            self._gather(op, ref, walk)
        self._emit(op, walk, None)

    # --- collectives -------------------------------------------------------------------------------------------

    def _gather(self, op: Op, name: str, walk: Walk, *, enters_column: bool = False) -> None:
        """Make ``name`` whole before ``op``. A split made by a column-parallel product is undone at its origin instead."""
        state = walk.states[name]
        if state.placement is None:
            if enters_column and self.requires_grad[name] and walk.gathered.get(name, -1) == -1:
                walk.gathered[name] = None
                walk.before.setdefault(op.name, []).append(self._collective(name, None, "all_reduce"))
            return
        if state.column:
            raise Conflict(next(iter(state.column)))
        refs = op.input_refs()
        reads = walk.reads.setdefault(op.name, {})
        reads.update({position: None for position, ref in enumerate(refs) if ref == name})
        if name not in walk.gathered:
            walk.gathered[name] = None
            walk.before.setdefault(op.name, []).append(self._collective(name, "all_gather", "reduce_scatter"))

    def _reduce(self, op: Op, walk: Walk, bias: str | None) -> None:
        """A partial sum becomes whole, or split along the sequence under sequence parallel."""
        out = op.outputs[0]
        dim = self._stream_dim(out)
        kind = ("all_reduce", None) if dim is None else ("reduce_scatter", "all_gather")
        walk.after.setdefault(op.name, []).append(self._collective(out.name, *kind))
        walk.states[out.name] = State(dim)
        if bias is not None and dim is not None:
            walk.partial.add(bias)

    def _collective(self, name: str, forward: str | None, backward: str | None) -> Collective:
        total = Expr.const(1)
        for size in self._shape(name):
            total = total * size
        return Collective(name, forward, backward if self.requires_grad[name] else None, total, self.tensors[name].dtype)

    def _settle_outputs(self, walk: Walk) -> None:
        """What leaves the block is the residual stream: whole, or split along the sequence."""
        for name in self.block.outputs:
            tensor, state = self.tensors[name], walk.states[name]
            wanted = self._stream_dim(tensor) if isinstance(tensor, TensorSpec) else None
            if state.placement == wanted:
                continue
            if state.column:
                raise Conflict(next(iter(state.column)))
            last = self.block.ops[-1].name
            if state.placement is not None:
                walk.after.setdefault(last, []).append(self._collective(name, "all_gather", "reduce_scatter"))
            elif self.requires_grad[name]:  # whole to split: a slice; its gradient is gathered
                walk.after.setdefault(last, []).append(self._collective(name, None, "all_gather"))
            walk.states[name] = State(wanted)

    # --- result ------------------------------------------------------------------------------------------------

    def _shape(self, name: str) -> tuple[Expr, ...]:
        return tuple(Expr.of(size) for size in self.tensors[name].shape)

    def _const(self, name: str, dim: int) -> int:
        return int(self._shape(name)[dim](1, 1))

    def _result(self, walk: Walk) -> PlacedBlock:
        roots = storage_roots(self.block)
        for name, placement in walk.placements.items():
            walk.states[name] = State(placement)
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
