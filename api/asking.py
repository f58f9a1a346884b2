"""The same questions asked of this process or of a service: documents in, documents out.

:class:`LocalAsker` reads the files, captures the model and computes here. :class:`RemoteAsker` sends the content of files to a
service (``--server URL``) and follows its jobs; a model named ``package.module:factory`` is captured here first, because no
service runs code of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from api.cli.inputs import Documents, Given, read_cluster
from api.client import Client
from api.documents import full
from api.engine import Engine, fits
from api.judging import judge, model_of
from api.schemas import PlanOptions, RecommendOptions
from specs.answer import PlanAnswer
from specs.base import read_mapping
from specs.calibration import Calibration
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.interchange import Exported, Judgement
from specs.memory import MemoryReport
from specs.plan import Plan
from specs.prediction import Prediction
from specs.profile import Profile
from specs.progress import ProgressSink
from specs.questions import PlanDiff, Recommendation, WhyNot
from specs.training import TrainingSpec


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a question is about, as the command line names it: files, presets, ids of a service's documents."""

    model: str | None = None
    cluster: str | None = None
    workload: Path | None = None
    profile: Path | None = None
    calibration: Path | None = None

    def require(self, *names: str) -> None:
        """Raise with every option of ``names`` that was not given."""
        absent = [f"--{name}" for name in names if getattr(self, name) is None]
        if absent:
            raise InvalidInput.single("missing_option", f"missing {', '.join(absent)}", subject="command line")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A priced plan."""

    plan: Plan
    prediction: Prediction
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"plan": full(self.plan), "prediction": full(self.prediction), "fits": self.fits}


class Asker(Protocol):
    """Questions and their answers; errors are ours, wherever they arise."""

    def plan(self, question: Question, options: PlanOptions, progress: ProgressSink) -> PlanAnswer:
        """The best plan."""

    def estimate(self, question: Question, plan: Plan | None, strategy: str | None) -> Estimate:
        """A plan or strategy, priced."""

    def memory(self, question: Question, strategy: str | None, micro_batch: int, host_buffer_factor: float) -> MemoryReport:
        """Memory, term by term."""

    def why_not(self, question: Question, asked: str, plan: Plan | None, options: PlanOptions, progress: ProgressSink) -> WhyNot:
        """A strategy against the chosen plan, which is searched when ``plan`` is None."""

    def diff(self, question: Question, before: Plan, after: Plan) -> PlanDiff:
        """What changes between two plans."""

    def recommend(self, question: Question, device: str, options: RecommendOptions, progress: ProgressSink) -> Recommendation:
        """How many devices."""

    def export(self, question: Question, plan: Plan, target: str) -> Exported:
        """A plan in another framework's words."""

    def judge(self, question: Question, text: str, framework: str, strategy: str | None) -> Judgement:
        """A framework's config, judged."""


def asker(server: str | None, token: str | None = None) -> Asker:
    """The service at ``server``, or this process."""
    return LocalAsker(Engine(allow_factory=True)) if server is None else RemoteAsker(Client(server, token))


