"""Splitting a block over context-parallel and expert-parallel ranks: what becomes smaller and what must be exchanged.

Context parallel (degree c): every rank holds 1/c of the sequence; attention needs the keys and values of all of it, which go
round in a ring beside the attention of the parts that are there (Liu et al., arXiv 2310.01889), or are gathered before. Forward
moves them once, backward once more and their gradients once. Causal work is balanced: every rank has an early and a late part.

Expert parallel (degree e): every rank holds 1/e of the experts. Tokens go to the ranks of their experts and come back: an
all-to-all before and after the experts, and the same again in backward (Lepikhin et al., arXiv 2006.16668). Routing is taken
as balanced. A dispatcher that sends a token once to every place where it is needed (a node, or a rank of one node), instead of one
copy per expert, sends n (1 - (1 - 1/n)^k) of k copies over n places (DeepEP, DeepSeek-V3, arXiv 2412.19437 section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from profiler.opset import OpClass
from profiler.placed import LocalTensor, PlacedBlock, numeric_tensor
from simulator.network import GroupShape, Network
from simulator.pricing import OpPrice
from specs.expr import Expr

# Time that a collective and the work beside it lose to each other, share of the shorter one (arXiv 2507.03114).
INTERFERENCE = 0.19


@dataclass(frozen=True, slots=True)
class Split:
    """How a unit is split besides tp. ``cp_shape``, ``ep_shape``: groups of those axes, None when they have one rank.
    ``whole_experts``: experts are not split over tp, see :class:`specs.plan.Mesh`. ``sends_once``: see the module docstring."""

    cp_shape: GroupShape | None = None
    ep_shape: GroupShape | None = None
    ring: bool = True
    whole_experts: bool = False
    sends_once: bool = False

    @property
    def cp(self) -> int:
        """Ranks that share a sequence."""
        return self.cp_shape.size if self.cp_shape is not None else 1

    @property
    def ep(self) -> int:
        """Ranks that share the experts."""
        return self.ep_shape.size if self.ep_shape is not None else 1


WHOLE = Split()


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Exposed seconds of one unit by time term, forward and backward, and the bytes of one pass through the links."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    num_bytes: float = 0.0


def expert_params(placed: PlacedBlock) -> set[str]:
    """Names of the stacked weights of experts."""
    return {op.inputs[1].name for op in placed.ops if op.op_class == OpClass.GROUPED_GEMM and op.inputs[1].kind == "param"}


def with_local_experts(placed: PlacedBlock, degree: int) -> PlacedBlock:
    """The block with 1/``degree`` of its experts; unchanged where it has none."""
    names = expert_params(placed)
    if degree == 1 or not names:
        return placed

    def local(tensor: LocalTensor) -> LocalTensor:
        if tensor.name not in names:
            return tensor
        count = -(-int(tensor.shape[0](1, 1)) // degree)
        return replace(tensor, shape=(Expr.const(count), *tensor.shape[1:]))

    ops = tuple(replace(op, inputs=tuple(local(tensor) for tensor in op.inputs)) for op in placed.ops)
    return replace(placed, ops=ops, params={name: local(tensor) for name, tensor in placed.params.items()})


def exchanges(
    placed: PlacedBlock, prices: Sequence[OpPrice], network: Network, split: Split, *, batch: int, seq: int, dtype: str
) -> Exchanges:
    """Exposed exchanges of a block. ``seq``: the rank's own share of the sequence."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    moved = 0.0
    if split.cp_shape is not None:
        for op, price in zip(placed.ops, prices, strict=True):
            if op.op_class != OpClass.ATTENTION:
                continue
            whole = split.cp * sum(numeric_tensor(tensor, batch, seq, dtype).bytes for tensor in op.inputs[1:3])
            gather = network.collective("all_gather", whole, split.cp_shape).seconds
            scatter = network.collective("reduce_scatter", whole, split.cp_shape).seconds
            _add(forward, "cp_comm", exposed_s(gather, price.forward_s) if split.ring else gather)
            moves = gather + scatter
            _add(backward, "cp_comm", exposed_s(moves, price.backward_s) if split.ring else moves)
            moved += whole
    if split.ep_shape is not None:
        grouped = [op for op in placed.ops if op.op_class == OpClass.GROUPED_GEMM]
        for tensor in (grouped[0].inputs[0], grouped[-1].outputs[0]) if grouped else ():
            copies = numeric_tensor(tensor, batch, seq, dtype)
            size = float(copies.bytes)
            if split.sends_once:
                size *= distinct_share(copies.numel / copies.shape[-1] / (batch * seq), split.ep_shape)
            seconds = network.collective("all_to_all", size, split.ep_shape).seconds
            _add(forward, "ep_comm", seconds)
            _add(backward, "ep_comm", seconds)
            moved += size
    return Exchanges(forward, backward, moved)


def distinct_share(copies: float, shape: GroupShape) -> float:
    """Places that hold some of ``copies`` evenly drawn experts of a token, over the copies: nodes, or the ranks of one node."""
    places = shape.num_nodes if shape.num_nodes > 1 else shape.size
    return places * (1 - (1 - 1 / places) ** copies) / copies if copies > 1 else 1.0


def exposed_s(comm_s: float, beside_s: float) -> float:
    """What a collective adds to the work that hides it."""
    return max(0.0, comm_s - beside_s) + INTERFERENCE * min(comm_s, beside_s)


def _add(terms: dict[str, float], name: str, seconds: float) -> None:
    terms[name] = terms.get(name, 0.0) + seconds
