"""The verbs ``robust`` and ``diagnose``: what do slow and failing devices cost this plan, and which device is slow?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.cli.inputs import (
    CalibrationOption,
    ClusterOption,
    Given,
    ModelOption,
    ProfileOption,
    WorkloadOption,
    read_plan,
    save_document,
)
from api.cli.output import JsonOption, NoColorOption, output
from api.cli.planning import OutputOption, PlanFileOption, StrategyOption, chosen_plan
from api.cli.show_robustness import show_diagnosis, show_robustness, show_spreads
from api.documents import full
from api.engine import Engine
from specs.base import read_mapping
from specs.errors import InvalidInput
from specs.measurement import Measurement
from specs.straggler import Diagnosis, StragglerModel, Timings

StragglersOption = Annotated[
    Path | None,
    typer.Option("--stragglers", help="Straggler model (YAML, JSON, TOML): slowdowns, jitter, failures, spot."),
]
WhatIfOption = Annotated[
    list[str] | None,
    typer.Option("--what-if", metavar="CHANGE", help="'device 17 x0.8', 'node 3 x0.5', 'link 3 at half rate'; may be repeated."),
]


def robust(
    model: ModelOption,
    cluster: ClusterOption,
    workload: WorkloadOption,
    plan_file: PlanFileOption = None,
    strategy: StrategyOption = None,
    stragglers: StragglersOption = None,
    what_if: WhatIfOption = None,
    steps: Annotated[int, typer.Option("--steps", min=100, max=1_000_000, help="Steps to draw.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    profile: ProfileOption = None,
    calibration: CalibrationOption = None,
    out: OutputOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """What do slow and failing devices cost this plan? Step time p50 to p99, goodput, spot cost, and single changes.

    Example: meshwright robust --model llama-2-7b --cluster examples/clusters/two-a100-80g-nodes.yaml
    --workload examples/workloads/pretrain-8k.yaml --strategy "tp=8 dp=2 micro_batch=1 zero=1"
    --stragglers examples/stragglers/datacentre.yaml --what-if "device 3 x0.8" --what-if "link 1 at half rate"
    """
    engine = Engine(allow_factory=True)
    given = Given(engine)
    speeds = StragglerModel() if stragglers is None else given.try_read(lambda: StragglerModel.load(stragglers))
    documents = given.read(model, cluster, workload, profile, calibration)
    plan = chosen_plan(engine, plan_file, strategy, documents)
    found = engine.robustness(
        *documents[:3], plan, speeds, profile=documents.profile, calibration=documents.calibration, what_if=what_if or (),
        steps=steps, seed=seed,
    )  # fmt: skip
    save_document(out, found)
    output.document(full(found), lambda console: show_robustness(console, found))


def diagnose(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Timings of the ranks step by step, or a measurement.")],
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Plan that ran: who does the same work, who meets whom.")] = None,
    out: OutputOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Which rank is slow, in which phase, by how much, since when? Least, middle and largest times of every phase.

    Example: meshwright diagnose timings.json
    """
    engine = Engine(allow_factory=True)
    data = read_mapping(file)
    if not isinstance(data, dict):
        raise InvalidInput.single("not_a_document", f"{file} holds no document", subject=str(file))
    if "seconds" in data:
        given = Given(engine)
        timings = given.try_read(lambda: Timings.parse(data, subject=f"timings {file}"))
        plan = None if plan_file is None else given.try_read(lambda: read_plan(plan_file))
        given.raise_any()
        found = engine.diagnose(timings, plan)
    else:
        measurement = Measurement.parse(data, subject=f"measurement {file}")
        found = Diagnosis(steps=measurement.steps, phases=engine.phase_spreads(measurement))
    save_document(out, found)

    def show(console: Console) -> None:
        if "seconds" in data:
            show_diagnosis(console, found)
        else:
            console.print("means over the steps: lasting and one-off slowness need timings step by step", style="dim")
        show_spreads(console, found.phases)

    output.document(full(found), show)
