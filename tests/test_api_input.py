"""What clients may send, and what they get for what they may not: problem bodies with every violation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.settings import Settings
from specs.errors import InvalidInput
from tests.api_client import serving
from tests.api_fake import CLUSTER, CONFIG, WORKLOAD, FakeEngine, tiny_graph


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with serving(tmp_path_factory.mktemp("service"), FakeEngine(), max_body_bytes=200_000) as client:
        yield client


def request(**changes: Any) -> dict[str, Any]:
    return {"model": CONFIG, "cluster": CLUSTER, "workload": WORKLOAD, **changes}


def problem(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert {"type", "title", "status", "detail", "errors"} <= set(body)
    assert body["status"] == status
    return body


def test_unknown_key_of_the_request_names_the_nearest(client: TestClient) -> None:
    body = problem(client.post("/v1/plans", json=request(optoins={})), 422)
    assert body["errors"][0]["code"] == "unknown_key"
    assert body["errors"][0]["loc"] == ["optoins"]
    assert body["errors"][0]["nearest"] == "options"


def test_unknown_key_below_options(client: TestClient) -> None:
    body = problem(client.post("/v1/plans", json=request(options={"time_limt_s": 3})), 422)
    assert body["errors"][0]["loc"] == ["options", "time_limt_s"]
    assert body["errors"][0]["nearest"] == "time_limit_s"


def test_all_violations_of_all_documents_at_once(client: TestClient) -> None:
    bad = request(
        model={**CONFIG, "num_key_value_heads": 3},
        cluster={**CLUSTER, "oversubscripton": 2},
        workload={**WORKLOAD, "global_batch": 0},
    )
    errors = problem(client.post("/v1/plans", json=bad), 422)["errors"]
    assert {error["loc"][0] for error in errors} == {"model", "cluster", "workload"}
    assert any(error["nearest"] == "oversubscription" for error in errors)


def test_missing_key(client: TestClient) -> None:
    errors = problem(client.post("/v1/plans", json={"model": CONFIG}), 422)["errors"]
    assert {tuple(error["loc"]) for error in errors} == {("cluster",), ("workload",)}


def test_malformed_json(client: TestClient) -> None:
    response = client.post("/v1/plans", content=b"{", headers={"content-type": "application/json"})
    assert problem(response, 422)["errors"][0]["code"] == "json_invalid"


def test_unknown_id_names_the_nearest(client: TestClient) -> None:
    errors = problem(client.post("/v1/plans", json=request(model="lama-demo", cluster="locl")), 422)["errors"]
    assert {error["code"] for error in errors} == {"unknown_id"}
    assert {error["nearest"] for error in errors} == {"llama-demo", "local"}


def test_model_preset_by_name(client: TestClient) -> None:
    assert client.post("/v1/plans", json=request(model="llama-demo")).status_code == 202


def test_model_that_is_neither_config_nor_graph(client: TestClient) -> None:
    body = problem(client.post("/v1/models", json={"hello": 1}), 422)
    assert body["errors"][0]["code"] == "unknown_model_document"


def test_cyclic_graph(client: TestClient) -> None:
    graph = tiny_graph().to_dict()
    graph["blocks"][0]["ops"][0]["args"] = [{"ref": "y"}]
    assert problem(client.post("/v1/models", json=graph), 422)["errors"][0]["code"] == "cyclic_graph"


def test_malformed_graph(client: TestClient) -> None:
    graph = tiny_graph().to_dict()
    graph["blocks"][0]["ops"][0]["args"] = [{"ref": "nowhere"}]
    assert problem(client.post("/v1/models", json=graph), 422)["errors"][0]["code"] == "unknown_tensor"
    graph["segments"][0]["block"] = "absent"
    assert problem(client.post("/v1/models", json=graph), 422)["errors"][0]["code"] == "unknown_block"


def test_graph_is_stored_and_captured(client: TestClient) -> None:
    created = client.post("/v1/models", json=tiny_graph("posted").to_dict())
    assert created.status_code == 201
    assert created.headers["Location"] == f"/v1/models/{created.json()['id']}"
    assert client.post("/v1/models", json=tiny_graph("posted").to_dict()).status_code == 200
    assert client.get(f"{created.headers['Location']}/graph").json()["name"] == "posted"


def test_config_has_no_graph_before_capture(client: TestClient) -> None:
    created = client.post("/v1/models", json={**CONFIG, "num_hidden_layers": 5})
    problem(client.get(f"{created.headers['Location']}/graph"), 409)


def test_token_file_is_refused(client: TestClient) -> None:
    body = problem(client.post("/v1/workloads", json={**WORKLOAD, "data_source": "/etc/passwd"}), 422)
    assert body["errors"][0]["code"] == "data_source_not_allowed"


def test_factory_is_no_model_of_the_service(client: TestClient) -> None:
    assert problem(client.post("/v1/plans", json=request(model="os:getcwd")), 422)["errors"][0]["code"] == "unknown_id"


def test_plan_or_strategy(client: TestClient) -> None:
    assert problem(client.post("/v1/estimates", json=request()), 422)["errors"][0]["code"] == "plan_or_strategy"


def test_search_longer_than_allowed(client: TestClient) -> None:
    body = problem(client.post("/v1/plans", json=request(options={"time_limit_s": 1e6})), 422)
    assert body["errors"][0]["loc"] == ["options", "time_limit_s"]
    assert body["errors"][0]["nearest"] == 3600


def test_large_bodies_are_refused(client: TestClient) -> None:
    body = problem(client.post("/v1/models", json={"model_type": "x" * 300_000}), 413)
    assert "200000 bytes" in body["detail"]


def test_large_bodies_without_a_length_are_refused(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 10_000

    response = client.post("/v1/models", content=chunks(), headers={"content-type": "application/json"})
    problem(response, 413)


def test_not_found(client: TestClient) -> None:
    for path in ("/v1/plans/plan-x", "/v1/executions/execution-x", "/v1/clusters/locl", "/v1/nothing"):
        problem(client.get(path), 404)
    assert client.get("/v1/clusters/locl").json()["errors"][0]["nearest"] == "local"


def test_method_not_allowed(client: TestClient) -> None:
    problem(client.put("/v1/plans", json={}), 405)


def test_request_id(client: TestClient) -> None:
    assert client.get("/healthz", headers={"X-Request-ID": "mine-1"}).headers["X-Request-ID"] == "mine-1"
    fresh = client.get("/v1/plans/none", headers={"X-Request-ID": "bad id\twith spaces"})
    assert fresh.headers["X-Request-ID"] == fresh.json()["request_id"] != "bad id\twith spaces"


def test_foreign_host_header_is_refused(client: TestClient) -> None:
    assert client.get("/healthz", headers={"Host": "attacker.example"}).status_code == 400


def test_lists_are_paged(client: TestClient) -> None:
    for batch in (2, 4, 16):
        client.post("/v1/workloads", json={**WORKLOAD, "global_batch": batch})
    seen: list[str] = []
    cursor = None
    while True:
        page = client.get("/v1/workloads", params={"limit": 2} | ({"before": cursor} if cursor else {})).json()
        seen += [item["id"] for item in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert len(seen) == len(set(seen)) >= 3
    problem(client.get("/v1/workloads", params={"limit": 101}), 422)


def test_ready_and_open_api(client: TestClient) -> None:
    assert client.get("/readyz").json()["checks"] == {"database": "ok", "jobs": "ok"}
    document = client.get("/openapi.json").json()
    operations = [item for path in document["paths"].values() for item in path.values()]
    assert all(item.get("summary") and item.get("operationId") for item in operations)
    assert len({item["operationId"] for item in operations}) == len(operations)
    posts = [path["post"] for name, path in document["paths"].items() if "post" in path]
    assert all("examples" in item["requestBody"]["content"]["application/json"] for item in posts if "requestBody" in item)
    page = client.get("/docs")
    assert page.status_code == 200
    assert "https://" not in page.text  # opens where nothing outside can be reached
    assert client.get("/static-offline-docs/swagger-ui-bundle.js").status_code == 200


def test_beyond_loopback_needs_a_token() -> None:
    with pytest.raises(InvalidInput, match="token"):
        Settings(host="0.0.0.0").check_exposed()
    Settings(host="0.0.0.0", token="secret").check_exposed()
    Settings(host="::1").check_exposed()
