"""The OpenAPI document, completed: every refusal is a problem body, and what any request may get stands at every operation."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from api.problems import MEDIA_TYPE

_PROBLEM = {"schema": {"$ref": "#/components/schemas/Problem"}}
_ALWAYS = {
    "401": "no valid bearer token (only where the operator set one)",
    "403": "the token lacks the scope, or the operator does not allow it",
    "422": "every broken rule at once",
}
_WITH_BODY = {"400": "the body is no JSON", "413": "the body is larger than this service takes"}
_BUSY = {"429": "too many jobs wait; see Retry-After", "503": "busy; see Retry-After"}


def install(app: FastAPI) -> None:
    """Complete the document the first time that it is asked for."""
    plain = app.openapi

    def completed() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    if path.startswith("/v1/"):
                        _complete(method, operation)
            _drop_unused(document)
        found: dict[str, Any] = app.openapi_schema or {}
        return found

    app.openapi = completed  # type: ignore[method-assign]


def _complete(method: str, operation: dict[str, Any]) -> None:
    """Add what may always happen, and give every refusal its media type."""
    responses = operation["responses"]
    extra = {**_ALWAYS, **(_WITH_BODY if "requestBody" in operation else {}), **(_BUSY if method == "post" else {})}
    for code, description in extra.items():
        responses.setdefault(code, {"description": description})
    for code, response in responses.items():
        if code.startswith(("4", "5")):
            response["content"] = {MEDIA_TYPE: _PROBLEM}


def _drop_unused(document: dict[str, Any]) -> None:
    """The framework's own error schemas, which nothing uses."""
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
