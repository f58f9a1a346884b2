"""A simulated step played again for many draws of device and link speeds at once: max-plus algebra over arrays.

The event simulation of a plan gives tasks, their streams, dependencies and real durations (beside collectives they take longer).
With the same order of work a task ends at max(its stream is free, its dependencies have ended) + its duration; each duration is
split by what it hangs on and every part multiplied by the draw's factor. With all factors 1 this is the simulated step. What is
beside what is that of the nominal step, the one thing that the replay does not work out anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.engine import Task
from simulator.rank_step import RankStep
from simulator.step import StepResult

Array = NDArray[np.float64]

# What a part of a duration hangs on. SYNC: collectives over all replicas; FINISH: compute after them (the optimizer).
COMPUTE, INTRA, INTER, SYNC, FINISH, FIXED = range(6)
NUM_FACTORS = FIXED  # FIXED has none
_COMPUTE_TERMS = ("forward", "backward", "recompute")
_MAX_COLUMNS = 2048  # columns that stay in the cache together


@dataclass(frozen=True, slots=True)
class Node:
    """A task. ``place``: the (pipeline, rank) whose factors it takes, as a number; ``parts``: seconds by what they hang on."""

    stream: int
    after: tuple[int, ...]
    place: int
    parts: tuple[float, ...]


class Replay:
    """The tasks of one pipeline's step, ready to be played with other speeds. ``messages``: what messages between stages hang on,
    ``INTRA`` or ``INTER``."""

    def __init__(self, result: StepResult, pipeline: int = 0, messages: int = INTER) -> None:
        self.num_places = sum(1 for rank in result.ranks if rank.pipeline == pipeline)
        self.nodes = _nodes(result, pipeline, messages)
        self._last_use = _last_use(self.nodes)

    def seconds(self, kind: int, place: int) -> float:
        """Seconds of a place's tasks that hang on ``kind``."""
        return sum(node.parts[kind] for node in self.nodes if node.place == place)

    def run(self, factors: Array) -> Array:
        """Step times. ``factors``: (NUM_FACTORS, places, draws), on the parts of each place's durations."""
        draws = factors.shape[2]
        pieces = [self._run(factors[:, :, start : start + _MAX_COLUMNS]) for start in range(0, draws, _MAX_COLUMNS)]
        return np.concatenate(pieces) if pieces else np.zeros(0)

    def _run(self, factors: Array) -> Array:
        columns = factors.shape[2]
        free: dict[int, Array] = {}
        ends: dict[int, Array] = {}
        known: dict[tuple[int, tuple[float, ...]], Array] = {}
        for index, node in enumerate(self.nodes):
            key = (node.place, node.parts)
            if key not in known:
                known[key] = _duration(node.parts, factors[:, node.place, :], columns)
            before = [ends[number] for number in node.after]
            if node.stream in free:
                before.append(free[node.stream])
            if len(before) < 2:
                end = before[0] + known[key] if before else known[key]
            else:
                start = np.maximum(before[0], before[1])
                for other in before[2:]:
                    np.maximum(start, other, out=start)
                end = np.add(start, known[key], out=start)
            free[node.stream] = ends[index] = end
            for number in self._last_use[index]:
                del ends[number]
        step = np.zeros(columns)
        for end in free.values():
            np.maximum(step, end, out=step)
        return step


def _duration(parts: tuple[float, ...], factors: Array, columns: int) -> Array:
    total = np.full(columns, parts[FIXED])
    for kind in range(NUM_FACTORS):
        if parts[kind]:
            total += parts[kind] * factors[kind]
    return total


def _nodes(result: StepResult, pipeline: int, messages: int) -> list[Node]:
    """A pipeline's tasks in the order in which they were added: what a task waits for comes before it."""
    tasks = result.engine.tasks
    after = result.engine.dependencies()
    ranks = [rank for rank in result.ranks if rank.pipeline == pipeline]
    place_of = {stream: number for number, rank in enumerate(ranks) for stream in (rank.compute, rank.comm)}
    others = {stream for rank in result.ranks if rank.pipeline != pipeline for stream in (rank.compute, rank.comm)}
    compute = {rank.compute for rank in ranks}
    kinds = [_link_kinds(rank, messages) for rank in ranks]
    nodes: list[Node] = []
    numbers: dict[int, int] = {}
    for task in tasks:
        earlier = after[task.index]
        if task.stream in others or (task.stream not in place_of and earlier[0] not in numbers):
            continue
        before = tuple(numbers[number] for number in earlier)
        place = place_of.get(task.stream)
        if place is None:  # a message takes the factors of the rank that sends it
            place = nodes[before[0]].place
        numbers[task.index] = len(nodes)
        nodes.append(Node(task.stream, before, place, _parts(task, kinds[place], task.stream in compute)))
    return nodes


def _parts(task: Task, kinds: dict[str, int], is_compute: bool) -> tuple[float, ...]:
    """The task's real duration by what it hangs on. What a pass loses beside a collective lasts as long as the collective does."""
    found = [0.0] * (NUM_FACTORS + 1)
    lost = max(0.0, task.end_s - task.start_s - task.duration_s)
    lost = 0.0 if lost < 1e-12 * task.end_s else lost
    for term, seconds in task.terms.items():
        found[kinds.get(term, FIXED)] += seconds
    if not task.terms:
        found[FIXED] += task.duration_s
    if is_compute:
        found[SYNC] += lost
    elif lost:
        found = [part * (1 + lost / task.duration_s) for part in found]
    return tuple(found)


def _link_kinds(rank: RankStep, messages: int) -> dict[str, int]:
    """What each time term of a rank hangs on, by the tier that its collectives cross."""
    cost = next(iter(rank.stages.values()))
    tp = INTRA if cost.tp_shape.tier == "intra" else INTER
    wide = INTRA if cost.dp_shape.tier == "intra" else INTER
    kinds = dict.fromkeys(_COMPUTE_TERMS, COMPUTE)
    return kinds | {
        "tp_comm": tp, "cp_comm": wide, "ep_comm": wide, "pipeline": messages, "dp_comm": SYNC, "optimizer": FINISH,
    }  # fmt: skip


def _last_use(nodes: list[Node]) -> list[list[int]]:
    """For each task the earlier ones whose end nothing reads after it (streams keep their own last end)."""
    last = {index: index for index in range(len(nodes))}
    for index, node in enumerate(nodes):
        for number in node.after:
            last[number] = index
    found: list[list[int]] = [[] for _ in nodes]
    for number, index in last.items():
        found[index].append(number)
    return found
