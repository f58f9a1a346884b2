"""Verbs that use this machine's devices, and the comparison: profile, run, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.cli.inputs import (
    ClusterOption,
    Given,
    ModelOption,
    ProfileOption,
    WorkloadOption,
    read_part,
    read_plan,
    read_prediction,
    save_text,
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
from specs.units import GIB, format_seconds


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
    graph, resolved, spec, _ = Given(engine).read(model, cluster, workload, None)
    with progress_display() as sink:
        measured = engine.profile(graph, resolved, spec, strategies=strategy or (), quick=quick, progress=sink)
    if out is not None:
        save_text(out, measured.to_json(indent=1) + "\n")
    output.document(full(measured), lambda console: console.print(_profile_table(measured)))


def _profile_table(measured: Profile) -> object:
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
    with progress_display(step_line) as sink:
        measurement = engine.execute(
            chosen, graph, spec, steps=steps, warmup_steps=warmup_steps, profile=measured_profile, run_time_limit_s=time_limit_s,
            progress=sink,
        )  # fmt: skip
    if out is not None:
        save_text(out, measurement.to_json(indent=1) + "\n")
    if measurement.status != "succeeded":
        raise ExecutionFailed(measurement.error or "the run failed")
    output.document(full(measurement), lambda console: show_measurement(console, measurement))


def step_line(event: Progress) -> str | None:
    """A training step in the order that torchtitan logs it, so that log parsers work."""
    data = event.data
    if "step" not in data or "loss" not in data:
        return None
    parts = [f"step: {data['step']:2d}", f"loss: {data['loss']:8.5f}"]
    if "grad_norm" in data:
        parts.append(f"grad_norm: {data['grad_norm']:7.4f}")
    if "memory_bytes" in data:
        parts.append(f"memory: {data['memory_bytes'] / GIB:5.2f}GiB")
    if "tokens_per_s" in data:
        parts.append(f"tps: {round(data['tokens_per_s']):,}")
    if "flop_per_s" in data:
        parts.append(f"tflops: {data['flop_per_s'] / 1e12:,.2f}")
    if "mfu" in data:
        parts.append(f"mfu: {data['mfu']:.2%}")
    return "  ".join(parts)


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
    if out is not None:
        save_text(out, comparison.to_json(indent=1) + "\n")
    output.document(
        {**full(comparison), **comparison_sides(predicted.step_time_s, measured.step_time_s, comparison.step_time.relative_error)},
        lambda console: show_comparison(console, comparison),
    )


def comparison_sides(predicted_s: float, measured_s: float | None, error: float | None) -> dict[str, float | None]:
    """The step's three numbers at the top of the JSON, beside the terms."""
    return {"predicted": predicted_s, "measured": measured_s, "relative_error": error}
