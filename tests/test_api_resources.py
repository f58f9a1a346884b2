"""Lists, filters, cursors, deletion, reuse, ETags, downloads, metrics, back-pressure, scopes and log lines of the service."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.logs import JsonFormatter, belonging_to
from api.tokens import new_token
from specs.errors import InvalidInput
from tests.api_client import finished, serving, until
from tests.api_fake import CLUSTER, CONFIG, WORKLOAD, FakeEngine, tiny_graph


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with serving(tmp_path_factory.mktemp("service"), FakeEngine()) as client:
        yield client


def request(name: str = "quick", **changes: Any) -> dict[str, Any]:
    return {"model": CONFIG, "cluster": CLUSTER, "workload": {**WORKLOAD, "name": name}, **changes}


def start(client: TestClient, name: str = "quick", query: str = "?reuse=false", **changes: Any) -> str:
    response = client.post(f"/v1/plans{query}", json=request(name, **changes))
    assert response.status_code in (200, 202), response.text
    return str(response.headers["Location"])


@pytest.fixture(scope="module")
def ended(client: TestClient) -> str:
    """A plan job that succeeded."""
    path = start(client, cluster="local")
    finished(client, path)
    return path


@pytest.fixture(scope="module")
def infeasible(client: TestClient) -> str:
    """A plan job without a plan."""
    path = start(client, "infeasible")
    finished(client, path)
    return path


def cancelled(client: TestClient) -> str:
    """A job that ends at once."""
    path = start(client, "slow")
    client.delete(path)
    finished(client, path, within_s=15)
    return path


def test_identical_work_is_done_once(client: TestClient, ended: str) -> None:
    again = client.post("/v1/plans", json=request(cluster="local"))
    assert again.status_code == 200  # it has ended already
    assert again.headers["Location"] == ended
    others = [start(client, "slow", query=""), start(client, "slow", query="", options={"seed": 12}), start(client, "slow")]
    assert len({ended, *others}) == 4
    assert start(client, "slow", query="") in (others[0], others[2])  # one that still runs is reused as well
    for path in others:
        client.delete(path)


def test_lists_filter_and_page(client: TestClient, ended: str, infeasible: str) -> None:
    found = client.get("/v1/plans", params={"status": "infeasible"}).json()["items"]
    assert [item["id"] for item in found] == [infeasible.rpartition("/")[2]]
    seen, cursor = [], None
    while True:
        page = client.get("/v1/plans", params={"limit": 2, **({"before": cursor} if cursor else {})}).json()
        seen += [item["id"] for item in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert len(seen) == len(set(seen))
    assert {ended.rpartition("/")[2], infeasible.rpartition("/")[2]} <= set(seen)
    assert client.get("/v1/plans", params={"before": "nonsense"}).json()["errors"][0]["code"] == "bad_cursor"
    assert client.get("/v1/plans", params={"status": "nonsense"}).status_code == 422
    model = client.get("/v1/models").json()["items"][0]
    same = client.get("/v1/models", params={"content_hash": model["content_hash"]}).json()["items"]
    assert [item["id"] for item in same] == [model["id"]]
    assert client.get("/v1/models", params={"name": "no such name"}).json()["items"] == []


def test_a_deleted_row_does_not_break_its_cursor(client: TestClient) -> None:
    paths = [cancelled(client) for _ in range(3)]
    first = client.get("/v1/plans", params={"limit": 1}).json()
    assert client.delete(paths[2], params={"purge": True}).status_code == 204
    second = client.get("/v1/plans", params={"limit": 1, "before": first["next"]}).json()
    assert second["items"][0]["id"] == paths[1].rpartition("/")[2]


def test_delete_and_cancel(client: TestClient) -> None:
    slow = start(client, "slow")
    until(client, slow, "running")
    assert client.delete(slow, params={"purge": True}).status_code == 409
    assert client.post(f"{slow}/cancel").status_code == 202
    finished(client, slow, within_s=15)
    assert client.delete(slow, params={"purge": True}).status_code == 204
    assert client.get(slow).status_code == 404
    assert client.get(f"{slow}/events").status_code == 404


def test_documents_that_jobs_rest_on_stay(client: TestClient, ended: str) -> None:
    job = client.get(ended).json()
    refused = client.delete(f"/v1/workloads/{job['request']['workload']}")
    assert refused.status_code == 409
    assert "rests on it" in refused.json()["detail"]
    own = client.post("/v1/workloads", json={**WORKLOAD, "name": "nobody's", "global_batch": 3}).json()["id"]
    assert client.delete(f"/v1/workloads/{own}").status_code == 204
    assert client.get(f"/v1/workloads/{own}").status_code == 404
    assert client.delete("/v1/clusters/local").status_code == 409


def test_etags(client: TestClient, ended: str) -> None:
    for target in (ended, f"{ended}/artifacts/plan.json", f"/v1/models/{client.get(ended).json()['request']['model']}"):
        first = client.get(target)
        again = client.get(target, headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get(target, headers={"If-None-Match": '"other"'}).status_code == 200


def test_artifacts_download(client: TestClient, ended: str, infeasible: str) -> None:
    path = ended
    items = client.get(f"{path}/artifacts").json()["items"]
    types = {item["name"]: client.get(item["href"]).headers["content-type"].split(";")[0] for item in items}
    assert types == {
        "answer.json": "application/json", "plan.json": "application/json", "prediction.json": "application/json",
        "trace.json": "application/json", "report.html": "text/html", "candidates.csv": "text/csv",
    }  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(client.get(f"{path}/artifacts/candidates.csv").text)))
    assert rows[0]["status"] == "chosen"
    missing = client.get(f"{path}/artifacts/plan.jsn")
    assert missing.status_code == 404
    assert missing.json()["errors"][0]["nearest"] == "plan.json"
    bad = infeasible
    assert {item["name"] for item in client.get(f"{bad}/artifacts").json()["items"]} >= {"answer.json", "candidates.csv"}
    assert client.get(f"{bad}/artifacts/plan.json").status_code == 409
    assert "memory" in client.get(f"{bad}/artifacts/candidates.csv").text  # what was rejected, and why


def test_metrics_count_requests_jobs_and_prediction_errors(client: TestClient, ended: str) -> None:
    path = ended
    run = client.post(f"{path}/executions", json={"steps": 3}).headers["Location"]
    finished(client, run)
    text = client.get("/metrics").text
    assert 'meshwright_jobs{kind="plan",status="succeeded"}' in text
    assert 'meshwright_requests_total{method="POST",route="/v1/plans",status="202"}' in text
    assert 'meshwright_step_time_error_bucket{le="0.0"} 1.0' in text  # predicted 0.30 s, measured 0.31 s
    assert path.rpartition("/")[2] not in text  # templates of paths, no ids


def test_request_ids_reach_the_lines_of_a_job(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, str | None, str | None]] = []

    class Watch(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            from api import logs

            seen.append((record.getMessage(), logs._request_id.get(), logs._job_id.get()))
            return True

    watch = Watch()
    caplog.set_level(logging.INFO)
    for name in ("meshwright.api", "meshwright.jobs"):
        logging.getLogger(name).addFilter(watch)
    response = client.post("/v1/plans?reuse=false", json=request(), headers={"X-Request-ID": "mine-1"})
    job = finished(client, response.headers["Location"])
    assert response.headers["X-Request-ID"] == "mine-1"
    assert any(request_id == "mine-1" and "POST /v1/plans" in text for text, request_id, _ in seen)
    ended = [(request_id, job_id) for text, request_id, job_id in seen if "ended as succeeded" in text and job["id"] in text]
    assert ended == [("mine-1", job["id"])]


def test_queue_limit_is_429_with_retry_after(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(), max_queued_jobs=1) as client:
        running = start(client, "slow")
        until(client, running, "running")
        waiting = start(client, "slow")
        refused = client.post("/v1/plans?reuse=false", json=request("slow"))
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) > 0
        assert refused.json()["type"].endswith("too-many-jobs")
        for path in (waiting, running):
            client.delete(path)
            finished(client, path, within_s=15)


def test_depth_and_size_of_documents(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(), max_depth=12, max_graph_ops=1, max_units=1) as client:
        deep: Any = 1
        for _ in range(200):
            deep = {"x": deep}
        response = client.post("/v1/models", json={**CONFIG, "other": deep})
        assert response.json()["errors"][0]["code"] == "too_deep"
        bombs = [b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"[" * 100_000]
        for body in bombs:
            assert client.post("/v1/models", content=body, headers={"content-type": "application/json"}).status_code in (400, 422)
        graph = tiny_graph().to_dict()
        graph["blocks"][0]["ops"] *= 2
        graph["segments"][0]["count"] = 5
        codes = {error["code"] for error in client.post("/v1/models", json=graph).json()["errors"]}
        assert codes == {"too_many_ops", "too_many_units"}


def test_scopes_of_hashed_tokens(tmp_path: Path) -> None:
    reader, reads = new_token(["read"])
    planner, plans = new_token(["read", "plan"])
    assert reader not in reads.text()
    with serving(tmp_path, FakeEngine(), token_hashes=[reads.text(), plans.text()]) as client:

        def get(token: str, method: str, path: str, **kwargs: Any) -> int:
            return client.request(method, path, headers={"Authorization": f"Bearer {token}"}, **kwargs).status_code

        assert get("nobody", "GET", "/v1/plans") == 401
        assert get(reader, "GET", "/v1/plans") == 200
        assert get(reader, "POST", "/v1/plans", json=request()) == 403
        assert get(planner, "POST", "/v1/plans", json=request()) == 202
        assert get(planner, "POST", "/v1/plans/x/executions", json={}) == 403
        assert get(planner, "POST", "/v1/profiles", json={}) == 403
        lacking = client.post("/v1/plans", json=request(), headers={"Authorization": f"Bearer {reader}"})
        assert "insufficient_scope" in lacking.headers["WWW-Authenticate"]
    for bad in ("read:xyz", "reed:" + "0" * 64, "secret"):
        with pytest.raises(InvalidInput), serving(tmp_path, FakeEngine(), token_hashes=[bad]):
            pass


def test_a_log_line_is_one_object() -> None:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "hi %s", "args": ("you",), "status": 200})
    with belonging_to(request_id="r", job_id="j"):
        from api.logs import _Ids

        _Ids().filter(record)
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["status"], line["request_id"], line["job_id"]) == ("hi you", 200, "r", "j")
