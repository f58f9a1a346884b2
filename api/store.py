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

_metadata = sa.MetaData()

_documents = sa.Table(
    "documents", _metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False, index=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("content_hash", sa.String(64), nullable=False),
    sa.Column("created_at", sa.String(32), nullable=False),
    sa.Column("attributes", sa.JSON, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
)  # fmt: skip

_graphs = sa.Table(
    "graphs", _metadata,
    sa.Column("model_hash", sa.String(64), primary_key=True),
    sa.Column("graph", sa.JSON, nullable=False),
)  # fmt: skip

_jobs = sa.Table(
    "jobs", _metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False, index=True),
    sa.Column("parent_id", sa.String(64), index=True),
    sa.Column("status", sa.String(16), nullable=False, index=True),
    sa.Column("request", sa.JSON, nullable=False),
    sa.Column("result", sa.JSON),
    sa.Column("error", sa.JSON),
    sa.Column("progress", sa.JSON),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("cancel_requested", sa.Boolean, nullable=False, default=False),
    sa.Column("idempotency_key", sa.String(255)),
    sa.Column("request_hash", sa.String(64)),
    sa.Column("created_at", sa.String(32), nullable=False),
    sa.Column("started_at", sa.String(32)),
    sa.Column("finished_at", sa.String(32)),
    sa.UniqueConstraint("kind", "idempotency_key"),
)  # fmt: skip

_events = sa.Table(
    "events", _metadata,
    sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("type", sa.String(16), nullable=False),
    sa.Column("created_at", sa.String(32), nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
)  # fmt: skip

OPEN = ("queued", "running")
FINAL = ("succeeded", "infeasible", "failed", "cancelled", "timed_out")


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
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
        _metadata.create_all(self._engine)

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

    def documents(self, kind: str, *, limit: int, before: str | None = None) -> list[StoredDocument]:
        """Newest first; ``before`` is the id of the last one seen."""
        with self._engine.connect() as connection:
            query = _page(_documents, before).where(_documents.c.kind == kind).limit(limit)
            return [StoredDocument(**row._mapping) for row in connection.execute(query)]

    def document_ids(self, kind: str) -> list[str]:
        """The newest thousand ids of a kind, for "did you mean"."""
        with self._engine.connect() as connection:
            query = sa.select(_documents.c.id).where(_documents.c.kind == kind).order_by(_documents.c.created_at.desc()).limit(1000)
            return list(connection.execute(query).scalars())

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
        idempotency_key: str | None = None, request_hash: str | None = None,
    ) -> tuple[Job, bool]:  # fmt: skip
        """A new queued job, or the one that this idempotency key already made; ``(job, created)``."""
        job = Job(
            id=f"{kind}-{secrets.token_hex(8)}", kind=kind, parent_id=parent_id, status="queued", request=request, result=None,
            error=None, progress=None, attempts=0, cancel_requested=False, idempotency_key=idempotency_key,
            request_hash=request_hash, created_at=now_utc(), started_at=None, finished_at=None,
        )  # fmt: skip
        try:
            with self._transaction() as connection:
                connection.execute(sa.insert(_jobs).values({name: getattr(job, name) for name in Job.__slots__}))
                _append(connection, job.id, "status", {"status": "queued"})
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

    def jobs(self, kind: str, *, limit: int, before: str | None = None, parent_id: str | None = None) -> list[Job]:
        """Newest first, results left out; ``before`` is the id of the last one seen."""
        query = _page(_jobs, before).where(_jobs.c.kind == kind).limit(limit)
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


def _page(table: sa.Table, before: str | None) -> sa.Select[Any]:
    query = sa.select(table).order_by(table.c.created_at.desc(), table.c.id.desc())
    if before is None:
        return query
    created = sa.select(table.c.created_at).where(table.c.id == before).scalar_subquery()
    return query.where(sa.or_(table.c.created_at < created, sa.and_(table.c.created_at == created, table.c.id < before)))


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = "IMMEDIATE"  # a transaction takes the write lock at its start and never fails half-way
    connection.execute("PRAGMA journal_mode=WAL")  # readers do not wait for the writer; kept in the file
    connection.execute("PRAGMA busy_timeout=30000")
    connection.execute("PRAGMA foreign_keys=ON")
