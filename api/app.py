"""The service: FastAPI over the store, the engine and the durable jobs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from fastapi_offline import FastAPIOffline
from starlette.concurrency import run_in_threadpool
from starlette.middleware.trustedhost import TrustedHostMiddleware

from api import middleware, openapi, problems
from api.engine import Engine
from api.metrics import CONTENT_TYPE
from api.routes.artifacts import artifacts
from api.routes.calibrations import calibrations
from api.routes.documents import document_router, reading_router
from api.routes.pages import pages, views
from api.routes.plans import estimates, memory, plans
from api.routes.questions import of_plans, questions
from api.routes.recommendations import recommendations
from api.routes.runs import executions, executions_of_plans, profiles
from api.service import Service, ServiceDep
from api.settings import Settings
from api.tokens import KnownToken

_DESCRIPTION = """How should this model be parallelised on this cluster, how fast and how full will it be, and was that right?

Post a model, a cluster and a workload to `/v1/plans`; follow the job; execute the plan where the operator allows it; compare.
Inputs are documents or ids of stored ones. Long work is a durable job: `202` with a `Location`, progress as server-sent events,
cancelled by `DELETE`. Errors are RFC 9457 problem bodies that hold every broken rule. SI units throughout."""


def create_app(settings: Settings, engine: Engine | None = None) -> FastAPI:
    """The ASGI app. Raises :class:`specs.errors.InvalidInput` when others could reach it without a token."""
    settings.check_exposed()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = await run_in_threadpool(Service, settings, engine or Engine())
        service.hub.bind()
        await run_in_threadpool(service.register_local)
        await run_in_threadpool(service.jobs.launch)
        app.state.service = service
        try:
            yield
        finally:
            await run_in_threadpool(service.close)

    app = FastAPIOffline(  # the pages of /docs with their scripts, so that they open where nothing outside can be reached
        title="Meshwright", version=importlib.metadata.version("meshwright"), description=_DESCRIPTION, lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,
    )  # fmt: skip
    problems.install(app)
    openapi.install(app)
    known = [KnownToken.parse(text) for text in settings.token_hashes] + ([KnownToken.of(settings.token)] if settings.token else [])
    middleware.wrap(app, limit_bytes=settings.max_body_bytes, tokens=known)
    if not known:  # no page of another origin may reach a service without a token through a rebound name
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]", "::1"])
    for kind in ("model", "cluster", "workload"):
        app.include_router(document_router(kind))
    documents = (profiles, reading_router("profile"), calibrations, reading_router("calibration"))
    routers = (
        pages,
        views,
        plans,
        artifacts,
        of_plans,
        estimates,
        memory,
        questions,
        recommendations,
        executions_of_plans,
        executions,
    )
    for router in (*documents, *routers):
        app.include_router(router)
    _add_health(app)
    return app


def _add_health(app: FastAPI) -> None:
    @app.get("/metrics", operation_id="metrics", tags=["health"], summary="Prometheus metrics", response_class=Response)
    def metrics(service: ServiceDep) -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/healthz", operation_id="healthz", tags=["health"], summary="Alive: the process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", operation_id="readyz", tags=["health"], summary="Ready: database and jobs answer (503 when not)")
    def readyz(service: ServiceDep) -> JSONResponse:
        checks = service.health()
        ready = all(state == "ok" for state in checks.values())
        return JSONResponse({"status": "ok" if ready else "unavailable", "checks": checks}, status_code=200 if ready else 503)
