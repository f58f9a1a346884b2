"""Memory of the ranks of a pipeline by walking its rows stage by stage: what every action adds and takes, as cumulative sums.

The closed form of ``planner.stage_memory`` knows one stage a rank and whole backwards; this walk knows every schedule. What a stage
needs within an action is worked out once from its units (``StageNeeds``), so a walk is a few array operations. The peak is that of
``simulator.memory``: a test compares them. Rows of very many micro-batches repeat, and are walked with fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats, Prices, UnitPrices
from planner.schedule_path import KINDS, few_micro_batches
from planner.sites import Site
from planner.stage_memory import unit_memory
from specs.schedule import SCHEDULES, passes_of, rows_for, stage_ranks

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StageNeeds:
    """Bytes per stage. ``saved``: of a micro-batch between forward and backward, ``waiting``: of it until weight gradients are
    made, ``output``: of a stage that sends on. ``stays``: states and weights, ``grads``: what gradients add for good.
    ``in_forward``: most beyond what was held before it; ``in_backward`` [first time, later] and ``in_input`` (the first part of a
    split one): beyond what is held before without the micro-batch's own ``saved``; ``in_weight`` [first time, later] beyond what
    is held before. ``beside``: most that a forward holds beyond what it keeps, while a backward runs beside it."""

    saved: Floats
    waiting: Floats
    output: Floats
    stays: Floats
    grads: Floats
    in_forward: Floats
    in_backward: Floats
    in_input: Floats
    in_weight: Floats
    beside: Floats


def stage_needs(prices: Prices, units: UnitPrices, site: Site, split: Sequence[int], *, zero: int) -> StageNeeds:
    """Needs of the stages of a split under a pipeline (zero 2 at most). ``units``, ``site``: of any rank; alike in memory."""
    memory, kind = unit_memory(prices, units, site, zero=zero, num_micro_batches=2), prices.kind_of_unit
    waiting, starts = units.weight_saved_bytes[kind], np.cumsum((0, *split))[:-1]
    saved, kept, full = memory.saved, memory.kept_grad, memory.grad
    new = np.where(kept < full, full, 0.0)  # what a gradient takes before it is where it stays

    def totals(values: Floats) -> Floats:
        return np.asarray(np.add.reduceat(values, starts))

    def most(values: Floats) -> Floats:
        return np.asarray(np.maximum.reduceat(values, starts))

    def upto(values: Floats) -> Floats:
        """Sums over a stage's units up to each one."""
        sums = np.cumsum(values)
        return sums - np.repeat((sums - values)[starts], split)

    def behind(values: Floats) -> Floats:
        """Sums over a stage's units behind each one."""
        return np.repeat(totals(values), split) - upto(values)

    output = memory.output[np.cumsum(split) - 1] if prices.memory_rules.keeps_stage_outputs else np.zeros(len(split))
    output[-1] = 0.0
    grown, own = behind(kept) + kept, (np.maximum(new, memory.flat_grads), np.maximum(full, memory.flat_grads))
    peaks = [np.maximum(memory.backward_peak + grad, memory.flat_grads) for grad in (new, full)]
    return StageNeeds(
        saved=totals(saved), waiting=totals(waiting), output=output, stays=totals(memory.stays), grads=totals(kept),
        in_forward=most(upto(saved) - saved + np.maximum(saved + memory.forward_peak, memory.flat_weights)),
        in_backward=np.stack([most(upto(saved) + grown + peaks[0]), most(upto(saved) + peaks[1])]),
        in_input=most(upto(saved) + behind(waiting) + units.input_backward_peak_bytes[kind]),
        in_weight=np.stack([most(grown + own[0] - behind(waiting)), most(own[1] - behind(waiting))]),
        beside=most(memory.forward_peak),
    )  # fmt: skip


@dataclass(frozen=True)
class _Row:
    """A rank's actions as arrays: kind, stage, whether it is the first to make the stage's gradients, and the stage whose forward
    runs beside it (-1: none)."""

    kind: Ints
    stage: Ints
    first: NDArray[np.bool_]
    beside: Ints


