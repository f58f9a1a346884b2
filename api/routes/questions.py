"""/v1/exports, /v1/imports, /v1/diffs, /v1/why-not: questions about given plans and configs, answered at once."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body
from fastapi.responses import JSONResponse

from api.cluster_text import cluster_from_text
from api.documents import full
from api.inputs import Inputs
from api.judging import judge, model_of
from api.routes import examples
from api.routes.documents import PROBLEMS
from api.routes.plans import chosen_plan
from api.schemas import ClusterTextRequest, DiffRequest, ExportRequest, ImportRequest, Reference, WhyNotOfPlanRequest, WhyNotRequest
from api.service import Service, ServiceDep
from api.store import Job, StoredDocument
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.interchange import Exported, Judgement, Target
from specs.plan import Plan
from specs.questions import PlanDiff, WhyNot
from specs.training import TrainingSpec

ExportBody = Annotated[ExportRequest, Body(openapi_examples=examples.of("export"))]
ImportBody = Annotated[ImportRequest, Body(openapi_examples=examples.of("import"))]
ClusterTextBody = Annotated[ClusterTextRequest, Body(openapi_examples=examples.of("cluster_text"))]
DiffBody = Annotated[DiffRequest, Body(openapi_examples=examples.of("diff"))]
WhyNotBody = Annotated[WhyNotRequest, Body(openapi_examples=examples.of("why_not"))]
WhyNotOfPlanBody = Annotated[WhyNotOfPlanRequest, Body(openapi_examples=examples.of("why_not_of_plan"))]
questions = APIRouter(prefix="/v1", responses=PROBLEMS)
of_plans = APIRouter(prefix="/v1/plans", tags=["plans"], responses=PROBLEMS)
_NO_PLAN: dict[int | str, dict[str, Any]] = {409: {"description": "the planning job has no plan"}}


def _plan(service: Service, reference: Reference, name: str) -> tuple[Plan, Job | None]:
    """A plan document, or the chosen plan of a job and that job."""
    if isinstance(reference, str):
        job = service.job("plan", reference)
        return chosen_plan(service, job), job
    return Plan.parse(reference, subject=name), None


def _rows(service: Service, jobs: list[Job | None], **references: Reference | None) -> dict[str, StoredDocument]:
    """Documents that the request names; those it does not name are the first job's."""
    rows = service.reader.read({kind: reference for kind, reference in references.items() if reference is not None})
    for job in jobs:
        if job is not None:
            stored = service.reader.rows_of(job)
            return {**{kind: row for kind, row in stored.items() if kind in references}, **rows}
    return rows


def _graph(service: Service, rows: dict[str, StoredDocument]) -> ModelGraph | None:
    return service.graph(rows["model"]) if "model" in rows else None


def _cluster(service: Service, rows: dict[str, StoredDocument]) -> ClusterSpec | None:
    return service.engine.resolve(ClusterSpec.parse(rows["cluster"].document)) if "cluster" in rows else None


def _workload(rows: dict[str, StoredDocument]) -> TrainingSpec | None:
    return TrainingSpec.parse(rows["workload"].document) if "workload" in rows else None


@questions.post(
    "/exports", operation_id="create_export", tags=["exports"], summary="Write a plan in another framework's words",
    response_model=Exported, description="What the target cannot express is refused by name, all of it at once (422).",
)  # fmt: skip
def create_export(service: ServiceDep, request: ExportBody) -> JSONResponse:
    """Nothing is stored but the inputs."""
    plan, job = _plan(service, request.plan, "plan")
    rows = _rows(service, [job], model=request.model, cluster=request.cluster, workload=request.workload)
    return JSONResponse(full(_exported(service, plan, request.target, rows)))


def _exported(service: Service, plan: Plan, target: str, rows: dict[str, StoredDocument]) -> Exported:
    return service.engine.export(plan, target, _graph(service, rows), _workload(rows), _cluster(service, rows))


@of_plans.get(
    "/{job_id}/exports/{target}", operation_id="get_plan_export", summary="The chosen plan in another framework's words",
    response_model=Exported, responses=_NO_PLAN,
)  # fmt: skip
def plan_export(service: ServiceDep, job_id: str, target: Target) -> JSONResponse:
    """With the job's own documents."""
    job = service.job("plan", job_id)
    plan = chosen_plan(service, job)
    return JSONResponse(full(_exported(service, plan, target, service.reader.rows_of(job))))


