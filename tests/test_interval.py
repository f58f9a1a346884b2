"""The 80 % interval: what widens it, what narrows it, and how its widths are fitted."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest

from benchmarks import intervals
from benchmarks.intervals import Rows, fit, left_out, loss
from profiler.placement import place_block
from profiler.shapes import record_key
from simulator.calibrate import MeasuredRun, calibrate
from simulator.cost_model import CostModel
from simulator.factors import Factors
from simulator.interval import EXPOSURES, Widths, interval, widths
from simulator.predict import predict
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.measurement import Measurement
from specs.plan import Plan
from specs.prediction import Prediction
from specs.profile import DeviceProfile, OpRecord, Profile, Timing
from specs.training import TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster, make_plan

WIDTHS = Widths(low=1.0, high=2.0, kernels=1.6, intra=0.3, inter=0.5, pipeline=0.4, scale=0.02, measured=1.4)
BIG = {"layers": 4, "hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 5632}


@cache
def graph() -> ModelGraph:
    return llama_graph(**BIG)


def spec_of(plan: Plan) -> TrainingSpec:
    return TrainingSpec(global_batch=plan.global_batch, seq_len=plan.seq_len)


def predicted(plan: Plan, cluster: ClusterSpec, profile: Profile | None = None, factors: Factors | None = None) -> Prediction:
    model = CostModel(graph(), cluster, spec_of(plan), profile, factors=factors or Factors())
    return predict(graph(), cluster, spec_of(plan), plan, cost_model=model)


def width(prediction: Prediction) -> float:
    return math.log(prediction.step_time_high_s / prediction.step_time_low_s)


def test_every_exposure_widens_and_the_sides_may_differ() -> None:
    base = dict.fromkeys(EXPOSURES, 0.1)
    low, high = interval(10.0, base, WIDTHS)
    assert low < 10.0 < high
    assert math.log(high / 10) > math.log(10 / low)
    for name in EXPOSURES:
        wider = interval(10.0, {**base, name: 0.3}, WIDTHS)
        assert wider[0] < low
        assert wider[1] > high
    assert interval(10.0, {}, WIDTHS) == (10.0, 10.0)


def test_packaged_widths_say_where_they_come_from() -> None:
    data = json.loads(intervals.PACKAGED.read_text())
    assert set(data["widths"]) == {item.name for item in fields(Widths)}
    assert all(item["provenance"].startswith(("fitted", "stated")) for item in data["widths"].values())
    for name, (low, high) in intervals.BOUNDS.items():
        assert low <= getattr(widths(), name) <= high


def measured_profile(plan: Plan, cluster: ClusterSpec) -> Profile:
    """Every op of the model, measured at exactly what the efficiency models say."""
    model = CostModel(graph(), cluster, spec_of(plan))
    pricer, stage = model.pricer("toy"), plan.pipelines[0].stages[0]
    records: dict[str, OpRecord] = {}
    for block in graph().blocks:
        for op in place_block(block, stage.mesh.tp, stage.sequence_parallel).ops:
            price = pricer.price(op, plan.pipelines[0].micro_batch, plan.seq_len, block.name)
            key = record_key(op, plan.pipelines[0].micro_batch, plan.seq_len, pricer.compute_dtype)
            records[key] = OpRecord(
                key=key, op_class=op.op_class.value, forward=timing(price.forward_s), backward=timing(price.backward_s)
            )
    return Profile(devices=(DeviceProfile(device="toy", ops=tuple(records.values())),))


def timing(seconds: float) -> Timing:
    return Timing(median_s=seconds, p10_s=seconds, p90_s=seconds, samples=5)


def test_measured_is_narrower_than_calibrated_is_narrower_than_specs() -> None:
    cluster, plan = gpu_cluster(1), make_plan(graph(), micro_batch=4, seq_len=1024)
    specs = predicted(plan, cluster)
    run = Measurement(
        plan_hash=plan.content_hash(), step_time_s=1.1 * specs.step_time_s,
        waterfall={name: 1.1 * seconds for name, seconds in specs.waterfall.items()},
    )  # fmt: skip
    few, many = (calibrate(cluster, None, [MeasuredRun(graph(), spec_of(plan), plan, run)] * count) for count in (1, 6))
    refitted = [predicted(plan, cluster, factors=Factors.of(item)) for item in (few, many)]
    measured = predicted(plan, cluster, measured_profile(plan, cluster))
    assert width(specs) > width(refitted[0]) > width(refitted[1]) > width(measured) > 0.1
    assert measured.exposures.get("ops", 0.0) < 0.1 * specs.exposures["ops"]
    nothing = predicted(plan, cluster, factors=Factors.of(calibrate(cluster, None, [])))
    assert width(nothing) == pytest.approx(width(specs))


def test_exposures_follow_the_plan() -> None:
    one = predicted(make_plan(graph(), micro_batch=4, seq_len=1024), gpu_cluster(1)).exposures
    near = predicted(make_plan(graph(), tp=8, micro_batch=4, seq_len=1024), gpu_cluster(8)).exposures
    far = predicted(make_plan(graph(), dp=16, zero=3, seq_len=1024), gpu_cluster(16, nodes=4)).exposures
    deep = predicted(make_plan(graph(), pp=4, num_micro_batches=4, seq_len=1024), gpu_cluster(4)).exposures
    assert set(one) == {"ops", "kernels"}
    assert one["kernels"] < one["ops"]
    assert near["intra"] > 0.1
    assert "inter" not in near
    assert far["inter"] > 0.1
    assert far["scale"] == 2
    assert deep["pipeline"] > 0.2
    assert "pipeline" not in near


def synthetic(true: Widths, count: int, seed: int) -> Rows:
    """Rows of 12 sources whose errors have the 80 % intervals of ``true``: each side half-normal by its own width."""
    rng = np.random.default_rng(seed)
    scales = {"ops": 0.1, "kernels": 0.03, "intra": 0.1, "inter": 0.3, "pipeline": 0.2, "scale": 2.0, "measured": 0.0}
    exposures = {name: rng.uniform(0.3, 1.7, count) * scale for name, scale in scales.items()}
    sizes = np.abs(rng.normal(0, 1, count)) / 1.2816
    above = rng.random(count) < 0.5
    misses = np.where(above, sizes * true.spread(exposures, "high"), -sizes * true.spread(exposures, "low"))
    return Rows(misses, exposures, np.array([f"source {index % 12}" for index in range(count)]))


def test_fitted_widths_cover_eight_of_ten_new_rows_on_both_sides() -> None:
    true = replace(WIDTHS, low=1.5, high=3.5)
    seen, new = synthetic(true, 1200, 0), synthetic(true, 4000, 1)
    found = fit(seen, WIDTHS)
    assert loss(found, seen) <= loss(true, seen)
    assert new.inside(found).mean() == pytest.approx(0.8, abs=0.03)
    assert (new.misses > found.spread(new.exposures, "high")).mean() == pytest.approx(0.1, abs=0.03)
    assert found.high > found.low
    assert (found.kernels, found.measured) == (WIDTHS.kernels, WIDTHS.measured)
    assert 0.7 < np.mean(list(left_out(synthetic(true, 240, 2), WIDTHS).values())) < 0.9


def test_sources_count_alike() -> None:
    rows = synthetic(WIDTHS, 100, 3)
    rows = Rows(rows.misses, rows.exposures, np.array(["large"] * 90 + ["small"] * 10))
    assert rows.weights[:90].sum() == pytest.approx(0.5)
    assert rows.weights[90:].sum() == pytest.approx(0.5)


def test_written_widths_are_read_back(tmp_path, monkeypatch) -> None:
    path = tmp_path / "intervals.json"
    path.write_text(intervals.PACKAGED.read_text())
    monkeypatch.setattr(intervals, "PACKAGED", path)
    intervals.write(replace(widths(), low=1.25, inter=0.75), synthetic(WIDTHS, 24, 4))
    data = json.loads(path.read_text())["widths"]
    assert (data["low"]["value"], data["inter"]["value"]) == (1.25, 0.75)
    assert data["low"]["provenance"] == "fitted: 24 runs of 12 fit sources"
    assert data["measured"]["provenance"].startswith("stated")
