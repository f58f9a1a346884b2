"""The service's own tables: posted documents, captured graphs, jobs and their events. SQLite or PostgreSQL, SQLAlchemy core.

A document is stored under its content hash, so posting it twice gives the same resource. A job (plan, profile, execution)
is a row that only moves forward: queued -> running -> one final status. Its events are numbered from 1 without gaps, which
is what lets a client resume a stream. Every method is one transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from api.tables import documents as _documents
from api.tables import events as _events
from api.tables import graphs as _graphs
from api.tables import jobs as _jobs
from api.tables import metadata, prepare_sqlite
from api.tables import origins as _origins

OPEN = ("queued", "running")
FINAL = ("succeeded", "infeasible", "failed", "cancelled", "timed_out")


Cursor = tuple[str, str]  # created_at and id of the last row seen


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A posted document. ``attributes`` are facts about it (``local``, ``num_params``)."""

    id: str
    kind: str
    name: str
    content_hash: str
    created_at: str
    attributes: dict[str, Any]
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A plan, profile or execution job."""

    id: str
    kind: str
    parent_id: str | None
    status: str
    request: dict[str, Any]
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    progress: dict[str, Any] | None
    attempts: int
    cancel_requested: bool
    idempotency_key: str | None
    request_hash: str | None
    created_at: str
    started_at: str | None
    finished_at: str | None

    @property
    def is_open(self) -> bool:
        """Whether it still may change."""
        return self.status in OPEN


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a job's story."""

    seq: int
    type: str
    created_at: str
    data: dict[str, Any]


