"""Log lines that say which request and which job they belong to, as text or as one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_job_id: ContextVar[str | None] = ContextVar("job_id", default=None)
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id", "job_id"}


def current_request_id() -> str | None:
    """The id of the request that this code runs for."""
    return _request_id.get()


@contextlib.contextmanager
def belonging_to(*, request_id: str | None, job_id: str | None = None) -> Iterator[None]:
    """Lines logged inside carry these ids."""
    tokens = _request_id.set(request_id), _job_id.set(job_id)
    try:
        yield
    finally:
        _request_id.reset(tokens[0])
        _job_id.reset(tokens[1])


class _Ids(logging.Filter):
    """Puts the current ids on a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id, record.job_id = _request_id.get(), _job_id.get()
        return True


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, ids, and what ``extra=`` adds."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"), "level": record.levelname,
            "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        for name in ("request_id", "job_id"):
            if getattr(record, name, None):
                line[name] = getattr(record, name)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A line for people, the ids at its end."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        ids = " ".join(
            f"{name}={value}" for name in ("request_id", "job_id") if (value := getattr(record, name, None))
        )  # fmt: skip
        return f"{super().format(record)} {ids}".rstrip()


def configure(level: str, *, as_json: bool) -> None:
    """Log to stderr from ``level`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Ids())
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
