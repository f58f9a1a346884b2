"""Peak memory of every possible stage: all unit ranges [a, b) at once.

The closed form of what ``simulator.memory`` finds by walking a rank's actions, for schedules with one stage a rank. A stage holds
at most ``k`` micro-batches between forward and backward. Its peak is the largest of

forward    of the k-th micro-batch    S + grads [if m > k] + (k-1) saved + saved of the units before i + what unit i needs
backward   of the first of k          S + grads of units after i + (k-1) saved + saved up to i + what unit i needs
backward   later                      S + grads + (k-1 if m > k, else k-2) saved + saved up to i + what unit i needs + its gradient

over the units i of the range; S is what stays during the step. Sums over a range are differences of prefix sums, maxima are running
maxima. A test compares it with the walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats, Prices, UnitPrices, UnitSizes
from planner.sites import Site
from specs.plan import CollectiveOptions


def in_flight(schedule: str, *, pp: int, num_micro_batches: NDArray[np.int64]) -> NDArray[np.int64]:
    """[..., stage] -> micro-batches that a stage holds at most between forward and backward."""
    passes = num_micro_batches[..., None] + np.zeros(pp, dtype=np.int64)
    if pp == 1:
        return np.ones_like(passes)
    return passes if schedule == "gpipe" else np.minimum(passes, pp - np.arange(pp))


@dataclass(frozen=True)
class UnitMemory:
    """Bytes per unit. ``stays``: states and weights that stay gathered. ``kept_grad``: what its gradient adds for the rest of the
    step; ``grad``: the full gradient. ``flat_weights`` / ``flat_grads``: buffers of gathering and reducing. ``forward_gathered`` /
    ``backward_gathered``: weights gathered while it runs (zero 3). ``tied_grad``: the head's part of a tied gradient that waits."""

    stays: Floats
    kept_grad: Floats
    grad: Floats
    saved: Floats
    forward_peak: Floats
    backward_peak: Floats
    output: Floats
    flat_weights: Floats
    flat_grads: Floats
    forward_gathered: Floats
    backward_gathered: Floats
    tied_grad: Floats


def unit_memory(
    prices: Prices, units: UnitPrices, sizes: UnitSizes, *, zero: int, shard_degree: int, ddp: bool, num_micro_batches: int
) -> UnitMemory:
    """Bytes per unit of a stage at these prices. ``ddp``: zero 0 on several dp ranks without a pipeline."""
    model, rules = prices.model, prices.memory_rules
    _, _, state_bytes = model.state_bytes_per_param
    share = 1.0 / shard_degree if zero else 1.0
    weights, grads = sizes.weight_bytes, sizes.grad_bytes
    stays = sizes.trainable * state_bytes * share
    stays = stays + (weights if zero < 3 else 0.0)  # zero 1 and 2 keep gathered weights for the step
    if zero == 3 or (zero and model.precision.master_dtype is None):
        stays = stays + weights * share
    in_buckets = ddp and rules.grads_live_in_buckets
    kept = grads * share if zero >= 2 else grads
    if in_buckets:
        stays = stays + grads
        kept = grads if num_micro_batches > 1 else 0.0 * grads
    sharded = zero > 0 and shard_degree > 1
    gathered = weights if zero == 3 and sharded else 0.0 * weights
    ahead = CollectiveOptions().prefetch_units
    kind, owner = prices.kind_of_unit, model.tied_owner_unit
    index = np.arange(len(kind))
    shared = sizes.tied_weight_bytes if zero == 3 and sharded else 0.0
    beyond = index - (owner or 0)  # units behind the owner of a tied parameter
    return UnitMemory(
        stays=stays[kind], kept_grad=kept[kind], grad=grads[kind], saved=units.saved_bytes[kind],
        forward_peak=units.forward_peak_bytes[kind], backward_peak=units.backward_peak_bytes[kind],
        output=units.output_bytes[kind],
        flat_weights=rules.flat_copies * weights[kind] if sharded else 0.0 * weights[kind],
        flat_grads=(1 + rules.flat_copies) * grads[kind] if sharded and zero >= 2 else 0.0 * grads[kind],
        forward_gathered=_window(gathered[kind], ahead) + np.where((beyond > 0) | (beyond < -ahead), shared, 0.0),
        backward_gathered=_window(gathered[kind][::-1], ahead)[::-1] + np.where((beyond > ahead) | (beyond < 0), shared, 0.0),
        tied_grad=np.where(beyond >= 0, sizes.tied_grad_bytes, 0.0),
    )  # fmt: skip


def _window(values: Floats, ahead: int) -> Floats:
    """Each value with the next ``ahead`` ones."""
    total = values.copy()
    for shift in range(1, ahead + 1):
        total[:-shift] += values[shift:]
    return total


