"""Every error of the app leaves it as a problem body (``api.problem_body``)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from api.problem_body import ApiProblem, problem_of
from specs.base import violations_of_items
from specs.errors import InvalidInput, MeshwrightError, Violation

logger = logging.getLogger("meshwright.api")
MEDIA_TYPE = "application/problem+json"


def response_of(error: BaseException, request: Request | None = None) -> JSONResponse:
    """The HTTP response of any error, with the request's id."""
    content = problem_of(error)
    request_id = getattr(request.state, "request_id", None) if request is not None else None
    if request_id:
        content["request_id"] = request_id
    headers = error.headers if isinstance(error, ApiProblem) else None
    return JSONResponse(content, status_code=content["status"], media_type=MEDIA_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Make every error of the app a problem body."""

    async def own(request: Request, error: Exception) -> JSONResponse:
        return response_of(error, request)

    async def of_pydantic(request: Request, error: Exception) -> JSONResponse:
        items = error.errors() if isinstance(error, RequestValidationError) else []
        return response_of(InvalidInput(_request_violations(items, _body_model(request)), subject="request"), request)

    async def of_http(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        slug = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
        headers = dict(error.headers) if error.headers else None
        return response_of(ApiProblem(error.status_code, slug, str(error.detail), headers=headers), request)

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("request %s failed", getattr(request.state, "request_id", "?"), exc_info=error)
        return response_of(error, request)

    for kind in (MeshwrightError, ApiProblem):
        app.add_exception_handler(kind, own)
    app.add_exception_handler(RequestValidationError, of_pydantic)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, unexpected)


def _body_model(request: Request) -> Any:
    """The model of the request body of the route that was called, for 'nearest known key'."""
    field = getattr(request.scope.get("route"), "body_field", None)
    return getattr(getattr(field, "field_info", None), "annotation", None)


def _request_violations(items: Iterable[Any], model: Any) -> list[Violation]:
    """FastAPI's error items as violations; ``loc`` loses its leading 'body', keeps 'query', 'header' and 'path'."""
    kept = [{**item, "loc": item["loc"][1:] if item["loc"][:1] == ("body",) else item["loc"]} for item in items]
    return violations_of_items(kept, model)
