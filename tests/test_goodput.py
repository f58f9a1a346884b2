"""Goodput against Young's and Daly's closed forms, a renewal simulation, and sums worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from simulator.stragglers.goodput import (
    Interruption,
    Job,
    availability,
    best_interval_s,
    daly_interval_s,
    goodput,
    job_of,
    segment_wall_s,
    young_interval_s,
)
from specs.straggler import StragglerModel
from tests.blocks import llama_graph
from tests.plans import gpu_cluster, make_plan


def losing(mtbf_s: float, restart_s: float = 0.0) -> tuple[Interruption, ...]:
    return (Interruption(1 / mtbf_s, restart_s),)


@pytest.mark.parametrize(("save_s", "mtbf_s", "tolerance"), [(1, 1e5, 1e-5), (30, 1e4, 1e-4), (60, 3600, 1e-3), (300, 3600, 3e-3)])
def test_the_best_interval_is_dalys(save_s: float, mtbf_s: float, tolerance: float) -> None:
    found = best_interval_s(save_s=save_s, losing=losing(mtbf_s, 120))
    assert found == pytest.approx(daly_interval_s(save_s, mtbf_s), rel=tolerance)
    assert found < young_interval_s(save_s, mtbf_s)
    assert found == pytest.approx(young_interval_s(save_s, mtbf_s), rel=2 * math.sqrt(save_s / mtbf_s))


def test_no_other_interval_is_better() -> None:
    best = best_interval_s(save_s=30, losing=losing(7200, 300))
    values = [availability(interval_s=best * factor, save_s=30, losing=losing(7200, 300)) for factor in (0.5, 0.9, 1, 1.1, 2)]
    assert max(values) == values[2]


def simulated_wall_s(work_s: float, save_s: float, kinds: tuple[Interruption, ...], segments: int) -> float:
    """Mean wall-clock seconds of a segment, played event by event."""
    rng = np.random.default_rng(0)
    rate = sum(kind.rate_per_s for kind in kinds)
    shares = [kind.rate_per_s / rate for kind in kinds]
    total, recovery, done = 0.0, 0.0, 0
    while done < segments:
        wanted = recovery if recovery else work_s + save_s
        until_failure = rng.exponential(1 / rate)
        if until_failure < wanted:
            total += until_failure
            recovery = kinds[int(rng.choice(len(kinds), p=shares))].recovery_s
        else:
            total += wanted
            done += 0 if recovery else 1
            recovery = 0.0
    return total / segments


@pytest.mark.parametrize(
    "kinds", [losing(1000, 200), (Interruption(1 / 2000, 100), Interruption(1 / 1500, 600))], ids=["one kind", "two kinds"]
)
def test_the_closed_form_is_what_happens(kinds: tuple[Interruption, ...]) -> None:
    wanted = segment_wall_s(work_s=400, save_s=50, losing=kinds)
    assert simulated_wall_s(400, 50, kinds, 15_000) == pytest.approx(wanted, rel=0.02)


def test_limits() -> None:
    assert segment_wall_s(work_s=100, save_s=1, losing=()) == 101
    assert availability(interval_s=100, save_s=0, losing=losing(1e12)) == pytest.approx(1)
    assert availability(interval_s=1e9, save_s=1, losing=losing(1)) == 0
    with pytest.raises(ValueError, match="no best interval"):
        best_interval_s(save_s=0, losing=losing(1))
    assert daly_interval_s(10, 2) == 2


SHAPE = {"failures": {"device_mtbf_hours": 50_000, "restart_minutes": 10}, "checkpoints": {"save_s": 30}}
JOB = Job(devices=4096, nodes=512, tokens_per_step=4e6, price_usd_per_hour=512 * 20.0)


def test_failures_of_4096_devices() -> None:
    """A failure every 12.2 h; Young: a checkpoint every 27 min; 3.1 % of the time goes: 1.8 % each for saving and lost work, 1.4 %
    for restarts."""
    found = goodput(JOB, StragglerModel.parse(SHAPE), nominal_step_s=5.0, mean_step_s=6.0)
    assert found.job_mtbf_s == pytest.approx(50_000 * 3600 / 4096)
    assert found.young_interval_s == pytest.approx(1624, rel=0.01)
    assert found.checkpoint_interval_s == pytest.approx(found.daly_interval_s, abs=6.0)
    assert found.interval_steps == round((found.checkpoint_interval_s or 0) / 6.0)
    lost = 30 / 1624 + 1624 / 2 / found.job_mtbf_s + 600 / found.job_mtbf_s  # type: ignore[operator]
    assert found.availability == pytest.approx(1 - lost, abs=0.002)
    assert found.goodput == pytest.approx(found.availability * 5 / 6)
    assert found.tokens_per_s == pytest.approx(found.availability * 4e6 / 6)
    assert found.cost_usd_per_hour == 10240
    assert found.cost_usd_per_million_tokens == pytest.approx(10240 / 3600 / found.tokens_per_s * 1e6)


def test_spot_is_cheaper_until_it_is_revoked_too_often() -> None:
    def cost(per_hour: float, notice_s: float = 0) -> float:
        spot = {"revocations_per_hour": per_hour, "replacement_minutes": 5, "price_usd_per_hour": 8, "notice_s": notice_s}
        found = goodput(JOB, StragglerModel.parse({**SHAPE, "spot": spot}), nominal_step_s=6, mean_step_s=6, spot=True)
        return found.cost_usd_per_million_tokens or 0

    on_demand = goodput(JOB, StragglerModel.parse(SHAPE), nominal_step_s=6, mean_step_s=6).cost_usd_per_million_tokens or 0
    assert cost(0) == pytest.approx(on_demand * 8 / 20)
    assert cost(0.0001) < cost(0.01) < on_demand < cost(0.05)
    assert cost(0.01, notice_s=60) < cost(0.01, notice_s=29)


def test_a_given_interval_is_kept_and_no_failures_need_no_checkpoints() -> None:
    given = StragglerModel.parse({**SHAPE, "checkpoints": {"save_s": 30, "interval_hours": 3}})
    found = goodput(JOB, given, nominal_step_s=6, mean_step_s=6)
    best = goodput(JOB, StragglerModel.parse(SHAPE), nominal_step_s=6, mean_step_s=6)
    assert (found.checkpoint_interval_s, found.interval_is_best) == (3 * 3600, False)
    assert found.availability < best.availability
    quiet = goodput(JOB, StragglerModel(), nominal_step_s=6, mean_step_s=6)
    assert (quiet.availability, quiet.job_mtbf_s, quiet.checkpoint_interval_s) == (1.0, None, None)


def test_the_job_pays_its_nodes_whole() -> None:
    plan = make_plan(llama_graph(), dp=4)
    job = job_of(plan, gpu_cluster(16, nodes=2), StragglerModel())
    assert (job.devices, job.nodes, job.price_usd_per_hour) == (4, 1, 16.0)
    assert job_of(plan, gpu_cluster(16, nodes=2), StragglerModel(node_price_usd_per_hour=5)).price_usd_per_hour == 5
