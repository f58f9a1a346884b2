"""The main job end to end on this machine, through the HTTP API: capture, profile, plan, execute, compare.

Besides the chosen plan at least five of other kinds run, so that the ranking is tested and not only one number; the losses of
all of them must equal those of the unsharded model in one process on the same data.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from api.client import Client
from api.demo_result import DemoResult, LossCheck, Run, check_losses, scores_of, subject_of
from api.engine import Engine
from api.isolate import isolated
from api.local_service import local_service
from api.settings import LOCAL_CLUSTER_ID
from specs.answer import PlanAnswer
from specs.base import read_mapping
from specs.cluster import ClusterSpec
from specs.errors import ExecutionFailed, Infeasible, InvalidInput
from specs.graph import ModelGraph
from specs.measurement import Comparison, Measurement
from specs.plan import Plan
from specs.prediction import Prediction
from specs.progress import Progress, ProgressSink
from specs.training import TrainingSpec

MODEL_PRESET = "llama-demo"
WORKLOAD = {
    "name": "demo",
    "global_batch": 8,
    "seq_len": 128,
    "precision": "fp32",
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
}
MIN_OTHER_PLANS = 5
# Largest relative difference of a step's loss in fp32: sharding changes the order of sums, and AdamW amplifies that with
# every step. Below 1e-6 in ten steps of the built-in model; the margin is for larger ones. [assumed]
LOSS_TOLERANCE = 1e-4


class View(Protocol):
    """Who watches the demo."""

    def phase(self, title: str) -> None:
        """A new part begins."""

    def note(self, text: str) -> None:
        """A result of the part."""

    def progress(self, event: Progress) -> None:
        """Within the part."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the demo does. ``model`` and ``workload`` are files; None = the built-in ones."""

    output_dir: Path
    num_devices: int = 2
    steps: int = 8
    warmup_steps: int = 2
    time_limit_s: float = 30.0
    model: Path | None = None
    workload: Path | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan to execute."""

    label: str
    plan_id: str
    answer: PlanAnswer
    chosen: bool = False


@dataclass(slots=True)
class _Clock:
    """Wall time by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - started


