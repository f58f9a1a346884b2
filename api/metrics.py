"""Prometheus metrics: requests, jobs, searches, and how wrong predictions were. Counted per process, jobs from the database."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from api.store import Job, Store

CONTENT_TYPE = CONTENT_TYPE_LATEST
_ERRORS = (-0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)
_GAPS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.5)


class _Jobs(Collector):
    """Jobs by kind and status, looked up when asked."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """One sample per kind and status; queued ones are the queue's depth."""
        family = GaugeMetricFamily("meshwright_jobs", "jobs by kind and status", labels=("kind", "status"))
        for (kind, status), count in self._store.counts().items():
            family.add_metric((kind, status), count)
        yield family


class Metrics:
    """The metrics of one service."""

    def __init__(self, store: Store) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Jobs(store))
        self.requests = Counter(
            "meshwright_requests", "HTTP requests", ("method", "route", "status"), registry=self._registry
        )  # fmt: skip
        self.request_seconds = Histogram(
            "meshwright_request_seconds",
            "time to the first byte of an answer",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.search_seconds = Histogram(
            "meshwright_search_seconds", "wall time of a search", buckets=_SECONDS, registry=self._registry
        )
        self.search_gap = Histogram(
            "meshwright_search_gap", "step time over the best bound - 1", buckets=_GAPS, registry=self._registry
        )
        self.step_error = Histogram(
            "meshwright_step_time_error",
            "predicted / measured step time - 1 of executions",
            buckets=_ERRORS,
            registry=self._registry,
        )
        self.memory_error = Histogram(
            "meshwright_peak_memory_error", "predicted / measured peak - 1 of executions", buckets=_ERRORS, registry=self._registry
        )

    def observe(self, job: Job) -> None:
        """Count what an ended job tells."""
        result: dict[str, Any] = job.result or {}
        search = (result.get("answer") or {}).get("search")
        if job.kind == "plan" and search:
            self.search_seconds.observe(search["wall_s"])
            if search["gap"] is not None:
                self.search_gap.observe(search["gap"])
        comparison = result.get("comparison")
        for name, histogram in (("step_time", self.step_error), ("peak_memory", self.memory_error)):
            error = (comparison or {}).get(name, {}).get("relative_error")
            if error is not None:
                histogram.observe(error)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