def now_utc() -> str:
    """The time as ISO 8601 in UTC, to the microsecond; sorts as text."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Store:
    """All reads and writes of the service."""

    def __init__(self, url: str) -> None:
        parsed = sa.make_url(url)
        if parsed.get_backend_name() == "sqlite" and parsed.database:
            Path(parsed.database).absolute().parent.mkdir(parents=True, exist_ok=True)
        self._engine = sa.create_engine(url, pool_pre_ping=True)
        if parsed.get_backend_name() == "sqlite":
            sa.event.listen(self._engine, "connect", prepare_sqlite)
        metadata.create_all(self._engine)

    def close(self) -> None:
        """Give all connections back."""
        self._engine.dispose()

    def ping(self) -> None:
        """Raise when the database does not answer."""
        with self._engine.connect() as connection:
            connection.execute(sa.select(1))

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with self._engine.begin() as connection:
            yield connection

    # documents -------------------------------------------------------------------------------------------------------

    def put_document(
        self, kind: str, *, name: str, content_hash: str, document: dict[str, Any],
        attributes: dict[str, Any] | None = None, fixed_id: str | None = None,
    ) -> tuple[StoredDocument, bool]:  # fmt: skip
        """Store a document; ``(row, created)``. The same content is the same resource; ``fixed_id`` is overwritten."""
        identifier = fixed_id or f"{kind}-{content_hash[:16]}"
        values: dict[str, Any] = {
            "id": identifier, "kind": kind, "name": name[:200], "content_hash": content_hash, "created_at": now_utc(),
            "attributes": attributes or {}, "document": document,
        }  # fmt: skip
        stored = None if fixed_id is not None else self.document(kind, identifier)  # most are there: no write, no lock
        if stored is not None:
            return stored, False
        try:
            with self._transaction() as connection:
                if fixed_id is not None:
                    connection.execute(sa.delete(_documents).where(_documents.c.id == fixed_id))
                connection.execute(sa.insert(_documents).values(**values))
            return StoredDocument(**values), True
        except IntegrityError:
            stored = self.document(kind, identifier)
            if stored is None:
                raise
            return stored, False

    def document(self, kind: str, identifier: str) -> StoredDocument | None:
        """The document of that kind and id, or None."""
        with self._engine.connect() as connection:
            row = connection.execute(
                sa.select(_documents).where(_documents.c.kind == kind, _documents.c.id == identifier)
            ).one_or_none()
        return None if row is None else StoredDocument(**row._mapping)

    def documents(
        self, kind: str, *, limit: int, before: Cursor | None = None, name: str | None = None, content_hash: str | None = None
    ) -> list[StoredDocument]:
        """Newest first; ``before`` is the last one seen. ``name`` and ``content_hash`` filter."""
        query = _page(_documents, before).where(_documents.c.kind == kind).limit(limit)
        if name is not None:
            query = query.where(_documents.c.name == name)
        if content_hash is not None:
            query = query.where(_documents.c.content_hash == content_hash)
        with self._engine.connect() as connection:
            return [StoredDocument(**row._mapping) for row in connection.execute(query)]

    def document_ids(self, kind: str) -> list[str]:
        """The newest thousand ids of a kind, for "did you mean"."""
        with self._engine.connect() as connection:
            query = sa.select(_documents.c.id).where(_documents.c.kind == kind).order_by(_documents.c.created_at.desc()).limit(1000)
            return list(connection.execute(query).scalars())

    def delete_document(self, row: StoredDocument) -> str | None:
        """Delete a document (and a model's graph); what rests on it when it has to stay."""
        with self._transaction() as connection:
            users = sa.select(_jobs.c.id).where(sa.cast(_jobs.c.request, sa.Text).contains(f'"{row.id}"', autoescape=True)).limit(1)
            used = connection.execute(users).scalar_one_or_none()
            if used is not None:
                return f"job {used} rests on it"
            connection.execute(sa.delete(_documents).where(_documents.c.id == row.id))
            if row.kind == "model":
                connection.execute(sa.delete(_graphs).where(_graphs.c.model_hash == row.content_hash))
        return None

    def graph(self, model_hash: str) -> dict[str, Any] | None:
        """The captured graph of the model document with that hash."""
        with self._engine.connect() as connection:
            return connection.execute(sa.select(_graphs.c.graph).where(_graphs.c.model_hash == model_hash)).scalar_one_or_none()

    def put_graph(self, model_hash: str, graph: dict[str, Any], attributes: dict[str, Any]) -> None:
        """Keep a captured graph, and what it told about its model document."""
        with self._transaction() as connection:
            connection.execute(sa.delete(_graphs).where(_graphs.c.model_hash == model_hash))
            connection.execute(sa.insert(_graphs).values(model_hash=model_hash, graph=graph))
            of_model = sa.and_(_documents.c.kind == "model", _documents.c.content_hash == model_hash)
            connection.execute(sa.update(_documents).where(of_model).values(attributes=attributes))

    # jobs ------------------------------------------------------------------------------------------------------------

    def create_job(
        self, kind: str, request: dict[str, Any], *, parent_id: str | None = None,
        idempotency_key: str | None = None, request_hash: str | None = None, input_hash: str | None = None,
        request_id: str | None = None,
    ) -> tuple[Job, bool]:  # fmt: skip
        """A new queued job, or the one that this idempotency key already made; ``(job, created)``.

        ``input_hash``: of everything that the answer depends on. ``request_id``: of the request that asked for it.
        """
        job = Job(
            id=f"{kind}-{secrets.token_hex(8)}", kind=kind, parent_id=parent_id, status="queued", request=request, result=None,
            error=None, progress=None, attempts=0, cancel_requested=False, idempotency_key=idempotency_key,
            request_hash=request_hash, created_at=now_utc(), started_at=None, finished_at=None,
        )  # fmt: skip
        try:
            with self._transaction() as connection:
                connection.execute(sa.insert(_jobs).values({name: getattr(job, name) for name in Job.__slots__}))
                _append(connection, job.id, "status", {"status": "queued"})
                if input_hash is not None:
                    connection.execute(sa.insert(_origins).values(job_id=job.id, input_hash=input_hash, request_id=request_id))
            return job, True
        except IntegrityError:
            earlier = self._job_where(_jobs.c.kind == kind, _jobs.c.idempotency_key == idempotency_key)
            if earlier is None:
                raise
            return earlier, False

    def job(self, identifier: str, kind: str | None = None) -> Job | None:
        """The job with that id (and kind), or None."""
        conditions = [_jobs.c.id == identifier] + ([_jobs.c.kind == kind] if kind else [])
        return self._job_where(*conditions)

    def _job_where(self, *conditions: Any) -> Job | None:
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(_jobs).where(*conditions)).one_or_none()
        return None if row is None else Job(**row._mapping)

    def answered_job(self, kind: str, input_hash: str) -> Job | None:
        """The newest job of these inputs that runs, or whose answer time did not cut short; None when there is none."""
        query = (
            sa.select(_jobs)
            .join(_origins, _origins.c.job_id == _jobs.c.id)
            .where(_jobs.c.kind == kind, _origins.c.input_hash == input_hash, _jobs.c.cancel_requested.is_(False))
            .where(_jobs.c.status.in_((*OPEN, "succeeded", "infeasible")))
            .order_by(_jobs.c.created_at.desc())
            .limit(1)
        )
        with self._engine.connect() as connection:
            row = connection.execute(query).one_or_none()
        job = None if row is None else Job(**row._mapping)
        return None if job is None or ((job.result or {}).get("answer") or {}).get("status") == "feasible" else job

    def request_id(self, identifier: str) -> str | None:
        """The id of the request that asked for the job."""
        with self._engine.connect() as connection:
            return connection.execute(sa.select(_origins.c.request_id).where(_origins.c.job_id == identifier)).scalar_one_or_none()

    def counts(self) -> dict[tuple[str, str], int]:
        """Number of jobs by (kind, status)."""
        query = sa.select(_jobs.c.kind, _jobs.c.status, sa.func.count()).group_by(_jobs.c.kind, _jobs.c.status)
        with self._engine.connect() as connection:
            return {(kind, status): count for kind, status, count in connection.execute(query)}

    def delete_job(self, identifier: str) -> str | None:
        """Delete a final job with its events; why it has to stay otherwise."""
        with self._transaction() as connection:
            status = connection.execute(sa.select(_jobs.c.status).where(_jobs.c.id == identifier)).scalar_one_or_none()
            if status in OPEN:
                return f"it is {status}: cancel it first"
            child = connection.execute(sa.select(_jobs.c.id).where(_jobs.c.parent_id == identifier).limit(1)).scalar_one_or_none()
            if child is not None:
                return f"job {child} rests on it"
            for table in (_events, _origins):
                connection.execute(sa.delete(table).where(table.c.job_id == identifier))
            connection.execute(sa.delete(_jobs).where(_jobs.c.id == identifier))
        return None

    def jobs(
        self, kind: str, *, limit: int, before: Cursor | None = None, parent_id: str | None = None, status: str | None = None,
        input_hash: str | None = None,
    ) -> list[Job]:  # fmt: skip
        """Newest first, results left out; ``before`` is the last one seen. The others filter."""
        query = _page(_jobs, before).where(_jobs.c.kind == kind).limit(limit)
        if status is not None:
            query = query.where(_jobs.c.status == status)
        if input_hash is not None:
            query = query.join(_origins, _origins.c.job_id == _jobs.c.id).where(_origins.c.input_hash == input_hash)
        if parent_id is not None:
            query = query.where(_jobs.c.parent_id == parent_id)
        with self._engine.connect() as connection:
            return [replace(Job(**row._mapping), result=None) for row in connection.execute(query)]

    def open_jobs(self) -> list[Job]:
        """Every queued or running job, oldest first."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(_jobs).where(_jobs.c.status.in_(OPEN)).order_by(_jobs.c.created_at))
            return [Job(**row._mapping) for row in rows]

    def start(self, identifier: str) -> Job | None:
        """Count an attempt and mark an open job running; the job, or None when it is final or gone."""
        with self._transaction() as connection:
            values = {
                "status": "running",
                "attempts": _jobs.c.attempts + 1,
                "started_at": sa.func.coalesce(_jobs.c.started_at, now_utc()),
            }
            changed = connection.execute(sa.update(_jobs).where(_jobs.c.id == identifier, _jobs.c.status.in_(OPEN)).values(values))
            if changed.rowcount:
                _append(connection, identifier, "status", {"status": "running"})
        return self.job(identifier) if changed.rowcount else None

    def put_back(self, identifier: str) -> None:
        """The service stops in order while a job runs: it waits again, and this start does not count."""
        with self._transaction() as connection:
            values = {"status": "queued", "attempts": _jobs.c.attempts - 1}
            changed = connection.execute(
                sa.update(_jobs).where(_jobs.c.id == identifier, _jobs.c.status == "running").values(values)
            )
            if changed.rowcount:
                _append(connection, identifier, "status", {"status": "queued", "reason": "the service stopped"})

    def finish(self, identifier: str, status: str, *, error: dict[str, Any] | None = None) -> bool:
        """Give an open job its final status; False when it already had one."""
        with self._transaction() as connection:
            values = {"status": status, "error": error, "finished_at": now_utc()}
            changed = connection.execute(sa.update(_jobs).where(_jobs.c.id == identifier, _jobs.c.status.in_(OPEN)).values(values))
            if changed.rowcount:
                _append(connection, identifier, "status", {"status": status} | ({"error": error} if error else {}))
        return bool(changed.rowcount)

    def add_result(self, identifier: str, part: dict[str, Any]) -> None:
        """Merge ``part`` into the job's result."""
        with self._transaction() as connection:
            mine = _jobs.c.id == identifier
            connection.execute(
                sa.update(_jobs).where(mine).values(id=identifier)
            )  # writes first, so that the read is under the lock
            have = connection.execute(sa.select(_jobs.c.result).where(mine)).scalar_one()
            connection.execute(sa.update(_jobs).where(mine).values(result={**(have or {}), **part}))

    def request_cancel(self, identifier: str) -> None:
        """Ask an open job to end; a queued one is cancelled at once."""
        with self._transaction() as connection:
            connection.execute(sa.update(_jobs).where(_jobs.c.id == identifier).values(cancel_requested=True))
            values = {"status": "cancelled", "finished_at": now_utc()}
            changed = connection.execute(
                sa.update(_jobs).where(_jobs.c.id == identifier, _jobs.c.status == "queued").values(values)
            )
            if changed.rowcount:
                _append(connection, identifier, "status", {"status": "cancelled"})

    # events ----------------------------------------------------------------------------------------------------------

    def record(self, identifier: str, data: dict[str, Any]) -> None:
        """Append a progress event."""
        with self._transaction() as connection:
            connection.execute(sa.update(_jobs).where(_jobs.c.id == identifier).values(progress=data))
            _append(connection, identifier, "progress", data)

    def events(self, identifier: str, *, after: int = 0, limit: int = 500) -> list[Event]:
        """Events with a number above ``after``, in order."""
        query = sa.select(_events.c.seq, _events.c.type, _events.c.created_at, _events.c.data)
        query = query.where(_events.c.job_id == identifier, _events.c.seq > after).order_by(_events.c.seq).limit(limit)
        with self._engine.connect() as connection:
            return [Event(**row._mapping) for row in connection.execute(query)]


def _append(connection: sa.Connection, job_id: str, kind: str, data: dict[str, Any]) -> None:
    # The job's row was written before in this transaction, so writers of one job take turns and numbers have no gaps.
    last = sa.select(sa.func.coalesce(sa.func.max(_events.c.seq), 0)).where(_events.c.job_id == job_id)
    number = connection.execute(last).scalar_one() + 1
    connection.execute(sa.insert(_events).values(job_id=job_id, seq=number, type=kind, created_at=now_utc(), data=data))


def _page(table: sa.Table, before: Cursor | None) -> sa.Select[Any]:
    query = sa.select(table).order_by(table.c.created_at.desc(), table.c.id.desc())
    if before is None:
        return query
    created, identifier = before  # values, not a row: the row may have been deleted since
    return query.where(sa.or_(table.c.created_at < created, sa.and_(table.c.created_at == created, table.c.id < identifier)))
