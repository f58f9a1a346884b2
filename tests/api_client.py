"""A service in this process for tests: FastAPI's test client over a fresh database."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from api.app import create_app
from api.engine import Engine
from api.settings import Settings
from api.store import FINAL


@contextmanager
def serving(folder: Path, engine: Engine, **settings: Any) -> Iterator[TestClient]:
    """A started service; everything is stopped at the end."""
    given = {"database_url": f"sqlite:///{folder / 'service.sqlite'}", "local_devices": 2, **settings}
    with TestClient(create_app(Settings.model_validate(given), engine), base_url="http://127.0.0.1") as client:
        yield client


def finished(client: TestClient, path: str, *, within_s: float = 60.0) -> dict[str, Any]:
    """The job's resource once it is final."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        job: dict[str, Any] = client.get(path).json()
        if job["status"] in FINAL:
            return job
        time.sleep(0.05)
    raise AssertionError(f"{path} is still {job['status']}: {job}")


def until(client: TestClient, path: str, status: str, *, within_s: float = 30.0) -> dict[str, Any]:
    """The job's resource once it has ``status``."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        job: dict[str, Any] = client.get(path).json()
        if job["status"] == status:
            return job
        time.sleep(0.05)
    raise AssertionError(f"{path} is {job['status']}, not {status}")


def read_events(client: TestClient, path: str, *, after: int | None = None) -> list[tuple[int, str, str]]:
    """All events of a job to its end: number, type, data."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    events, fields = [], {}
    with client.stream("GET", f"{path}/events", headers=headers) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line and not line.startswith(":"):
                name, _, value = line.partition(":")
                fields[name] = value.strip()
            elif not line and fields:
                events.append((int(fields["id"]), fields["event"], fields["data"]))
                fields = {}
    return events
