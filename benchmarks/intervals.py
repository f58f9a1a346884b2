"""Fit the widths of the step time's 80 % interval on the fit sources of published runs; print what it covers, on the check too.

    python -m benchmarks.intervals runs.csv [--write]

Each width is the one of ``simulator.interval`` that makes the sum of the pinball losses of the 10 % and the 90 % quantile of
log(measured / predicted) least, within its bounds; ``kernels`` and ``measured`` are stated and stay. Sources count alike, however
many rows they have: a prediction is asked for a site that is in no table, and sites differ by more than the rows of one. Left out,
each source in turn, is how an unknown one would fare. The check sources are only counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.validate_runs.runs import read_runs
from planner.validate_runs.scores import Judged
from planner.validate_runs.sets import set_of, source_of
from planner.validate_runs.validate import validate_rows
from profiler.decoder_graph import decoder_graph
from simulator.interval import EXPOSURES, Widths, widths

PACKAGED = Path(__file__).parent.parent / "traces" / "intervals.json"
TAIL = 0.1
# Bounds: an interval is no narrower than the errors that the kernels' own fits show on unseen data, and no single cause is off by
# more than a factor of e.
BOUNDS = {
    "low": (1.0, 5.0), "high": (1.0, 5.0), "intra": (0.0, 1.0), "inter": (0.0, 1.0), "pipeline": (0.0, 1.0), "scale": (0.0, 0.1),
}  # fmt: skip
STEPS = 40
MOST_ROUNDS = 40

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """``misses``: log(measured / predicted); ``exposures`` by name and ``weights``, one entry a row."""

    misses: Vector
    exposures: Mapping[str, Vector]
    sources: NDArray[np.str_]

    @classmethod
    def of(cls, judged: Sequence[Judged]) -> Rows:
        """The rows with a step error."""
        items = [item for item in judged if item.step_error is not None]
        found = [item.predicted.prediction.exposures for item in items]
        return cls(
            -np.log1p(np.array([item.step_error for item in items], dtype=float)),
            {name: np.array([one.get(name, 0.0) for one in found]) for name in EXPOSURES},
            np.array([source_of(item.row.run) for item in items]),
        )

    def where(self, mask: NDArray[np.bool_]) -> Rows:
        """Some of the rows."""
        return Rows(self.misses[mask], {name: values[mask] for name, values in self.exposures.items()}, self.sources[mask])

    @property
    def weights(self) -> Vector:
        """Sources count alike; sum 1."""
        names, index, counts = np.unique(self.sources, return_inverse=True, return_counts=True)
        return np.asarray(1.0 / counts[index] / len(names))

    def inside(self, known: Widths) -> NDArray[np.bool_]:
        """Whether each measured step lies in its interval."""
        above, below = known.spread(self.exposures, "high"), known.spread(self.exposures, "low")
        return np.asarray((self.misses <= above) & (self.misses >= -below))


def loss(known: Widths, rows: Rows) -> float:
    """Pinball losses of both ends of the interval."""
    low, high = -known.spread(rows.exposures, "low"), known.spread(rows.exposures, "high")
    return float(rows.weights @ (_pinball(TAIL, rows.misses - low) + _pinball(1 - TAIL, rows.misses - high)))


def _pinball(level: float, misses: Vector) -> Vector:
    return np.where(misses >= 0, level * misses, (level - 1) * misses)


def fit(rows: Rows, stated: Widths) -> Widths:
    """The widths of least loss: one after another over a grid within the bounds until none improves, from both ends."""
    starts = [replace(stated, **{name: bounds[end] for name, bounds in BOUNDS.items()}) for end in (0, 1)]
    return min((_descend(start, rows) for start in starts), key=lambda found: loss(found, rows))


def _descend(known: Widths, rows: Rows) -> Widths:
    least = loss(known, rows)
    for _ in range(MOST_ROUNDS):
        before = least
        for name, (low, high) in BOUNDS.items():
            for value in np.linspace(low, high, STEPS + 1).round(4).tolist():
                tried = replace(known, **{name: value})
                found = loss(tried, rows)
                if found < least - 1e-9:
                    known, least = tried, found
        if least > before - 1e-9:
            break
    return known


def left_out(rows: Rows, stated: Widths) -> dict[str, float]:
    """By source: coverage of its rows by the widths that all others give."""
    found = {}
    for source in sorted(set(rows.sources.tolist())):
        mask = rows.sources == source
        found[source] = float(rows.where(mask).inside(fit(rows.where(~mask), stated)).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write the widths to {PACKAGED.name}")
    options = parser.parse_args()
    judged = validate_rows(read_runs(options.runs), decoder_graph).judged
    parts = {name: Rows.of([item for item in judged if set_of(item.row.run) == name]) for name in ("fit", "check")}
    known = fit(parts["fit"], widths())
    print("widths: " + ", ".join(f"{name} {getattr(known, name):g}" for name in BOUNDS))
    for source, covered in left_out(parts["fit"], widths()).items():
        own = parts["fit"].where(parts["fit"].sources == source)
        print(f"{source}: {len(own.misses)} rows, covers {own.inside(known).mean():.1%}, left out {covered:.1%}")
    for name, rows in parts.items():
        if len(rows.misses):
            inside = rows.inside(known)
            print(f"{name}: {len(rows.misses)} rows, covers {inside.mean():.1%} of them, {rows.weights @ inside:.1%} by source")
    if options.write:
        write(known, parts["fit"])


def write(known: Widths, rows: Rows) -> None:
    """Replace the fitted widths of the packaged file."""
    data: dict[str, Any] = json.loads(PACKAGED.read_text())
    why = f"fitted: {len(rows.misses)} runs of {len(set(rows.sources.tolist()))} fit sources"
    for name in BOUNDS:
        data["widths"][name] = {"value": getattr(known, name), "provenance": why}
    lines = [f'  "{name}": {json.dumps(item)}' for name, item in data["widths"].items()]
    PACKAGED.write_text(f'{{\n "note": {json.dumps(data["note"])},\n "widths": {{\n' + ",\n".join(lines) + "\n }\n}\n")


if __name__ == "__main__":
    main()
