"""/v1/recommendations: how many devices of one type does a job need?"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body
from fastapi.responses import JSONResponse

from api.routes import examples
from api.routes.documents import PROBLEMS
from api.routes.jobs import accepted, add_job_routes, add_list_route
from api.routes.plans import check_time_limit
from api.schemas import RecommendationResource, RecommendRequest
from api.service import IdempotencyKey, Reuse, ServiceDep, job_resource
from api.store import Job

recommendations = APIRouter(prefix="/v1/recommendations", tags=["recommendations"], responses=PROBLEMS)
RecommendBody = Annotated[RecommendRequest, Body(openapi_examples=examples.of("recommendation"))]


def recommendation_resource(job: Job) -> dict[str, Any]:
    """A recommendation job as clients see it."""
    return {**job_resource(job), "answer": (job.result or {}).get("answer")}


@recommendations.post(
    "", operation_id="create_recommendation", summary="How many devices of this type?", status_code=202,
    response_model=RecommendationResource, responses={200: {"model": RecommendationResource, "description": "it was there"}},
    description="Starts a durable job that plans at every size: the fewest devices that fit, the cheapest per token, the curve.",
)  # fmt: skip
def create_recommendation(
    service: ServiceDep, request: RecommendBody, idempotency_key: IdempotencyKey = None, reuse: Reuse = True
) -> JSONResponse:
    """Check and store the inputs, then enqueue the job."""
    check_time_limit(service, request.options.time_limit_s)
    node = service.engine.device_cluster(request.device, request.options.preset)
    rows = service.reader.read({"model": request.model, "cluster": node.to_dict(), "workload": request.workload})
    stored: dict[str, Any] = {kind: row.id for kind, row in rows.items()}
    stored |= {"device": request.device, "options": request.options.model_dump(mode="json")}
    job = service.create_job("recommendation", stored, idempotency_key, stored, reuse=reuse)
    return accepted(recommendation_resource(job))


add_list_route(recommendations, "recommendation")
add_job_routes(recommendations, "recommendation", recommendation_resource, RecommendationResource)
