"""Exports, imports, differences, why-not and sizes over HTTP and through ``--server``, on the real engine (themes D, M, N)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from api.cli.main import app
from api.client import Client
from api.engine import Engine
from tests.api_client import finished, serving
from tests.plans import gpu_cluster

CLUSTER = gpu_cluster(8).to_dict()
WORKLOAD = {"name": "w", "global_batch": 32, "seq_len": 512, "precision": "bf16_mixed"}
BASE: dict[str, Any] = {"model": "llama-demo", "cluster": CLUSTER, "workload": WORKLOAD}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with serving(tmp_path_factory.mktemp("service"), Engine(), local_devices=0) as client:
        yield client


@pytest.fixture(scope="module")
def planned(client: TestClient) -> dict[str, Any]:
    return finished(client, client.post("/v1/plans", json=BASE).headers["Location"], within_s=110)


def test_export_of_a_job_and_of_a_document(client: TestClient, planned: dict[str, Any]) -> None:
    by_id = client.post("/v1/exports", json={"plan": planned["id"], "target": "megatron"}).json()
    assert "--num-layers 8" in by_id["files"]["megatron.args"]
    whole = {"plan": planned["answer"]["plan"], "target": "megatron", **BASE}
    assert client.post("/v1/exports", json=whole).json() == by_id
    assert client.get(f"/v1/plans/{planned['id']}/exports/megatron").json() == by_id
    assert client.get(f"/v1/plans/{planned['id']}/exports/megatrn").status_code == 422
    pipeline = client.post("/v1/estimates", json={**BASE, "strategy": "pp=2 tp=2 dp=2 sequence_parallel=true"}).json()["plan"]
    refused = client.post("/v1/exports", json={"plan": pipeline, "target": "deepspeed"})
    assert refused.status_code == 422
    assert {error["code"] for error in refused.json()["errors"]} == {"pp_not_expressible", "sequence_parallel"}


def test_judge_a_config(client: TestClient) -> None:
    text = "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2 --global-batch-size 64 --bf16 --zap 1"
    answer = client.post("/v1/imports", json={**BASE, "text": text, "framework": "megatron"}).json()
    assert answer["fits"] is True
    assert answer["plan"]["strategy"].startswith("pp=1 dp=4 tp=2 micro_batch=2 zero=0 sequence_parallel=true")
    assert answer["prediction"]["step_time_s"] > 0
    assert any("global_batch: the config says 64, the workload 32" in line for line in answer["conflicts"])
    assert [key["key"] for key in answer["imported"]["not_understood"]] == ["--zap"]
    bare = client.post("/v1/imports", json={"text": text, "framework": "megatron"}).json()
    assert bare["prediction"] is None
    assert len(bare["missing"]) == 3


def test_a_config_that_rules_forbid_names_them_all(client: TestClient) -> None:
    """U051: all violated rules together."""
    text = '{"train_batch_size": 30, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2, ' \
        '"tensor_parallel": {"autotp_size": 3}, "bf16": {"enabled": true}}'  # fmt: skip
    answer = client.post("/v1/imports", json={**BASE, "text": text, "framework": "deepspeed"}).json()
    assert answer["plan"] is None
    assert {"heads_divisible_by_tp", "kv_heads_divisible_by_tp", "tp_inside_node"} <= {rule["code"] for rule in answer["rules"]}
    assert client.post("/v1/imports", json={"text": "{", "framework": "deepspeed"}).status_code == 422


def test_why_not_and_diff(client: TestClient, planned: dict[str, Any]) -> None:
    own = client.post(f"/v1/plans/{planned['id']}/why-not", json={"strategy": "tp=4 dp=2 micro_batch=1"}).json()
    assert own["verdict"] == "slower"
    given = {"plan": planned["answer"]["plan"], "strategy": "tp=4 dp=2 micro_batch=1", **BASE}
    assert client.post("/v1/why-not", json=given).json()["step_time"] == own["step_time"]
    forbidden = client.post(f"/v1/plans/{planned['id']}/why-not", json={"strategy": "tp=3"}).json()
    assert forbidden["verdict"] == "forbidden"
    other = client.post("/v1/estimates", json={**BASE, "strategy": "tp=2 dp=4"}).json()["plan"]
    found = client.post("/v1/diffs", json={"before": planned["id"], "after": other}).json()
    assert found["moved_bytes"] > 0
    lonely = client.post("/v1/diffs", json={"before": other, "after": other})
    assert lonely.status_code == 422
    assert "model and workload" in lonely.json()["detail"]


def test_recommendation_is_a_job(client: TestClient) -> None:
    body = {
        "model": "llama-demo",
        "device": "a100_sxm_80gb",
        "workload": WORKLOAD,
        "options": {"max_devices": 4, "time_limit_s": 20},
    }
    path = client.post("/v1/recommendations", json=body).headers["Location"]
    job = finished(client, path, within_s=110)
    assert job["answer"]["fewest_devices"] == 1
    assert [point["devices"] for point in job["answer"]["curve"]] == [1, 2, 4]
    assert client.get("/v1/recommendations").json()["items"][0]["id"] == job["id"]
    assert client.post("/v1/recommendations", json={**body, "device": "a100_sxm_80g"}).json()["errors"][0]["nearest"]


# --- the same verbs through --server --------------------------------------------------------------------------------


@pytest.fixture
def remote(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a question to the service, whose requests go to it without a socket."""
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump(WORKLOAD))
    monkeypatch.setattr("api.asking.Client", lambda url, token=None: Client(url, token, http=client))
    monkeypatch.chdir(tmp_path)
    return ["--server", "http://127.0.0.1", "--model", "llama-demo", "--workload", "workload.yaml"]


