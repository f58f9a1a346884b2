"""Errors on the wire: RFC 9457 problem bodies, one shape for our rules, pydantic's and HTTP's own, every violation at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specs.base import violations_of_items
from specs.errors import ExecutionFailed, Infeasible, InvalidInput, MeshwrightError, NoAnswerInTime, Violation

logger = logging.getLogger("meshwright.api")
MEDIA_TYPE = "application/problem+json"
_TYPE = "urn:meshwright:problem:"

# exception -> (slug of the type, title, HTTP status)
_KINDS: dict[type[BaseException], tuple[str, str, int]] = {
    InvalidInput: ("invalid-input", "The input breaks rules", 422),
    Infeasible: ("infeasible", "No plan keeps the limits", 422),
    NoAnswerInTime: ("no-answer-in-time", "No answer in time", 504),
    ExecutionFailed: ("execution-failed", "The run failed", 500),
}
_INTERNAL = ("internal-error", "A defect of the service", 500)


class ApiProblem(Exception):
    """An HTTP-level refusal: not found, conflict, too large, unauthorised."""

    def __init__(
        self, status: int, slug: str, detail: str, *, violations: Iterable[Violation] = (), headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.slug, self.detail, self.headers = status, slug, detail, headers
        self.violations = tuple(violations)


def body(*, slug: str, title: str, status: int, detail: str, violations: Iterable[Violation] = ()) -> dict[str, Any]:
    """A problem body."""
    errors = [violation.as_dict() for violation in violations]
    return {"type": _TYPE + slug, "title": title, "status": status, "detail": detail, "errors": errors}


def problem_of(error: BaseException) -> dict[str, Any]:
    """The problem body of any error; what went wrong inside the service stays in its log."""
    if isinstance(error, ApiProblem):
        title = HTTPStatus(error.status).phrase
        return body(slug=error.slug, title=title, status=error.status, detail=error.detail, violations=error.violations)
    for kind, (slug, title, status) in _KINDS.items():
        if isinstance(error, kind):
            violations: tuple[Violation, ...] = tuple(getattr(error, "violations", ()))
            detail = str(error)
            if isinstance(error, InvalidInput):
                detail = f"{error.subject}: {len(violations)} violation{'s' if len(violations) != 1 else ''}; see errors"
                if len(violations) == 1:
                    detail = f"{error.subject}: {violations[0].render()}"
            return body(slug=slug, title=title, status=status, detail=detail, violations=violations)
    slug, title, status = _INTERNAL
    detail = (
        str(error)
        if isinstance(error, MeshwrightError)
        else f"unexpected {type(error).__name__}; the service's log has the details"
    )
    return body(slug=slug, title=title, status=status, detail=detail)


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
