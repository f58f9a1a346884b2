"""Tables of the service's database, and how SQLite is opened."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()

documents = sa.Table(
    "documents", metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False, index=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("content_hash", sa.String(64), nullable=False),
    sa.Column("created_at", sa.String(32), nullable=False),
    sa.Column("attributes", sa.JSON, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
)  # fmt: skip

graphs = sa.Table(
    "graphs", metadata,
    sa.Column("model_hash", sa.String(64), primary_key=True),
    sa.Column("graph", sa.JSON, nullable=False),
)  # fmt: skip

jobs = sa.Table(
    "jobs", metadata,
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

events = sa.Table(
    "events", metadata,
    sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("type", sa.String(16), nullable=False),
    sa.Column("created_at", sa.String(32), nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
)  # fmt: skip

origins = sa.Table(
    "job_origins", metadata,
    sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("input_hash", sa.String(64), nullable=False, index=True),
    sa.Column("request_id", sa.String(64)),
)  # fmt: skip


def prepare_sqlite(connection: Any, _record: Any) -> None:
    """Set up a new connection."""
    connection.isolation_level = "IMMEDIATE"  # a transaction takes the write lock at its start and never fails half-way
    connection.execute("PRAGMA journal_mode=WAL")  # readers do not wait for the writer; kept in the file
    connection.execute("PRAGMA busy_timeout=30000")
    connection.execute("PRAGMA foreign_keys=ON")
