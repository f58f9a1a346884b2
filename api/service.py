"""What the routes share: the store, the engine, the jobs, and how rows become resources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Header, Query, Request
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from api.cache import Cache
from api.engine import Engine
from api.inputs import InputReader, Inputs
from api.isolate import isolated
from api.jobs import Jobs
from api.logs import current_request_id
from api.metrics import Metrics
from api.problem_body import ApiProblem
from api.settings import LOCAL_CLUSTER_ID, Settings
from api.store import Cursor, Job, Store, StoredDocument
from api.stream import EventHub
from specs.errors import InvalidInput, Violation, nearest_name
from specs.graph import ModelGraph

VERSION = importlib.metadata.version("meshwright")
RETRY_AFTER_S = 5
CAPTURE_LIMIT_S = 600.0
LOCAL_LIMIT_S = 300.0
PLURALS = {
    "model": "models",
    "cluster": "clusters",
    "workload": "workloads",
    "profile": "profiles",
    "calibration": "calibrations",
    "plan": "plans",
    "recommendation": "recommendations",
    "execution": "executions",
}
IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255, description="the same key and body give the same job")
]
Reuse = Annotated[bool, Query(description="give the earlier job of the same inputs and options, unless time cut its answer short")]
Limit = Annotated[int, Query(ge=1, le=100, description="most items to return")]
Before = Annotated[str | None, Query(description="cursor: 'next' of the page before")]


class Service:
    """The parts of one running service."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings, self.engine = settings, engine
        self.store, self.hub = Store(settings.url), EventHub()
        self.reader, self.metrics = InputReader(self.store, engine, settings), Metrics(self.store)
        self.jobs = Jobs(settings, self.store, engine, self.hub.notify, self.metrics.observe)
        self._capturing = threading.Lock()
        self._capture_slots = threading.BoundedSemaphore(settings.max_waiting_captures)
        self.estimates: Cache[bytes] = Cache(512)

    def register_local(self) -> None:
        """Register this machine as the cluster 'local', as the operator asked; measured once per machine and device count."""
        count = self.settings.local_devices
        machine = f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores"
        facts = {"local": True, "num_devices": count, "machine": machine}
        before = self.store.document("cluster", LOCAL_CLUSTER_ID)
        if count == 0 or (before is not None and before.attributes == facts):
            return
        cluster = isolated(self.engine.local_cluster, count, time_limit_s=LOCAL_LIMIT_S)
        self.store.put_document(
            "cluster",
            name=cluster.name,
            content_hash=cluster.content_hash(),
            document=cluster.to_dict(),
            attributes=facts,
            fixed_id=LOCAL_CLUSTER_ID,
        )

    def document(self, kind: str, identifier: str) -> StoredDocument:
        """The stored document, or 404 naming the nearest id."""
        row = self.store.document(kind, identifier)
        if row is None:
            near = nearest_name(identifier, self.store.document_ids(kind))
            raise _not_found(kind, identifier, near)
        return row

    def job(self, kind: str, identifier: str) -> Job:
        """The job, or 404."""
        job = self.store.job(identifier, kind)
        if job is None:
            raise _not_found(kind, identifier, None)
        return job

    def create_job(
        self, kind: str, request: dict[str, Any], key: str | None, posted: Any, *, parent_id: str | None = None, reuse: bool = False
    ) -> Job:
        """Store and enqueue a job, once per idempotency key; the same key with another body is refused.

        ``reuse``: an earlier job of the same inputs, answered by this version, is given instead of a new one. Raises
        :class:`ApiProblem` (429) when too many jobs wait.
        """
        digest = _digest(parent_id, posted)
        inputs = _digest(VERSION, kind, parent_id, posted)
        earlier = self.store.answered_job(kind, inputs) if reuse and key is None else None
        if earlier is not None:
            return earlier
        self._refuse_when_full(kind)
        job, created = self.store.create_job(
            kind, request, parent_id=parent_id, idempotency_key=key, request_hash=digest, input_hash=inputs,
            request_id=current_request_id(),
        )  # fmt: skip
        if not created and job.request_hash != digest:
            raise ApiProblem(
                422,
                "idempotency-key-reused",
                f"Idempotency-Key '{key}' was used before with another request",
                violations=[
                    Violation(
                        code="idempotency_key_reused",
                        message=f"it belongs to {job.id}",
                        loc=("header", "Idempotency-Key"),
                        actual=key,
                    )
                ],
            )
        self.jobs.submit(job)
        return job

    def _refuse_when_full(self, kind: str) -> None:
        waiting = self.store.counts().get((kind, "queued"), 0)
        if waiting >= self.settings.max_queued_jobs:
            raise ApiProblem(
                429, "too-many-jobs", f"{waiting} {PLURALS[kind]} wait already, the most that this service takes",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )  # fmt: skip

    def inputs(self, rows: dict[str, StoredDocument]) -> tuple[Inputs, ModelGraph]:
        """Documents and graph; a model that nobody captured yet is captured now."""
        return self.reader.load(rows), self.graph(rows["model"])

    def graph(self, model: StoredDocument) -> ModelGraph:
        """The graph of a model; one that nobody captured yet is captured now, in a child process, one at a time.

        Raises :class:`ApiProblem` (503) when many wait for captures already.
        """
        found = self.reader.graph(model.content_hash)
        if found is not None:
            return found
        if not self._capture_slots.acquire(blocking=False):
            raise ApiProblem(503, "busy", "many models wait to be captured", headers={"Retry-After": str(RETRY_AFTER_S)})
        try:
            with self._capturing:  # whoever held the lock may have captured it
                return self.reader.graph_of(
                    model, lambda row: isolated(self.engine.capture, row.document, row.name, time_limit_s=CAPTURE_LIMIT_S)
                )
        finally:
            self._capture_slots.release()

    def health(self) -> dict[str, str]:
        """'ok' or what is wrong, by part."""
        checks = {"database": "ok", "jobs": "ok" if self.jobs.is_running else "stopped"}
        try:
            self.store.ping()
        except SQLAlchemyError as error:
            checks["database"] = type(error).__name__
        return checks

    def close(self) -> None:
        """Stop jobs and give the database back."""
        self.jobs.stop()
        self.store.close()


