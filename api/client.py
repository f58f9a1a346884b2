"""A thin client of the service: resources in and out, jobs followed by server-sent events, problems raised as our errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

from api.store import FINAL
from specs.errors import ExecutionFailed, Infeasible, InvalidInput, MeshwrightError, NoAnswerInTime, Violation
from specs.progress import Progress, ProgressSink, ignore

RECONNECT_S = 0.5


class Client:
    """Requests to one service."""

    def __init__(self, base_url: str, token: str | None = None, *, http: httpx.Client | None = None) -> None:
        """``http``: a client of one's own, else one that connects to ``base_url``."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = http or httpx.Client(base_url=base_url, headers=headers, timeout=httpx.Timeout(30.0, read=120.0))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def base_url(self) -> str:
        """Where the service is."""
        return str(self._http.base_url).rstrip("/")

    def is_ready(self) -> bool:
        """Whether the service answers and takes jobs."""
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        """The JSON of a resource."""
        return self._answer(self._http.get(path))

    def post(self, path: str, body: Any, *, idempotency_key: str | None = None) -> Any:
        """The JSON of the answer."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self._answer(self._http.post(path, json=body, headers=headers))

    def run(self, path: str, body: Any, progress: ProgressSink = ignore, *, needs_plan: bool = True) -> dict[str, Any]:
        """Start a job, follow it, return its final resource. Raises what the job's error says when it did not succeed;
        ``needs_plan=False``: an answer that no plan keeps the limits, or none was found in time, is returned as well."""
        job = self.post(path, body)
        return self.follow(job["links"]["self"], progress, needs_plan=needs_plan)

    def follow(self, path: str, progress: ProgressSink = ignore, *, needs_plan: bool = True) -> dict[str, Any]:
        """Follow a job to its end, over broken connections; its final resource."""
        last = 0
        while True:
            try:
                for number, kind, data in self._events(path, last):
                    last = number
                    if kind == "progress":
                        data.pop("at", None)
                        progress(Progress.model_validate(data))
            except httpx.TransportError:
                time.sleep(RECONNECT_S)
            job: dict[str, Any] = self.get(path)
            if job["status"] in FINAL:
                if needs_plan or not job.get("answer"):
                    _raise_unless_succeeded(job)
                return job

    def _events(self, path: str, after: int) -> Iterator[tuple[int, str, dict[str, Any]]]:
        headers = {"Last-Event-ID": str(after)} if after else {}
        with self._http.stream("GET", f"{path}/events", headers=headers) as response:
            if response.status_code != 200:
                response.read()
                self._answer(response)
            fields: dict[str, str] = {}
            for line in response.iter_lines():
                if line and not line.startswith(":"):
                    name, _, value = line.partition(":")
                    fields[name] = value.removeprefix(" ")
                elif not line and "data" in fields:
                    yield int(fields.get("id", after)), fields.get("event", "message"), json.loads(fields["data"])
                    fields = {}

    def _answer(self, response: httpx.Response) -> Any:
        if response.is_success:
            return response.json()
        try:
            problem = response.json()
        except ValueError:
            problem = {"detail": response.text[:500]}
        raise error_of({"status": response.status_code, **problem})


def error_of(problem: dict[str, Any]) -> MeshwrightError:
    """The exception behind a problem body."""
    detail = str(problem.get("detail", "the service gave no reason"))
    violations = [
        Violation(
            code=item["code"], message=item["msg"], loc=tuple(item["loc"]), actual=item.get("actual"),
            allowed=item.get("allowed"), nearest=item.get("nearest"),
        )
        for item in problem.get("errors", ())
    ]  # fmt: skip
    kind = str(problem.get("type", "")).rpartition(":")[2]
    if kind == "infeasible":
        return Infeasible(detail, violations)
    if kind == "no-answer-in-time":
        return NoAnswerInTime(detail)
    if kind == "execution-failed":
        return ExecutionFailed(detail)
    if violations:
        return InvalidInput(violations, subject="request")
    return MeshwrightError(f"the service answered {problem.get('status')}: {detail}")


def _raise_unless_succeeded(job: dict[str, Any]) -> None:
    if job["status"] == "succeeded":
        return
    if job.get("error"):
        raise error_of(job["error"])
    limits = (job.get("answer") or {}).get("limits", ())
    reasons = "; ".join(f"{limit['limit']}: {limit['message']}" for limit in limits)
    if job["status"] == "infeasible":
        raise Infeasible(f"{job['id']} is infeasible: {reasons}")
    if job["status"] == "timed_out":
        raise NoAnswerInTime(f"{job['id']} found no plan in time")
    raise MeshwrightError(f"{job['id']} ended as '{job['status']}'")
