"""What the demo shows while it runs and at its end."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.text import Text

from api.cli.output import progress_display
from api.cli.show import show_waterfall, table
from api.demo_result import DemoResult
from specs.progress import Progress
from specs.units import format_bytes, format_seconds

DRIFT_LEGEND = (
    "This machine changes its speed while it is used. 're-probed': the prediction times a fixed probe just before the run over the "
    "same probe in the profile; 'without drift': the measured time divided by that probe's drift between the steps."
)


class DemoView:
    """Phases, notes and bars on stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._display = progress_display()
        self._started = time.monotonic()

    def __enter__(self) -> DemoView:
        self._sink = self._display.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._display.__exit__(kind, error, trace)

    def phase(self, title: str) -> None:
        """A new part begins."""
        wall = time.monotonic() - self._started
        self._console.print(Text.assemble((f"{wall:5.0f} s  ", "dim"), (title, "bold")))

    def note(self, text: str) -> None:
        """A result of the part."""
        self._console.print(f"         {text}", style="green", markup=False)

    def progress(self, event: Progress) -> None:
        """Within the part."""
        self._sink(event)

    def show(self, console: Console, result: DemoResult, folder: Path) -> None:
        """The table, the waterfall of the chosen plan, the scores."""
        rows = table(
            "plan", ">predicted", ">measured", ">p10-p90", ">error", ">re-probed", ">peak predicted", ">measured", ">error",
            "losses", title="Predicted against measured",
        )  # fmt: skip
        for run in result.runs:
            step, memory = run.comparison.step_time, run.comparison.peak_memory
            restated = run.comparison.step_time_at_start_speed
            low, high = run.measurement.step_time_p10_s or 0.0, run.measurement.step_time_p90_s or 0.0
            rows.add_row(
                f"{run.label}\n{run.strategy}",
                format_seconds(step.predicted),
                format_seconds(step.measured),
                f"{format_seconds(low)} - {format_seconds(high)}",
                _percent(step.relative_error),
                _percent(None if restated is None else restated.relative_error),
                format_bytes(memory.predicted),
                format_bytes(memory.measured),
                _percent(memory.relative_error),
                ""
                if run.losses is None
                else f"{'agree' if run.losses.agrees else 'DIFFER'} {run.losses.max_relative_difference:.0e}",
                style="bold" if run.chosen else None,
            )
        console.print(rows)
        chosen = next((run for run in result.runs if run.chosen), None)
        if chosen is not None:
            console.print(Text(f"The chosen plan, term by term: {chosen.strategy}", style="bold"))
            show_waterfall(console, {"predicted": chosen.prediction.waterfall, "measured": chosen.measurement.waterfall})
        if result.scores is not None:
            scores = result.scores
            restated_error, undrifted_error = scores.step_median_error_at_start_speed, scores.step_median_error_without_drift
            parts = [
                f"step error median {scores.step_median_error:.1%}, worst {scores.step_worst_error:.1%}",
                *([] if restated_error is None else [f"median {restated_error:.1%} re-probed"]),
                *([] if undrifted_error is None else [f"median {undrifted_error:.1%} without drift"]),
                f"peak memory error median {scores.memory_median_error:.1%}",
            ]
            if scores.kendall_tau is not None:
                parts.append(f"Kendall tau {scores.kendall_tau:.2f}")
            if scores.regret is not None:
                parts.append(f"regret {scores.regret:.1%}")
            console.print(Text("; ".join(parts), style="bold"))
            if restated_error is not None:
                console.print(DRIFT_LEGEND, style="dim")
        console.print(f"wrote {folder / 'report.html'} and {folder / 'result.json'}", markup=False)


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.1%}"
