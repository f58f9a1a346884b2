"""Calibration on synthetic runs: the simulator with known hidden factors plays the machine."""

from __future__ import annotations

import math
import random
from functools import cache

import numpy as np
import pytest

from planner.assemble import Assembler
from planner.refine import DoesNotFit, Refiner
from simulator.calibrate import MeasuredRun, calibrate
from simulator.cost_model import CostModel
from simulator.factors import Factors
from simulator.predict import fits, predict
from specs.calibration import FACTORS, Calibration
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.measurement import Measurement
from specs.plan import Plan
from specs.training import TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster, make_plan
from tests.test_planner_bounds import BIG, bounded, unlike_cluster

HIDDEN = {"compute": 1.3, "memory_bound": 0.8, "intra_comm": 1.5, "inter_comm": 2.0, "optimizer": 1.4, "memory": 1.1}
SEQ = 1024


@cache
def graph() -> ModelGraph:
    return llama_graph(**{**BIG, "layers": 4})


@cache
def cluster() -> ClusterSpec:
    return gpu_cluster(8, nodes=2)


def workload(plan: Plan) -> TrainingSpec:
    return TrainingSpec(global_batch=plan.global_batch, seq_len=SEQ)


@cache
def plans() -> list[Plan]:
    """Different enough to tell the factors apart: products, small ops, both tiers of links."""
    given = [
        {"dp": 8, "micro_batch": 2}, {"dp": 4, "tp": 2, "micro_batch": 4, "zero": 1}, {"pp": 2, "dp": 4, "num_micro_batches": 4},
        {"dp": 2, "tp": 4, "micro_batch": 8, "sequence_parallel": True}, {"dp": 8, "zero": 3, "micro_batch": 4},
        {"pp": 4, "tp": 2, "num_micro_batches": 8, "micro_batch": 2}, {"dp": 8, "zero": 2, "num_micro_batches": 2},
        {"pp": 2, "tp": 4, "num_micro_batches": 4, "micro_batch": 2}, {"dp": 4, "tp": 2, "num_micro_batches": 2},
    ]  # fmt: skip
    return [make_plan(graph(), seq_len=SEQ, **options) for options in given]


def measured(plan: Plan, *, scatter: float = 0.0, terms: bool = True) -> Measurement:
    """What a machine with those factors would measure, scattered run by run."""
    model = CostModel(graph(), cluster(), workload(plan), factors=Factors(**HIDDEN))
    found = predict(graph(), cluster(), workload(plan), plan, cost_model=model)
    noise = math.exp(random.Random(plan.content_hash()).gauss(0, scatter))
    return Measurement(
        plan_hash=plan.content_hash(), step_time_s=found.step_time_s * noise, peak_memory_bytes=found.memory.peak_bytes,
        waterfall={name: seconds * noise for name, seconds in found.waterfall.items()} if terms else {},
    )  # fmt: skip


def runs(count: int, **options) -> list[MeasuredRun]:
    return [MeasuredRun(graph(), workload(plan), plan, measured(plan, **options)) for plan in plans()[:count]]


def miss(calibration: Calibration) -> float:
    """Mean distance from the hidden factors, in logarithms; host time hides behind the device here."""
    return float(np.mean([abs(math.log(calibration.value(name) / value)) for name, value in HIDDEN.items()]))


def step_error(calibration: Calibration | None, held_out: list[Plan]) -> float:
    errors = []
    for plan in held_out:
        model = CostModel(graph(), cluster(), workload(plan), factors=Factors.of(calibration))
        predicted = predict(graph(), cluster(), workload(plan), plan, cost_model=model)
        errors.append(abs(predicted.step_time_s / (measured(plan).step_time_s or 0) - 1))
    return float(np.mean(errors))


def test_hidden_factors_are_found_as_runs_are_added() -> None:
    nothing = miss(calibrate(cluster(), None, []))
    one, three, many = (calibrate(cluster(), None, runs(count)) for count in (1, 3, 9))
    assert nothing > miss(one) > miss(three) > miss(many)
    assert miss(many) < 0.35 * nothing
    for name, within in (("inter_comm", 0.05), ("optimizer", 0.08), ("memory", 0.01), ("intra_comm", 0.1)):
        assert many.value(name) == pytest.approx(HIDDEN[name], rel=within)
    # products and small ops share the terms forward and backward: the prior holds what these plans cannot tell apart
    assert 1.1 < many.value("memory_bound") * many.value("compute") < 1.3
    assert many.residual_after < 0.25 * many.residual_before
    for name in ("compute", "intra_comm"):  # a width that shrinks with what is known
        widths = [math.log(found.factors[name].high / found.factors[name].low) for found in (one, three, many)]
        assert widths == sorted(widths, reverse=True)
    assert many.num_runs == len(many.runs) == 9


def test_plans_that_were_not_measured_are_predicted_better() -> None:
    held_out = plans()[5:]
    found = calibrate(cluster(), None, runs(5, scatter=0.03))
    assert step_error(found, held_out) < 0.35 * step_error(None, held_out)
    assert step_error(calibrate(cluster(), None, runs(1)), held_out) < step_error(None, held_out)


