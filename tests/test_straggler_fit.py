"""Straggler models fitted from per-rank times: what was put in comes out."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.stragglers.fit import fit_jitter, fit_link_jitter, fit_stragglers
from specs.errors import InvalidInput
from tests.test_detect import BACKWARD, quiet


@pytest.mark.parametrize("cv", [0.02, 0.2])
@pytest.mark.parametrize("shape", ["lognormal", "gamma"])
def test_shape_and_width_of_jitter(shape: str, cv: float) -> None:
    rng = np.random.default_rng(1)
    width = np.sqrt(np.log1p(cv**2))
    draws = rng.lognormal(-(width**2) / 2, width, 60_000) if shape == "lognormal" else rng.gamma(cv**-2, cv**2, 60_000)
    found = fit_jitter(draws)
    assert found.cv == pytest.approx(cv, rel=0.03)
    if cv > 0.1:  # narrow ones look alike
        assert found.shape == shape


def test_chronic_jitter_and_pauses_apart() -> None:
    rng = np.random.default_rng(2)
    times = 0.5 * np.exp(0.03 * rng.standard_normal((600, 16))) * (1 + 0.1 * rng.random((600, 1)))
    times[:, 3] *= 1.25
    where = (rng.integers(600, size=40), rng.integers(16, size=40))
    times[where] += 2.0
    found = fit_stragglers(times, devices=range(16, 32))
    assert list(found.slowdown) == [19]
    assert found.slowdown[19] == pytest.approx(1.25, rel=0.01)
    assert found.device_jitter.cv == pytest.approx(0.03, rel=0.05)
    assert found.pauses.probability == pytest.approx(40 / 9600, rel=0.1)
    assert found.pauses.mean_s == pytest.approx(2.0, rel=0.1)


def test_slow_nodes_are_told_from_jitter() -> None:
    rng = np.random.default_rng(3)
    times = np.exp(0.02 * rng.standard_normal((1000, 32)))
    slow = rng.random((1000, 4)) < 0.05
    times *= np.repeat(np.where(slow, 1.3, 1.0), 8, axis=1)
    nodes = [rank // 8 for rank in range(32)]
    found = fit_stragglers(times, nodes=nodes)
    assert found.slow_nodes.share == pytest.approx(0.05, rel=0.15)
    assert found.slow_nodes.factor == pytest.approx(1.3, rel=0.03)  # low: two of four nodes slow move the common median
    assert found.device_jitter.cv == pytest.approx(0.02, rel=0.05)
    assert fit_stragglers(times).slow_nodes.share == 0


def test_devices_that_differ_by_less_than_a_percent_are_not_slow() -> None:
    found = fit_stragglers(quiet(500, 1)[:, :, BACKWARD])
    assert all(factor < 1.025 for factor in found.slowdown.values())
    assert found.device_jitter.cv == pytest.approx(0.02, rel=0.1)


def test_links() -> None:
    rng = np.random.default_rng(4)
    assert fit_link_jitter(rng.gamma(100, 0.01, (500, 8)) * np.linspace(1, 2, 8)).cv == pytest.approx(0.1, rel=0.05)


def test_too_little_to_fit() -> None:
    with pytest.raises(InvalidInput, match="at least 20 steps"):
        fit_stragglers(np.ones((5, 4)))
