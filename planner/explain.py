"""Why this plan: each choice with its nearest alternative and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.alternatives import Mask, best_of, difference
from planner.candidates import Candidates, Confirmed
from planner.strategy_text import recompute_text
from simulator.memory_report import loss_memory, memory_notes
from simulator.rank_memory import fill
from specs.answer import Alternative
from specs.memory import LossMemory
from specs.plan import RecomputeMode
from specs.units import format_bytes, format_seconds

# Neighbours of a choice that are simulated before it is called the nearest.
TRIES_PER_CHOICE = 4


def explain(
    candidates: Candidates,
    chosen: Confirmed,
    others: Sequence[Alternative],
    fixed: Mapping[str, Any],
    out_of_time: Callable[[], bool] = lambda: False,
) -> list[str]:
    """One line a choice, after one on the plan itself. Choices not reached in time are left out."""
    prediction, strategy = chosen.prediction, chosen.strategy
    devices = f"{chosen.pool.size} devices ({chosen.pool.label})"
    lines = [
        f"{chosen.plan.strategy}: {format_seconds(chosen.step_time_s)} a step on {devices}, "
        f"{prediction.tokens_per_s:.0f} tokens/s, {prediction.tokens_per_s / chosen.pool.size:.0f} a device; "
        f"peak {format_bytes(prediction.memory.peak_bytes)} of {format_bytes(prediction.memory.capacity_bytes)}"
    ]
    for choice in _choices(candidates, chosen):
        if out_of_time():
            break
        if choice.name in fixed:
            lines.append(f"{choice.name}={choice.value}: given, not searched")
        elif choice.mask.any():
            lines.append(f"{choice.name}={choice.value}: {_nearest(candidates, chosen, choice)}")
    if strategy.split is not None and len(set(strategy.split)) > 1:
        lines.append(f"split {','.join(map(str, strategy.split))}: units balanced by time within each stage's memory")
    if "performance_risk" in prediction.flags:
        lines.append(
            f"performance risk: {fill(prediction.memory):.1%} of the device with margin and baseline, above 95 %: it fits, but the "
            "allocator may have to free and retry in every step, which costs time"
        )
    lines += memory_notes(candidates.prices.model, [rank.memory for rank in prediction.ranks], _loss(candidates, chosen))
    if others:
        lines.append(f"best plan of another kind: {others[0].strategy}, {others[0].why_not}")
    return lines


def _loss(candidates: Candidates, chosen: Confirmed) -> LossMemory | None:
    return loss_memory(candidates.prices.model, chosen.strategy.micro_batch)


@dataclass(frozen=True)
class _Choice:
    """A dimension, the chosen value in words, and the rows that differ in it alone (dp follows)."""

    name: str
    value: str
    mask: Mask


def _choices(candidates: Candidates, chosen: Confirmed) -> Iterator[_Choice]:
    space, row = candidates.space, candidates.space.rows[chosen.row]
    rows, layouts, own = space.rows, space.layouts, space.layout(chosen.row)
    same_pool = np.array([layout.pool is own.pool for layout in layouts])[rows["layout"]]
    same_pp = np.array([layout.pp == own.pp for layout in layouts])[rows["layout"]]
    same_tp = np.array([layout.tp == own.tp for layout in layouts])[rows["layout"]]
    equal = {name: rows[name] == row[name] for name in ("micro_batch", "zero", "sequence_parallel", "recompute", "schedule")}
    same_group = rows["shard_group"] == row["shard_group"]
    inner = same_pool & equal["schedule"]
    yield _Choice("tp", str(own.tp), inner & same_pp & ~same_tp & equal["micro_batch"] & equal["zero"] & equal["recompute"])
    yield _Choice("pp", str(own.pp), inner & ~same_pp & same_tp & equal["micro_batch"] & equal["zero"] & equal["recompute"])
    shape = inner & same_pp & same_tp & equal["sequence_parallel"]
    yield _Choice("zero", str(chosen.strategy.zero), shape & equal["micro_batch"] & ~equal["zero"] & equal["recompute"])
    recompute = recompute_text(chosen.strategy.recompute, chosen.strategy.op_classes)
    yield _Choice("recompute", recompute, shape & same_group & equal["micro_batch"] & equal["zero"] & ~equal["recompute"])
    micro_batch = shape & same_group & ~equal["micro_batch"] & equal["zero"] & equal["recompute"]
    yield _Choice("micro_batch", str(chosen.strategy.micro_batch), micro_batch)
    if own.tp > 1:
        parallel = inner & same_pp & same_tp & same_group & equal["micro_batch"] & equal["zero"] & equal["recompute"]
        yield _Choice("sequence_parallel", str(chosen.strategy.sequence_parallel).lower(), parallel & ~equal["sequence_parallel"])


def _nearest(candidates: Candidates, chosen: Confirmed, choice: _Choice) -> str:
    """The best plan that differs in this choice alone, or why there is none."""
    best = best_of(candidates, choice.mask, TRIES_PER_CHOICE)
    if best is not None:
        return f"with {_value(best, choice.name)} {difference(best, chosen)}"
    rows = np.flatnonzero(choice.mask)
    closest = int(rows[np.argmin(candidates.bounds.fill[rows])])
    value = _value_of_row(candidates, closest, choice.name)
    fill = float(candidates.bounds.fill[closest])
    missed = candidates.memory_misses.get(closest)
    if missed is not None:
        return f"anything else does not fit; {value} misses {format_bytes(missed.missing_bytes)} on its fullest device"
    need = f"at least {max(fill - 1, 1e-3):.1%} more memory" if np.isfinite(fill) else "more memory for a single unit alone"
    return f"anything else does not fit; {value} needs {need}"


def _value(confirmed: Confirmed, name: str) -> str:
    strategy = confirmed.strategy
    if name == "recompute":
        return f"recompute={recompute_text(strategy.recompute, strategy.op_classes)}"
    value = getattr(strategy, name)
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def _value_of_row(candidates: Candidates, row: int, name: str) -> str:
    strategy = candidates.space.strategy(row)
    value = (
        strategy.recompute.value
        if isinstance(strategy.recompute, RecomputeMode) and name == "recompute"
        else getattr(strategy, name)
    )
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"
