"""What all job resources have: read, list, events, cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi.responses import JSONResponse
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from api.problem_body import ApiProblem
from api.schemas import JobResource, Page
from api.service import PLURALS, Before, Limit, Service, ServiceDep, job_resource, page
from api.store import Job

LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", pattern=r"^\d{1,12}$", description="number of the last event seen; the stream goes on after it"),
]


def accepted(resource: dict[str, Any]) -> JSONResponse:
    """202 with the job's resource and its Location."""
    return JSONResponse(resource, status_code=202, headers={"Location": resource["links"]["self"]})


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
    def read(service: ServiceDep, job_id: str) -> JSONResponse:
        return JSONResponse(resource(service.job(kind, job_id)))

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

    @router.delete(
        path,
        operation_id=f"cancel_{kind}",
        summary="Cancel the job",
        response_model=model,
        status_code=202,
        description="A queued job is cancelled at once, a running one within seconds; one that has ended stays as it is (200).",
    )
    def cancel(service: ServiceDep, job_id: str) -> JSONResponse:
        was_open = service.job(kind, job_id).is_open
        if was_open:
            service.jobs.cancel(job_id)
        return JSONResponse(resource(service.job(kind, job_id)), status_code=202 if was_open else 200)


def add_list_route(router: APIRouter, kind: str) -> None:
    """Add the list of one kind of job."""

    @router.get(
        "",
        operation_id=f"list_{PLURALS[kind]}",
        summary=f"List {PLURALS[kind]}, newest first, without results",
        response_model=Page,
    )
    def list_all(service: ServiceDep, limit: Limit = 50, before: Before = None) -> JSONResponse:
        return JSONResponse(page([job_resource(job) for job in service.store.jobs(kind, limit=limit, before=before)], limit))


def answered(service: Service, job: Job, part: str) -> Any:
    """A part of a job's result, or 409 saying why it is not there."""
    value = (job.result or {}).get(part)
    if value is None:
        why = "it is still " + job.status if job.is_open else f"it ended as '{job.status}'"
        raise ApiProblem(409, "not-there", f"{job.kind} {job.id} has no {part}: {why}")
    return value
