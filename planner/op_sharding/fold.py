"""Folding a block's ops into nodes: views and element-wise ops follow each other without a change of state in between.

An op joins the node of the one that makes its input where both are light and nothing heavy reads in between. States then go
through the node unchanged in size, so a change inside it would cost what it costs at the node's edge.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.op_sharding.mesh import WHOLE, State
from planner.op_sharding.rules import AxisStrategy, OpView, constants, expert_rows, strategies
from profiler.opset import OpClass, base_name, op_class_of
from profiler.placement_flow import grad_flow, storage_roots
from specs.expr import Expr
from specs.graph import Block, Op

_LIGHT = (OpClass.VIEW, OpClass.ELEMENTWISE)


@dataclass(frozen=True)
class Node:
    """Ops that choose a strategy together. ``entries``: tensors read from outside; ``made``: results that others read."""

    index: int
    ops: tuple[Op, ...]
    entries: tuple[str, ...]
    made: tuple[str, ...]


class Folded:
    """A block with its nodes and what every tensor is."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.shapes = {name: tuple(Expr.of(size) for size in tensor.shape) for name, tensor in block.tensors().items()}
        self.dtypes = {name: tensor.dtype for name, tensor in block.tensors().items()}
        self.params = {param.name: param for param in block.params if not param.buffer}
        self.constant = constants(block)
        self.needs_grad = {name: flow and name not in self.constant for name, flow in grad_flow(block).items()}
        self.roots = storage_roots(block)
        self.rows = expert_rows(block)
        self.steps = [op for op in block.ops if not all(tensor.name in self.constant for tensor in op.outputs)]
        self.readers: dict[str, list[Op]] = {}
        for op in self.steps:
            for ref in set(op.input_refs()):
                self.readers.setdefault(ref, []).append(op)
        self.nodes = self._nodes()

    def activations(self, op: Op) -> list[str]:
        """What the op reads that is neither a parameter nor a constant, in order."""
        return [ref for ref in op.input_refs() if ref not in self.params and ref not in self.constant]

    def _light(self, op: Op) -> bool:
        light = op_class_of(op.target) in _LIGHT or base_name(op.target) in ("cat", "clone", "contiguous")
        return light and not any(ref in self.params for ref in op.input_refs())

    def _nodes(self) -> list[Node]:
        maker = {tensor.name: op for op in self.steps for tensor in op.outputs}
        group = {op.name: op.name for op in self.steps}
        outputs = set(self.block.outputs)

        def root(name: str) -> str:
            while group[name] != name:
                name = group[name]
            return name

        for op in self.steps:
            for ref in self.activations(op):
                source = maker.get(ref)
                if source is None or not self._light(op) or not self._light(source):
                    continue
                read_by = [reader for tensor in source.outputs for reader in self.readers.get(tensor.name, [])]
                if all(self._light(reader) for reader in read_by) and not outputs & {tensor.name for tensor in source.outputs}:
                    group[root(op.name)] = root(source.name)
        members: dict[str, list[Op]] = {}
        for op in self.steps:
            members.setdefault(root(op.name), []).append(op)
        return [self._node(index, ops) for index, ops in enumerate(members.values())]

    def _node(self, index: int, ops: list[Op]) -> Node:
        own = {tensor.name for op in ops for tensor in op.outputs}
        names = {op.name for op in ops}
        entries = dict.fromkeys(ref for op in ops for ref in self.activations(op) if ref not in own)
        read_outside = {ref for ref in own if any(reader.name not in names for reader in self.readers.get(ref, []))}
        made = [tensor.name for op in ops for tensor in op.outputs if tensor.name in read_outside | set(self.block.outputs)]
        return Node(index, tuple(ops), tuple(entries), tuple(made))

    # --- strategies on one axis --------------------------------------------------------------------------------

    def view(self, op: Op, degree: int) -> OpView:
        """The op as the rules see it."""
        refs = op.input_refs()
        return OpView(
            op, tuple(self.shapes[ref] for ref in refs), tuple(self.shapes[tensor.name] for tensor in op.outputs),
            tuple(ref in self.constant for ref in refs), tuple(ref in self.params for ref in refs), self.rows, degree,
        )  # fmt: skip

    def axis_strategies(self, node: Node, degree: int) -> list[dict[str, State]]:
        """Consistent states of all tensors of a node on one axis: one state per tensor that is no constant."""
        found: list[dict[str, State]] = [{}]
        for op in node.ops:
            choices = [self._states(op, strategy) for strategy in strategies(self.view(op, degree))]
            joined = []
            for known in found:
                for states in choices:
                    if states is not None and all(known.get(name, state) == state for name, state in states.items()):
                        joined.append({**known, **states})
            found = joined
        unique = {tuple(sorted(states.items())): states for states in found}
        return list(unique.values())

    def _states(self, op: Op, strategy: AxisStrategy) -> dict[str, State] | None:
        states: dict[str, State] = {}
        pairs = [*zip(op.input_refs(), strategy.inputs, strict=True)]
        for name, state in [*pairs, *zip((tensor.name for tensor in op.outputs), strategy.outputs, strict=True)]:
            if name in self.constant:
                continue
            plain = WHOLE if state.kind == "G" and not self.needs_grad[name] else state
            if states.setdefault(name, plain) != plain:
                return None
        return states
