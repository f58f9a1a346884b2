"""The service with the real engine on a small model: answers that agree with each other, and real processes that die with it."""

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
from fastapi.testclient import TestClient

from api.client import Client
from api.engine import Engine
from specs.errors import ExecutionFailed, InvalidInput
from tests.api_client import finished, serving
from tests.api_fake import CLUSTER, CONFIG, WORKLOAD

STEPS = 60  # enough that the service can be killed in between
REQUEST = {"model": CONFIG, "cluster": CLUSTER, "workload": WORKLOAD}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with serving(tmp_path_factory.mktemp("service"), Engine(), local_devices=0) as client:
        yield client


@pytest.fixture(scope="module")
def plan(client: TestClient) -> dict[str, Any]:
    path = client.post("/v1/plans", json=REQUEST).headers["Location"]
    job = finished(client, path, within_s=110)
    assert job["status"] == "succeeded", job
    return job


def test_the_planner_answers(plan: dict[str, Any]) -> None:
    answer = plan["answer"]
    assert answer["status"] == "optimal"
    assert answer["search"]["candidates"] > 1
    assert sum(answer["prediction"]["waterfall"].values()) == pytest.approx(answer["prediction"]["step_time_s"], rel=1e-6)
    assert answer["alternatives"]


def test_an_estimate_of_the_plan_agrees_with_the_plan(client: TestClient, plan: dict[str, Any]) -> None:
    ids = {kind: plan["request"][kind] for kind in ("model", "cluster", "workload")}
    response = client.post("/v1/estimates", json={**ids, "plan": plan["answer"]["plan"]})
    assert response.status_code == 200
    assert response.json()["prediction"]["step_time_s"] == pytest.approx(plan["answer"]["prediction"]["step_time_s"])
    assert response.json()["fits"] is True


def test_a_calibration_from_a_measured_run_changes_estimates(client: TestClient, plan: dict[str, Any]) -> None:
    ids = {kind: plan["request"][kind] for kind in ("model", "cluster", "workload")}
    answer = plan["answer"]
    predicted = answer["prediction"]
    run = {
        "plan_hash": predicted["plan_hash"], "plan": answer["plan"], "step_time_s": 1.3 * predicted["step_time_s"],
        "waterfall": {name: 1.3 * seconds for name, seconds in predicted["waterfall"].items()},
    }  # fmt: skip
    response = client.post("/v1/calibrations", json={**ids, "measurements": [run]})
    assert response.status_code == 201, response.text
    assert client.post("/v1/calibrations", json={**ids, "measurements": [run]}).status_code == 200  # the same content
    found = client.get(response.headers["Location"]).json()["document"]
    assert found["num_runs"] == 1
    body = {**ids, "plan": answer["plan"], "calibration": response.json()["id"]}
    calibrated = client.post("/v1/estimates", json=body).json()["prediction"]
    assert predicted["step_time_s"] < calibrated["step_time_s"] < 1.3 * predicted["step_time_s"]
    inline = client.post("/v1/estimates", json={**body, "calibration": found}).json()["prediction"]
    assert inline == calibrated
    bad = client.post("/v1/calibrations", json={**ids, "measurements": [{**run, "status": "failed"}, {**run, "model_hash": "x"}]})
    assert bad.status_code == 422
    assert client.post("/v1/calibrations", json={**ids, "measurements": []}).status_code == 422
    assert client.post("/v1/estimates", json={**body, "calibration": "calibration-none"}).status_code == 422


def test_trace_and_report(client: TestClient, plan: dict[str, Any]) -> None:
    events = client.get(plan["links"]["trace"]).json()["traceEvents"]
    assert any(event["ph"] == "X" and event["dur"] > 0 for event in events)
    page = client.get(plan["links"]["report"])
    assert page.headers["content-type"].startswith("text/html")
    assert plan["answer"]["plan"]["strategy"] in page.text
    assert 'id="timeline"' in page.text


def test_every_violation_of_a_strategy(client: TestClient) -> None:
    eight = {**CLUSTER, "nodes": [{**CLUSTER["nodes"][0], "devices_per_node": 8}]}  # type: ignore[index]
    response = client.post("/v1/estimates", json={**REQUEST, "cluster": eight, "strategy": "tp=8 micro_batch=3"})
    assert response.status_code == 422
    errors = response.json()["errors"]
    assert len(errors) >= 2
    heads = next(error for error in errors if "head" in error["code"] or "head" in error["msg"])
    assert heads["allowed"] is not None
    assert heads["nearest"] is not None


