"""ETags: a client that has the current content gets 304 and no body."""

from __future__ import annotations

import hashlib

from starlette.requests import Request
from starlette.responses import Response


def tagged(request: Request, response: Response, *, tag: str | None = None) -> Response:
    """The response with its ETag (``tag``, or the hash of the body), or 304 when ``If-None-Match`` names it."""
    etag = f'"{tag or hashlib.sha256(response.body).hexdigest()[:32]}"'
    wanted = {item.strip().removeprefix("W/") for item in request.headers.get("if-none-match", "").split(",")}
    if etag in wanted or "*" in wanted:
        return Response(status_code=304, headers={"ETag": etag})
    response.headers["ETag"] = etag
    response.headers["Cache-Control"] = "private, no-cache"
    return response
