"""``meshwright calibrate`` and ``--calibration``: from measurement files to other predictions, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.engine import Engine
from specs.calibration import Calibration
from specs.measurement import Measurement
from specs.plan import Plan
from specs.prediction import Prediction
from specs.training import TrainingSpec
from tests.test_cli import as_json, files, meshwright

__all__ = ["files"]  # a fixture
STRATEGIES = ("dp=2 micro_batch=4", "tp=2 micro_batch=8", "pp=2 micro_batch=2")


@pytest.fixture
def site(files: list[str]) -> list[str]:
    """Model and cluster without the workload."""
    return files[:4]


def measure(tmp_path: Path, files: list[str], strategy: str, slower: float, **changes: Any) -> str:
    """A run that took ``slower`` times as long as predicted in every term."""
    estimate = as_json("estimate", *files, "--strategy", strategy)
    predicted, plan = Prediction.parse(estimate["prediction"]), Plan.parse(estimate["plan"])
    measurement = Measurement(
        plan_hash=plan.content_hash(), plan=plan, workload=TrainingSpec.load(files[5]),
        step_time_s=slower * predicted.step_time_s, peak_memory_bytes=predicted.memory.peak_bytes,
        waterfall={name: slower * seconds for name, seconds in predicted.waterfall.items()},
    )  # fmt: skip
    path = tmp_path / f"measurement {len(list(tmp_path.iterdir()))}.json"
    measurement.replace(**changes).save(path)
    return str(path)


def test_calibrate_then_estimate_and_plan(tmp_path: Path, files: list[str], site: list[str]) -> None:
    out = tmp_path / "calibration.json"
    runs = [measure(tmp_path, files, strategy, 1.4) for strategy in STRATEGIES]
    printed = as_json("calibrate", *runs, *site, "-o", str(out))
    assert Calibration.load(out).num_runs == printed["num_runs"] == 3
    assert printed["residual_after"] < 0.5 * printed["residual_before"]
    assert {"before_s", "after_s", "measured_s"} <= set(printed["runs"][0])
    text = meshwright("calibrate", *runs, *site).stdout
    assert "3 measured runs" in text
    assert "80 % interval" in text

    before = as_json("estimate", *files, "--strategy", "dp=2 micro_batch=2")["prediction"]
    given = ("--calibration", str(out))
    after = as_json("estimate", *files, *given, "--strategy", "dp=2 micro_batch=2")["prediction"]
    assert 1.2 < after["step_time_s"] / before["step_time_s"] < 1.4
    assumed = next(item for item in after["assumptions"] if "refitted from 3 measured runs" in item["what"])
    assert assumed["value"]["compute"] == pytest.approx(printed["factors"]["compute"]["value"], abs=1e-4)
    answer = as_json("plan", *files, *given, "--strategy", "dp=2 micro_batch=2")
    assert answer["prediction"]["step_time_s"] == pytest.approx(after["step_time_s"])
    assert answer["search"]["best_bound_s"] <= after["step_time_s"] * (1 + 1e-9)
    assert any("refitted" in item["what"] for item in answer["assumptions"])
    trace = tmp_path / "trace.json"
    simulated = as_json("simulate", *files, *given, "--strategy", "dp=2 micro_batch=2", "--trace", str(trace))
    assert simulated["prediction"]["step_time_s"] == after["step_time_s"]


def test_a_measurement_without_plan_and_workload_takes_the_given_ones(tmp_path: Path, files: list[str], site: list[str]) -> None:
    plan = tmp_path / "plan.json"
    as_json("estimate", *files, "--strategy", STRATEGIES[0], "-o", str(plan))
    run = measure(tmp_path, files, STRATEGIES[0], 1.2, plan=None, workload=None)
    codes = {error["code"] for error in as_json("calibrate", run, *site, code=2)["error"]["errors"]}
    assert codes == {"plan_not_given", "workload_not_given"}
    assert as_json("calibrate", run, *files, "--plan", str(plan))["num_runs"] == 1


def test_what_does_not_belong_is_refused_in_one_message(tmp_path: Path, files: list[str], site: list[str]) -> None:
    nan = {"step_time_s": float("nan")}
    wrong = {
        "measurement_of_another_model": {"model_hash": "0" * 64}, "measurement_of_another_cluster": {"cluster": "elsewhere"},
        "no_measurement": {"status": "failed", "step_time_s": None, "waterfall": {}}, "not_a_time": nan,
    }  # fmt: skip
    for code, changes in wrong.items():
        run = measure(tmp_path, files, STRATEGIES[0], 1.2, **changes)
        problem = as_json("calibrate", run, *site, code=2)["error"]
        assert [error["code"] for error in problem["errors"]] == [code]
    run = measure(tmp_path, files, STRATEGIES[0], 1.2)
    problem = as_json("calibrate", run, run, *site, code=2)["error"]
    assert [error["code"] for error in problem["errors"]] == ["same_run_twice"]
    meshwright("calibrate", *site, code=2)  # no run at all
    meshwright("calibrate", str(tmp_path / "none.json"), *site, code=2)


def test_a_calibration_of_other_prices_is_refused(tmp_path: Path, files: list[str], site: list[str]) -> None:
    out = tmp_path / "calibration.json"
    as_json("calibrate", measure(tmp_path, files, STRATEGIES[0], 1.2), *site, "-o", str(out))
    good = json.loads(out.read_text())
    changed = {
        "calibration_of_another_cluster": {"hardware_hash": "0" * 64}, "calibration_of_other_prices": {"profile_hash": "1" * 64},
        "factor_out_of_bounds": {"factors": {"compute": {"value": 9.0, "low": 8.0, "high": 10.0}}},
        "unknown_factor": {"factors": {"comput": {"value": 1.0, "low": 0.9, "high": 1.1}}},
    }  # fmt: skip
    for code, changes in changed.items():
        out.write_text(json.dumps({**good, **changes}))
        problem = as_json("estimate", *files, "--calibration", str(out), "--strategy", STRATEGIES[0], code=2)["error"]
        assert [error["code"] for error in problem["errors"]] == [code]


def test_the_same_hardware_in_another_number_is_admitted(tmp_path: Path, files: list[str], site: list[str]) -> None:
    """What is learnt on a few nodes is for many of them."""
    from specs.cluster import ClusterSpec

    out = tmp_path / "calibration.json"
    as_json("calibrate", measure(tmp_path, files, STRATEGIES[0], 1.2), *site, "-o", str(out))
    cluster = ClusterSpec.load(files[3])
    many = cluster.replace(nodes=tuple(group.replace(count=4) for group in cluster.nodes))
    many.save(tmp_path / "many.json")
    options = [*files[:2], "--cluster", str(tmp_path / "many.json"), *files[4:]]
    assert as_json("estimate", *options, "--calibration", str(out), "--strategy", STRATEGIES[0])["fits"]
    assert Engine().resolve(many).num_devices == 4 * cluster.num_devices