def test_unreadable_strategy(client: TestClient) -> None:
    response = client.post("/v1/estimates", json={**REQUEST, "strategy": "tp=2 micro_bach=1"})
    assert response.status_code == 422
    assert any(error["nearest"] == "micro_batch" for error in response.json()["errors"])


def test_a_changed_plan_is_judged(client: TestClient, plan: dict[str, Any]) -> None:
    broken = {**plan["answer"]["plan"], "global_batch": 9}
    response = client.post("/v1/estimates", json={**REQUEST, "plan": broken})
    assert response.status_code == 422
    assert any("9" in error["msg"] for error in response.json()["errors"])


def test_unknown_device(client: TestClient) -> None:
    cluster = {"name": "typo", "nodes": [{"count": 1, "device": "h100_sx", "devices_per_node": 8}]}
    response = client.post("/v1/plans", json={**REQUEST, "cluster": cluster})
    assert response.status_code == 422
    error = response.json()["errors"][0]
    assert error["loc"] == ["cluster", "nodes", 0, "device"]
    assert "h100" in error["nearest"]


def test_infeasible_names_the_limit(client: TestClient) -> None:
    small = {**CLUSTER, "device_types": [{**CLUSTER["device_types"][0], "memory_gib": 0.0001}]}  # type: ignore[index]
    job = finished(client, client.post("/v1/plans", json={**REQUEST, "cluster": small}).headers["Location"], within_s=60)
    assert job["status"] == "infeasible"
    limit = job["answer"]["limits"][0]
    assert limit["limit"] == "memory"
    assert limit["needed"] > limit["available"]


def test_capture_failure_is_a_problem_of_the_job(client: TestClient) -> None:
    response = client.post("/v1/models", json={**CONFIG, "model_type": "nothing"})
    assert response.status_code == 422
    assert response.json()["errors"][0]["code"] == "unknown_architecture"


def test_a_posted_graph_never_names_code(client: TestClient, plan: dict[str, Any]) -> None:
    graph = client.get(f"/v1/models/{plan['request']['model']}/graph").json()
    graph["attributes"] = {"factory": "os:getcwd"}
    created = client.post("/v1/models", json=graph)
    assert created.status_code == 201  # data like any other; only an execution would build it
    from specs.graph import ModelGraph
    from specs.plan import Plan
    from specs.training import TrainingSpec

    chosen = Plan.parse(plan["answer"]["plan"])
    with pytest.raises((InvalidInput, ExecutionFailed), match="from the command line only"):
        Engine().execute(chosen, ModelGraph.parse(graph), TrainingSpec.parse(WORKLOAD), steps=1, warmup_steps=0)


class Serve:
    """``meshwright serve`` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Client:
        command = [
            sys.executable, "-m", "api.cli.main", "serve", "--port", str(self.port), "--local-devices", "2",
            "--database-url", f"sqlite:///{self.folder / 'service.sqlite'}",
        ]  # fmt: skip
        with (self.folder / "service.log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        client = Client(f"http://127.0.0.1:{self.port}")
        deadline = time.monotonic() + 120
        while not client.is_ready():
            assert self.process.poll() is None, (self.folder / "service.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        return client

    def kill(self) -> list[psutil.Process]:
        """kill -9; the processes that it had started."""
        assert self.process is not None
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return started


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    real = Serve(tmp_path)
    yield real
    if real.process is not None and real.process.poll() is None:
        real.process.terminate()
        real.process.wait(30)


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_kill_during_a_real_execution_leaves_no_worker_and_loses_nothing(serve: Serve) -> None:
    client = serve.start()
    request = {"model": CONFIG, "cluster": "local", "workload": WORKLOAD, "options": {"strategy": "dp=2 micro_batch=4 zero=0"}}
    plan = client.run("/v1/plans", request)
    path = client.post(f"{plan['links']['self']}/executions", {"steps": STEPS})["links"]["self"]
    deadline = time.monotonic() + 90
    while (client.get(path)["progress"] or {}).get("done", 0) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    started = serve.kill()
    assert len(started) >= 4  # the job, the launcher, two workers
    _, alive = psutil.wait_procs(started, timeout=15)
    assert not alive
    client = serve.start()
    job = client.follow(path)
    assert job["status"] == "succeeded"
    assert len(job["measurement"]["step_times_s"]) == STEPS
    assert client.get(f"{path}/comparison")["comparison"]["step_time"]["measured"] > 0
