"""The op sharding of a block as numbers: every node's strategies with their price, every tensor's changes of state with theirs.

Node cost: seconds of the local ops forward and backward by the one op pricer, sums inside an op (vocabulary-parallel loss), and the
sum of gradients of parameters that an axis holds whole (once a step, so divided by the micro-batches). Memory: states of the local
parameters, and what is kept for backward, each storage once per form in which it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from planner.op_sharding.fold import Folded, Node
from planner.op_sharding.mesh import DeviceMesh, Redistributor, Sent, State, States, states_text
from profiler.opset import OpClass, op_class_of
from profiler.placed import LocalOp, LocalTensor
from simulator.cost_model import CostModel
from specs.expr import Expr
from specs.graph import DTYPE_BYTES, Block, Op

PADDED_FROM = 1024  # a dim this large (a vocabulary) is padded where it does not divide
LAUNCH_TIE_S = 1e-9  # of two plans of equal time the one with fewer collectives


@dataclass(frozen=True)
class Strategy:
    """One way to run a node. ``kept``: (storage, form) -> bytes kept for backward."""

    states: dict[str, States]
    seconds: float
    compute_s: float
    state_bytes: float
    kept: dict[tuple[str, str], float]
    extra_bytes: float
    sent: tuple[Sent, ...]
    gathered: bool = False

    def text(self) -> str:
        """States of all its tensors."""
        return ", ".join(f"{name}: {states_text(states)}" for name, states in self.states.items())


@dataclass
class Tensor:
    """A tensor between nodes. ``source``: the node that makes it, ``None`` for a block input; ``forms``: the states that an input
    may enter in. ``changes``: (from, to) -> seconds and collectives."""

    name: str
    source: int | None
    readers: tuple[int, ...]
    forms: tuple[States, ...] = ()
    changes: dict[tuple[States, States], tuple[float, tuple[Sent, ...]]] = field(default_factory=dict)


@dataclass
class Problem:
    """Everything that the solver needs; see the module docstring. ``ends``: input or output -> its state, or the
    input whose state an output takes."""

    folded: Folded
    mesh: DeviceMesh
    nodes: list[Node]
    strategies: list[list[Strategy]]
    tensors: list[Tensor]
    ends: dict[str, States | str]
    memory_limit_bytes: float | None
    passes_in_flight: int


class Builder:
    """Builds the :class:`Problem` of a block on a mesh."""

    def __init__(
        self, block: Block, mesh: DeviceMesh, model: CostModel, *, batch: int, micro_batches: int, memory_limit_bytes: float | None,
        passes_in_flight: int, ends: dict[str, States | str],
    ) -> None:  # fmt: skip
        self.folded, self.mesh, self.model, self.ends = Folded(block), mesh, model, ends
        self.batch, self.seq, self.micro_batches = batch, model.seq, micro_batches
        self.limit, self.in_flight = memory_limit_bytes, passes_in_flight
        self.redistributor = Redistributor(mesh, model.network)
        self.pricer = model.pricer(model.network.places[mesh.devices[0]].device)
        self._prices: dict[object, tuple[float, tuple[int, ...], tuple[int, ...], float]] = {}
        self._numbers: dict[str, tuple[int, ...]] = {}

    def build(self) -> Problem:
        """The problem."""
        nodes = self.folded.nodes
        found = [self._strategies(node) for node in nodes]
        return Problem(
            self.folded, self.mesh, nodes, found, self._tensors(nodes, found), self.ends, self.limit, self.in_flight,
        )  # fmt: skip

    # --- nodes -------------------------------------------------------------------------------------------------

    def _strategies(self, node: Node) -> list[Strategy]:
        by_axis = [self.folded.axis_strategies(node, size) for size in self.mesh.sizes]
        found = []
        for combination in product(*by_axis):
            states = {name: tuple(axis[name] for axis in combination) for name in combination[0]}
            if all(self.local_shape(name, item) is not None for name, item in states.items()):
                found += self._priced(node, states)
        return found

    def numbers(self, name: str) -> tuple[int, ...]:
        """Whole shape at this batch and sequence."""
        if name not in self._numbers:
            self._numbers[name] = tuple(round(size(self.batch, self.seq)) for size in self.folded.shapes[name])
        return self._numbers[name]

    def local_shape(self, name: str, states: States) -> tuple[int, ...] | None:
        """Shape on a rank; ``None`` where a dim does not divide (a vocabulary is padded)."""
        shape = list(self.numbers(name))
        parts: dict[int, int] = {}
        for state, size in zip(states, self.mesh.sizes, strict=True):
            if state.divides:
                parts[state.dim] = parts.get(state.dim, 1) * size
        for dim, count in parts.items():
            constant = self.folded.shapes[name][dim].is_const
            if shape[dim] % count and not (constant and shape[dim] >= PADDED_FROM * count):
                return None
            shape[dim] = -(-shape[dim] // count)
        return tuple(shape)

    def tensor_bytes(self, name: str, states: States | None = None) -> float:
        """Bytes of the whole tensor, or of a rank's part, in the compute dtype."""
        shape = self.numbers(name) if states is None else self.local_shape(name, states) or self.numbers(name)
        total = DTYPE_BYTES[self._dtype(name)]
        for size in shape:
            total *= size
        return total

    def _dtype(self, name: str) -> str:
        dtype = self.folded.dtypes[name]
        return self.pricer.compute_dtype if dtype == "float32" else dtype

    def _priced(self, node: Node, states: dict[str, States]) -> list[Strategy]:
        compute_s, extra, kept, sent = 0.0, 0.0, {}, []
        for op in node.ops:
            seconds, saved_in, saved_out, more = self._price(op, states)
            compute_s, extra = compute_s + seconds, extra + more
            refs, outs = op.input_refs(), [tensor.name for tensor in op.outputs]
            for name in (*(refs[index] for index in saved_in), *(outs[index] for index in saved_out)):
                if name in states and name not in self.folded.params:
                    kept[self._storage(name, states[name])] = self.tensor_bytes(name, states[name])
            sent += self._inside(op, states)
        inside_s = sum(self.redistributor.seconds(item) for item in sent)
        params = {name: states[name] for name in states if name in self.folded.params}
        return [
            Strategy(states, compute_s + inside_s + sync_s, compute_s, state_bytes, kept, extra, tuple(sent), gathered)
            for sync_s, state_bytes, gathered in self._stored(params)
        ]

    def _storage(self, name: str, states: States) -> tuple[str, str]:
        root = self.folded.roots[name]
        kinds = " ".join("R" if state.kind in "RG" else state.text() if root == name else state.kind for state in states)
        return (root, kinds)

    def _stored(self, params: dict[str, States]) -> list[tuple[float, float, bool]]:
        """(seconds a pass, bytes of states, whether split) of holding parameters whole on the axes that sum their gradients, or,
        where memory is limited, split over those axes and gathered for every pass (ZeRO 3)."""
        weight, grad, states = self.model.state_bytes_per_param
        sync_s, gather_s, held, split_held = 0.0, 0.0, 0.0, 0.0
        for name, item in params.items():
            local = 1.0
            for size in self.local_shape(name, item) or ():
                local *= size
            trained = self.folded.params[name].trainable
            per_element = weight + grad + states if trained else self.model.frozen_bytes_per_param
            summed = [axis for axis, state in enumerate(item) if state.kind == "G"]
            whole = [axis for axis, state in enumerate(item) if state.kind == "R" and not trained]
            shards = 1
            for axis in summed:
                sync_s += self._collective_s("all_reduce", axis, local * DTYPE_BYTES[self.model.precision.grad_dtype])
            for axis in (*summed, *whole):
                shards *= self.mesh.sizes[axis]
                whole_bytes = local * DTYPE_BYTES[self.model.precision.param_dtype]
                gather_s += 2 * self._collective_s("all_gather", axis, whole_bytes)
                gather_s += self._collective_s("reduce_scatter", axis, whole_bytes) if trained else 0.0
            held, split_held = held + local * per_element, split_held + local * per_element / shards
        rows = [(sync_s / self.micro_batches, held, False)]
        if self.limit is not None and split_held < held:
            rows.append((gather_s, split_held, True))
        return rows

    def _collective_s(self, op: str, axis: int, size_bytes: float) -> float:
        return self.redistributor.seconds(Sent(op, axis, False, size_bytes))

    def _inside(self, op: Op, states: dict[str, States]) -> list[Sent]:
        """Sums inside a vocabulary-parallel loss: greatest logit, sum of exponentials, target's logit; one float a token each."""
        if op_class_of(op.target) != OpClass.LOSS:
            return []
        logits = op.input_refs()[0]
        last = len(self.numbers(logits)) - 1
        local = self.local_shape(logits, states[logits]) or ()
        tokens = 1.0
        for size in local[:-1]:
            tokens *= size
        axes = [axis for axis, state in enumerate(states[logits]) if state.kind == "S" and state.dim == last]
        return [Sent("all_reduce", axis, False, tokens * 4.0) for axis in axes for _ in range(3)]

    def _price(self, op: Op, states: dict[str, States]) -> tuple[float, tuple[int, ...], tuple[int, ...], float]:
        refs = op.input_refs()
        inputs = tuple(self._local(ref, states.get(ref)) for ref in refs)
        outputs = tuple(self._local(tensor.name, states.get(tensor.name)) for tensor in op.outputs)
        key = (op.name, tuple(tensor.shape for tensor in (*inputs, *outputs)))
        if key not in self._prices:
            price = self.pricer.price(LocalOp(op, op_class_of(op.target), inputs, outputs), self.batch, self.seq)
            self._prices[key] = (price.seconds, price.saved_inputs, price.saved_outputs, price.saved_extra_bytes)
        return self._prices[key]

    def _local(self, name: str, states: States | None) -> LocalTensor:
        shape = self.numbers(name) if states is None else self.local_shape(name, states) or ()
        kind = "param" if name in self.folded.params else "activation"
        sizes = tuple(Expr.const(size) for size in shape)
        return LocalTensor(name, sizes, self.folded.dtypes[name], None, name, self.folded.needs_grad.get(name, False), kind)

    # --- tensors -----------------------------------------------------------------------------------------------

    def _tensors(self, nodes: Sequence[Node], found: Sequence[Sequence[Strategy]]) -> list[Tensor]:
        maker = {name: node.index for node in nodes for name in node.made}
        names = [*(tensor.name for tensor in self.folded.block.inputs), *maker]
        tensors = []
        for name in names:
            readers = tuple(node.index for node in nodes if name in node.entries)
            tensor = Tensor(name, maker.get(name), readers, self._forms(name) if name not in maker else ())
            targets = list(dict.fromkeys(item.states[name] for reader in readers for item in found[reader]))
            wanted = self.ends.get(name)
            if name in self.folded.block.outputs:
                targets = list(dict.fromkeys([*targets, *([wanted] if isinstance(wanted, tuple) else self._forms(name))]))
            made = tensor.forms if tensor.source is None else dict.fromkeys(item.states[name] for item in found[tensor.source])
            for start in made:
                for target in targets:
                    change = self.redistributor.change(
                        self.tensor_bytes(name), start, target, needs_grad=self.folded.needs_grad[name]
                    )
                    if change is not None:
                        tensor.changes[start, target] = (change[0] + LAUNCH_TIE_S * len(change[1]), change[1])
            tensors.append(tensor)
        return tensors

    def _forms(self, name: str) -> tuple[States, ...]:
        """States in which a tensor may enter or leave the block: whole or split, or what ``ends`` says."""
        wanted = self.ends.get(name)
        if isinstance(wanted, tuple):
            return (wanted,)
        rank = len(self.folded.shapes[name])
        kinds = [State("R"), *(State("S", dim) for dim in range(rank))]
        return tuple(item for item in product(kinds, repeat=len(self.mesh.sizes)) if self.local_shape(name, item) is not None)