class LocalAsker:
    """Answers computed in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _read(self, question: Question) -> Documents:
        question.require("model", "cluster", "workload")
        return Given(self._engine).read(
            question.model or "", question.cluster or "", question.workload or Path(), question.profile, question.calibration
        )

    def plan(self, question: Question, options: PlanOptions, progress: ProgressSink) -> PlanAnswer:
        """Search here."""
        graph, cluster, spec, profile, factors = self._read(question)
        return self._engine.plan(graph, cluster, spec, profile, options, progress=progress, calibration=factors)

    def estimate(self, question: Question, plan: Plan | None, strategy: str | None) -> Estimate:
        """Price here."""
        given = self._read(question)
        graph, cluster, spec = given[:3]
        if plan is None:
            plan = self._engine.plan_of(strategy or "", graph, cluster, spec)
        else:
            violations = self._engine.violations(plan, graph, cluster, spec)
            if violations:
                raise InvalidInput(violations, subject="plan")
        prediction = self._engine.estimate(graph, cluster, spec, plan, given.profile, given.calibration)
        return Estimate(plan=plan, prediction=prediction, fits=fits(prediction))

    def memory(self, question: Question, strategy: str | None, micro_batch: int, host_buffer_factor: float) -> MemoryReport:
        """Count here."""
        graph, cluster, spec, *_ = self._read(question)
        return self._engine.memory(graph, cluster, spec, strategy, micro_batch=micro_batch, host_buffer_factor=host_buffer_factor)

    def why_not(self, question: Question, asked: str, plan: Plan | None, options: PlanOptions, progress: ProgressSink) -> WhyNot:
        """Search here unless the chosen plan is given, then compare."""
        given = self._read(question)
        proven = False
        if plan is None:
            answer = self._engine.plan(*given[:4], options, progress=progress, calibration=given.calibration)
            plan, proven = _plan_of(answer), answer.status == "optimal"
        return self._engine.why_not(asked, plan, *given[:3], given.profile, given.calibration, proven=proven)

    def diff(self, question: Question, before: Plan, after: Plan) -> PlanDiff:
        """Compare here."""
        question.require("model", "workload")
        graph = self._engine.load_model(question.model or "")
        cluster = None if question.cluster is None else read_cluster(question.cluster, self._engine)
        return self._engine.diff(before, after, graph, TrainingSpec.load(question.workload or Path()), cluster)

    def recommend(self, question: Question, device: str, options: RecommendOptions, progress: ProgressSink) -> Recommendation:
        """Search every size here."""
        question.require("model", "workload")
        graph = self._engine.load_model(question.model or "")
        return self._engine.recommend(graph, device, TrainingSpec.load(question.workload or Path()), options, progress)

    def export(self, question: Question, plan: Plan, target: str) -> Exported:
        """Write here."""
        graph = None if question.model is None else self._engine.load_model(question.model)
        spec = None if question.workload is None else TrainingSpec.load(question.workload)
        cluster = None if question.cluster is None else read_cluster(question.cluster, self._engine)
        return self._engine.export(plan, target, graph, spec, cluster)

    def judge(self, question: Question, text: str, framework: str, strategy: str | None) -> Judgement:
        """Read and price here."""
        imported = self._engine.read_config(text, framework)
        own = model_of(imported, self._engine) if question.model is None else None
        name = question.model
        graph = None
        if name is not None:
            graph = lambda: self._engine.load_model(name)  # noqa: E731
        elif own is not None:
            graph = lambda: self._engine.capture(own, "config")  # noqa: E731
        return judge(
            self._engine, imported, graph=graph, strategy=strategy,
            cluster=None if question.cluster is None else read_cluster(question.cluster, self._engine),
            workload=None if question.workload is None else TrainingSpec.load(question.workload),
            profile=None if question.profile is None else Profile.load(question.profile),
            calibration=None if question.calibration is None else Calibration.load(question.calibration),
        )  # fmt: skip


class RemoteAsker:
    """Answers of a service."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def _documents(self, question: Question) -> dict[str, Any]:
        """Content of files; what is no file is an id or preset of the service."""
        found: dict[str, Any] = {}
        if question.model is not None:
            found["model"] = _model_reference(question.model)
        if question.cluster is not None:
            is_file = Path(question.cluster).is_file()
            found["cluster"] = ClusterSpec.load(question.cluster).to_dict() if is_file else question.cluster.partition(":")[0]
        if question.workload is not None:
            is_file = question.workload.is_file()
            found["workload"] = TrainingSpec.load(question.workload).to_dict() if is_file else str(question.workload)
        if question.profile is not None:
            found["profile"] = Profile.load(question.profile).to_dict()
        if question.calibration is not None:
            found["calibration"] = Calibration.load(question.calibration).to_dict()
        return found

    def plan(self, question: Question, options: PlanOptions, progress: ProgressSink) -> PlanAnswer:
        """A planning job, followed to its end."""
        return PlanAnswer.parse(self._plan_job(question, options, progress)["answer"])

    def _plan_job(self, question: Question, options: PlanOptions, progress: ProgressSink) -> dict[str, Any]:
        question.require("model", "cluster", "workload")
        body = {**self._documents(question), "options": options.model_dump(mode="json")}
        return self._client.run("/v1/plans", body, progress, needs_plan=False)

    def estimate(self, question: Question, plan: Plan | None, strategy: str | None) -> Estimate:
        """Priced by the service."""
        question.require("model", "cluster", "workload")
        given = {"strategy": strategy} if plan is None else {"plan": plan.to_dict()}
        answer = self._client.post("/v1/estimates", {**self._documents(question), **given})
        return Estimate(
            plan=Plan.parse(answer["plan"]), prediction=Prediction.parse(answer["prediction"]), fits=bool(answer["fits"])
        )

    def memory(self, question: Question, strategy: str | None, micro_batch: int, host_buffer_factor: float) -> MemoryReport:
        """Counted by the service."""
        question.require("model", "cluster", "workload")
        body = {"strategy": strategy, "micro_batch": micro_batch, "host_buffer_factor": host_buffer_factor}
        return MemoryReport.parse(self._client.post("/v1/memory", {**self._documents(question), **body}))

    def why_not(self, question: Question, asked: str, plan: Plan | None, options: PlanOptions, progress: ProgressSink) -> WhyNot:
        """A planning job of the service (reused where it has one), and its answer about the strategy."""
        if plan is not None:
            question.require("model", "cluster", "workload")
            body = {**self._documents(question), "plan": plan.to_dict(), "strategy": asked}
            return WhyNot.parse(self._client.post("/v1/why-not", body))
        job = self._plan_job(question, options, progress)
        _plan_of(PlanAnswer.parse(job["answer"]))
        return WhyNot.parse(self._client.post(f"{job['links']['self']}/why-not", {"strategy": asked}))

    def diff(self, question: Question, before: Plan, after: Plan) -> PlanDiff:
        """Compared by the service."""
        question.require("model", "workload")
        body = {**self._documents(question), "before": before.to_dict(), "after": after.to_dict()}
        return PlanDiff.parse(self._client.post("/v1/diffs", body))

    def recommend(self, question: Question, device: str, options: RecommendOptions, progress: ProgressSink) -> Recommendation:
        """A job of the service, followed to its end."""
        question.require("model", "workload")
        body = {**self._documents(question), "device": device, "options": options.model_dump(mode="json")}
        return Recommendation.parse(self._client.run("/v1/recommendations", body, progress)["answer"])

    def export(self, question: Question, plan: Plan, target: str) -> Exported:
        """Written by the service."""
        return Exported.parse(
            self._client.post("/v1/exports", {**self._documents(question), "plan": plan.to_dict(), "target": target})
        )

    def judge(self, question: Question, text: str, framework: str, strategy: str | None) -> Judgement:
        """Read and priced by the service."""
        body = {**self._documents(question), "text": text, "framework": framework, "strategy": strategy}
        return Judgement.parse(self._client.post("/v1/imports", body))


def _model_reference(text: str) -> Any:
    if Path(text).is_file():
        return read_mapping(text)
    if ":" in text:
        return Engine(allow_factory=True).load_model(text).to_dict()
    return text


def _plan_of(answer: PlanAnswer) -> Plan:
    """The plan, or bad input: nothing can be held against an answer without one."""
    if answer.plan is None:
        reasons = "; ".join(limit.message for limit in answer.limits) or answer.status
        raise InvalidInput.single("no_chosen_plan", f"there is no chosen plan to compare with: {reasons}", subject="why")
    return answer.plan