def as_json(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
    return json.loads(result.stdout)


def test_every_question_can_be_asked_of_a_service(remote: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ["--cluster", "cluster.yaml"]
    asked = [*remote, *cluster]
    estimate = as_json("estimate", *asked, "--strategy", "tp=2 dp=4", "-o", "estimate.json")
    local = as_json("estimate", *asked[2:], "--strategy", "tp=2 dp=4")
    assert estimate["plan"]["strategy"] == local["plan"]["strategy"]
    assert estimate["prediction"]["waterfall"] == local["prediction"]["waterfall"]
    monkeypatch.setattr("api.engine.Engine.load_model", lambda self, text: pytest.fail("captured here instead of there"))
    answer = as_json("plan", *asked, "-o", "plan.json")
    assert answer["status"] == "optimal"
    assert as_json("memory", *asked, "--strategy", "zero=3")["states"]
    assert as_json("why", "--not", "tp=4 dp=2 micro_batch=1", *asked)["verdict"] == "slower"
    assert as_json("why", "--not", "tp=3", "--plan", "plan.json", *asked)["verdict"] == "forbidden"
    assert as_json("diff", "estimate.json", "plan.json", *asked)["changes"]
    assert as_json("export", "plan.json", "--to", "slurm", *remote, "-o", "out")["target"] == "slurm"
    assert (tmp_path / "out" / "job.sbatch").exists()
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    assert as_json("import", "ds.json", "--from", "deepspeed", *asked)["fits"] is True
    found = as_json("recommend", "--device", "a100_sxm_80gb", "--max-devices", "2", "--time-limit", "20", *remote)
    assert found["fewest_devices"] == 1


def test_errors_of_a_service_are_errors_here(remote: list[str]) -> None:
    problem = as_json("estimate", *remote, "--cluster", "cluster.yaml", "--strategy", "tp=3", code=2)["error"]
    assert any(error["nearest"] is not None for error in problem["errors"])
    small = {**CLUSTER, "device_types": [{**CLUSTER["device_types"][0], "memory_bytes": 1e6}]}
    Path("small.yaml").write_text(yaml.safe_dump(small))
    assert as_json("plan", *remote, "--cluster", "small.yaml", code=3)["limits"]


def test_cluster_from_texts(client: TestClient) -> None:
    matrix = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV12\tPXB\nGPU1\tNV12\t X \tSYS\nNIC0\tPXB\tSYS\t X\n"
    body = {"device": "a100_sxm_80gb", "topology": matrix, "hostfile": "a slots=2\nb slots=2\nc slots=1\n"}
    found = client.post("/v1/clusters/from-text", json=body).json()
    assert [(group["count"], group["devices_per_node"]) for group in found["nodes"]] == [(2, 2), (1, 1)]
    assert found["nodes"][0]["intra"]["bandwidth_bytes_per_s"] == 300e9
    assert client.post("/v1/clusters", json=found).status_code == 201
    wrong = client.post("/v1/clusters/from-text", json={"hostfile": "a slots=x\nb b b", "topology": "nothing"}).json()
    assert {error["loc"][0] for error in wrong["errors"] if error["loc"]} == {"hostfile", "topology"}
    lone = client.post("/v1/clusters/from-text", json={"device": "a100_sxm_80gb"})
    assert lone.json()["errors"][0]["code"] == "incomplete_node_group"
    assert "device_or_preset" in {error["code"] for error in wrong["errors"]}
