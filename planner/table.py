"""All candidates of a search as a table: what each is, what bounds it, and what became of it; and the best by several measures."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.candidates import Candidates, Confirmed
from planner.objective import price_usd_per_s
from planner.strategy_text import recompute_text

COLUMNS = (
    "devices", "pool", "pp", "dp", "cp", "tp", "ep", "whole_experts", "micro_batch", "num_micro_batches", "zero", "shard_group",
    "sequence_parallel", "recompute", "schedule", "chunks", "bound_s", "least_memory_fill", "step_time_s", "peak_bytes", "status",
)  # fmt: skip
# Rows turned into Python values at a time.
PART = 4096


@dataclass(frozen=True)
class CandidateTable:
    """See the module docstring. ``status``: per row ``chosen``, why it was rejected, or empty where the search ended before it was
    judged."""

    candidates: Candidates
    status: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.status)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Values in the order of ``COLUMNS``. Bounds are seconds; a row that memory forbids has none; ``step_time_s`` and
        ``peak_bytes`` only of simulated ones."""
        space, bounds = self.candidates.space, self.candidates.bounds
        recomputes = [recompute_text(choice.mode, choice.op_classes) for choice in space.recomputes]
        for low in range(0, len(self), PART):
            part = space.rows[low : low + PART]
            for offset, row in enumerate(part.tolist()):
                index, values = low + offset, dict(zip(part.dtype.names or (), row, strict=True))
                layout, schedule = space.layouts[values["layout"]], space.schedules[values["schedule"]]
                bound = self.candidates.bound_s(index) if np.isfinite(bounds.time_s[index]) else None
                simulated = self.candidates.simulated(index)
                yield (
                    layout.pool.size, layout.pool.label, layout.pp, layout.dp, layout.cp, layout.tp, layout.ep,
                    layout.whole_experts, values["micro_batch"], values["num_micro_batches"], values["zero"],
                    values["shard_group"] or None,
                    values["sequence_parallel"], recomputes[values["recompute"]], schedule.name if layout.pp > 1 else None,
                    schedule.chunks if layout.pp > 1 else None, bound, float(bounds.fill[index]),
                    simulated.step_time_s if simulated else None, simulated.prediction.memory.peak_bytes if simulated else None,
                    str(self.status[index]),
                )  # fmt: skip

    def write(self, path: str | Path) -> int:
        """Write all candidates to a ``.csv`` file, or a ``.parquet`` one where pandas and a Parquet engine are installed; returns
        how many."""
        if str(path).endswith(".parquet"):
            import pandas

            pandas.DataFrame(self.rows(), columns=list(COLUMNS)).to_parquet(path)
            return len(self)
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(self.rows())
        return len(self)


@dataclass(frozen=True)
class ParetoPoint:
    """A simulated plan that none is better than in step time, memory, devices and cost at once. ``cost_usd``: of a step, ``None``
    without prices."""

    confirmed: Confirmed
    step_time_s: float
    peak_bytes: float
    devices: int
    cost_usd: float | None


def pareto_front(candidates: Candidates, *, tries: int = 4) -> list[ParetoPoint]:
    """Plans of each choice of devices and of each recompute that no simulated plan beats in all of time, memory, devices and cost,
    fastest first. ``tries``: candidates simulated for each in the order of their bounds."""
    space, bounds = candidates.space, candidates.bounds
    pool_number = {id(pool): number for number, pool in enumerate({id(x.pool): x.pool for x in space.layouts}.values())}
    pools = np.array([pool_number[id(layout.pool)] for layout in space.layouts])[space.rows["layout"]]
    found: list[ParetoPoint] = []
    for pool in np.unique(pools).tolist():
        for recompute in range(len(space.recomputes)):
            rows = np.flatnonzero((pools == pool) & (space.rows["recompute"] == recompute) & bounds.fits)
            for row in candidates.nearest(rows, tries):
                confirmed = candidates.confirm(row)
                if isinstance(confirmed, Confirmed):
                    found.append(_point(candidates, confirmed))
    front = [point for point in found if not any(_beats(other, point) for other in found)]
    return sorted(front, key=lambda point: (point.step_time_s, point.devices, point.confirmed.row))


def _point(candidates: Candidates, confirmed: Confirmed) -> ParetoPoint:
    price = price_usd_per_s(candidates.prices.model.cluster, confirmed.pool)
    cost = None if price is None else price * confirmed.step_time_s
    return ParetoPoint(confirmed, confirmed.step_time_s, confirmed.prediction.memory.peak_bytes, confirmed.pool.size, cost)


def _beats(one: ParetoPoint, other: ParetoPoint) -> bool:
    """No worse in anything, and better in something."""
    first = (one.step_time_s, one.peak_bytes, one.devices, one.cost_usd or 0.0)
    second = (other.step_time_s, other.peak_bytes, other.devices, other.cost_usd or 0.0)
    return all(a <= b for a, b in zip(first, second, strict=True)) and first != second
