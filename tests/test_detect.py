"""Detection on synthetic timings with realistic noise: who, which phase, by how much, how soon, and nothing where nothing is."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from simulator.stragglers.detect import Detector, diagnose
from simulator.stragglers.phases import Phase, phases_of
from specs.errors import InvalidInput
from specs.straggler import Finding
from tests.blocks import llama_graph
from tests.plans import make_plan

Array = NDArray[np.float64]
RANKS, TP = 32, 4
EVERYONE = (tuple(range(RANKS)),)
PHASES = [
    Phase("forward", "compute", EVERYONE),
    Phase("backward", "compute", EVERYONE),
    Phase("tp_comm", "comm", tuple(tuple(range(first, first + TP)) for first in range(0, RANKS, TP))),
    Phase("dp_comm", "comm", tuple(tuple(range(first, RANKS, TP)) for first in range(TP))),
    Phase("data", "data", EVERYONE),
    Phase("wait", "wait", ()),
]
FORWARD, BACKWARD, TP_COMM, DP_COMM, DATA, _ = range(len(PHASES))


def quiet(steps: int, seed: int, *, work: Array | None = None) -> Array:
    """Seconds with what healthy clusters show: devices that differ by 0.7 %, lognormal jitter of 2 % correlated from step to step,
    a common swing of all ranks, and in 0.05 % of a rank's phases a pause of up to 5 x."""
    rng = np.random.default_rng(seed)
    times = np.zeros((steps, RANKS, len(PHASES)))
    chip = 1 + 0.007 * rng.standard_normal(RANKS)
    swing = 1 + 0.05 * np.sin(np.arange(steps) / 40)[:, None]
    load = np.ones((steps, RANKS)) if work is None else work
    for phase, seconds in ((FORWARD, 0.2), (BACKWARD, 0.4)):
        noise = np.zeros((steps, RANKS))
        fresh = rng.standard_normal((steps, RANKS))
        for step in range(steps):
            noise[step] = 0.4 * noise[step - 1] + np.sqrt(1 - 0.4**2) * fresh[step] if step else fresh[0]
        pauses = np.where(rng.random((steps, RANKS)) < 5e-4, rng.uniform(1.5, 5, (steps, RANKS)), 1.0)
        times[:, :, phase] = seconds * chip * swing * load * np.exp(0.02 * noise) * pauses
    times[:, :, DATA] = 0.002 * rng.lognormal(0, 0.5, (steps, RANKS))
    return times


def collectives(times: Array, seed: int, links: dict[tuple[int, int], float] | None = None, since: int = 0) -> Array:
    """Collectives on top: the transfer of each group, jittering by 8 %, and the wait for its slowest member. ``links``: (phase,
    group) -> factor on its transfer."""
    rng = np.random.default_rng(seed + 1000)
    for phase, seconds in ((TP_COMM, 0.08), (DP_COMM, 0.06)):
        busy = times[:, :, [FORWARD, BACKWARD, DATA]].sum(axis=2)
        for number, group in enumerate(PHASES[phase].groups):
            members = list(group)
            transfer = seconds * np.exp(0.08 * rng.standard_normal((len(times), 1)))
            transfer[since:] *= (links or {}).get((phase, number), 1.0)
            waits = busy[:, members].max(axis=1, keepdims=True) - busy[:, members]
            times[:, members, phase] = transfer + waits
    return times


def names(findings: tuple[Finding, ...]) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(item.kind, item.phase, item.ranks) for item in findings}


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_quiet_steps_raise_no_alarm(seed: int) -> None:
    found = diagnose(collectives(quiet(1000, seed), seed), PHASES)
    assert found.findings == ()
    assert found.one_offs  # the pauses were seen
    assert {item.kind for item in found.one_offs} == {"one_off"}
    assert found.slowdown() == {}


@pytest.mark.parametrize(("factor", "delay"), [(1.1, 20), (1.25, 12), (2.0, 8), (4.0, 8)])
def test_a_slow_device_is_named_with_its_factor(factor: float, delay: int) -> None:
    times = quiet(400, 1)
    times[200:, 13, [FORWARD, BACKWARD]] *= factor
    found = diagnose(collectives(times, 1), PHASES)
    assert names(found.findings) == {("slow_compute", "forward", (13,)), ("slow_compute", "backward", (13,))}
    for item in found.findings:
        assert abs(item.since_step - 200) <= 3
        assert item.delay_steps <= delay
        assert item.factor == pytest.approx(factor, rel=0.025)  # devices differ by 0.7 % from the start
        assert item.low < item.factor < item.high
        assert item.until_step is None
    assert found.slowdown() == {13: max(item.factor for item in found.findings)}
    assert found.phases[BACKWARD].worst_ranks[0] in (13, *range(RANKS))


