"""Pages for people: shells without data, which ask the API from the browser. Nothing outside this service is loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool

from api import figures
from api.etag import tagged
from api.problem_body import ApiProblem
from api.routes.documents import PROBLEMS
from api.routes.jobs import answered
from api.routes.plans import trace_of
from api.service import ServiceDep
from api.stage_table import stage_rows
from api.verdict import verdict
from specs.answer import PlanAnswer
from specs.interchange import FRAMEWORKS, TARGETS
from specs.terms import MEMORY_TERMS, TIME_TERMS
from specs.training import PRECISIONS

_STATIC = Path(__file__).parent.parent / "static"
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Plotly writes style elements; nothing else may come from anywhere but this service.
_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'"
)
pages = APIRouter(include_in_schema=False)
views = APIRouter(prefix="/v1", tags=["pages"], responses=PROBLEMS)


@cache
def _templates() -> Environment:
    return Environment(loader=PackageLoader("api", "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def _page(name: str, **values: Any) -> HTMLResponse:
    text = _templates().get_template(name).render(**values)
    return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})


@pages.get("/")
def start() -> HTMLResponse:
    """Paste a model, choose a cluster, plan; or paste a config and have it judged."""
    return _page("start.html.j2", precisions=list(PRECISIONS), frameworks=FRAMEWORKS)


@pages.get("/plans/{job_id}")
def plan(job_id: str) -> HTMLResponse:
    """One planning job, live and with its answer."""
    return _page("plan.html.j2", job_id=job_id, targets=TARGETS)


@pages.get("/static/{name}")
async def static(request: Request, name: str) -> Response:
    """Style, scripts, and the plot library of the installed package."""
    if name == "plotly.js":
        return tagged(request, Response(await run_in_threadpool(_plotly), media_type="text/javascript"), tag=_plotly_tag())
    path = _STATIC / name
    known = {item.name: item for item in _STATIC.iterdir()}
    if name not in known or path.suffix not in _TYPES:
        raise ApiProblem(404, "not-found", f"there is no file '{name}'")
    return tagged(request, Response(known[name].read_bytes(), media_type=_TYPES[path.suffix]))


@cache
def _plotly() -> bytes:
    from plotly.offline import get_plotlyjs

    return bytes(get_plotlyjs().encode())


@cache
def _plotly_tag() -> str:
    from importlib.metadata import version

    return f"plotly-{version('plotly')}"


@views.get("/catalogue", operation_id="get_catalogue", summary="Names to choose from: devices, node and model presets")
def catalogue(service: ServiceDep, request: Request) -> Response:
    """Short; the sources of the numbers are on the command line (meshwright devices --detail)."""
    nodes = [
        {"name": node["name"], "device": node["device"], "devices_per_node": node["devices_per_node"]}
        for node in service.engine.node_presets()
    ]
    devices = [device["name"] for device in service.engine.devices()]
    found = {"devices": devices, "node_presets": nodes, "model_presets": service.engine.model_presets()}
    return tagged(request, JSONResponse(found))


@views.get("/plans/{job_id}/view", operation_id="get_plan_view", summary="A finished plan as sentences, tables and figures")
def plan_view(service: ServiceDep, request: Request, job_id: str) -> Response:
    """What the plan page draws; figures are Plotly's."""
    job = service.job("plan", job_id)
    answer = PlanAnswer.parse(answered(service, job, "answer"))
    rows = service.reader.rows_of(job)
    title = f"{rows['model'].name} on {rows['cluster'].name}"
    shown: dict[str, Any] = {"title": title, "verdict": verdict(answer), "status": answer.status, "figures": {}, "stages": []}
    shown["meanings"] = {**TIME_TERMS, **MEMORY_TERMS}
    if answer.plan is not None and answer.prediction is not None:
        shown["stages"] = stage_rows(answer.plan)
        drawn = {"waterfall": figures.waterfall(answer.prediction, None), "memory": figures.memory_by_stage(answer.prediction)}
        line = figures.timeline(trace_of(service, job, answer.plan))
        shown["figures"] = drawn if line is None else {**drawn, "timeline": line}
    return tagged(request, JSONResponse(shown))
