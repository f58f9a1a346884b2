"""A whole table: every row predicted or skipped with a reason, scored, and written out with its terms."""

from __future__ import annotations

import csv
import io
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from planner.validate_runs.predict_row import Capture, RunPrediction, RunPredictor
from planner.validate_runs.runs import Row, SkippedRun
from planner.validate_runs.scores import Judged, grouped, scores
from specs.progress import Progress, ProgressSink, ignore
from specs.terms import MEMORY_TERMS, TIME_TERMS
from specs.units import GIB


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that was not predicted, and why."""

    row: Row
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Validation:
    """All rows of a table."""

    judged: tuple[Judged, ...]
    skipped: tuple[Skipped, ...]

    def document(self) -> dict[str, Any]:
        """The report: counts, reasons, errors over all rows, by source and by device."""
        reasons = Counter(item.code for item in self.skipped)
        return {
            "rows": len(self.judged) + len(self.skipped),
            "predicted_rows": len(self.judged),
            "skipped": {
                "rows": len(self.skipped),
                "by_reason": dict(reasons.most_common()),
                "each": [{"id": item.row.run.id, "code": item.code, "reason": item.reason} for item in self.skipped],
            },
            **scores(self.judged),
            "by_source": grouped(self.judged, lambda item: item.row.run.source),
            "by_device": grouped(self.judged, lambda item: item.row.run.gpu),
        }


# A process starts in a few seconds; fewer rows than this are predicted sooner by one.
ROWS_WORTH_A_PROCESS = 150
CHUNK_ROWS = 40


def validate_rows(rows: Sequence[Row], capture: Capture, progress: ProgressSink = ignore, *, processes: int = 1) -> Validation:
    """Predict every row. ``capture`` makes the graph of a decoder (it needs torch, this package does not).

    ``processes``: worker processes to share the rows, when they are many; ``capture`` must pickle. The result is the same.
    """
    outcomes: list[Judged | Skipped] = []
    chunks = [rows[first : first + CHUNK_ROWS] for first in range(0, len(rows), CHUNK_ROWS)]
    processes = min(processes, len(rows) // ROWS_WORTH_A_PROCESS)
    progress(Progress(stage="predict", done=0, total=len(rows)))
    if processes > 1:
        # spawned, not forked: threads of the caller may hold locks
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_worker, (capture,))
        with pool:
            for found in pool.map(_predict_in_worker, chunks):
                outcomes += found
                progress(Progress(stage="predict", done=len(outcomes), total=len(rows), message=found[-1].row.run.id))
    else:
        predictor = RunPredictor(capture)
        for row in rows:
            outcomes.append(_outcome(predictor, row))
            progress(Progress(stage="predict", done=len(outcomes), total=len(rows), message=row.run.id))
    judged = tuple(item for item in outcomes if isinstance(item, Judged))
    return Validation(judged, tuple(item for item in outcomes if isinstance(item, Skipped)))


def _outcome(predictor: RunPredictor, row: Row) -> Judged | Skipped:
    try:
        return Judged(row, predictor.predict(row.run))
    except SkippedRun as error:
        return Skipped(row, error.code, str(error))


_worker: list[RunPredictor] = []  # of this process: its graphs and prices serve all its chunks


def _start_worker(capture: Capture) -> None:
    _worker[:] = [RunPredictor(capture)]


def _predict_in_worker(rows: Sequence[Row]) -> list[Judged | Skipped]:
    return [_outcome(_worker[0], row) for row in rows]


COLUMNS = (
    "id", "source", "model", "gpu", "num_gpus", "status", "framework", "strategy", "assumed", "fabric", "predicted_step_s",
    "predicted_step_low_s", "predicted_step_high_s", "predicted_tokens_per_s_per_gpu", "predicted_mfu", "predicted_peak_mem_gib",
    "predicted_fits", "measured_step_s", "measured_peak_mem_gib", "step_error", "memory_error",
    *(f"time_{name}_s" for name in TIME_TERMS), *(f"memory_{name}_gib" for name in MEMORY_TERMS),
)  # fmt: skip


def predictions_csv(validation: Validation) -> str:
    """One line per row of the table, in its order within predicted and skipped rows."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for item in validation.judged:
        writer.writerow({**_identity(item.row), "status": "predicted", **_predicted(item.predicted), **_errors(item)})
    for skipped in validation.skipped:
        writer.writerow({**_identity(skipped.row), "status": f"skipped: {skipped.code}: {skipped.reason}"})
    return out.getvalue()


def _identity(row: Row) -> dict[str, Any]:
    run = row.run
    return {"id": run.id, "source": run.source, "model": run.model, "gpu": run.gpu, "num_gpus": run.num_gpus}


def _predicted(item: RunPrediction) -> dict[str, Any]:
    prediction = item.prediction
    return {
        "framework": item.framework,
        "strategy": item.strategy,
        "assumed": "; ".join(item.assumed),
        "fabric": "; ".join(link.text() for link in prediction.fabric),
        "predicted_step_s": _number(prediction.step_time_s),
        "predicted_step_low_s": _number(prediction.step_time_low_s),
        "predicted_step_high_s": _number(prediction.step_time_high_s),
        "predicted_tokens_per_s_per_gpu": _number(item.tokens_per_s_per_gpu),
        "predicted_mfu": _number(prediction.mfu),
        "predicted_peak_mem_gib": _number(item.reported_memory_bytes / GIB),
        "predicted_fits": int(item.fits),
        **{f"time_{name}_s": _number(prediction.waterfall.get(name, 0.0)) for name in TIME_TERMS},
        **{f"memory_{name}_gib": _number(prediction.memory.terms.get(name, 0.0) / GIB) for name in MEMORY_TERMS},
    }


def _errors(item: Judged) -> dict[str, Any]:
    measured = item.row.measured
    memory = measured.peak_memory_bytes
    return {
        "measured_step_s": measured.step_s,
        "measured_peak_mem_gib": None if memory is None else _number(memory / GIB),
        "step_error": _number(item.step_error),
        "memory_error": _number(item.memory_error),
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
