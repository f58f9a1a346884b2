"""Problem bodies (RFC 9457): one shape for our rules, pydantic's and HTTP's own, every violation at once. No web framework."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from specs.errors import ExecutionFailed, Infeasible, InvalidInput, MeshwrightError, NoAnswerInTime, Violation

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
