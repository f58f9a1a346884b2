"""Verbs about given plans and configs: why, diff, recommend, export, import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.asking import Question, asker
from api.cli.inputs import CalibrationOption, ProfileOption, ServerOption, TokenOption, read_plan, save_document, save_text
from api.cli.output import JsonOption, NoColorOption, output, progress_display
from api.cli.planning import OutputOption, improvement
from api.cli.show_answers import show_diff, show_export, show_judgement, show_recommendation, show_why_not
from api.documents import full
from api.schemas import PlanOptions, RecommendOptions
from specs.errors import InvalidInput
from specs.interchange import FRAMEWORKS, TARGETS

ModelText = Annotated[str | None, typer.Option("--model", help="HF config.json, op graph, preset, or package.module:factory.")]
ClusterText = Annotated[str | None, typer.Option("--cluster", help="Cluster file, or local[:N].")]
WorkloadFile = Annotated[Path | None, typer.Option("--workload", help="Workload file (YAML, JSON, TOML).")]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file, or an answer that holds one.")]


def why(
    asked: Annotated[str, typer.Option("--not", metavar="STRATEGY", help="'tp=8 pp=2 micro_batch=1 zero=1'")],
    model: ModelText = None,
    cluster: ClusterText = None,
    workload: WorkloadFile = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="The chosen plan; none: it is searched first.")] = None,
    profile: ProfileOption = None,
    calibration: CalibrationOption = None,
    time_limit_s: Annotated[float, typer.Option("--time-limit", min=0.1, help="Seconds to search.")] = 60.0,
    server: ServerOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Why not this strategy? The rule or memory limit that forbids it, or what it loses against the chosen plan, term by term.

    Example: meshwright why --not "tp=8 dp=2 micro_batch=1 zero=1" --model llama-2-7b
    --cluster examples/clusters/two-a100-80g-nodes.yaml --workload examples/workloads/small-2k.yaml
    """
    question = Question(model=model, cluster=cluster, workload=workload, profile=profile, calibration=calibration)
    chosen = None if plan_file is None else read_plan(plan_file)
    with progress_display(improvement) as sink:
        found = asker(server, token).why_not(question, asked, chosen, PlanOptions(time_limit_s=time_limit_s, top=1), sink)
    output.document(full(found), lambda console: show_why_not(console, found))


def diff(
    before: Annotated[Path, typer.Argument(metavar="PLAN_A", help="Plan file, or an answer that holds one.")],
    after: Annotated[Path, typer.Argument(metavar="PLAN_B", help="The plan to go to.")],
    model: ModelText = None,
    workload: WorkloadFile = None,
    cluster: ClusterText = None,
    server: ServerOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """What changes from one plan to another, which checkpoints load, and how many bytes of states move to each rank?

    Example: meshwright diff plan.json plan.json --model llama-2-7b --workload examples/workloads/small-2k.yaml
    """
    question = Question(model=model, cluster=cluster, workload=workload)
    found = asker(server, token).diff(question, read_plan(before), read_plan(after))
    output.document(full(found), lambda console: show_diff(console, found))


def recommend(
    device: Annotated[str, typer.Option("--device", help="Device of the catalogue (meshwright devices).")],
    model: ModelText = None,
    workload: WorkloadFile = None,
    max_devices: Annotated[int, typer.Option("--max-devices", min=1, max=65536, help="End of the curve.")] = 512,
    preset: Annotated[str | None, typer.Option("--node", help="Node preset; none: one of the catalogue with that device.")] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="Fields that every plan must have, 'tp=2 pp=8'.")] = None,
    time_limit_s: Annotated[float, typer.Option("--time-limit", min=1, help="Seconds for all sizes together.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Seed of the solvers.")] = 0,
    out: OutputOption = None,
    server: ServerOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """How many devices of one type do I need? The fewest that fit, the cheapest per token, and the curve.

    Example: meshwright recommend --device a100_sxm_80gb --model llama-2-7b --workload examples/workloads/small-2k.yaml
    --max-devices 16 --time-limit 20
    """
    options = RecommendOptions(max_devices=max_devices, preset=preset, strategy=strategy, time_limit_s=time_limit_s, seed=seed)
    with progress_display() as sink:
        found = asker(server, token).recommend(Question(model=model, workload=workload), device, options, sink)
    save_document(out, found)
    output.document(full(found), lambda console: show_recommendation(console, found))


def export(
    plan_file: PlanArgument,
    target: Annotated[str, typer.Option("--to", help=" | ".join(TARGETS))],
    model: ModelText = None,
    workload: WorkloadFile = None,
    cluster: ClusterText = None,
    folder: Annotated[Path | None, typer.Option("-o", "--output", help="Write the files into this folder.")] = None,
    server: ServerOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Write a plan in another framework's words. What it cannot express is refused by name, all at once.

    Example: meshwright export plan.json --to megatron --model llama-2-7b --workload examples/workloads/small-2k.yaml -o out
    """
    question = Question(model=model, cluster=cluster, workload=workload)
    found = asker(server, token).export(question, read_plan(plan_file), target)
    for name, text in found.files.items() if folder is not None else ():
        save_text((folder or Path()) / name, text)
    output.document(full(found), lambda console: show_export(console, found, folder))


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The config or launch script.")],
    framework: Annotated[str, typer.Option("--from", help=" | ".join(FRAMEWORKS))],
    model: ModelText = None,
    cluster: ClusterText = None,
    workload: WorkloadFile = None,
    profile: ProfileOption = None,
    calibration: CalibrationOption = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="Fields that the file does not say, 'micro_batch=2'.")] = None,
    out: OutputOption = None,
    server: ServerOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Judge my config: the strategy it asks for, what was not understood, and how fast and full it is.

    Example: meshwright import examples/configs/deepspeed-zero3.json --from deepspeed --model llama-2-7b
    --cluster examples/clusters/two-a100-80g-nodes.yaml --workload examples/workloads/small-2k.yaml
    """
    question = Question(model=model, cluster=cluster, workload=workload, profile=profile, calibration=calibration)
    found = asker(server, token).judge(question, _text_of(file), framework, strategy)
    save_document(out, found)
    output.document(full(found), lambda console: show_judgement(console, found))
    if found.rules:
        raise typer.Exit(InvalidInput.exit_code)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidInput.single("unreadable_file", f"cannot read {file}: {error.strerror}", subject=str(file)) from None
    except UnicodeDecodeError:
        raise InvalidInput.single("not_text", f"{file} is not a text file", subject=str(file)) from None