class RangePeaks:
    """Peaks of all unit ranges; what does not depend on the stage is computed once."""

    def __init__(self, memory: UnitMemory, *, num_micro_batches: int, keeps_outputs: bool) -> None:
        self.memory, self.num_micro_batches, self.keeps_outputs = memory, num_micro_batches, keeps_outputs
        self.stays, self.grads, self.saved = (_prefix(item) for item in (memory.stays, memory.kept_grad, memory.saved))
        own = np.where(memory.kept_grad < memory.grad, memory.grad, 0.0)
        forward = np.maximum(memory.saved + memory.forward_peak, memory.flat_weights) + memory.forward_gathered
        first = np.maximum(memory.backward_peak + own + memory.tied_grad, memory.flat_grads) + memory.backward_gathered
        later = np.maximum(memory.backward_peak + memory.grad + memory.tied_grad, memory.flat_grads) + memory.backward_gathered
        self._forward = _running_max(self.saved[:-1] + forward)
        self._first = _running_max(self.saved[1:] + first - self.grads[:-1])
        self._later = _running_max(self.saved[1:] + later)

    def peaks(self, *, held: int, is_last: bool) -> Floats:
        """[a, b] -> peak bytes of a stage of units [a, b) that holds ``held`` micro-batches; infinite where b <= a. (U x U+1)"""
        passes = self.num_micro_batches
        stays, grads, saved = (_ranges(item) for item in (self.stays, self.grads, self.saved))
        base = stays - self.saved[:-1, None]
        output = np.zeros_like(stays)
        if self.keeps_outputs and not is_last:
            output[:, 1:] = self.memory.output[None, :]
        forward = base + (grads if passes > held else 0.0) + (held - 1) * (saved + output) + self._forward
        first = base + self.grads[None, :] + (held - 1) * saved + held * output + self._first
        peak = np.maximum(forward, first)
        if passes > 1:
            others = held - 1 if passes > held else held - 2
            if others >= 0:
                peak = np.maximum(peak, base + grads + others * saved + (others + 1) * output + self._later)
        peak = np.maximum(peak, stays + grads)
        peak[np.arange(len(peak))[:, None] >= np.arange(peak.shape[1])[None, :]] = np.inf
        return peak


def _prefix(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _ranges(prefix: Floats) -> Floats:
    """[a, b] -> sum over [a, b)."""
    return prefix[None, :] - prefix[:-1, None]


def _running_max(values: Floats) -> Floats:
    """[a, b] -> largest of ``values[a:b]``; -infinite where empty. (U x U+1)"""
    size = len(values)
    table = np.where(np.arange(size)[:, None] <= np.arange(size)[None, :], values[None, :], -np.inf)
    return np.concatenate([np.full((size, 1), -np.inf), np.maximum.accumulate(table, axis=1)], axis=1)


def stage_peaks(peaks: RangePeaks, *, schedule: str, pp: int, num_micro_batches: int) -> list[Floats]:
    """One table of :meth:`RangePeaks.peaks` per stage."""
    held = in_flight(schedule, pp=pp, num_micro_batches=np.array(num_micro_batches))
    return [peaks.peaks(held=int(held[stage]), is_last=stage == pp - 1) for stage in range(pp)]


def furthest_ends(tables: Sequence[Floats], sites: Sequence[Site], slack_bytes: float = 0.0) -> NDArray[np.int64]:
    """[stage, a] -> the largest b so that units [a, b) fit the stage's memory; a where not even one unit does. (pp x U)"""
    rows = []
    for table, site in zip(tables, sites, strict=True):
        fits = table <= site.budget_bytes + slack_bytes
        starts = np.arange(len(table))
        beyond = np.where(np.arange(table.shape[1])[None, :] > starts[:, None], ~fits, False)
        first_bad = np.where(beyond.any(axis=1), beyond.argmax(axis=1), table.shape[1])
        rows.append(first_bad - 1)
    return np.array(rows, dtype=np.int64)


def missing_bytes(tables: Sequence[Floats], sites: Sequence[Site]) -> float:
    """How many bytes more each stage would need for the best split to fit; 0 when it fits."""
    low, high = 0.0, max(float(np.max(table[np.isfinite(table)])) for table in tables)
    if _reaches_end(furthest_ends(tables, sites)):
        return 0.0
    while high - low > 2.0**20:
        middle = (low + high) / 2
        low, high = (low, middle) if _reaches_end(furthest_ends(tables, sites, middle)) else (middle, high)
    return high


def _reaches_end(ends: NDArray[np.int64]) -> bool:
    """Whether filling each stage as far as it goes covers all units, each stage holding at least one."""
    stages, units = ends.shape
    start = 0
    for stage in range(stages):
        end = min(int(ends[stage][start]), units - (stages - 1 - stage))
        if end <= start:
            return False
        start = end
    return start == units
