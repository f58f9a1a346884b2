"""/v1/calibrations: factors of a cluster's prices, stored or refitted from measured runs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from api.isolate import isolated
from api.routes import examples
from api.routes.documents import PROBLEMS, stored
from api.schemas import CalibrationRequest, DocumentResource
from api.service import Service, ServiceDep
from specs.base import violations_of
from specs.calibration import Calibration
from specs.errors import InvalidInput
from specs.measurement import Measurement
from specs.plan import Plan

FIT_LIMIT_S = 300.0
calibrations = APIRouter(prefix="/v1/calibrations", tags=["calibrations"], responses=PROBLEMS)
CalibrationBody = Annotated[dict[str, Any], Body(openapi_examples=examples.of("calibration"))]


@calibrations.post(
    "",
    operation_id="create_calibration",
    summary="Store a calibration, or refit one from measured runs",
    status_code=201,
    response_model=DocumentResource,
    responses={200: {"model": DocumentResource, "description": "it was there"}},
    description="A calibration document (it has 'factors') is stored. A request {model, cluster, workload, measurements} refits "
    "the factors of that cluster's prices, at once, and stores them; plans and estimates name them as 'calibration'.",
)
def create_calibration(service: ServiceDep, document: CalibrationBody) -> JSONResponse:
    """Tell the two apart by 'factors'."""
    if "factors" not in document:
        document = _refitted(service, document).to_dict()
    return stored(*service.reader.store_document("calibration", document))


def _refitted(service: Service, document: dict[str, Any]) -> Calibration:
    try:
        request = CalibrationRequest.model_validate(document)
    except ValidationError as error:
        raise InvalidInput(violations_of(error, CalibrationRequest), subject="request") from None
    named = {"model": request.model, "cluster": request.cluster, "workload": request.workload}
    rows = service.reader.read(named if request.profile is None else {**named, "profile": request.profile})
    inputs, graph = service.inputs(rows)
    runs, plans = [Measurement.parse(item) for item in request.measurements], [Plan.parse(item) for item in request.plans]
    found: Calibration = isolated(
        service.engine.calibrate, graph, inputs.cluster, inputs.profile, runs, plans=plans, workload=inputs.workload,
        time_limit_s=FIT_LIMIT_S,
    )  # fmt: skip
    return found
