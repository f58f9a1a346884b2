"""Random factors: lognormal and gamma of mean 1, and the largest of many of them from one draw.

P(max of n <= x) = F(x)^n, so with E exponential of mean 1 the largest of n is F^-1(exp(-E / n)): one look-up at log(E / n) in a
table of x over log(-log F(x)), which is exact in both tails.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specs.straggler import Jitter

Array = NDArray[np.float64]

_LOW, _HIGH, _CELLS = -42.0, 7.0, 1 << 15  # of log(-log F); largest of 1e12 draws down to the smallest
_GRID = 40001


class JitterSampler:
    """Draws factors of a jitter's distribution."""

    def __init__(self, jitter: Jitter) -> None:
        self.is_none = jitter.cv == 0
        self._table = np.ones(1) if self.is_none else _table(jitter)

    def largest(self, rng: np.random.Generator, counts: Array, draws: int) -> Array:
        """The largest factor of ``counts`` devices each, (len(counts), draws)."""
        if self.is_none:
            return np.ones((len(counts), draws))
        key = np.log(rng.standard_exponential((len(counts), draws)))
        key -= np.log(counts)[:, None]
        return self.at(key)

    def at(self, key: Array) -> Array:
        """The factor x with log(-log F(x)) = ``key``."""
        if self.is_none:
            return np.ones_like(key)
        cell = np.clip((key - _LOW) * (_CELLS / (_HIGH - _LOW)), 0, _CELLS - 1).astype(np.int32)
        return self._table[cell]


def _table(jitter: Jitter) -> Array:
    """Factor by log(-log F), at the middle of each cell."""
    log_x, density = _lognormal(jitter.cv) if jitter.shape == "lognormal" else _gamma(jitter.cv)
    mass = density / density.sum()
    below = np.cumsum(mass) - mass / 2
    above = np.cumsum(mass[::-1])[::-1] - mass / 2
    log_f = np.where(below < 0.5, np.log(np.maximum(below, 1e-300)), np.log1p(-np.minimum(above, 0.9)))
    key = np.log(np.maximum(-log_f, 1e-300))
    middle = _LOW + (np.arange(_CELLS) + 0.5) * (_HIGH - _LOW) / _CELLS
    return np.exp(np.interp(middle, key[::-1], log_x[::-1]))


def _lognormal(cv: float) -> tuple[Array, Array]:
    """(log x, density over it)."""
    width = math.sqrt(math.log1p(cv**2))
    z = np.linspace(-9.5, 9.5, _GRID)
    return width * z - width**2 / 2, np.exp(-(z**2) / 2)


def _gamma(cv: float) -> tuple[Array, Array]:
    """The same of a gamma distribution of shape k = 1/cv^2 and scale cv^2: x^k exp(-k x) over log x."""
    k = cv**-2
    log_x = np.linspace(-(12 * cv + 45 * cv**2), math.log1p(12 * cv + 50 * cv**2), _GRID)
    log_density = k * (log_x - np.exp(log_x))
    return log_x, np.exp(log_density - log_density.max())
