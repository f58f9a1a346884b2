"""/v1/plans/{id}/artifacts: what a planning job made, as files to download."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from api.etag import tagged
from api.problem_body import ApiProblem
from api.routes.documents import PROBLEMS
from api.routes.jobs import answered
from api.routes.plans import chosen_plan, report_of, trace_of
from api.service import Service, ServiceDep
from api.store import Job
from specs.errors import Violation, nearest_name

artifacts = APIRouter(prefix="/v1/plans", tags=["plans"], responses=PROBLEMS)
Made = tuple[str, str]  # media type, text


def _json(value: Any) -> Made:
    return "application/json", json.dumps(value, indent=1) + "\n"


def _answer(service: Service, job: Job) -> Made:
    return _json(answered(service, job, "answer"))


def _plan(service: Service, job: Job) -> Made:
    return _json(chosen_plan(service, job).to_dict())


def _prediction(service: Service, job: Job) -> Made:
    chosen_plan(service, job)
    return _json(answered(service, job, "answer")["prediction"])


def _trace(service: Service, job: Job) -> Made:
    return _json(trace_of(service, job, chosen_plan(service, job)))


def _report(service: Service, job: Job) -> Made:
    return "text/html", report_of(service, job)


def _candidates(service: Service, job: Job) -> Made:
    """The chosen plan, its alternatives and the counts of rejected candidates by reason, one a row."""
    answer = answered(service, job, "answer")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["status", "strategy", "step_time_s", "peak_bytes", "count", "reason"])
    if answer.get("plan"):
        predicted = answer["prediction"]
        rows.writerow(["chosen", answer["plan"]["strategy"], predicted["step_time_s"], predicted["memory"]["peak_bytes"], 1, ""])
    for item in answer.get("alternatives", ()):
        rows.writerow(["alternative", item["strategy"], item["step_time_s"], item["peak_bytes"], 1, item["why_not"]])
    for reason, count in answer.get("rejected", {}).items():
        rows.writerow(["rejected", "", "", "", count, reason])
    return "text/csv", text.getvalue()


_MAKERS: dict[str, Callable[[Service, Job], Made]] = {
    "answer.json": _answer, "plan.json": _plan, "prediction.json": _prediction, "trace.json": _trace, "report.html": _report,
    "candidates.csv": _candidates,
}  # fmt: skip


@artifacts.get("/{job_id}/artifacts", operation_id="list_plan_artifacts", summary="Files that the job made")
def list_artifacts(service: ServiceDep, job_id: str) -> JSONResponse:
    """Names and links; what a job without a plan lacks is left out."""
    job = service.job("plan", job_id)
    answer = (job.result or {}).get("answer") or {}
    names = list(_MAKERS) if answer.get("plan") else ["answer.json", "report.html", "candidates.csv"] if answer else []
    return JSONResponse({"items": [{"name": name, "href": f"/v1/plans/{job_id}/artifacts/{name}"} for name in names]})


@artifacts.get(
    "/{job_id}/artifacts/{name}", operation_id="get_plan_artifact", summary="Download one file", response_class=Response,
    responses={304: {"description": "unchanged"}, 409: {"description": "the job has not made it"}},
)  # fmt: skip
def get_artifact(service: ServiceDep, request: Request, job_id: str, name: str) -> Response:
    """With an ETag; immutable once the job has ended."""
    job = service.job("plan", job_id)
    if name not in _MAKERS:
        near = nearest_name(name, _MAKERS)
        violation = Violation(
            code="unknown_artifact", message=f"there is no artifact '{name}'", loc=("path", "name"), actual=name,
            allowed=list(_MAKERS), nearest=near,
        )  # fmt: skip
        raise ApiProblem(404, "not-found", violation.message, violations=[violation])
    media_type, text = _MAKERS[name](service, job)
    disposition = {"Content-Disposition": f'attachment; filename="{job_id}-{name}"'} if media_type != "text/html" else {}
    return tagged(request, Response(text, media_type=media_type, headers=disposition))
