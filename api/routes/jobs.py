"""What all job resources have: read, list, events, cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from api.etag import tagged
from api.problem_body import ApiProblem
from api.schemas import JobResource, JobStatus, Page, Problem
from api.service import PLURALS, Before, Limit, Service, ServiceDep, cursor, job_resource, page
from api.store import OPEN, Job

Purge = Annotated[bool, Query(description="delete a job that has ended instead of cancelling one that runs")]
StatusFilter = Annotated[JobStatus | None, Query(description="only jobs in this state")]
PlanFilter = Annotated[str | None, Query(max_length=64, description="only executions of this plan")]
HashFilter = Annotated[str | None, Query(pattern="^[0-9a-f]{64}$", description="only jobs with these inputs and options")]
LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", pattern=r"^\d{1,12}$", description="number of the last event seen; the stream goes on after it"),
]


def accepted(resource: dict[str, Any]) -> JSONResponse:
    """202 with the job's resource and its Location; 200 when the job has ended, which an earlier request started."""
    code = 202 if resource["status"] in OPEN else 200
    return JSONResponse(resource, status_code=code, headers={"Location": resource["links"]["self"]})


def add_job_routes(
    router: APIRouter, kind: str, resource: Callable[[Job], dict[str, Any]], model: type[JobResource], *, path: str = "/{job_id}"
) -> None:
    """Add read, events and cancel of one kind of job to a router."""

    @router.get(
        path,
        operation_id=f"get_{kind}_job" if kind == "profile" else f"get_{kind}",
        summary=f"Read one {kind} job",
        response_model=model,
    )
    def read(service: ServiceDep, request: Request, job_id: str) -> Response:
        return tagged(request, JSONResponse(resource(service.job(kind, job_id))))

    @router.get(
        path + "/events",
        operation_id=f"follow_{kind}",
        summary="Follow the job (server-sent events)",
        description="Events 'status' and 'progress', numbered from 1, from the start or after Last-Event-ID; "
        "ends with the final status.",
        response_class=EventSourceResponse,
    )
    async def events(service: ServiceDep, job_id: str, last_event_id: LastEventId = None) -> EventSourceResponse:
        await run_in_threadpool(service.job, kind, job_id)
        return EventSourceResponse(service.hub.follow(service.store, job_id, int(last_event_id or 0)), ping=15)

    def cancelled(service: Service, job_id: str) -> JSONResponse:
        was_open = service.job(kind, job_id).is_open
        if was_open:
            service.jobs.cancel(job_id)
        return JSONResponse(resource(service.job(kind, job_id)), status_code=202 if was_open else 200)

    @router.post(
        path + "/cancel",
        operation_id=f"cancel_{kind}",
        summary="Cancel the job",
        response_model=model,
        status_code=202,
        responses={200: {"model": model, "description": "it had ended"}},
        description="A queued job is cancelled at once, a running one within seconds; one that has ended stays as it is (200).",
    )
    def cancel(service: ServiceDep, job_id: str) -> JSONResponse:
        return cancelled(service, job_id)

    @router.delete(
        path,
        operation_id=f"delete_{kind}_job" if kind == "profile" else f"delete_{kind}",
        summary="Cancel the job, or delete it",
        response_model=model,
        status_code=202,
        responses={
            200: {"model": model, "description": "it had ended"},
            204: {"description": "deleted"},
            409: {"model": Problem, "description": "it runs, or other jobs rest on it"},
        },
        description="Cancels as POST .../cancel does. With purge=true a job that has ended is deleted with its events and results.",
    )
    def delete(service: ServiceDep, job_id: str, purge: Purge = False) -> Response:
        if not purge:
            return cancelled(service, job_id)
        service.job(kind, job_id)
        why = service.store.delete_job(job_id)
        if why is not None:
            raise ApiProblem(409, "in-use", f"{kind} {job_id} stays: {why}")
        return Response(status_code=204)


def add_list_route(router: APIRouter, kind: str) -> None:
    """Add the list of one kind of job."""

    @router.get(
        "",
        operation_id=f"list_{PLURALS[kind]}",
        summary=f"List {PLURALS[kind]}, newest first, without results",
        response_model=Page,
    )
    def list_all(
        service: ServiceDep, limit: Limit = 50, before: Before = None, status: StatusFilter = None, plan_id: PlanFilter = None,
        input_hash: HashFilter = None,
    ) -> JSONResponse:  # fmt: skip
        found = service.store.jobs(
            kind, limit=limit, before=cursor(before), parent_id=plan_id, status=status, input_hash=input_hash
        )
        return JSONResponse(page([job_resource(job) for job in found], limit))


def answered(service: Service, job: Job, part: str) -> Any:
    """A part of a job's result, or 409 saying why it is not there."""
    value = (job.result or {}).get(part)
    if value is None:
        why = "it is still " + job.status if job.is_open else f"it ended as '{job.status}'"
        raise ApiProblem(409, "not-there", f"{job.kind} {job.id} has no {part}: {why}")
    return value