def other_strategies(workload: TrainingSpec, num_devices: int) -> dict[str, str]:
    """Plans of different kinds for ``num_devices`` equal devices, by what they are called."""
    share, rest = workload.global_batch // num_devices, num_devices // 2
    half, of_pair = max(1, share // 2), workload.global_batch // rest
    flat = f"pp=1 tp=1 dp={num_devices}"
    return {
        "DDP": f"{flat} micro_batch={share} zero=0 recompute=none",
        "ZeRO-2": f"{flat} micro_batch={half} zero=2 recompute=none",
        "ZeRO-3": f"{flat} micro_batch={share} zero=3 recompute=none",
        "tensor parallel": f"pp=1 tp=2 dp={rest} micro_batch={of_pair} zero=0 recompute=none",
        "pipeline 1F1B": f"pp=2 tp=1 dp={rest} micro_batch={max(1, of_pair // 4)} zero=0 recompute=none schedule=1f1b",
        "full recompute": f"{flat} micro_batch={share} zero=0 recompute=full",
        "DDP, micro-batch 1": f"{flat} micro_batch=1 zero=0 recompute=none",
    }


def run_demo(options: DemoOptions, view: View) -> DemoResult:
    """Run it all; write ``result.json`` and ``report.html``. Raises :class:`ExecutionFailed` when losses disagree."""
    workload = TrainingSpec.parse(WORKLOAD) if options.workload is None else TrainingSpec.load(options.workload)
    if workload.global_batch % options.num_devices or options.num_devices % 2:
        raise InvalidInput.single(
            "devices_do_not_divide", f"{options.num_devices} devices do not share a global batch of {workload.global_batch}",
            loc=("devices",), actual=options.num_devices,
            allowed=[n for n in range(2, 9, 2) if workload.global_batch % n == 0], subject="demo",
        )  # fmt: skip
    clock = _Clock()
    with ExitStack() as stack:
        with clock.measure("start service"):
            view.phase(f"serve the API on SQLite; this machine as a cluster of {options.num_devices} worker processes")
            client = stack.enter_context(local_service(options.output_dir, num_devices=options.num_devices))
        result, trace = _Demo(options, workload, client, view, clock).run()
    _write(options.output_dir, result, trace)
    _require_agreement(result)
    return result


class _Demo:
    """One run of the demo against a service."""

    def __init__(self, options: DemoOptions, workload: TrainingSpec, client: Client, view: View, clock: _Clock) -> None:
        self.options, self.workload, self.client, self.view, self.clock = options, workload, client, view, clock
        self.engine = Engine()
        self.ids: dict[str, str] = {"cluster": LOCAL_CLUSTER_ID}
        self.profile_summary: dict[str, Any] = {}
        self.strategies = other_strategies(workload, options.num_devices)

    def run(self) -> tuple[DemoResult, dict[str, Any]]:
        """All phases in order."""
        self._post_documents()
        self._profile()
        candidates = self._plan()
        runs = [self._execute(candidate, index, len(candidates)) for index, candidate in enumerate(candidates, start=1)]
        graph = ModelGraph.parse(self.client.get(f"/v1/models/{self.ids['model']}/graph"))
        reference = self._reference(graph)
        checked = [run.replace(losses=check_losses(run.measurement.losses, reference, LOSS_TOLERANCE)) for run in runs]
        cluster = self.engine.resolve(ClusterSpec.parse(self.client.get(f"/v1/clusters/{LOCAL_CLUSTER_ID}")["document"]))
        trace = self.client.get(f"/v1/plans/{candidates[0].plan_id}/trace")
        result = DemoResult(
            title="Meshwright demo: predicted against measured", created_utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            subject=subject_of(graph, cluster, self.workload), answer=candidates[0].answer, runs=tuple(checked),
            scores=scores_of(checked), reference_losses=tuple(reference), profile_summary=self.profile_summary,
            durations_s={name: round(seconds, 2) for name, seconds in self.clock.seconds.items()},
            environment={"python": platform.python_version(), "machine": platform.platform()},
        )  # fmt: skip
        return result, trace

    def _post_documents(self) -> None:
        self.view.phase("capture the model")
        if self.options.model is None:
            config = {"name": MODEL_PRESET, **self.engine.model_preset(MODEL_PRESET)}
        else:
            config = {"name": self.options.model.stem, **read_mapping(self.options.model)}
        self.ids["model"] = self.client.post("/v1/models", config)["id"]
        self.ids["workload"] = self.client.post("/v1/workloads", self.workload.to_dict())["id"]

    def _profile(self) -> None:
        self.view.phase("profile this machine: the ops, collectives and optimizer of this model")
        with self.clock.measure("profile"):
            body = {**self.ids, "strategies": list(self.strategies.values()), "quick": True}
            job = self.client.run("/v1/profiles", body, self.view.progress)
        self.ids["profile"] = job["profile_id"]
        document = self.client.get(f"/v1/profiles/{job['profile_id']}")["document"]
        devices = document["devices"]
        self.profile_summary = {
            "ops measured": sum(len(device.get("ops", ())) for device in devices),
            "collectives measured": len(document.get("collectives", ())),
            "profile": job["profile_id"],
        }
        self.view.note(f"{self.profile_summary['ops measured']} ops, {self.profile_summary['collectives measured']} collectives "
                       f"in {self.clock.seconds['profile']:.0f} s")  # fmt: skip

    def _plan(self) -> list[Candidate]:
        """The chosen plan first, then those of other kinds that are not the same plan and that fit."""
        self.view.phase("plan")
        with self.clock.measure("plan"):
            best = self._ask("chosen", {"time_limit_s": self.options.time_limit_s}, chosen=True)
            self.view.note(f"chosen: {_plan_of(best.answer).strategy}")
            candidates = [best]
            for label, strategy in self.strategies.items():
                try:
                    other = self._ask(label, {"strategy": strategy})
                except Infeasible as error:
                    self.view.note(f"{label}: {error}")
                    continue
                if _same_run(_plan_of(other.answer), _plan_of(best.answer)):
                    candidates[0] = Candidate(f"chosen ({label})", best.plan_id, best.answer, chosen=True)
                else:
                    candidates.append(other)
        if len(candidates) <= MIN_OTHER_PLANS:
            raise ExecutionFailed(
                f"only {len(candidates) - 1} plans besides the chosen one fit this machine, not {MIN_OTHER_PLANS}"
            )
        return candidates

    def _ask(self, label: str, options: dict[str, Any], *, chosen: bool = False) -> Candidate:
        job = self.client.run("/v1/plans", {**self.ids, "options": options}, self.view.progress)
        return Candidate(label, job["id"], PlanAnswer.parse(job["answer"]), chosen=chosen)

    def _execute(self, candidate: Candidate, index: int, count: int) -> Run:
        strategy = _plan_of(candidate.answer).strategy
        self.view.phase(f"execute {index}/{count}: {candidate.label}  [{strategy}]")
        body = {"steps": self.options.steps, "warmup_steps": self.options.warmup_steps}
        with self.clock.measure(f"execute {candidate.label}"):
            job = self.client.run(f"/v1/plans/{candidate.plan_id}/executions", body, self.view.progress)
        comparison = Comparison.parse(self.client.get(f"{job['links']['comparison']}")["comparison"])
        error = comparison.step_time.relative_error or 0.0
        self.view.note(
            f"predicted {comparison.step_time.predicted:.3f} s, measured {comparison.step_time.measured:.3f} s ({error:+.1%})"
        )
        return Run(
            label=candidate.label,
            strategy=strategy,
            chosen=candidate.chosen,
            prediction=Prediction.parse(job["prediction"]),
            measurement=Measurement.parse(job["measurement"]),
            comparison=comparison,
        )

    def _reference(self, graph: ModelGraph) -> list[float]:
        self.view.phase("single-process reference on the same data")
        steps = self.options.steps + self.options.warmup_steps
        with self.clock.measure("reference"):
            losses: list[float] = isolated(self.engine.reference_losses, graph, self.workload, steps, progress=_sink(self.view))
        return losses


def _sink(view: View) -> ProgressSink:
    return view.progress


def _plan_of(answer: PlanAnswer) -> Plan:
    if answer.plan is None:
        raise Infeasible("the planner found no plan for this machine")
    return answer.plan


def _same_run(first: Plan, second: Plan) -> bool:
    """Whether two plans do the same, whatever they are called."""
    names = {"name": "", "strategy": ""}
    return first.replace(**names).content_hash() == second.replace(**names).content_hash()


def _write(folder: Path, result: DemoResult, trace: dict[str, Any]) -> None:
    from api.report import render_report

    result.save(folder / "result.json")
    for name, text in (("report.html", render_report(result, trace)), ("trace.json", json.dumps(trace))):
        partial = folder / f"{name}.partial"
        partial.write_text(text)
        partial.replace(folder / name)


def _require_agreement(result: DemoResult) -> None:
    wrong: list[tuple[Run, LossCheck]] = [
        (run, run.losses) for run in result.runs if run.losses is not None and not run.losses.agrees
    ]
    if wrong:
        lines = "\n".join(
            f"  - {run.label} [{run.strategy}]: largest relative difference {check.max_relative_difference:.2e}, "
            f"tolerance {check.tolerance:g}"
            for run, check in wrong
        )
        raise ExecutionFailed(f"losses disagree with the single-process reference:\n{lines}")
