"""The command line: exit codes, one JSON document on stdout, messages that name every violation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from api.cli.main import app
from specs.measurement import Measurement
from specs.plan import Plan
from tests.api_fake import CLUSTER, CONFIG, WORKLOAD, FakeEngine, plan_for, tiny_graph
from tests.test_report import run as demo_run

VERBS = (
    "demo", "capture", "profile", "plan", "estimate", "memory", "mfu", "simulate", "run", "compare", "calibrate", "devices",
    "serve",
)  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Options that name a small model, a cluster and a workload."""
    (tmp_path / "model.json").write_text(json.dumps(CONFIG))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump(WORKLOAD))
    names = {"--model": "model.json", "--cluster": "cluster.yaml", "--workload": "workload.yaml"}
    return [part for option, name in names.items() for part in (option, str(tmp_path / name))]


def meshwright(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
    return result


def as_json(*args: str, code: int = 0) -> Any:
    return json.loads(meshwright(*args, "--json", code=code).stdout)


def test_version_and_help() -> None:
    assert meshwright("--version").stdout.startswith("meshwright 0.")
    for verb in VERBS:
        text = meshwright(verb, "--help").stdout
        assert f"Example: meshwright {verb}" in " ".join(text.split())


def test_unknown_verb_and_option_are_bad_input() -> None:
    meshwright("plam", code=2)
    meshwright("devices", "--jsn", code=2)


def test_capture_writes_the_graph(tmp_path: Path, files: list[str]) -> None:
    target = tmp_path / "graph.json"
    printed = as_json("capture", files[1], "-o", str(target))
    assert json.loads(target.read_text()) == printed
    assert printed["blocks"]
    again = as_json("capture", str(target))  # a stored graph is a model too
    assert again["blocks"] == printed["blocks"]


def test_estimate(files: list[str]) -> None:
    answer = as_json("estimate", *files, "--strategy", "dp=2 micro_batch=4 zero=1")
    assert answer["fits"] is True
    assert sum(answer["prediction"]["waterfall"].values()) == pytest.approx(answer["prediction"]["step_time_s"], rel=1e-6)
    assert {"step_time_s", "tokens_per_s", "mfu", "waterfall", "memory", "provenance"} <= set(answer["prediction"])
    text = meshwright("estimate", *files, "--strategy", "dp=2 micro_batch=4 zero=1").stdout
    assert "fits" in text
    assert "Where the step goes" in text


def test_estimate_of_a_plan_file(tmp_path: Path, files: list[str]) -> None:
    target = tmp_path / "estimate.json"
    first = as_json("estimate", *files, "--strategy", "pp=2 micro_batch=2", "-o", str(target))
    second = as_json("estimate", *files, "--plan", str(target))  # an estimate holds its plan
    assert second["prediction"] == first["prediction"]


@pytest.mark.parametrize("schedule", ["interleaved chunks=2", "zb_h1", "zb_v", "dualpipe_v"])
def test_schedules_are_estimated_and_simulated(tmp_path: Path, files: list[str], schedule: str) -> None:
    strategy = f"pp=2 micro_batch=1 schedule={schedule}"
    answer = as_json("estimate", *files, "--strategy", strategy)
    assert answer["plan"]["schedule"]["name"] == schedule.split()[0]
    assert f"schedule={schedule}" in answer["plan"]["strategy"]
    trace = tmp_path / "trace.json"
    meshwright("simulate", *files, "--strategy", strategy, "--trace", str(trace))
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert any("B0" in name or "W0" in name for name in names)


def test_every_violation_of_a_strategy(files: list[str]) -> None:
    result = meshwright("estimate", *files, "--strategy", "tp=3 micro_batch=3 zeor=1", code=2)
    assert "nearest" in result.stderr
    assert result.stdout == ""


def test_heads_that_tp_does_not_divide(tmp_path: Path, files: list[str]) -> None:
    cluster = {**CLUSTER, "nodes": [{**CLUSTER["nodes"][0], "devices_per_node": 8}]}  # type: ignore[index]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    problem = as_json("estimate", *files, "--strategy", "tp=8 micro_batch=8", code=2)["error"]
    assert problem["status"] == 422
    assert any("head" in error["msg"] and error["nearest"] is not None for error in problem["errors"])


def test_plan_or_strategy(files: list[str]) -> None:
    meshwright("estimate", *files, code=2)
    meshwright("estimate", *files, "--plan", "x.json", "--strategy", "dp=2", code=2)


def test_all_bad_files_are_reported_at_once(files: list[str]) -> None:
    result = meshwright(
        "estimate", "--model", "lama-demo", "--cluster", "no.yaml", "--workload", "no.json", "--strategy", "", code=2
    )
    assert "llama-demo" in result.stderr
    assert "no.yaml" in result.stderr
    assert "no.json" in result.stderr


def test_error_as_json_is_one_document(files: list[str]) -> None:
    result = meshwright("capture", "lama-demo", "--json", code=2)
    assert json.loads(result.stdout)["error"]["errors"][0]["nearest"] == "llama-demo"
    assert "lama-demo" in result.stderr


def test_plan_with_a_given_strategy(tmp_path: Path, files: list[str]) -> None:
    target = tmp_path / "plan.json"
    answer = as_json("plan", *files, "--strategy", "dp=2 micro_batch=4", "-o", str(target))
    assert answer["status"] == "optimal"
    assert Plan.load(target).content_hash() == Plan.parse(answer["plan"]).content_hash()
    assert {"status", "plan", "prediction", "search", "alternatives", "rejected", "assumptions"} <= set(answer)


def test_infeasible_is_exit_code_3_with_its_answer(tmp_path: Path, files: list[str]) -> None:
    small = {**CLUSTER["device_types"][0], "memory_gib": 0.0001}  # type: ignore[index]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({**CLUSTER, "device_types": [small]}))
    answer = as_json("plan", *files, "--strategy", "dp=2 micro_batch=4", code=3)
    assert answer["plan"] is None
    assert answer["limits"][0]["limit"] == "memory"
    assert answer["limits"][0]["needed"] > answer["limits"][0]["available"]
    text = meshwright("plan", *files, "--strategy", "dp=2 micro_batch=4", code=3).stdout
    assert "Infeasible" in text
    assert "would help" in text


def test_simulate_writes_a_trace(tmp_path: Path, files: list[str]) -> None:
    target = tmp_path / "trace.json"
    as_json("simulate", *files, "--strategy", "pp=2 micro_batch=1", "--trace", str(target))
    events = json.loads(target.read_text())["traceEvents"]
    assert {"X", "M"} <= {event["ph"] for event in events}


def test_unwritable_output_is_one_message(files: list[str]) -> None:
    result = meshwright("capture", files[1], "-o", "/proc/none/graph.json", code=1)
    assert "cannot write" in result.stderr


def test_compare(tmp_path: Path) -> None:
    one = demo_run("one", 0.4, 0.5)
    one.prediction.save(tmp_path / "prediction.json")
    one.measurement.save(tmp_path / "measurement.json")
    answer = as_json("compare", str(tmp_path / "prediction.json"), str(tmp_path / "measurement.json"))
    assert answer["relative_error"] == pytest.approx(-0.2)
    assert answer["terms"]["forward"]["predicted"] == pytest.approx(0.1)
    assert "-20.0%" in meshwright("compare", str(tmp_path / "prediction.json"), str(tmp_path / "measurement.json")).stdout


def test_devices() -> None:
    answer = as_json("devices")
    assert any(device["name"] == "h100_sxm_80gb" or "h100" in device["name"] for device in answer["devices"])
    assert all(device["provenance"] for device in answer["devices"])
    assert "a100" in meshwright("devices", "--detail").stdout


def test_local_cluster_wants_a_count(files: list[str]) -> None:
    options = [*files]
    options[3] = "local:many"
    assert "1 to 64" in meshwright("estimate", *options, "--strategy", "dp=2", code=2).stderr


def test_failed_run_is_exit_code_5(tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from specs.training import TrainingSpec

    plan_for(TrainingSpec.parse(WORKLOAD)).save(tmp_path / "plan.json")
    failed = Measurement(status="failed", error="rank 1: out of memory")
    monkeypatch.setattr("api.engine.Engine.execute", lambda self, *args, **kwargs: failed)
    monkeypatch.setattr("api.engine.Engine.load_model", lambda self, text: tiny_graph())
    result = meshwright("run", str(tmp_path / "plan.json"), *files[:2], *files[4:], code=5)
    assert "rank 1: out of memory" in result.stderr


def test_run_prints_step_lines_on_stderr(tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from specs.progress import Progress
    from specs.training import TrainingSpec

    plan_for(TrainingSpec.parse(WORKLOAD)).save(tmp_path / "plan.json")

    def execute(self: object, plan: Plan, graph: object, workload: TrainingSpec, *, progress: Any, **options: Any) -> Measurement:
        for step in range(2):
            data = {"step": step, "loss": 5.0 - step, "step_time_s": 0.5, "warmup": step == 0}
            progress(Progress(stage="execute", done=step + 1, total=2, data=data))
        return FakeEngine().execute(plan, tiny_graph(), workload, steps=1, warmup_steps=1)

    monkeypatch.setattr("api.engine.Engine.execute", execute)
    monkeypatch.setattr("api.engine.Engine.load_model", lambda self, text: tiny_graph())
    result = meshwright("run", str(tmp_path / "plan.json"), *files[:2], *files[4:], "--json")
    assert json.loads(result.stdout)["step_time_s"] == pytest.approx(0.31)
    assert "step:  2  loss:  4.00000  tps: 128" in result.stderr  # 8 x 16 tokens in 0.5 s on 2 devices


def test_no_color_is_respected(files: list[str]) -> None:
    command = [sys.executable, "-m", "api.cli.main", "estimate", *files, "--strategy", "dp=2 micro_batch=4", "--no-color"]
    env = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100, check=True)
    assert "\x1b[3" not in done.stdout  # no foreground colour
    assert "\x1b[9" not in done.stdout


def test_json_is_pure_in_a_real_process(files: list[str]) -> None:
    command = [sys.executable, "-m", "api.cli.main", "estimate", *files, "--strategy", "dp=2 micro_batch=4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout)["fits"] is True


def test_help_is_fast_and_free_of_torch() -> None:
    code = "import sys; from api.cli.main import app; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_serve_refuses_a_public_address_without_a_token() -> None:
    result = meshwright("serve", "--host", "0.0.0.0", code=2)
    assert "token" in result.stderr


def test_a_device_without_a_peak_is_bad_input(tmp_path: Path, files: list[str]) -> None:
    vague = {key: value for key, value in CLUSTER["device_types"][0].items() if key != "peak_tflops"}  # type: ignore[index, union-attr]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({**CLUSTER, "device_types": [vague]}))
    assert "has no peak" in meshwright("estimate", *files, "--strategy", "dp=2 micro_batch=4", code=2).stderr
