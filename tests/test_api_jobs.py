"""Jobs: status, events, cancellation, idempotency, failures. The engine is a fake; its numbers mean nothing here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.api_client import finished, read_events, serving, until
from tests.api_fake import CLUSTER, CONFIG, WORKLOAD, FakeEngine


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with serving(tmp_path_factory.mktemp("service"), FakeEngine()) as client:
        yield client


def request(name: str = "quick", **changes: Any) -> dict[str, Any]:
    return {"model": CONFIG, "cluster": CLUSTER, "workload": {**WORKLOAD, "name": name}, **changes}


def start(client: TestClient, name: str = "quick", **changes: Any) -> str:
    response = client.post("/v1/plans?reuse=false", json=request(name, **changes))
    assert response.status_code == 202, response.text
    assert response.headers["Location"] == f"/v1/plans/{response.json()['id']}"
    return response.headers["Location"]


def test_plan_succeeds_with_times_and_answer(client: TestClient) -> None:
    job = finished(client, start(client))
    assert job["status"] == "succeeded"
    assert job["answer"]["status"] == "optimal"
    assert job["created_at"] <= job["started_at"] <= job["finished_at"]
    assert job["created_at"].endswith("Z")
    listed = client.get("/v1/plans").json()["items"]
    assert job["id"] in {item["id"] for item in listed}
    assert all("answer" not in item for item in listed)


def test_infeasible_is_a_result(client: TestClient) -> None:
    path = start(client, "infeasible")
    job = finished(client, path)
    assert job["status"] == "infeasible"
    assert job["error"] is None
    assert job["answer"]["limits"][0]["limit"] == "memory"
    assert client.get(f"{path}/trace").status_code == 409
    assert client.post(f"{path}/executions", json={}).status_code == 409


def test_events_resume_after_the_last_one_seen(client: TestClient) -> None:
    path = start(client)
    finished(client, path)
    events = read_events(client, path)
    numbers = [number for number, _, _ in events]
    assert numbers == list(range(1, len(events) + 1))
    assert [json.loads(data)["status"] for _, kind, data in events if kind == "status"] == ["queued", "running", "succeeded"]
    assert "progress" in {kind for _, kind, _ in events}
    assert read_events(client, path, after=2) == events[2:]
    assert read_events(client, path, after=numbers[-1]) == []


def test_events_follow_a_running_job_to_its_end(client: TestClient) -> None:
    path = start(client)  # no waiting: the stream itself must end
    assert json.loads(read_events(client, path)[-1][2])["status"] == "succeeded"


def test_bad_last_event_id_is_a_problem(client: TestClient) -> None:
    response = client.get(f"{start(client)}/events", headers={"Last-Event-ID": "x"})
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"


def test_idempotency_key(client: TestClient) -> None:
    headers = {"Idempotency-Key": "once"}
    first = client.post("/v1/plans", json=request(), headers=headers)
    again = client.post("/v1/plans", json=request(), headers=headers)
    assert first.json()["id"] == again.json()["id"]
    other = client.post("/v1/plans", json=request(options={"seed": 7}), headers=headers)
    assert other.status_code == 422
    assert other.json()["errors"][0]["code"] == "idempotency_key_reused"


def test_cancel_a_running_job(client: TestClient) -> None:
    path = start(client, "slow")
    until(client, path, "running")
    assert client.delete(path).status_code == 202
    job = finished(client, path, within_s=15)
    assert job["status"] == "cancelled"
    assert client.delete(path).status_code == 200  # stays as it is


def test_cancel_a_queued_job(client: TestClient) -> None:
    first = start(client, "slow")
    until(client, first, "running")
    second = start(client, "slow", options={"seed": 1})
    response = client.delete(second)
    assert response.json()["status"] == "cancelled"
    client.delete(first)
    assert finished(client, first, within_s=15)["status"] == "cancelled"
    after = finished(client, start(client))  # the queue goes on
    assert after["status"] == "succeeded"


def test_long_jobs_do_not_block_requests(client: TestClient) -> None:
    path = start(client, "slow")
    until(client, path, "running")
    assert client.get("/healthz").elapsed.total_seconds() < 1
    assert client.post("/v1/estimates", json=request(strategy="dp=2")).status_code == 200
    client.delete(path)
    finished(client, path, within_s=15)


def test_defect_is_reported_and_not_leaked(client: TestClient) -> None:
    job = finished(client, start(client, "defect"))
    assert job["status"] == "failed"
    assert job["error"]["type"].endswith("internal-error")
    assert "Traceback" not in json.dumps(job)


def test_death_of_the_job_process_is_reported(client: TestClient) -> None:
    job = finished(client, start(client, "dies"))
    assert job["status"] == "failed"
    assert "ended without an answer" in job["error"]["detail"]


def test_time_limit_ends_a_search_that_does_not(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.jobs.SEARCH_GRACE_S", 0.5)
    job = finished(client, start(client, "slow", options={"time_limit_s": 0.5}), within_s=20)
    assert job["status"] == "timed_out"


def test_execution_and_comparison(client: TestClient) -> None:
    path = start(client, cluster="local")
    plan = finished(client, path)
    response = client.post(f"{path}/executions", json={"steps": 3})
    assert response.status_code == 202
    location = response.headers["Location"]
    job = finished(client, location)
    assert job["status"] == "succeeded"
    assert job["plan_id"] == plan["id"]
    assert job["measurement"]["steps"] == 3
    comparison = client.get(f"{location}/comparison").json()["comparison"]
    assert comparison["step_time"]["measured"] == pytest.approx(0.31)
    assert "plotly" in client.get(f"{path}/report").text.lower()
    assert job["id"] in {item["id"] for item in client.get("/v1/executions").json()["items"]}


def test_execution_only_on_the_local_cluster(client: TestClient) -> None:
    elsewhere = {**CLUSTER, "name": "elsewhere"}
    path = start(client, cluster=elsewhere)
    finished(client, path)
    response = client.post(f"{path}/executions", json={})
    assert response.status_code == 403
    assert "local" in response.json()["detail"]


def test_comparison_before_the_end_is_a_conflict(client: TestClient) -> None:
    path = start(client, cluster="local", workload={**WORKLOAD, "name": "quick", "seed": 5})
    finished(client, path)
    slow = client.post("/v1/plans", json=request("slow", cluster="local")).headers["Location"]
    assert client.get(f"{slow}/trace").status_code == 409
    client.delete(slow)
    finished(client, slow, within_s=15)


def test_profile_job_and_posted_profile(client: TestClient) -> None:
    body = {"model": CONFIG, "cluster": "local", "workload": WORKLOAD}
    response = client.post("/v1/profiles", json=body)
    assert response.status_code == 202
    job = finished(client, response.headers["Location"])
    assert job["status"] == "succeeded"
    document = client.get(f"/v1/profiles/{job['profile_id']}").json()["document"]
    posted = client.post("/v1/profiles", json=document)
    assert posted.status_code == 200  # the same content is the same resource
    assert posted.json()["id"] == job["profile_id"]
    plan = finished(client, start(client, profile=job["profile_id"]))
    assert plan["request"]["profile"] == job["profile_id"]
