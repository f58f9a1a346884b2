"""The service on PostgreSQL: one URL, several processes on it, and nothing lost when one of them is killed."""

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

import pytest

from api.client import Client
from tests.api_client import finished, serving
from tests.api_fake import CLUSTER, CONFIG, WORKLOAD, FakeEngine
from tests.postgres import postgres

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres() as url:
        yield url


def request(name: str = "quick", seed: int = 0) -> dict[str, Any]:
    return {"model": CONFIG, "cluster": CLUSTER, "workload": {**WORKLOAD, "name": name}, "options": {"seed": seed}}


def test_one_service(url: str, tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(), database_url=url) as client:
        path = client.post("/v1/plans", json={**request(), "cluster": "local"}).headers["Location"]
        job = finished(client, path)
        assert job["status"] == "succeeded"
        assert client.post("/v1/plans", json={**request(), "cluster": "local"}).status_code == 200  # reused
        run = client.post(f"{path}/executions", json={"steps": 2}).headers["Location"]
        assert finished(client, run)["status"] == "succeeded"
        assert client.get("/v1/plans", params={"status": "succeeded", "limit": 1}).json()["items"][0]["id"] == job["id"]
        assert client.delete(f"/v1/models/{job['request']['model']}").status_code == 409
        assert client.delete(path, params={"purge": True}).status_code == 409
        assert client.delete(run, params={"purge": True}).status_code == 204
        assert client.delete(path, params={"purge": True}).status_code == 204
        assert client.get("/readyz").json()["checks"]["database"] == "ok"


class Process:
    """A service process of its own name on the shared database."""

    def __init__(self, url: str, folder: Path, name: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "MESHWRIGHT_EXECUTOR_ID": name, "MESHWRIGHT_TEST_TICKS": "20"}
        with (folder / f"{name}.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.api_fake", url, str(port)], stdout=log, stderr=log, env=environment
            )
        self.client = Client(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 90
        while not self.client.is_ready():
            assert self.process.poll() is None, (folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def test_two_processes_share_the_work_and_a_killed_one_loses_nothing(url: str, tmp_path: Path) -> None:
    first, second = Process(url, tmp_path, "one"), Process(url, tmp_path, "two")
    try:
        paths = [first.client.post("/v1/plans", request("slow", seed))["links"]["self"] for seed in range(4)]
        assert second.client.post("/v1/plans", request("slow", 0))["links"]["self"] == paths[0]  # one database, one answer
        time.sleep(2)
        first.kill()
        first = Process(url, tmp_path, "one")
        jobs = [second.client.follow(path) for path in paths]
        assert [job["status"] for job in jobs] == ["succeeded"] * 4
        assert len({job["id"] for job in jobs}) == 4
    finally:
        for process in (first, second):
            process.process.terminate()
            process.process.wait(30)
