"""Cutting a flat trace into units: the children of repeated containers, and the stretches between them. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from profiler.trace import TracedOp


@dataclass(frozen=True)
class Unit:
    """Consecutive ops. ``prefix``: the module that they belong to (``model.layers.3``), "" for a stretch between containers.

    ``index`` is the last component of ``prefix`` where that is a number.
    """

    ops: tuple[TracedOp, ...]
    prefix: str = ""

    @property
    def index(self) -> int | None:
        """Position in the container, ``None`` outside of one."""
        last = self.prefix.rpartition(".")[2]
        return int(last) if last.isdigit() else None

    @property
    def container(self) -> str:
        """Module path of the container."""
        return self.prefix.rpartition(".")[0]


UnitKey = Callable[[Unit], Hashable]


def split_named(ops: Sequence[TracedOp], prefixes: Sequence[str]) -> list[Unit]:
    """One unit per given module, in that order; ops outside all of them go to the unit before (the first ones to the first).

    Returns an empty list when the ops don't run in the order of the prefixes.
    """
    position = 0
    groups: list[list[TracedOp]] = [[] for _ in prefixes]
    for op in ops:
        owner = next((index for index, prefix in enumerate(prefixes) if _inside(op.module_path, prefix)), position)
        if owner < position:
            return []
        position = owner
        groups[owner].append(op)
    return [Unit(tuple(group), prefix) for group, prefix in zip(groups, prefixes, strict=True) if group]


def split_repeated(ops: Sequence[TracedOp], key: UnitKey) -> list[Unit]:
    """Units found by repetition: the outermost numbered containers in which two neighbours are equal under ``key``.

    A container without equal neighbours is opened, and what it holds is searched the same way. Ops that run between two
    children of a container, outside both, are counted to the earlier one or to the later one, whichever folds better.
    """
    candidates = [_join_plain(list(_split(ops, 1, key, glue_forward=forward))) for forward in (False, True)]
    return min(candidates, key=lambda units: _distinct_runs(units, key))


def _split(ops: Sequence[TracedOp], depth: int, key: UnitKey, *, glue_forward: bool) -> Iterator[Unit]:
    labels = _glued([_numbered_prefix(op.module_path, depth) for op in ops], glue_forward=glue_forward)
    labelled = list(zip(ops, labels, strict=True))
    for container, group in groupby(labelled, key=lambda pair: None if pair[1] is None else pair[1].rpartition(".")[0]):
        members = list(group)
        if container is None:
            yield Unit(tuple(op for op, _ in members))
            continue
        units = [Unit(tuple(op for op, _ in part), label or "") for label, part in groupby(members, key=lambda pair: pair[1])]
        if _has_equal_neighbours(units, key):
            yield from units
        elif any(_numbered_prefix(op.module_path, depth + 1) for op, _ in members):
            yield from _split([op for op, _ in members], depth + 1, key, glue_forward=glue_forward)
        else:
            yield Unit(tuple(op for op, _ in members))


def _join_plain(units: Sequence[Unit]) -> list[Unit]:
    """Neighbouring stretches outside of containers become one."""
    joined: list[Unit] = []
    for unit in units:
        if joined and not joined[-1].prefix and not unit.prefix:
            joined[-1] = Unit(joined[-1].ops + unit.ops)
        else:
            joined.append(unit)
    return joined


def _distinct_runs(units: Sequence[Unit], key: UnitKey) -> int:
    return sum(1 for _ in groupby(units, key=key))


def _has_equal_neighbours(units: Sequence[Unit], key: UnitKey) -> bool:
    keys = [key(unit) for unit in units]
    return any(left == right for left, right in pairwise(keys))


def _numbered_prefix(path: str, depth: int) -> str | None:
    """``a.3.b.1.c`` at depth 1 -> ``a.3``, at depth 2 -> ``a.3.b.1``; ``None`` where the path has fewer numbers."""
    ends = [match.end() for match in re.finditer(r"(?:^|(?<=\.))\d+(?=\.|$)", path)]
    return path[: ends[depth - 1]] if len(ends) >= depth else None


def _glued(labels: list[str | None], *, glue_forward: bool) -> list[str | None]:
    """Give unlabelled stretches between two children of one container the label of a neighbour."""
    result = list(labels)
    position = 0
    for label, group in groupby(labels):
        size = len(list(group))
        start, end = position, position + size
        position = end
        if label is not None or start == 0 or end == len(labels):
            continue
        left, right = labels[start - 1], labels[end]
        if left and right and left != right and left.rpartition(".")[0] == right.rpartition(".")[0]:
            result[start:end] = [right if glue_forward else left] * size
    return result


def _inside(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + ".")