def _not_found(kind: str, identifier: str, near: str | None) -> ApiProblem:
    violation = Violation(
        code="unknown_id", message=f"there is no {kind} '{identifier}'", loc=("path", f"{kind}_id"), actual=identifier, nearest=near
    )
    return ApiProblem(404, "not-found", violation.message, violations=[violation])


def service_of(request: Request) -> Service:
    """The service behind a request."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(service_of)]


def document_resource(row: StoredDocument, *, whole: bool) -> dict[str, Any]:
    """A stored document as clients see it."""
    resource = asdict(row)
    if not whole:
        del resource["document"]
    return resource


def job_resource(job: Job) -> dict[str, Any]:
    """The part of a job's resource that all kinds share."""
    base = f"/v1/{PLURALS[job.kind]}/{job.id}" if job.kind != "profile" else f"/v1/profiles/jobs/{job.id}"
    return {
        "id": job.id, "kind": job.kind, "status": job.status, "created_at": job.created_at, "started_at": job.started_at,
        "finished_at": job.finished_at, "progress": job.progress, "request": {k: v for k, v in job.request.items() if k != "plan"},
        "error": job.error, "links": {"self": base, "events": f"{base}/events"},
    }  # fmt: skip


def page(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page and the cursor of the next one."""
    return {"items": items, "next": f"{items[-1]['created_at']}~{items[-1]['id']}" if len(items) == limit else None}


def cursor(text: str | None) -> Cursor | None:
    """The cursor that :func:`page` gave, read back."""
    if text is None:
        return None
    created, separator, identifier = text.partition("~")
    if not separator:
        violation = Violation(code="bad_cursor", message="this is no cursor of a page", loc=("query", "before"), actual=text)
        raise InvalidInput([violation], subject="request")
    return created, identifier


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def exclusive(url: str) -> Iterator[None]:
    """Hold a SQLite database for one service: two on one file would run each other's jobs. PostgreSQL has executor ids."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        yield
        return
    path = Path(parsed.database).absolute().with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidInput.single(
                "database_in_use", f"another service uses {parsed.database}", loc=("database_url",), subject="settings"
            ) from None
        yield
