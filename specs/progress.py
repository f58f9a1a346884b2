"""Progress: the one event shape that capture, profile, search, execution, the service's SSE and the command line share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specs.base import Spec


class Progress(Spec):
    """``done`` of ``total`` steps of ``stage`` (total None = unknown). ``data`` holds what the stage wants shown."""

    stage: str
    message: str = ""
    done: float = 0
    total: float | None = None
    eta_s: float | None = None
    data: dict[str, Any] = {}


ProgressSink = Callable[[Progress], None]


def ignore(event: Progress) -> None:
    """The sink of callers who do not watch."""
