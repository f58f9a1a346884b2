"""The verb ``validate``: how good are the predictions on published training runs?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from api.cli.inputs import save_text
from api.cli.output import JsonOption, NoColorOption, output, progress_display
from api.cli.show import table


def validate(
    runs: Annotated[Path, typer.Argument(help="CSV of published runs, one a row.")],
    out: Annotated[Path | None, typer.Option("-o", "--output", help="Write each row's prediction and terms to this CSV.")] = None,
    sources: Annotated[str, typer.Option("--sources", help="Only sources whose names begin so, separated by commas.")] = "",
    which: Annotated[str, typer.Option("--set", help="fit: sources that constants were tuned on; check: all others; all.")] = "all",
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Predict every row of a table of published runs and report the errors.

    Predictions never look at a measured column. Rows that cannot be predicted are counted with their reason.

    Example: meshwright validate runs.csv --set check -o predictions.csv
    """
    from planner.validate_runs.runs import read_runs
    from planner.validate_runs.sets import chosen_rows
    from planner.validate_runs.validate import predictions_csv, validate_rows
    from profiler.decoder_graph import decoder_graph
    from profiler.worker_env import allowed_cores

    names = [name.strip() for name in sources.split(",") if name.strip()]
    rows = chosen_rows(read_runs(runs), sources=names, which=which)
    with progress_display() as sink:
        validation = validate_rows(rows, decoder_graph, sink, processes=len(allowed_cores()))
    if out is not None:
        save_text(out, predictions_csv(validation))
    document = validation.document()
    output.document(document, lambda console: _show(console, document, out))


def _show(console: Console, document: dict[str, Any], out: Path | None) -> None:
    console.print(f"{document['predicted_rows']} of {document['rows']} rows predicted")
    reasons = ", ".join(f"{code} {count}" for code, count in document["skipped"]["by_reason"].items())
    if reasons:
        console.print(f"skipped: {reasons}", markup=False)
    found = table("rows of", ">step", ">median", ">p90", ">bias", ">memory", ">median", ">p90", ">bias", title="Error")
    found.add_row("all", *_cells(document), style="bold")
    for title, groups in (("source", document["by_source"]), ("device", document["by_device"])):
        for name, group in groups.items():
            found.add_row(f"{title}: {name}", *_cells(group))
    console.print(found)
    covered = document["step_time"]["coverage"]
    if covered is not None:
        console.print(f"the 80 % interval holds {_percent(covered)} of the measured step times")
    oom = document["oom"]
    console.print(
        f"out of memory: {oom['true_positive']} rightly, {oom['false_positive']} wrongly predicted; "
        f"{oom['false_negative']} missed, {oom['true_negative']} rightly fit"
    )
    if out is not None:
        console.print(f"each row in {out}", markup=False)


def _cells(group: dict[str, Any]) -> list[str]:
    cells = []
    for name in ("step_time", "peak_memory"):
        part = group[name]
        cells += [str(part["rows"]), *(_percent(part[key]) for key in ("median_ape", "p90_ape", "bias"))]
    return cells


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
