"""Verbs that use this machine's devices, and the comparison: profile, run, compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from api.cli.inputs import (
    ClusterOption,
    Given,
    ModelOption,
    ProfileOption,
    WorkloadOption,
    read_part,
    read_plan,
    read_prediction,
    save_document,
)
from api.cli.output import JsonOption, NoColorOption, output, progress_display
from api.cli.planning import OutputOption
from api.cli.show import show_comparison, show_measurement, table
from api.documents import full
from api.engine import Engine
from specs.errors import ExecutionFailed
from specs.measurement import Measurement
from specs.profile import Profile
from specs.progress import Progress
from specs.training import TrainingSpec
from specs.units import format_bytes, format_seconds


def profile(
    model: ModelOption,
    workload: WorkloadOption,
    cluster: ClusterOption = "local:2",
    quick: Annotated[bool, typer.Option("--quick/--thorough", help="Fewer or more samples.")] = True,
    strategy: Annotated[list[str] | None, typer.Option(help="Measure this strategy's local shapes too; may be repeated.")] = None,
    out: OutputOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Measure what this model does on the devices that are here: ops, collectives, copies, optimizer.

    Example: meshwright profile --model llama-demo --workload examples/workloads/demo.yaml --cluster local:2 -o profile.json
    """
    engine = Engine(allow_factory=True)
    graph, resolved, spec = Given(engine).read(model, cluster, workload, None)[:3]
    with progress_display() as sink:
        measured = engine.profile(graph, resolved, spec, strategies=strategy or (), quick=quick, progress=sink)
    save_document(out, measured)
    output.document(full(measured), lambda console: console.print(_profile_table(measured)))


def _profile_table(measured: Profile) -> Table:
    rows = table("what", ">measured", ">slowest", title=f"Profile {measured.name or measured.cluster}")
    for device in measured.devices:
        slowest = max(device.ops, key=lambda op: op.forward.median_s, default=None)
        name = f"{slowest.op_class} {format_seconds(slowest.forward.median_s)}" if slowest else ""
        rows.add_row(f"{device.device}: ops", str(len(device.ops)), name)
        rows.add_row(f"{device.device}: copies, optimizers", str(len(device.copies) + len(device.optimizers)), "")
    rows.add_row("collectives", str(len(measured.collectives)), "")
    return rows


def run(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file, or an answer that holds one.")],
    model: ModelOption,
    workload: WorkloadOption,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 10,
    warmup_steps: Annotated[int, typer.Option("--warmup", min=0, help="Steps before measuring.")] = 2,
    profile_file: ProfileOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only build it, on a fake process group of any size.")] = False,
    time_limit_s: Annotated[float, typer.Option("--time-limit", min=1, help="Seconds until the run is given up.")] = 1800.0,
    out: OutputOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Run a plan on this machine as a sharded PyTorch program, one worker process per device, and measure it.

    Example: meshwright run plan.json --model llama-demo --workload examples/workloads/demo.yaml --steps 10 -o measurement.json
    """
    engine = Engine(allow_factory=True)
    chosen, spec = read_plan(plan_file), TrainingSpec.load(workload)
    measured_profile = None if profile_file is None else Profile.load(profile_file)
    graph = engine.load_model(model)
    if dry_run:
        reports = engine.dry_run(chosen, graph, spec)
        output.document({"ranks": reports}, lambda console: console.print(_dry_run_table(reports)))
        return
    flop = graph.flop(batch=1, seq=chosen.seq_len) * chosen.global_batch
    lines = StepLines(chosen.global_batch * chosen.seq_len, flop, chosen.world_size)
    with progress_display(lines) as sink:
        measurement = engine.execute(
            chosen, graph, spec, steps=steps, warmup_steps=warmup_steps, profile=measured_profile, run_time_limit_s=time_limit_s,
            progress=sink,
        )  # fmt: skip
    save_document(out, measurement)
    if measurement.status != "succeeded":
        raise ExecutionFailed(measurement.error or "the run failed")
    output.document(full(measurement), lambda console: show_measurement(console, measurement))


def _dry_run_table(reports: list[dict[str, Any]]) -> Table:
    rows = table(">rank", ">pp", ">dp", ">tp", "units", ">parameters", ">bytes", title="What the first rank of each stage holds")
    for report in reports:
        units = report["units"]
        place = (str(report[key]) for key in ("rank", "pp", "dp", "tp"))
        rows.add_row(*place, f"{units[0]}-{units[-1]}", f"{report['num_params']:,}", format_bytes(report["param_bytes"]))
    return rows


@dataclass(frozen=True, slots=True)
class StepLines:
    """Training steps as torchtitan logs them, so that log parsers work: rates are per device."""

    tokens_per_step: float
    flop_per_step: float
    num_devices: int

    def __call__(self, event: Progress) -> str | None:
        """The line of a finished step."""
        data = event.data
        if "step" not in data or "loss" not in data:
            return None
        parts = [f"step: {data['step'] + 1:2d}", f"loss: {data['loss']:8.5f}"]
        if data.get("step_time_s"):
            device_seconds = data["step_time_s"] * self.num_devices
            parts.append(f"tps: {self.tokens_per_step / device_seconds:,.0f}")
            parts.append(f"tflops: {self.flop_per_step / device_seconds / 1e12:,.3f}")
        return "  ".join(parts) + ("  (warm-up)" if data.get("warmup") else "")


def compare(
    prediction: Annotated[Path, typer.Argument(help="Prediction, estimate or answer file.")],
    measurement: Annotated[Path, typer.Argument(help="Measurement file.")],
    out: OutputOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Was the prediction right? Term by term.

    Example: meshwright compare answer.json measurement.json
    """
    predicted, measured = read_prediction(prediction), read_part(measurement, Measurement, "measurement")
    comparison = Engine().compare(predicted, measured)
    save_document(out, comparison)
    output.document(
        {**full(comparison), **comparison_sides(predicted.step_time_s, measured.step_time_s, comparison.step_time.relative_error)},
        lambda console: show_comparison(console, comparison),
    )


def comparison_sides(predicted_s: float, measured_s: float | None, error: float | None) -> dict[str, float | None]:
    """The step's three numbers at the top of the JSON, beside the terms."""
    return {"predicted": predicted_s, "measured": measured_s, "relative_error": error}