def test_a_slow_device_from_the_first_step_and_its_rate() -> None:
    times = quiet(300, 2)
    times[:, 5, BACKWARD] *= 1.3
    found = diagnose(collectives(times, 2), PHASES)
    assert names(found.findings) == {("slow_compute", "backward", (5,))}
    assert found.findings[0].since_step == 0
    rates = {(item.rank, item.phase): item for item in found.rates}
    assert rates[5, "backward"].factor == pytest.approx(1.3, rel=0.03)
    assert rates[5, "forward"].factor == pytest.approx(1.0, abs=0.03)
    assert found.phases[BACKWARD].worst_ranks[0] == 5


def test_a_device_that_recovers() -> None:
    times = quiet(500, 3)
    times[150:300, 7, [FORWARD, BACKWARD]] *= 1.5
    detector = Detector(PHASES)
    timed = collectives(times, 3)
    events = [(step, item) for step in range(500) for item in detector.update(timed[step])]
    found = detector.diagnosis()
    assert {(item.since_step, item.until_step) for item in found.findings} == {(150, 300)}
    assert found.slowdown() == {}
    ended = [step for step, item in events if item.until_step is not None]
    assert len(ended) == 2
    assert max(ended) <= 300 + 12
    rates = {(item.rank, item.phase): item.factor for item in found.rates}
    assert rates[7, "forward"] == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(("phase", "group"), [(TP_COMM, 3), (DP_COMM, 2)])
def test_a_slow_link_is_a_link_and_no_device(phase: int, group: int) -> None:
    times = collectives(quiet(400, 4), 4, {(phase, group): 2.0}, since=250)
    found = diagnose(times, PHASES)
    assert names(found.findings) == {("slow_link", PHASES[phase].name, PHASES[phase].groups[group])}
    item = found.findings[0]
    assert item.factor == pytest.approx(2.0, rel=0.05)
    assert item.delay_steps <= 10


def test_a_data_stall_of_one_rank_and_of_all() -> None:
    times = quiet(400, 5)
    times[200:, 9, DATA] += 0.15
    found = diagnose(collectives(times, 5), PHASES)
    assert names(found.findings) == {("data_stall", "data", (9,))}
    times = quiet(400, 6)
    times[200:, :, DATA] += 0.2
    found = diagnose(collectives(times, 6), PHASES)
    assert names(found.findings) == {("data_stall", "data", ())}
    assert found.findings[0].factor == pytest.approx(1 + 0.2 / 0.8, rel=0.15)
    assert "all ranks" in found.findings[0].text()


def test_one_long_step_is_noise() -> None:
    times = quiet(400, 7)
    times[222, 3, BACKWARD] *= 40
    found = diagnose(collectives(times, 7), PHASES)
    assert found.findings == ()
    seen = [item for item in found.one_offs if item.ranks == (3,) and item.since_step == 222]
    assert len(seen) == 1
    assert seen[0].factor == pytest.approx(40, rel=0.1)


def test_drifting_loads_of_experts_are_no_slow_device() -> None:
    """Rank 11 gets up to twice the tokens: with the loads given nothing is slow, and the drift is reported as what it is."""
    steps = 600
    work = np.ones((steps, RANKS))
    work[:, 11] += np.linspace(0, 1, steps)
    times = collectives(quiet(steps, 8, work=work), 8)
    found = diagnose(times, PHASES, work=work)
    assert found.findings == ()
    assert found.load_drift is not None
    assert found.load_drift > 1.5
    blind = diagnose(times, PHASES)
    assert names(blind.findings) >= {("slow_compute", "backward", (11,))}
    times[300:, 4, [FORWARD, BACKWARD]] *= 1.5  # a slow device beside the drift
    both = diagnose(times, PHASES, work=work)
    assert {item.ranks for item in both.findings} == {(4,)}


def test_two_ranks_are_compared_with_their_own_past() -> None:
    rng = np.random.default_rng(0)
    times = 0.1 * np.exp(0.02 * rng.standard_normal((300, 2, 1)))
    phases = [Phase("forward", "compute", ((0, 1),))]
    assert diagnose(times, phases).findings == ()
    times[100:, 1] *= 2
    found = diagnose(times, phases)
    assert [(item.ranks, item.since_step) for item in found.findings] == [((1,), 100)]
    assert found.findings[0].factor == pytest.approx(2, rel=0.03)


def test_phases_of_a_plan() -> None:
    plan = make_plan(llama_graph(), pp=2, dp=2, tp=2)
    forward, tp, dp, wait = phases_of(plan, ["forward", "tp_comm", "dp_comm", "wait"])
    assert forward.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert tp.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert dp.groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert wait.kind == "wait"


def test_all_that_is_wrong_with_timings() -> None:
    with pytest.raises(InvalidInput) as error:
        diagnose(np.full((5, 2, 1), np.nan), [Phase("forward", "compute", ((0, 1, 2),))], work=np.ones((5, 3)))
    codes = {violation.code for violation in error.value.violations}
    assert codes == {"too_few_steps", "not_a_duration", "no_such_rank", "bad_shape"}
