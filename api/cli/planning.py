"""Verbs that answer before anything runs: capture, plan, estimate, simulate, devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.asking import Question, asker
from api.cli.inputs import (
    CalibrationOption,
    ClusterOption,
    Documents,
    Given,
    ModelOption,
    ProfileOption,
    ServerOption,
    TokenOption,
    WorkloadOption,
    read_plan,
    save_document,
    save_text,
)
from api.cli.output import JsonOption, NoColorOption, output, progress_display
from api.cli.show import show_answer, show_assumptions, show_graph, show_plan, show_prediction, table
from api.documents import full
from api.engine import Engine
from api.schemas import PlanOptions
from specs.errors import Infeasible, InvalidInput, NoAnswerInTime
from specs.plan import Plan
from specs.progress import Progress
from specs.units import GB, format_bytes, format_seconds

OutputOption = Annotated[Path | None, typer.Option("-o", "--output", help="Write the document to this file.")]
StrategyOption = Annotated[str | None, typer.Option("--strategy", help="'tp=2 pp=2 micro_batch=1 recompute=full zero=0'.")]
PlanFileOption = Annotated[Path | None, typer.Option("--plan", help="Plan file, or an answer that holds one.")]


def capture(
    model: Annotated[str, typer.Argument(help="HF config.json, preset name, or package.module:factory.")],
    out: OutputOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Capture a model as an op graph.

    Example: meshwright capture examples/models/llama-demo.json -o graph.json
    """
    graph = Engine(allow_factory=True).load_model(model)
    save_document(out, graph)
    output.document(graph.to_dict(), lambda console: show_graph(console, graph))


def plan(
    model: ModelOption,
    cluster: ClusterOption,
    workload: WorkloadOption,
    profile: ProfileOption = None,
    calibration: CalibrationOption = None,
    time_limit_s: Annotated[float, typer.Option("--time-limit", min=0.1, help="Seconds to search.")] = 60.0,
    top: Annotated[int, typer.Option(min=1, max=50, help="Alternatives to list.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the solvers.")] = 0,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="Fields that the plan must have, 'pp=2 zero=1'; the others are searched.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what each choice gained.")] = False,
    out: OutputOption = None,
    server: ServerOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """How should this model be parallelised here? The best plan, with its certificate.

    Example: meshwright plan --model llama-2-7b --cluster examples/clusters/two-a100-80g-nodes.yaml
    --workload examples/workloads/pretrain-8k.yaml -o plan.json
    """
    question = Question(model=model, cluster=cluster, workload=workload, profile=profile, calibration=calibration)
    options = PlanOptions(time_limit_s=time_limit_s, top=top, seed=seed, strategy=strategy)
    with progress_display(improvement) as sink:
        answer = asker(server, token).plan(question, options, sink)
    if out is not None and answer.plan is not None:
        save_text(out, answer.plan.to_json(indent=1) + "\n")
    output.document(full(answer), lambda console: show_answer(console, answer, explain=explain))
    if answer.plan is None:
        raise typer.Exit(Infeasible.exit_code if answer.status == "infeasible" else NoAnswerInTime.exit_code)


def improvement(event: Progress) -> str | None:
    """A line per better plan, as solvers print them."""
    if "incumbent_s" not in event.data:
        return None
    bound = event.data.get("best_bound_s")
    text = f"better plan: {format_seconds(event.data['incumbent_s'])}" + (f", bound {format_seconds(bound)}" if bound else "")
    return f"{text}  {event.data.get('strategy', '')}".rstrip()


def _one_of(plan_file: Path | None, strategy: str | None) -> None:
    if (plan_file is None) == (strategy is None):
        raise InvalidInput.single(
            "plan_or_strategy",
            "give exactly one of --plan and --strategy",
            allowed=["--plan", "--strategy"],
            subject="command line",
        )


def chosen_plan(engine: Engine, plan_file: Path | None, strategy: str | None, given: Documents) -> Plan:
    """The plan of a file or a strategy, checked; exactly one of both is given."""
    _one_of(plan_file, strategy)
    graph, resolved, spec = given[:3]
    if strategy is not None:
        return engine.plan_of(strategy, graph, resolved, spec)
    chosen = read_plan(plan_file or Path())
    violations = engine.violations(chosen, graph, resolved, spec)
    if violations:
        raise InvalidInput(violations, subject=f"plan {plan_file}")
    return chosen


