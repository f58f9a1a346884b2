"""The best plan of each other kind, and what it loses against the chosen one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from planner.candidates import Candidates, Confirmed
from planner.space import Space
from specs.answer import Alternative
from specs.plan import RecomputeMode
from specs.units import format_bytes, format_seconds

# Candidates that a kind may cost before it is given up, and how much faster (by its bound) one must be than the kind's best so far.
TRIES_PER_KIND = 8
WORTH_A_TRY = 0.97

Mask = NDArray[np.bool_]


def kinds(space: Space, chosen: Confirmed) -> Iterator[tuple[str, Mask]]:
    """(name, rows) of every kind of plan that the chosen one is not."""
    rows, strategy = space.rows, chosen.strategy
    layouts = rows["layout"]

    def of_layout(name: str) -> NDArray[np.int64]:
        return np.array([getattr(layout, name) for layout in space.layouts], dtype=np.int64)[layouts]

    pp, tp, dp = of_layout("pp"), of_layout("tp"), of_layout("dp")
    devices = np.array([layout.pool.size for layout in space.layouts], dtype=np.int64)[layouts]
    full = np.array([choice.mode == RecomputeMode.FULL for choice in space.recomputes])[rows["recompute"]]
    yield (
        "data parallel (DDP)",
        _unless(strategy.pp == strategy.tp == 1 and strategy.zero == 0, (pp == 1) & (tp == 1) & (rows["zero"] == 0)),
    )
    for zero in range(1, 4):
        yield f"zero {zero}", _unless(strategy.zero == zero, (rows["zero"] == zero) & (dp > 1))
    yield "tensor parallel", _unless(strategy.tp > 1, tp > 1)
    yield "no tensor parallel", _unless(strategy.tp == 1, tp == 1)
    yield "pipeline", _unless(strategy.pp > 1, pp > 1)
    yield "no pipeline", _unless(strategy.pp == 1, pp == 1)
    yield "full recompute", _unless(strategy.recompute == RecomputeMode.FULL, full)
    yield "no recompute", _unless(strategy.recompute == RecomputeMode.NONE, ~full)
    yield "another micro-batch", rows["micro_batch"] != strategy.micro_batch
    yield "fewer devices", devices < chosen.pool.size
    yield "more devices", devices > chosen.pool.size


def _unless(already: bool, mask: Mask) -> Mask:
    return np.zeros_like(mask) if already else mask


def alternatives(candidates: Candidates, chosen: Confirmed, top: int, out_of_time: Callable[[], bool]) -> list[Alternative]:
    """One alternative of each kind, fastest first, each plan once; at most ``top``. Kinds of which nothing fits are left out."""
    found: dict[int, tuple[Confirmed, list[str]]] = {}
    for name, mask in kinds(candidates.space, chosen):
        if out_of_time():
            break
        best = best_of(candidates, mask)
        if best is not None and best.row != chosen.row:
            found.setdefault(best.row, (best, []))[1].append(name)
    ordered = sorted(found.values(), key=lambda item: (item[0].step_time_s, item[0].row))
    return [
        Alternative(
            strategy=other.plan.strategy, step_time_s=other.step_time_s, peak_bytes=other.prediction.memory.peak_bytes,
            plan=other.plan,
            why_not=f"best with {' and with '.join(names)}: {difference(other, chosen)}",
        )
        for other, names in ordered[:top]
    ]  # fmt: skip


def best_of(candidates: Candidates, mask: Mask, tries: int = TRIES_PER_KIND) -> Confirmed | None:
    """The fastest confirmed candidate of the masked rows, in bound order (within 3 %, and among the first ``tries``); ``None`` when
    none of these fits."""
    best: Confirmed | None = None
    for row in candidates.nearest(np.flatnonzero(mask & candidates.bounds.fits), tries):
        if best is not None and candidates.bound_s(row) >= WORTH_A_TRY * best.step_time_s:
            break
        candidates.refine(row)
        if best is not None and candidates.bound_s(row) >= WORTH_A_TRY * best.step_time_s:
            continue
        found = candidates.confirm(row)
        if isinstance(found, Confirmed) and (best is None or found.step_time_s < best.step_time_s):
            best = found
    return best


def difference(other: Confirmed, chosen: Confirmed) -> str:
    """What ``other`` costs against ``chosen``: step time by term, largest first, and memory."""
    seconds = other.step_time_s - chosen.step_time_s
    share = seconds / chosen.step_time_s
    terms = {**dict.fromkeys(chosen.prediction.waterfall, 0.0), **dict.fromkeys(other.prediction.waterfall, 0.0)}
    deltas = {name: other.prediction.waterfall.get(name, 0.0) - chosen.prediction.waterfall.get(name, 0.0) for name in terms}
    largest = sorted(deltas, key=lambda name: -abs(deltas[name]))
    shown = [f"{name} {_signed(deltas[name])}" for name in largest[:3] if abs(deltas[name]) > 1e-3 * chosen.step_time_s]
    text = f"{_signed(seconds)} ({share:+.1%})" + (": " + ", ".join(shown) if shown else "")
    if other.pool.size != chosen.pool.size:
        text += f"; {other.pool.size} devices instead of {chosen.pool.size} ({other.pool.label})"
    memory = other.prediction.memory.peak_bytes - chosen.prediction.memory.peak_bytes
    return text + f"; peak memory {'+' if memory >= 0 else '-'}{format_bytes(abs(memory))}"


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))
