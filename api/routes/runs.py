"""/v1/profiles and executions: the work that uses this machine's devices, and the comparison."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from api.documents import full
from api.problem_body import ApiProblem
from api.routes import examples
from api.routes.documents import PROBLEMS, stored
from api.routes.jobs import accepted, add_job_routes, add_list_route, answered
from api.routes.plans import chosen_plan
from api.schemas import ComparisonResource, ExecutionRequest, ExecutionResource, Problem, ProfileJobResource, ProfileRequest
from api.service import IdempotencyKey, Service, ServiceDep, job_resource
from api.settings import LOCAL_CLUSTER_ID
from api.store import Job, StoredDocument
from specs.base import violations_of
from specs.errors import InvalidInput

FORBIDDEN: dict[int | str, dict[str, Any]] = {
    403: {"model": Problem, "description": "not a cluster that the operator registered as local"}
}
ProfileBody = Annotated[dict[str, Any], Body(openapi_examples=examples.of("profile"))]
ExecutionBody = Annotated[ExecutionRequest, Body(openapi_examples=examples.of("execution"))]
profiles = APIRouter(prefix="/v1/profiles", tags=["profiles"], responses=PROBLEMS)
executions = APIRouter(prefix="/v1/executions", tags=["executions"], responses=PROBLEMS)
executions_of_plans = APIRouter(prefix="/v1/plans", tags=["executions"], responses=PROBLEMS)


def profile_resource(job: Job) -> dict[str, Any]:
    """A profiling job as clients see it."""
    profile_id = (job.result or {}).get("profile_id")
    resource = job_resource(job)
    if profile_id:
        resource["links"]["profile"] = f"/v1/profiles/{profile_id}"
    return {**resource, "profile_id": profile_id}


def execution_resource(job: Job) -> dict[str, Any]:
    """An execution as clients see it."""
    result = job.result or {}
    resource = job_resource(job)
    resource["links"] |= {"comparison": f"{resource['links']['self']}/comparison", "plan": f"/v1/plans/{job.parent_id}"}
    return {**resource, "plan_id": job.parent_id, "prediction": result.get("prediction"), "measurement": result.get("measurement")}


def _require_local(service: Service, cluster: StoredDocument) -> None:
    """Only the machine that the operator registered may be used, and only if it was."""
    local = service.store.document("cluster", LOCAL_CLUSTER_ID) if service.settings.local_devices else None
    if local is None:
        raise ApiProblem(
            403, "not-local", "this service registers no local devices; its operator may start it with --local-devices N"
        )
    if cluster.id != local.id and cluster.content_hash != local.content_hash:
        raise ApiProblem(403, "not-local", f"cluster '{cluster.name}' is not this machine; use cluster '{LOCAL_CLUSTER_ID}'")


@profiles.post(
    "",
    operation_id="create_profile",
    summary="Store a measured profile, or measure this machine",
    status_code=202,
    response_model=ProfileJobResource,
    responses=FORBIDDEN,
    description="A profile document (it has 'devices') is stored: 201. A request {model, cluster, workload} starts a durable job "
    "that measures the ops, collectives and optimizer of that model on this machine: 202; its resource names the profile "
    "when it is done.",
)
def create_profile(
    service: ServiceDep,
    document: ProfileBody,
    idempotency_key: IdempotencyKey = None,
) -> JSONResponse:
    """Tell the two apart by 'devices'."""
    if "devices" in document:
        return stored(*service.reader.store_document("profile", document))
    try:
        request = ProfileRequest.model_validate(document)
    except ValidationError as error:
        raise InvalidInput(violations_of(error, ProfileRequest), subject="request") from None
    rows = service.reader.read({"model": request.model, "cluster": request.cluster, "workload": request.workload})
    _require_local(service, rows["cluster"])
    body = {kind: row.id for kind, row in rows.items()} | {"strategies": list(request.strategies), "quick": request.quick}
    return accepted(profile_resource(service.create_job("profile", body, idempotency_key, body)))


add_job_routes(profiles, "profile", profile_resource, ProfileJobResource, path="/jobs/{job_id}")


@executions_of_plans.post(
    "/{job_id}/executions", operation_id="create_execution", summary="Run the chosen plan on this machine", status_code=202,
    response_model=ExecutionResource, responses={**FORBIDDEN, 409: {"model": Problem, "description": "the plan is not there"}},
    description="Starts a durable job: predict, run, compare. A run that a crash interrupts starts again from its first step.",
)  # fmt: skip
def create_execution(
    service: ServiceDep, job_id: str, request: ExecutionBody,
    idempotency_key: IdempotencyKey = None,
) -> JSONResponse:  # fmt: skip
    """Check that it may run here, then enqueue it."""
    job = service.job("plan", job_id)
    plan = chosen_plan(service, job)
    rows = service.reader.rows_of(job)
    _require_local(service, rows["cluster"])
    here = service.settings.local_devices
    if max(device for pipeline in plan.pipelines for stage in pipeline.stages for device in stage.devices) >= here:
        raise ApiProblem(409, "too-few-devices", f"the plan uses {plan.world_size} devices, this service registers {here}")
    ids = {kind: row.id for kind, row in rows.items()}
    if request.profile is not None:
        ids["profile"] = service.reader.read({"profile": request.profile})["profile"].id
    body = {**ids, "steps": request.steps, "warmup_steps": request.warmup_steps}
    execution = service.create_job("execution", {**body, "plan": full(plan)}, idempotency_key, body, parent_id=job_id)
    return accepted(execution_resource(execution))


add_list_route(executions, "execution")
add_job_routes(executions, "execution", execution_resource, ExecutionResource)


@executions.get(
    "/{job_id}/comparison",
    operation_id="get_comparison",
    summary="Predicted against measured, term by term",
    response_model=ComparisonResource,
    responses={409: {"model": Problem, "description": "the execution has not succeeded"}},
)
def comparison(service: ServiceDep, job_id: str) -> JSONResponse:
    """The comparison of a finished execution."""
    job = service.job("execution", job_id)
    return JSONResponse({"execution_id": job.id, "comparison": answered(service, job, "comparison")})