@lru_cache(maxsize=512)
def _rows(schedule: str, num_ranks: int, num_micro_batches: int, chunks: int) -> tuple[_Row, ...]:
    found = []
    for row in rows_for(schedule, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=chunks):
        kinds, stages, firsts, beside, seen = [], [], [], [], set()
        for actions in passes_of(row, overlaps=SCHEDULES[schedule].overlaps):
            for action in actions:
                makes = action.kind in "BW" and action.stage not in seen
                seen |= {action.stage} if makes else set()
                kinds.append(KINDS.index(action.kind))
                stages.append(action.stage)
                firsts.append(makes)
                beside.append(actions[0].stage if len(actions) > 1 and action.kind != "F" else -1)
        found.append(_Row(np.array(kinds), np.array(stages), np.array(firsts), np.array(beside)))
    return tuple(found)


def repeating_micro_batches(schedule: str, num_ranks: int, num_micro_batches: int) -> int:
    """Micro-batches of rows that hold as many as rows of ``num_micro_batches`` do."""
    if schedule == "gpipe":  # holds all of them
        return num_micro_batches
    return few_micro_batches(schedule, num_ranks, num_micro_batches)


def rank_peaks(schedule: str, needs: StageNeeds, *, num_ranks: int, num_micro_batches: int, chunks: int) -> Floats:
    """Peak bytes of each rank."""
    few = repeating_micro_batches(schedule, num_ranks, num_micro_batches)
    rows = _together(schedule, num_ranks, few, chunks)
    kind, stage = rows.kind, rows.stage
    forward, backward, first_part, weight = (kind == index for index in range(4))
    saved, output, waiting = needs.saved[stage], needs.output[stage], needs.waiting[stage]
    enters = forward.astype(float) - (backward | first_part)
    waits = first_part.astype(float) - weight
    change = enters * (saved + output) + waits * waiting + rows.first * needs.grads[stage]
    owner = np.array(stage_ranks(schedule, num_ranks=num_ranks, stages_per_rank=chunks))
    stays, grads = (np.bincount(owner, weights=item, minlength=num_ranks) for item in (needs.stays, needs.grads))
    before = stays[:, None] + np.cumsum(change, axis=1) - change
    later = (~rows.first).astype(np.int64)
    within = np.select(
        [forward, backward, first_part, weight],
        [
            needs.in_forward[stage], needs.in_backward[later, stage] - saved, needs.in_input[stage] - saved,
            needs.in_weight[later, stage],
        ],
        -np.inf,
    )  # fmt: skip
    within = within + np.where(rows.beside >= 0, needs.beside[rows.beside], 0.0)
    return np.asarray(np.maximum((before + within).max(axis=1), stays + grads), dtype=float)


@lru_cache(maxsize=512)
def _together(schedule: str, num_ranks: int, num_micro_batches: int, chunks: int) -> _Row:
    """The rows of all ranks, [rank, action]; kind -1 fills up shorter ones."""
    rows = _rows(schedule, num_ranks, num_micro_batches, chunks)
    length = max(len(row.kind) for row in rows)

    def filled(name: str, value: int) -> NDArray[Any]:
        return np.stack([
            np.pad(getattr(row, name), (0, length - len(row.kind)), constant_values=value) for row in rows
        ])  # fmt: skip

    return _Row(filled("kind", -1), filled("stage", 0), filled("first", 0), filled("beside", -1))


@dataclass(frozen=True)
class Moments:
    """Moments at which a rank holds most, two for each rank: before its first backward, and when all of its stages have gradients.
    [moment, stage]: micro-batches held, and those that wait for weight gradients."""

    held: Floats
    waiting: Floats


@lru_cache(maxsize=512)
def moments(schedule: str, num_ranks: int, num_micro_batches: int, chunks: int) -> Moments:
    """Of a named schedule; a second moment that a short row never has holds nothing."""
    few = repeating_micro_batches(schedule, num_ranks, num_micro_batches)
    held = np.zeros((2, num_ranks * chunks))
    waiting = np.zeros_like(held)
    for row in _rows(schedule, num_ranks, few, chunks):
        own = np.unique(row.stage)
        is_own = row.stage[None, :] == own[:, None]
        level = np.cumsum(is_own * np.select([row.kind == 0, row.kind == 3], [1, 0], -1), axis=1)
        left = np.cumsum(is_own * np.select([row.kind == 2, row.kind == 3], [1, -1], 0), axis=1)
        made = np.cumsum(is_own * row.first, axis=1).min(axis=0) > 0
        total = level.sum(axis=0)
        none_made = np.cumsum(row.first) == 0
        for index, allowed in enumerate((none_made, made)):
            if allowed.any():
                at = int(np.argmax(np.where(allowed, total, -1)))
                held[index, own], waiting[index, own] = level[:, at], left[:, at]
    return Moments(held, waiting)