@questions.post(
    "/imports", operation_id="create_import", tags=["imports"], summary="Judge a framework's config", response_model=Judgement,
    description="Reads Megatron flags, DeepSpeed JSON, accelerate YAML, torchtitan TOML or recipe, nanotron and GPT-NeoX YAML as "
    "data: the strategy, what was not understood, and with model, cluster and workload how fast and how full it is.",
)  # fmt: skip
def create_import(service: ServiceDep, request: ImportBody) -> JSONResponse:
    """Rules that forbid the config on this model and cluster are part of the answer."""
    imported = service.engine.read_config(request.text, request.framework)
    named: dict[str, Any] = {
        kind: getattr(request, kind) for kind in ("model", "cluster", "workload", "profile", "calibration")
    }  # fmt: skip
    own = model_of(imported, service.engine)
    if named["model"] is None and own is not None:
        named["model"] = own
    rows = _rows(service, [], **named)
    profile, calibration = service.reader.measured(rows)
    found = judge(
        service.engine, imported, graph=(lambda: service.graph(rows["model"])) if "model" in rows else None,
        cluster=_cluster(service, rows), workload=_workload(rows), profile=profile, calibration=calibration,
        strategy=request.strategy,
    )  # fmt: skip
    return JSONResponse(full(found))


@questions.post(
    "/clusters/from-text", operation_id="cluster_from_text", tags=["clusters"], summary="A cluster document from texts at hand",
    response_model=ClusterSpec,
    description="Reads a hostfile, `nvidia-smi topo -m` and nccl-tests. Nothing is stored: post the document to keep it.",
)  # fmt: skip
def make_cluster(service: ServiceDep, request: ClusterTextBody) -> JSONResponse:
    """Every line that does not read is named."""
    return JSONResponse(cluster_from_text(request, service.engine).to_dict())


@questions.post(
    "/diffs", operation_id="create_diff", tags=["diffs"], summary="What changes between two plans", response_model=PlanDiff,
    responses=_NO_PLAN,
)  # fmt: skip
def create_diff(service: ServiceDep, request: DiffBody) -> JSONResponse:
    """Settings, bytes of states that move to each rank, and which frameworks' checkpoints load."""
    before, first = _plan(service, request.before, "before")
    after, second = _plan(service, request.after, "after")
    rows = _rows(service, [second, first], model=request.model, workload=request.workload, cluster=request.cluster)
    graph, workload = _graph(service, rows), _workload(rows)
    if graph is None or workload is None:
        missing = [kind for kind in ("model", "workload") if kind not in rows]
        raise InvalidInput.single("missing_document", f"missing {' and '.join(missing)}", loc=(missing[0],), subject="request")
    return JSONResponse(full(service.engine.diff(before, after, graph, workload, _cluster(service, rows))))


@questions.post(
    "/why-not", operation_id="create_why_not", tags=["why-not"], summary="A strategy against a given plan", response_model=WhyNot,
)  # fmt: skip
def create_why_not(service: ServiceDep, request: WhyNotBody) -> JSONResponse:
    """The rule or limit that forbids it, or what it loses, term by term."""
    plan, job = _plan(service, request.plan, "plan")
    named = {kind: getattr(request, kind) for kind in ("model", "cluster", "workload", "profile", "calibration")}
    rows = _rows(service, [job], **named)
    missing = [kind for kind in ("model", "cluster", "workload") if kind not in rows]
    if missing:
        raise InvalidInput.single("missing_document", f"missing {' and '.join(missing)}", loc=(missing[0],), subject="request")
    return _why_not(service, request.strategy, plan, service.inputs(rows), proven=_is_proven(job))


@of_plans.post(
    "/{job_id}/why-not", operation_id="why_not_of_plan", summary="Why not this strategy?", response_model=WhyNot, responses=_NO_PLAN
)
def why_not_of_plan(service: ServiceDep, job_id: str, request: WhyNotOfPlanBody) -> JSONResponse:
    """Against the chosen plan of the job, with its documents."""
    job = service.job("plan", job_id)
    plan = chosen_plan(service, job)
    return _why_not(service, request.strategy, plan, service.inputs(service.reader.rows_of(job)), proven=_is_proven(job))


def _is_proven(job: Job | None) -> bool:
    answer = ((job.result or {}).get("answer") or {}) if job is not None else {}
    return answer.get("status") == "optimal"


def _why_not(service: Service, asked: str, plan: Plan, given: tuple[Inputs, ModelGraph], *, proven: bool) -> JSONResponse:
    inputs, graph = given
    found = service.engine.why_not(
        asked, plan, graph, inputs.cluster, inputs.workload, inputs.profile, inputs.calibration, proven=proven
    )
    return JSONResponse(full(found))
