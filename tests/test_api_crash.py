"""Nothing is lost when the service is killed: jobs resume, acknowledged requests are done, no process is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from api.client import Client
from api.jobs import Jobs
from api.store import Store
from tests.api_client import finished, serving, until
from tests.api_fake import CONFIG, WORKLOAD, FakeEngine

REQUEST = {"model": CONFIG, "cluster": "local", "workload": WORKLOAD}
SLOW = {**REQUEST, "workload": {**WORKLOAD, "name": "slow"}}


class RealService:
    """A service in a process of its own, over one database, that a test may kill and start again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Client:
        url = f"sqlite:///{self.folder / 'service.sqlite'}"
        command = [sys.executable, "-m", "tests.api_fake", url, str(self.port)]
        with (self.folder / "service.log").open("a") as log:
            env = {**os.environ, "MESHWRIGHT_TEST_TICKS": "25"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parent.parent, env=env)
        client = Client(f"http://127.0.0.1:{self.port}")
        deadline = time.monotonic() + 60
        while not client.is_ready():
            assert self.process.poll() is None, (self.folder / "service.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return client

    def kill(self) -> list[psutil.Process]:
        """kill -9; the processes that it had started."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return children


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RealService]:
    real = RealService(tmp_path)
    yield real
    if real.process is not None and real.process.poll() is None:
        real.process.terminate()
        real.process.wait(20)


def wait_for(client: Client, path: str, *, done: int) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        job: dict[str, Any] = client.get(path)
        if job["status"] == "running" and (job["progress"] or {}).get("done", 0) >= done:
            return job
        time.sleep(0.05)
    raise AssertionError(f"{path} did not get there: {job}")


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


@pytest.mark.distributed
def test_kill_during_a_plan(service: RealService) -> None:
    client = service.start()
    path = client.post("/v1/plans", SLOW)["links"]["self"]
    wait_for(client, path, done=5)
    children = service.kill()
    assert children
    assert_gone(children)
    client = service.start()
    assert client.get(path)["status"] in ("queued", "running")
    job = client.follow(path)
    assert job["status"] == "succeeded"
    assert job["answer"]["plan"] is not None


@pytest.mark.distributed
def test_kill_during_an_execution(service: RealService) -> None:
    client = service.start()
    plan = client.run("/v1/plans", SLOW)
    execution = client.post(f"{plan['links']['self']}/executions", {"steps": 4})["links"]["self"]
    wait_for(client, execution, done=5)
    assert_gone(service.kill())
    client = service.start()
    job = client.follow(execution)
    assert len(job["measurement"]["step_times_s"]) == 4
    assert client.get(f"{execution}/comparison")["comparison"]["inside_interval"]


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_acknowledged_requests_survive_kills_at_any_moment(service: RealService) -> None:
    accepted: dict[str, str] = {}
    for round_number, delay_s in enumerate((0.0, 0.15, 0.9)):
        client = service.start()
        for index in range(3):
            key = f"{round_number}-{index}"
            accepted[key] = client.post("/v1/plans", REQUEST, idempotency_key=key)["links"]["self"]
        time.sleep(delay_s)
        service.kill()
    client = service.start()
    for key, path in accepted.items():
        assert client.post("/v1/plans", REQUEST, idempotency_key=key)["links"]["self"] == path
        assert client.follow(path)["status"] == "succeeded"


def test_stop_in_order_puts_the_job_back(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine()) as client:
        path = client.post("/v1/plans", json=SLOW).headers["Location"]
        until(client, path, "running")
    store = Store(f"sqlite:///{tmp_path / 'service.sqlite'}")
    job = store.job(path.rpartition("/")[2])
    store.close()
    assert job is not None
    assert (job.status, job.attempts) == ("queued", 0)
    with serving(tmp_path, FakeEngine()) as client:
        until(client, path, "running")
        client.delete(path)
        assert finished(client, path)["status"] == "cancelled"


def test_row_without_a_workflow_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between writing the row and enqueueing its workflow."""
    with serving(tmp_path, FakeEngine()) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Jobs, "submit", lambda self, job: None)
            path = client.post("/v1/plans?reuse=false", json=REQUEST).headers["Location"]
        time.sleep(0.5)
        assert client.get(path).json()["status"] == "queued"
    with serving(tmp_path, FakeEngine()) as client:
        assert finished(client, path)["status"] == "succeeded"


def test_a_job_that_kills_the_service_is_given_up(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'service.sqlite'}")
    job, _ = store.create_job("plan", {"model": "m", "cluster": "c", "workload": "w", "options": {}})
    for _ in range(3):
        store.start(job.id)  # three starts without an end
    store.close()
    with serving(tmp_path, FakeEngine()) as client:
        ended = finished(client, f"/v1/plans/{job.id}")
    assert ended["status"] == "failed"
    assert "3 times" in ended["error"]["detail"]
