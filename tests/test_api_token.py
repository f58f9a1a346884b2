"""A service with a token, and one without local devices."""

from __future__ import annotations

from pathlib import Path

from tests.api_client import finished, serving
from tests.api_fake import CLUSTER, CONFIG, WORKLOAD, FakeEngine


def test_token_is_asked_of_everyone_but_probes(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(), token="secret") as client:
        refused = client.get("/v1/plans")
        assert refused.status_code == 401
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        assert client.get("/v1/plans", headers={"Authorization": "Bearer secrex"}).status_code == 401
        assert client.get("/v1/plans", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert client.get("/readyz").status_code == 200


def test_no_local_devices_no_executions(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(), local_devices=0) as client:
        path = client.post("/v1/plans", json={"model": CONFIG, "cluster": CLUSTER, "workload": WORKLOAD}).headers["Location"]
        finished(client, path)
        response = client.post(f"{path}/executions", json={})
        assert response.status_code == 403
        assert "--local-devices" in response.json()["detail"]


def test_plan_for_more_devices_than_are_registered(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(), local_devices=2) as client:
        path = client.post("/v1/plans", json={"model": CONFIG, "cluster": "local", "workload": WORKLOAD}).headers["Location"]
        finished(client, path)
    with serving(tmp_path, FakeEngine(), local_devices=1) as client:
        assert client.post(f"{path}/executions", json={}).status_code == 409
