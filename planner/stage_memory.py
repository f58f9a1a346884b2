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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats, Prices, UnitPrices, UnitSizes
from planner.sites import Site
from specs.plan import CollectiveOptions
from specs.schedule import SCHEDULES


def in_flight(schedule: str, *, pp: int, num_micro_batches: NDArray[np.int64], chunks: int = 1) -> NDArray[np.int64]:
    """[..., stage] -> micro-batches that a stage holds between forward and backward, at the moment when its rank holds most; where
    a rank has several stages, right before its first backward."""
    passes = num_micro_batches[..., None] + np.zeros(pp, dtype=np.int64)
    ranks = np.arange(pp)
    if pp == 1:
        return np.ones_like(passes)
    if schedule == "gpipe":
        return passes
    if chunks == 1:
        return np.minimum(passes, pp - ranks)
    if SCHEDULES[schedule].placement == "v":  # the second stages stand in the opposite order of ranks
        down, back = 2 * pp - ranks - 1, np.arange(pp)[::-1] + 1
        return np.concatenate([np.minimum(passes, down), np.minimum(passes, back)], axis=-1)
    warmup = np.where(passes == pp, passes * chunks, np.minimum(passes * chunks, 2 * (pp - ranks - 1) + (chunks - 1) * pp + 1))
    rounds, rest = warmup // (pp * chunks), warmup % (pp * chunks)
    return np.concatenate([rounds * pp + np.clip(rest - chunk * pp, 0, pp) for chunk in range(chunks)], axis=-1)


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


def settled_bytes(
    prices: Prices, sizes: UnitSizes, share: Any, *, zero: int, ddp: Any, num_micro_batches: Any
) -> tuple[Floats, Floats]:
    """Per kind: (states and weights that stay during the step, what its gradient adds for the rest of it). ``share`` of the states
    that a rank keeps, ``ddp``: replicated on several dp ranks without a pipeline; these and the micro-batches broadcast."""
    model = prices.model
    weights, grads = sizes.weight_bytes, sizes.grad_bytes
    stays = sizes.trainable * model.state_bytes_per_param[2] * share
    stays = stays + (weights if zero < 3 else 0.0)  # zero 1 and 2 keep gathered weights for the step
    if zero == 3 or (zero and model.precision.master_dtype is None):
        stays = stays + weights * share
    kept = grads * (share if zero >= 2 else 1.0 + 0.0 * share)
    if prices.memory_rules.grads_live_in_buckets:
        stays = stays + np.where(ddp, grads, 0.0)
        kept = np.where(np.logical_and(ddp, np.asarray(num_micro_batches) == 1), 0.0, kept)
    return stays, kept


def unit_memory(prices: Prices, units: UnitPrices, site: Site, *, zero: int, num_micro_batches: int) -> UnitMemory:
    """Bytes per unit of a stage on ``site`` at these prices."""
    rules, sizes = prices.memory_rules, prices.sizes(site)
    weights, grads = sizes.weight_bytes, sizes.grad_bytes
    ddp = zero == 0 and site.dp_shape.size > 1 and site.whole
    stays, kept = settled_bytes(
        prices, sizes, sizes.state_share(site, zero), zero=zero, ddp=ddp, num_micro_batches=num_micro_batches
    )
    sharded = zero > 0 and site.shard_shape.size > 1
    gathered = weights if zero == 3 and sharded else 0.0 * weights
    ahead = CollectiveOptions().prefetch_units
    kind, owner = prices.kind_of_unit, prices.model.tied_owner_unit
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
        size = len(self.memory.stays)
        starts, ends = np.meshgrid(np.arange(size), np.arange(size + 1), indexing="ij")
        peak = self.of_ranges(starts, ends, np.full_like(starts, held), np.full(starts.shape, is_last))
        peak[starts >= ends] = np.inf
        return peak

    def of_split(self, counts: Sequence[int], held: NDArray[np.int64]) -> Floats:
        """Peak bytes of each stage of a split."""
        bounds = np.cumsum((0, *counts))
        is_last = np.arange(len(counts)) == len(counts) - 1
        return self.of_ranges(bounds[:-1], bounds[1:], held, is_last)

    def of_ranges(self, starts: NDArray[Any], ends: NDArray[Any], held: NDArray[Any], is_last: NDArray[np.bool_]) -> Floats:
        """Peak bytes of stages of units [start, end), each not empty."""
        passes = self.num_micro_batches
        stays, grads, saved = (prefix[ends] - prefix[starts] for prefix in (self.stays, self.grads, self.saved))
        base = stays - self.saved[starts]
        output = np.where(is_last, 0.0, self.memory.output[np.maximum(ends - 1, 0)]) if self.keeps_outputs else 0.0
        steady = passes > held
        forward = base + np.where(steady, grads, 0.0) + (held - 1) * (saved + output) + self._forward[starts, ends]
        first = base + self.grads[ends] + (held - 1) * saved + held * output + self._first[starts, ends]
        others = np.where(steady, held - 1, held - 2)
        later = base + grads + others * saved + (others + 1) * output + self._later[starts, ends]
        peak = np.maximum(np.maximum(forward, first), np.where((passes > 1) & (others >= 0), later, 0.0))
        return np.maximum(peak, stays + grads)


def _prefix(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


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