def test_step_times_alone_move_less_and_say_so() -> None:
    whole, alone = calibrate(cluster(), None, runs(3)), calibrate(cluster(), None, runs(3, terms=False))
    moved = [sum(abs(math.log(item.value)) for item in found.factors.values()) for found in (alone, whole)]
    assert moved[0] < moved[1]
    assert {run.fitted for run in alone.runs} == {"step_time"}
    assert any("step time alone" in note for note in alone.notes)
    assert alone.residual_after < alone.residual_before


def test_without_runs_all_factors_are_one_as_wide_as_the_prior() -> None:
    found = calibrate(cluster(), None, [])
    assert {factor.value for factor in found.factors.values()} == {1.0}
    assert found.num_runs == 0
    assert math.log(found.factors["compute"].high) == pytest.approx(1.2816 * FACTORS["compute"].prior_width, rel=1e-3)


def test_a_crazy_run_stays_within_bounds_and_is_named() -> None:
    plan = plans()[0]
    crazy = measured(plan)
    for scale in (1e6, 1e-6):
        wrong = crazy.replace(
            step_time_s=(crazy.step_time_s or 0) * scale, waterfall={name: value * scale for name, value in crazy.waterfall.items()}
        )
        found = calibrate(cluster(), None, [MeasuredRun(graph(), workload(plan), plan, wrong)])
        for name, factor in found.factors.items():
            assert FACTORS[name].low <= factor.low <= factor.value <= factor.high <= FACTORS[name].high
        held = {name for name, factor in found.factors.items() if factor.at_bound}
        assert "compute" in held
        assert any("compute" in note and "bound" in note for note in found.notes)
        Calibration.parse(found.to_dict())  # its own bounds admit it


def test_the_order_of_runs_changes_nothing() -> None:
    given = runs(4, scatter=0.1)
    assert calibrate(cluster(), None, given).content_hash() == calibrate(cluster(), None, given[::-1]).content_hash()


def test_numbers_that_are_none_are_named_together() -> None:
    plan = plans()[0]
    good = measured(plan)
    bad = [
        good.replace(step_time_s=math.nan), good.replace(waterfall={"forward": -1.0}), Measurement(status="failed", error="killed"),
        good.replace(step_time_s=0.0),
    ]  # fmt: skip
    with pytest.raises(InvalidInput) as error:
        calibrate(cluster(), None, [MeasuredRun(graph(), workload(plan), plan, item) for item in bad])
    assert [violation.loc[:2] for violation in error.value.violations] == [("runs", index) for index in range(4)]


def test_every_factor_reaches_the_step_it_names() -> None:
    """Each time factor slows the step of some plan and none quickens it; the memory factor fills the margin term."""
    model = CostModel(graph(), cluster(), workload(plans()[1]))
    plain = predict(graph(), cluster(), workload(plans()[1]), plans()[1], cost_model=model)
    for name in FACTORS:
        slower = CostModel(graph(), cluster(), workload(plans()[1]), factors=Factors(**{name: 1.5}))
        found = predict(graph(), cluster(), workload(plans()[1]), plans()[1], cost_model=slower)
        if name == "memory":
            assert found.memory.peak_bytes == pytest.approx(1.5 * plain.memory.peak_bytes)
            assert found.memory.terms["margin"] == pytest.approx(0.5 * plain.memory.peak_bytes)
            assert sum(found.memory.terms.values()) == pytest.approx(found.memory.peak_bytes)
        elif name != "host":  # launches hide behind these large kernels
            assert plain.step_time_s < found.step_time_s < 1.5 * plain.step_time_s
    tiny = make_plan(llama_graph(2), seq_len=32)
    spec = TrainingSpec(global_batch=1, seq_len=32)
    steps = [
        predict(
            llama_graph(2), cluster(), spec, tiny, cost_model=CostModel(llama_graph(2), cluster(), spec, factors=Factors(host=host))
        ).step_time_s
        for host in (1.0, 1.5)
    ]
    assert steps[0] < steps[1]


@pytest.mark.parametrize("extreme", ["low", "high", "mixed"])
def test_bounds_hold_under_a_calibration(extreme: str) -> None:
    """The planner's lower bounds read the same prices."""
    values = {name: rule.low if extreme == "low" else rule.high for name, rule in FACTORS.items()}
    if extreme == "mixed":
        values |= {"compute": 0.5, "inter_comm": 4.0, "memory": 1.2, "optimizer": 0.3}
    spec, found_cluster = TrainingSpec(global_batch=16, seq_len=512), unlike_cluster(nodes=(2, 1))
    model, prices, space, bounds = bounded(graph(), found_cluster, spec, factors=Factors(**values))
    refiner, assembler = Refiner(prices), Assembler(graph(), found_cluster, spec)
    rows, checked = np.flatnonzero(bounds.fits).tolist(), 0
    for row in random.Random(0).sample(rows, min(25, len(rows))):
        pool = space.layout(row).pool
        found = refiner.refine(space.strategy(row), pool, int(space.rows[row]["num_micro_batches"]))
        if isinstance(found, DoesNotFit):
            continue
        predicted = predict(graph(), found_cluster, spec, assembler.plan(found.strategy, pool), cost_model=model)
        assert float(bounds.time_s[row]) <= predicted.step_time_s * (1 + 1e-6)
        assert found.bound_s <= predicted.step_time_s * (1 + 1e-6)
        assert fits(predicted)
        checked += 1
    assert checked > 5