def estimate(
    model: ModelOption,
    cluster: ClusterOption,
    workload: WorkloadOption,
    plan_file: PlanFileOption = None,
    strategy: StrategyOption = None,
    profile: ProfileOption = None,
    calibration: CalibrationOption = None,
    out: OutputOption = None,
    server: ServerOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """How fast and how full is this plan or strategy?

    Example: meshwright estimate --model llama-2-7b --cluster examples/clusters/two-a100-80g-nodes.yaml
    --workload examples/workloads/pretrain-8k.yaml --strategy "tp=8 dp=2 micro_batch=1 zero=1"
    """
    _one_of(plan_file, strategy)
    question = Question(model=model, cluster=cluster, workload=workload, profile=profile, calibration=calibration)
    chosen = None if plan_file is None else read_plan(plan_file)
    found = asker(server, token).estimate(question, chosen, strategy)
    if out is not None:
        save_text(out, json.dumps(found.as_dict(), indent=1) + "\n")

    def show(console: Console) -> None:
        console.print("fits" if found.fits else "does not fit", style="bold green" if found.fits else "bold red")
        show_plan(console, found.plan)
        show_prediction(console, found.prediction)
        show_assumptions(console, found.prediction.assumptions)

    output.document(found.as_dict(), show)


def simulate(
    model: ModelOption,
    cluster: ClusterOption,
    workload: WorkloadOption,
    trace: Annotated[Path, typer.Option("--trace", help="Where to write the Chrome/Perfetto trace.")],
    plan_file: PlanFileOption = None,
    strategy: StrategyOption = None,
    profile: ProfileOption = None,
    calibration: CalibrationOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Simulate one step, event by event, and write its timeline.

    Example: meshwright simulate --model llama-demo --cluster local:2 --workload examples/workloads/demo.yaml
    --strategy "pp=2 micro_batch=1" --trace trace.json
    """
    engine = Engine(allow_factory=True)
    given = Given(engine).read(model, cluster, workload, profile, calibration)
    chosen = chosen_plan(engine, plan_file, strategy, given)
    timeline = engine.trace(*given[:3], chosen, given.profile, given.calibration)
    prediction = engine.estimate(*given[:3], chosen, given.profile, given.calibration)
    save_text(trace, json.dumps(timeline))

    def show(console: Console) -> None:
        show_plan(console, chosen)
        show_prediction(console, prediction)
        console.print(f"{len(timeline['traceEvents']):,} events in {trace}; open it in ui.perfetto.dev or chrome://tracing")

    output.document({"plan": full(chosen), "prediction": full(prediction), "trace": str(trace)}, show)


def devices(
    detail: Annotated[bool, typer.Option("--detail", help="Say where each number comes from.")] = False,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """List the known devices and node presets, with the source of each number.

    Example: meshwright devices --detail
    """
    engine = Engine(allow_factory=True)
    catalogue, presets = engine.devices(), engine.node_presets()

    def show(console: Console) -> None:
        rows = table("device", ">memory", ">GB/s", ">dense bf16/fp16 TFLOP/s", ">fp32", "also called", title="Devices")
        for item in catalogue:
            peak = item["peak_flop_per_s"]
            rows.add_row(
                item["name"], format_bytes(item["memory_bytes"]), f"{item['memory_bandwidth_bytes_per_s'] / GB:,.0f}",
                _tera(peak.get("bfloat16") or peak.get("float16")), _tera(peak.get("float32")), ", ".join(item.get("aliases", ())),
            )  # fmt: skip
            for field, source in item["provenance"].items() if detail else ():
                rows.add_row(f"  {field}", "", "", "", "", source, style="dim")
        console.print(rows)
        nodes = table("preset", ">devices", "device", title="Node presets")
        for item in presets:
            nodes.add_row(item["name"], str(item["devices_per_node"] or ""), item["device"] or "")
        console.print(nodes)

    output.document({"devices": catalogue, "node_presets": presets}, show)


def _tera(flop_per_s: float | None) -> str:
    return "" if flop_per_s is None else f"{flop_per_s / 1e12:,.1f}"
