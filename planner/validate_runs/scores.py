"""How far predictions are from what was measured: over all rows, by source and by device.

Errors are relative: predicted over measured minus one. ``bias`` is their median, ``median_ape``, ``p90_ape`` and ``mape`` are
median, 90th percentile and mean of their magnitudes. Rows count by the quantities that their source printed. A source without a
step time but with a throughput is judged by that; one that prints TFLOPS alone is not, for sources count FLOP differently.
``coverage``: share of the rows whose measured step lies in the predicted 80 % interval.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.validate_runs.predict_row import RunPrediction
from planner.validate_runs.runs import Row


@dataclass(frozen=True, slots=True)
class Judged:
    """A row with its prediction."""

    row: Row
    predicted: RunPrediction

    @property
    def step_error(self) -> float | None:
        """Relative error of the step time (of the time per token where only a throughput was printed)."""
        measured, prediction = self.row.measured, self.predicted.prediction
        if measured.step_s is not None:
            return prediction.step_time_s / measured.step_s - 1
        if measured.tokens_per_s_per_gpu is not None:
            return measured.tokens_per_s_per_gpu / self.predicted.tokens_per_s_per_gpu - 1
        return None

    @property
    def inside_interval(self) -> bool | None:
        """Whether the measured step lies in the predicted interval."""
        error, prediction = self.step_error, self.predicted.prediction
        if error is None:
            return None
        measured_s = prediction.step_time_s / (1 + error)
        return prediction.step_time_low_s <= measured_s <= prediction.step_time_high_s

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory as the source reads it."""
        measured = self.row.measured.peak_memory_bytes
        return None if measured is None else self.predicted.reported_memory_bytes / measured - 1


def summary(errors: Sequence[float]) -> dict[str, float | int | None]:
    """Count and the four figures; figures are None when there is no error."""
    sizes = sorted(abs(error) for error in errors)
    if not sizes:
        return {"rows": 0, "median_ape": None, "p90_ape": None, "mape": None, "bias": None}
    return {
        "rows": len(sizes),
        "median_ape": statistics.median(sizes),
        "p90_ape": sizes[max(0, math.ceil(0.9 * len(sizes)) - 1)],
        "mape": sum(sizes) / len(sizes),
        "bias": statistics.median(errors),
    }


def coverage(judged: Iterable[Judged]) -> float | None:
    """Share of the judged steps inside the predicted interval."""
    inside = [item.inside_interval for item in judged if item.inside_interval is not None]
    return sum(inside) / len(inside) if inside else None


def scores(judged: Sequence[Judged]) -> dict[str, Any]:
    """Step time, peak memory and out-of-memory verdicts."""
    return {
        "step_time": {
            **summary([item.step_error for item in judged if item.step_error is not None]),
            "coverage": coverage(judged),
        },
        "peak_memory": summary([item.memory_error for item in judged if item.memory_error is not None]),
        "oom": out_of_memory(judged),
    }


def out_of_memory(judged: Iterable[Judged]) -> dict[str, int | float | None]:
    """Verdicts on rows that are known to have run or to have run out of memory; positive = predicted not to fit."""
    counts: Counter[str] = Counter()
    for item in judged:
        actual = item.row.measured.out_of_memory
        if actual is not None:
            counts[
                f"{'true' if actual != item.predicted.fits else 'false'}_{'negative' if item.predicted.fits else 'positive'}"
            ] += 1
    total = sum(counts.values())
    names = ("true_positive", "false_positive", "true_negative", "false_negative")
    found: dict[str, int | float | None] = {name: counts[name] for name in names}
    found["accuracy"] = (counts["true_positive"] + counts["true_negative"]) / total if total else None
    return found


def grouped(judged: Sequence[Judged], key: Callable[[Judged], str]) -> dict[str, dict[str, Any]]:
    """The scores of each group, groups in the order of their first row."""
    groups: dict[str, list[Judged]] = {}
    for item in judged:
        groups.setdefault(key(item), []).append(item)
    return {name: scores(items) for name, items in groups.items()}
