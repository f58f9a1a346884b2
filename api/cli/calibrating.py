"""The verb ``calibrate``: what do a few measured runs say about this cluster?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.cli.inputs import ClusterOption, Given, ModelOption, ProfileOption, read_part, read_plan, save_document
from api.cli.output import JsonOption, NoColorOption, output
from api.cli.planning import OutputOption
from api.cli.show import table
from api.documents import full
from api.engine import Engine
from specs.calibration import FACTORS, Calibration
from specs.measurement import Measurement
from specs.training import TrainingSpec
from specs.units import format_seconds


def calibrate(
    measurements: Annotated[list[Path], typer.Argument(metavar="MEASUREMENT...", help="Measurement files of one model's runs.")],
    model: ModelOption,
    cluster: ClusterOption,
    profile: ProfileOption = None,
    plan_files: Annotated[
        list[Path] | None, typer.Option("--plan", help="Plan that ran, where a measurement does not hold it; may be repeated.")
    ] = None,
    workload: Annotated[
        Path | None, typer.Option("--workload", help="Workload that ran, where a measurement does not hold it.")
    ] = None,
    out: OutputOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Refit a few factors of this cluster's prices from measured runs, for --calibration of plan, estimate and simulate.

    Example: meshwright calibrate measurement.json --model llama-demo --cluster local:2 --profile profile.json -o calibration.json
    """
    engine = Engine(allow_factory=True)
    given = Given(engine)
    runs = [given.try_read(partial(read_part, path, Measurement, "measurement")) for path in measurements]
    plans = [given.try_read(partial(read_plan, path)) for path in plan_files or ()]
    spec = None if workload is None else given.try_read(lambda: TrainingSpec.load(workload))
    graph, resolved, measured = given.read_site(model, cluster, profile)
    found = engine.calibrate(graph, resolved, measured, runs, plans=plans, workload=spec)
    save_document(out, found)
    output.document(full(found), lambda console: show_calibration(console, found))


def show_calibration(console: Console, found: Calibration) -> None:
    """Factors with their intervals, and every run before and after."""
    count = f"{found.num_runs} measured run{'s' if found.num_runs != 1 else ''}"
    console.print(f"calibration of cluster '{found.cluster}' from {count}", style="bold", markup=False)
    rows = table("factor", ">value", ">80 % interval", ">bounds", "multiplies", title="Factors")
    for name, factor in found.factors.items():
        bounds = f"{FACTORS[name].low:g} to {FACTORS[name].high:g}"
        bound = "  at its bound" if factor.at_bound else ""
        rows.add_row(name, f"{factor.value:.3f}", f"{factor.low:.3f} to {factor.high:.3f}", bounds, FACTORS[name].meaning + bound)
    console.print(rows)
    rows = table("run", ">measured", ">before", ">error", ">after", ">error", "fitted", title="Step time of the runs")
    for run in found.runs:
        rows.add_row(
            run.strategy or run.plan_hash[:12], format_seconds(run.measured_s), format_seconds(run.before_s),
            f"{run.before_s / run.measured_s - 1:+.1%}", format_seconds(run.after_s), f"{run.after_s / run.measured_s - 1:+.1%}",
            run.fitted.replace("_", " "),
        )  # fmt: skip
    console.print(rows)
    console.print(f"root mean square error of log step time {found.residual_before:.3f} before, {found.residual_after:.3f} after")
    for note in found.notes:
        console.print(note, style="yellow", markup=False)
