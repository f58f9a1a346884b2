"""What happens to every request before a route sees it: id, token, size. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.logs import belonging_to
from api.problem_body import ApiProblem
from api.problems import response_of
from api.tokens import KnownToken, scope_needed, scopes_of

logger = logging.getLogger("meshwright.api")
_SAFE_ID = re.compile(r"^[A-Za-z0-9._\-]{1,64}$")
OPEN_PATHS = ("/", "/healthz", "/readyz")
PAGE_PATHS = ("/plans/", "/static/")


class RequestId:
    """``X-Request-ID`` in (or a new one) and out, and in one log line per request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with ``state.request_id`` set."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _SAFE_ID.match(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (b"x-request-id", request_id.encode())]}
                _account(scope, message["status"], time.perf_counter() - started)
            await send(message)

        with belonging_to(request_id=request_id):
            await self.app(scope, receive, send_with_id)


def _account(scope: Scope, status: int, wall_s: float) -> None:
    """One log line and the metrics of a request."""
    method, path = scope["method"], scope["path"]
    facts = {"method": method, "path": path, "status": status, "wall_s": round(wall_s, 6)}
    logger.info("%s %s %d %.1f ms", method, path, status, wall_s * 1e3, extra=facts)
    service = getattr(scope["app"].state, "service", None) if "app" in scope else None
    if service is not None:
        route = getattr(scope.get("route"), "path", "none")  # the template: paths with ids would be a series each
        service.metrics.requests.labels(method, route, str(status)).inc()
        service.metrics.request_seconds.labels(route).observe(wall_s)


def _is_open(path: str) -> bool:
    """Probes, and pages: they hold no data and ask for the token themselves."""
    return path in OPEN_PATHS or path.startswith(PAGE_PATHS)


class BearerToken:
    """Every request but the health probes carries a token that may do what it asks for."""

    def __init__(self, app: ASGIApp, known: Sequence[KnownToken]) -> None:
        self.app, self._known = app, tuple(known)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse with 401 unless the token is known, with 403 unless it has the scope."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            problem = self._problem(scope)
            if problem is not None:
                await response_of(problem, Request(scope))(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiProblem | None:
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        kind, _, token = given.partition(" ")
        scopes = scopes_of(token.strip(), self._known) if kind.lower() == "bearer" else None
        if scopes is None:
            return ApiProblem(401, "unauthorized", "a valid bearer token is required", headers={"WWW-Authenticate": "Bearer"})
        needed = scope_needed(scope["method"], scope["path"])
        if needed not in scopes:
            header = {"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{needed}"'}
            return ApiProblem(403, "scope-missing", f"this token lacks the scope '{needed}'", headers=header)
        return None


class BodyLimit:
    """Refuse bodies above ``limit_bytes`` with 413, by their declared length or while they arrive."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self.app, self.limit_bytes = app, limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Buffer the body up to the limit and hand it on."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "DELETE", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self.limit_bytes:
            await self._refuse(scope, receive, send)
            return
        chunks: list[Message] = []
        size = 0
        while True:
            message = await receive()
            chunks.append(message)
            size += len(message.get("body", b""))
            if size > self.limit_bytes:
                await self._refuse(scope, receive, send)
                return
            if message["type"] != "http.request" or not message.get("more_body", False):
                break

        async def replay() -> Message:
            return chunks.pop(0) if chunks else await receive()

        await self.app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = ApiProblem(413, "content-too-large", f"the body is larger than {self.limit_bytes} bytes")
        await response_of(problem, Request(scope))(scope, receive, send)


def wrap(app: Any, *, limit_bytes: int, tokens: Sequence[KnownToken]) -> None:
    """Add the middleware to a FastAPI app; the last one added is the outermost."""
    app.add_middleware(BodyLimit, limit_bytes=limit_bytes)
    if tokens:
        app.add_middleware(BearerToken, known=tokens)
    app.add_middleware(RequestId)
