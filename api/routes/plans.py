"""/v1/plans and /v1/estimates."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body
from fastapi.responses import HTMLResponse, JSONResponse, Response

from api.documents import full
from api.engine import fits
from api.problem_body import ApiProblem
from api.report import plan_report
from api.routes import examples
from api.routes.documents import PROBLEMS
from api.routes.jobs import accepted, add_job_routes, add_list_route, answered
from api.schemas import EstimateRequest, EstimateResource, MemoryRequest, PlanRequest, PlanResource
from api.service import IdempotencyKey, Reuse, Service, ServiceDep, job_resource
from api.store import Job, StoredDocument
from specs.answer import PlanAnswer
from specs.errors import InvalidInput, Violation
from specs.memory import MemoryReport
from specs.plan import Plan

plans = APIRouter(prefix="/v1/plans", tags=["plans"], responses=PROBLEMS)
PlanBody = Annotated[PlanRequest, Body(openapi_examples=examples.of("plan"))]
EstimateBody = Annotated[EstimateRequest, Body(openapi_examples=examples.of("estimate"))]
MemoryBody = Annotated[MemoryRequest, Body(openapi_examples=examples.of("memory"))]
memory = APIRouter(prefix="/v1/memory", tags=["memory"], responses=PROBLEMS)
estimates = APIRouter(prefix="/v1/estimates", tags=["estimates"], responses=PROBLEMS)


def plan_resource(job: Job) -> dict[str, Any]:
    """A planning job as clients see it."""
    resource = job_resource(job)
    own = resource["links"]["self"]
    resource["links"] |= {
        "trace": f"{own}/trace",
        "report": f"{own}/report",
        "artifacts": f"{own}/artifacts",
        "executions": f"{own}/executions",
    }
    return {**resource, "answer": (job.result or {}).get("answer")}


def references(request: PlanRequest | EstimateRequest | MemoryRequest) -> dict[str, Any]:
    """The documents that a request names, by kind."""
    named = {"model": request.model, "cluster": request.cluster, "workload": request.workload}
    if isinstance(request, MemoryRequest):
        return named
    given = {"profile": request.profile, "calibration": request.calibration}
    return named | {kind: reference for kind, reference in given.items() if reference is not None}


@plans.post(
    "",
    operation_id="create_plan",
    summary="Plan: how should this model be parallelised here?",
    status_code=202,
    response_model=PlanResource,
    responses={200: {"model": PlanResource, "description": "the same question was answered before; see 'reuse'"}},
    description="Starts a durable planning job. It survives a crash of the service; follow it at /events. "
    "An infeasible job ends with status 'infeasible' and an answer that names the limits.",
)
def create_plan(
    service: ServiceDep, request: PlanBody, idempotency_key: IdempotencyKey = None, reuse: Reuse = True
) -> JSONResponse:
    """Check and store the inputs, then enqueue the job."""
    check_time_limit(service, request.options.time_limit_s)
    rows = service.reader.read(references(request))
    stored = {kind: row.id for kind, row in rows.items()} | {"options": full_options(request)}
    job = service.create_job("plan", stored, idempotency_key, stored, reuse=reuse)
    return accepted(plan_resource(job))


def check_time_limit(service: Service, asked_s: float) -> None:
    """Raise when a client asks for a longer search than the operator allows."""
    limit_s = service.settings.max_time_limit_s
    if asked_s > limit_s:
        raise InvalidInput.single(
            "time_limit_too_long", f"this service searches for at most {limit_s:g} s", loc=("options", "time_limit_s"),
            actual=asked_s, allowed=f"<= {limit_s:g}", nearest=limit_s, subject="request",
        )  # fmt: skip


def full_options(request: PlanRequest) -> dict[str, Any]:
    """The options with their defaults, as stored."""
    return request.options.model_dump(mode="json")


add_list_route(plans, "plan")
add_job_routes(plans, "plan", plan_resource, PlanResource)


@plans.get("/{job_id}/trace", operation_id="get_plan_trace", summary="Predicted timeline of one step, as Chrome/Perfetto JSON")
def plan_trace(service: ServiceDep, job_id: str) -> JSONResponse:
    """Simulate the chosen plan."""
    job = service.job("plan", job_id)
    return JSONResponse(trace_of(service, job, chosen_plan(service, job)))


@plans.get(
    "/{job_id}/report",
    operation_id="get_plan_report",
    summary="The plan and its executions as one HTML page",
    response_class=HTMLResponse,
)
def report(service: ServiceDep, job_id: str) -> HTMLResponse:
    """Self-contained: opens offline."""
    return HTMLResponse(report_of(service, service.job("plan", job_id)))


def report_of(service: Service, job: Job) -> str:
    """The report of a finished planning job."""
    answer = PlanAnswer.parse(answered(service, job, "answer"))
    inputs, graph = service.inputs(service.reader.rows_of(job))
    trace = None if answer.plan is None else trace_of(service, job, answer.plan)
    executions = [service.job("execution", item.id) for item in service.store.jobs("execution", limit=100, parent_id=job.id)]
    results = [execution.result or {} for execution in executions if execution.status == "succeeded"]
    return plan_report(answer, graph=graph, cluster=inputs.cluster, workload=inputs.workload, executions=results, trace=trace)


def chosen_plan(service: Service, job: Job) -> Plan:
    """The plan of a finished planning job, or 409."""
    answer = answered(service, job, "answer")
    if answer.get("plan") is None:
        raise ApiProblem(409, "no-plan", f"plan {job.id} ended as '{job.status}': there is no plan; see answer.limits")
    return Plan.parse(answer["plan"])


def trace_of(service: Service, job: Job, plan: Plan) -> dict[str, Any]:
    """The predicted timeline of a plan of a job."""
    inputs, graph = service.inputs(service.reader.rows_of(job))
    return service.engine.trace(graph, inputs.cluster, inputs.workload, plan, inputs.profile, inputs.calibration)


@estimates.post(
    "",
    operation_id="create_estimate",
    summary="Price one plan or strategy, at once",
    response_model=EstimateResource,
    description="Nothing is stored but the inputs. A config posted for the first time is captured first, which takes seconds.",
)
def create_estimate(service: ServiceDep, request: EstimateBody) -> Response:
    """Check the plan, price it, say whether it fits."""
    if (request.plan is None) == (request.strategy is None):
        violation = Violation(
            code="plan_or_strategy", message="give exactly one of 'plan' and 'strategy'", allowed=["plan", "strategy"]
        )
        raise InvalidInput([violation], subject="request")
    rows = service.reader.read(references(request))
    given = request.strategy if request.plan is None else json.dumps(request.plan, sort_keys=True)
    key = (*_hashes(rows), request.plan is None, given)
    return _kept(service, key, lambda: price(service, rows, request))


def _kept(service: Service, key: tuple[Any, ...], make: Callable[[], dict[str, Any]]) -> Response:
    """An answer made once; what is kept is its text."""
    return Response(service.estimates.get(key, lambda: bytes(JSONResponse(make()).body)), media_type="application/json")


@memory.post(
    "",
    operation_id="create_memory_report",
    summary="How much memory, before anything runs, at once",
    response_model=MemoryReport,
    description="States of every ZeRO stage term by term, activations by unit, logits, offload, and the peak of a strategy. "
    "No time is simulated and no device is needed.",
)
def create_memory_report(service: ServiceDep, request: MemoryBody) -> Response:
    """Check the inputs, count."""
    rows = service.reader.read(references(request))

    def count() -> dict[str, Any]:
        inputs, graph = service.inputs(rows)
        report = service.engine.memory(
            graph, inputs.cluster, inputs.workload, request.strategy, micro_batch=request.micro_batch,
            host_buffer_factor=request.host_buffer_factor,
        )  # fmt: skip
        return full(report)

    key = ("memory", *_hashes(rows), request.strategy, request.micro_batch, request.host_buffer_factor)
    return _kept(service, key, count)


def _hashes(rows: dict[str, StoredDocument]) -> list[tuple[str, str]]:
    """What documents these are."""
    return sorted((kind, row.content_hash) for kind, row in rows.items())


def price(service: Service, rows: dict[str, StoredDocument], request: EstimateRequest) -> dict[str, Any]:
    """The estimate; the same documents and plan always give the same."""
    inputs, graph = service.inputs(rows)
    if request.plan is not None:
        plan = Plan.parse(request.plan)
        violations = service.engine.violations(plan, graph, inputs.cluster, inputs.workload)
        if violations:
            raise InvalidInput(violations, subject="plan")
    else:
        plan = service.engine.plan_of(request.strategy or "", graph, inputs.cluster, inputs.workload)
    prediction = service.engine.estimate(graph, inputs.cluster, inputs.workload, plan, inputs.profile, inputs.calibration)
    return {"plan": full(plan), "prediction": full(prediction), "fits": fits(prediction)}
