"""States of a tensor on a device mesh, and what turning one state into another costs.

On one mesh axis a tensor is in one of five states. A state says what the ranks hold and in what form its gradient comes back:

* ``R``    every rank holds all of it; every rank gets the whole gradient.
* ``G``    every rank holds all of it; what comes back is each rank's part of a sum (the input of a column-parallel product).
* ``S(d)`` split along dim d; so is its gradient.
* ``P``    each rank holds a term of a sum; the gradient is whole (the output of a row-parallel product).
* ``X``    rows sorted by expert, each rank holding those of its own experts; so is the gradient.

The collectives of backward mirror those of forward: all-gather <-> reduce-scatter or slice, all-reduce <-> nothing (f and g of
arXiv 1909.08053 section 3, g-bar of arXiv 2205.05198 section 4.2.2). On a mesh of several axes one axis changes after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

from simulator.network import GroupShape, Network
from specs.errors import InvalidInput


class State(NamedTuple):
    """State of a tensor on one mesh axis; see the module docstring. ``dim``: of ``S`` (and 0 of ``X``)."""

    kind: str
    dim: int = -1

    @property
    def divides(self) -> bool:
        """Whether a rank holds a part of the elements only."""
        return self.kind in ("S", "X")

    def text(self) -> str:
        """As explanations write it."""
        return f"S({self.dim})" if self.kind == "S" else {"G": "R", "X": "S(experts)"}.get(self.kind, self.kind)


WHOLE, PARTIAL_GRAD, PARTIAL, BY_EXPERT = State("R"), State("G"), State("P"), State("X", 0)
States = tuple[State, ...]  # one per mesh axis


def split(dim: int) -> State:
    """``S(dim)``."""
    return State("S", dim)


def states_text(states: States) -> str:
    """All axes, e.g. ``S(0) R``."""
    return " ".join(state.text() for state in states)


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis: its name, how many ranks it has and how a group of them lies on the nodes."""

    name: str
    size: int
    shape: GroupShape


@dataclass(frozen=True)
class DeviceMesh:
    """A grid of devices; the last axis varies fastest."""

    axes: tuple[MeshAxis, ...]
    devices: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each axis."""
        return tuple(axis.size for axis in self.axes)


def device_mesh(network: Network, sizes: Sequence[int], names: Sequence[str] = (), devices: Sequence[int] = ()) -> DeviceMesh:
    """A mesh of ``sizes`` on the cluster's first devices (or ``devices``); raises :class:`InvalidInput` where they are too few."""
    total = 1
    for size in sizes:
        total *= size
    ranks = tuple(devices) or tuple(range(total))
    if not sizes or min(sizes) < 1 or len(ranks) != total or max(ranks) >= len(network.places):
        message = f"a mesh of {' x '.join(map(str, sizes)) or 'no'} devices does not lie on {len(network.places)} devices"
        raise InvalidInput.single("mesh_does_not_fit", message, subject="mesh", actual=list(sizes), allowed=len(network.places))
    axes, stride = [], total
    for index, size in enumerate(sizes):
        stride //= size
        group = tuple(ranks[step * stride] for step in range(size))
        axes.append(MeshAxis(names[index] if index < len(names) else f"axis{index}", size, network.shape(group)))
    return DeviceMesh(tuple(axes), ranks)


class Move(NamedTuple):
    """What one axis does: a collective forward and backward, ``None`` where nothing is sent (a slice, or nothing at all)."""

    forward: str | None
    backward: str | None


_NOTHING = Move(None, None)


def move(source: State, target: State) -> Move | None:  # one return a case
    """How ``source`` becomes ``target`` on one axis; ``None`` where there is no way."""
    if source == target:
        return _NOTHING
    pair = (source.kind, target.kind)
    if pair in (("S", "S"), ("S", "X"), ("X", "S")):
        return Move("all_to_all", "all_to_all")
    return _MOVES.get(pair)


_MOVES: dict[tuple[str, str], Move] = {
    ("R", "G"): Move(None, "all_reduce"),
    ("R", "S"): Move(None, "all_gather"),
    ("R", "X"): Move(None, "all_gather"),
    ("G", "S"): _NOTHING,  # a slice; its gradient, zeros elsewhere, is a term of the sum
    ("G", "X"): _NOTHING,
    ("S", "R"): Move("all_gather", None),
    ("X", "R"): Move("all_gather", None),
    ("S", "G"): Move("all_gather", "reduce_scatter"),
    ("X", "G"): Move("all_gather", "reduce_scatter"),
    ("P", "R"): Move("all_reduce", None),
    ("P", "G"): Move("all_reduce", "all_reduce"),
    ("P", "S"): Move("reduce_scatter", "all_gather"),
}


class Sent(NamedTuple):
    """One collective: what it is, on which axis, forward or backward, and its size (all-to-all: a rank's own buffer; all others:
    the tensor that the group holds together) in bytes."""

    op: str
    axis: int
    backward: bool
    size_bytes: float


class Redistributor:
    """Prices changes of states on a mesh."""

    def __init__(self, mesh: DeviceMesh, network: Network) -> None:
        self.mesh, self.network = mesh, network
        self._cheapest = lru_cache(maxsize=None)(self._find)

    def seconds(self, sent: Sent) -> float:
        """Time of one collective."""
        return self.network.collective(sent.op, sent.size_bytes, self.mesh.axes[sent.axis].shape).seconds

    def change(
        self, size_bytes: float, source: States, target: States, *, needs_grad: bool
    ) -> tuple[float, tuple[Sent, ...]] | None:
        """Seconds and collectives that turn ``source`` into ``target``, forward and backward; the cheapest order of axes.
        ``size_bytes``: of the whole tensor. ``None`` where there is no way."""
        return self._cheapest(size_bytes, source, target, needs_grad)

    def _find(self, size_bytes: float, source: States, target: States, needs_grad: bool) -> tuple[float, tuple[Sent, ...]] | None:
        changed = [axis for axis, (old, new) in enumerate(zip(source, target, strict=True)) if old != new]
        if not changed:
            return 0.0, ()
        if any(move(source[axis], target[axis]) is None for axis in changed):
            return None
        found = [self._in_order(size_bytes, source, target, order, needs_grad) for order in permutations(changed)]
        return min(found, key=lambda item: item[0])

    def _in_order(
        self, size_bytes: float, source: States, target: States, order: Sequence[int], needs_grad: bool
    ) -> tuple[float, tuple[Sent, ...]]:
        current, sent = list(source), []
        for axis in order:
            step = move(current[axis], target[axis])
            rest = size_bytes
            for other, state in enumerate(current):
                rest /= self.mesh.sizes[other] if other != axis and state.divides else 1
            for op, backward in ((step.forward, False), (step.backward, True)) if step is not None else ():
                if op is not None and (needs_grad or not backward) and self.mesh.sizes[axis] > 1:
                    sent.append(Sent(op, axis, backward, rest / self.mesh.sizes[axis] if op == "all_to_all" else rest))
            current[axis] = target[axis]
        return sum(self.seconds(item) for item in sent), tuple(sent)
