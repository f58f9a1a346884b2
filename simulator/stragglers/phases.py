"""What the timings of ranks mean: phases, peers that do the same work, groups that meet in collectives; and one number per channel.

A slow device shows in its own compute phase, and in the collectives of all others as waiting; the last to arrive waits for nobody,
so the shortest time in a collective over its group is that of the transfer alone. That keeps slow devices and slow links apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specs.plan import Plan, Stage

Array = NDArray[np.float64]
Kind = Literal["compute", "data", "comm", "wait"]
_TINY_S = 1e-9
# Kinds of the time terms that executors report (specs.terms); waits say nothing about who is slow.
KINDS: dict[str, Kind] = {
    "forward": "compute", "backward": "compute", "recompute": "compute", "optimizer": "compute", "tp_comm": "comm",
    "dp_comm": "comm", "other": "data", "transfer": "data",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a step. ``groups``: of compute and data the ranks that do the same work, of collectives those that meet; ranks in
    no group are not judged. ``wait`` phases are never judged."""

    name: str
    kind: Kind
    groups: tuple[tuple[int, ...], ...]


def phases_of_equal_ranks(names: Sequence[str], num_ranks: int, kinds: Mapping[str, Kind] = KINDS) -> list[Phase]:
    """Phases of ranks that all do the same and meet in one group, as in plain data parallelism."""
    everyone = (tuple(range(num_ranks)),)
    return [Phase(name, kinds.get(name, "wait"), everyone) for name in names]


def phases_of(plan: Plan, names: Sequence[str], kinds: Mapping[str, Kind] = KINDS) -> list[Phase]:
    """Phases of a plan's time terms; rank i is the i-th smallest device that the plan uses. ``kinds``: by name."""
    stages = {stage.devices: stage for pipeline in plan.pipelines for stage in pipeline.stages}
    number = {device: index for index, device in enumerate(sorted({device for devices in stages for device in devices}))}

    def numbered(groups: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(number[device] for device in group) for group in groups)

    peers = numbered(list(stages))
    tp = numbered([group for stage in stages.values() for group in _tp_groups(stage)])
    dp = numbered([group for stage in stages.values() for group in _dp_groups(stage)])
    groups = {"tp_comm": tp, "dp_comm": dp}
    return [Phase(name, kinds.get(name, "wait"), groups.get(name, peers)) for name in names]


def _tp_groups(stage: Stage) -> list[tuple[int, ...]]:
    tp = stage.mesh.tp
    return [stage.devices[start : start + tp] for start in range(0, len(stage.devices), tp)] if tp > 1 else []


def _dp_groups(stage: Stage) -> list[tuple[int, ...]]:
    tp = stage.mesh.tp
    return [stage.devices[first::tp] for first in range(tp)] if len(stage.devices) > tp else []


def channels_of(phase: Phase) -> list[tuple[int, ...]]:
    """The ranks of each channel: one rank, or of collectives the members of a group."""
    if phase.kind == "comm":
        return list(phase.groups)
    return [(rank,) for group in phase.groups for rank in group]


def has_peers(phase: Phase) -> bool:
    """Whether each channel has two others at least to be compared with; else it is compared with its own past."""
    if phase.kind == "comm":
        return len(phase.groups) >= 3
    return bool(phase.groups) and min(len(group) for group in phase.groups) >= 3


def signal(phase: Phase, times_s: Array, step_s: float, work: Array | None) -> Array:
    """One number per channel, 0 where it is as its peers: of compute and links the log of a ratio of times, of data the seconds
    above the peers' in units of the step."""
    if phase.kind == "comm":
        logs = np.log(np.array([max(times_s[list(group)].min(), _TINY_S) for group in phase.groups]))
        return logs - (np.median(logs) if has_peers(phase) else 0.0)
    found = []
    for group in phase.groups:
        values = times_s[list(group)]
        if phase.kind == "data":
            values = values / max(step_s, _TINY_S)
        else:
            share = np.ones(len(group)) if work is None else np.maximum(work[list(group)], _TINY_S)
            values = np.log(np.maximum(values, _TINY_S) / share)
        found.append(values - (np.median(values) if has_peers(phase) else 0.0))
    return np.concatenate(found)
