"""Which measurements a fit sees and which it is judged by: whole (n, k) pairs, or whole groups, stay unseen."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profiler.fit.records import Error

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

HELD_OUT_SHARE = 0.25
FOLDS = 5


def held_out(groups: Array, rng: np.random.Generator, share: float = HELD_OUT_SHARE) -> Mask:
    """Rows whose group is held out."""
    distinct = np.unique(groups)
    chosen = distinct[rng.random(len(distinct)) < share]
    if len(chosen) in (0, len(distinct)):  # few groups: take one
        chosen = distinct[rng.integers(len(distinct), size=1)]
    return np.isin(groups, chosen)


def folds(groups: Array, rng: np.random.Generator, count: int = FOLDS) -> list[Mask]:
    """Rows of each fold; a group lies in one fold."""
    distinct = rng.permutation(np.unique(groups))
    return [np.isin(groups, part) for part in np.array_split(distinct, min(count, len(distinct)))]


def choose(rows: NDArray[np.int64], count: int, rng: np.random.Generator, weights: Array | None = None) -> NDArray[np.int64]:
    """At most ``count`` of the rows, without repeats."""
    if len(rows) <= count:
        return rows
    share = None if weights is None else weights / weights.sum()
    return np.sort(rng.choice(rows, count, replace=False, p=share))


def error_of(predicted: Array, measured: Array, method: str) -> Error | None:
    """APE statistics; ``None`` without data."""
    if len(measured) == 0:
        return None
    ape = np.abs(predicted / measured - 1)
    return Error(method=method, points=len(ape), median_ape=_digits(np.median(ape)), mape=_digits(ape.mean()))


def _digits(value: np.floating) -> float:
    return float(f"{float(value):.4g}")
