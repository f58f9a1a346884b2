"""Least absolute log error within bounds: damped Gauss-Newton on reweighted residuals, numerical derivatives, NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiler.fit.forms import Space

Array = NDArray[np.float64]

_KNEE = 0.01  # below this residual the loss is a parabola: keeps the weights finite
_ITERATIONS = 60
_TRIES = 8
_DERIVATIVE_STEP = 1e-4


@dataclass(frozen=True, slots=True)
class Prior:
    """Where parameters lie when data says nothing: centre and spread, and how many points it is worth."""

    centre: Array
    spread: Array
    strength: float = 0.02


@dataclass(frozen=True, slots=True)
class Solution:
    """Parameters and the mean absolute residual that they leave (without the prior's share)."""

    values: Array
    loss: float


def solve(residuals: Callable[[Array], Array], space: Space, starts: Sequence[Array], prior: Prior | None = None) -> Solution:
    """Parameters within the space's bounds with the least mean absolute residual, from the best of ``starts``."""
    bounds = np.array(space.low), np.array(space.high)
    found = [_descend(residuals, np.array(space.step), bounds, start, prior) for start in starts]
    return min(found, key=lambda solution: solution[1])[0]


def _descend(
    residuals: Callable[[Array], Array], step: Array, bounds: tuple[Array, Array], start: Array, prior: Prior | None
) -> tuple[Solution, float]:
    low, high = bounds
    values = np.clip(start, low, high)
    errors = residuals(values)
    cost = _cost(errors, values, prior)
    damping = 1e-2
    for _ in range(_ITERATIONS):
        curvature, slope = _normal_equations(residuals, values, errors, step, high, prior)
        before = cost
        for _ in range(_TRIES):
            trial = np.clip(values + _bounded_step(curvature, slope, damping, values, step, bounds), low, high)
            trial_errors = residuals(trial)
            trial_cost = _cost(trial_errors, trial, prior)
            if trial_cost < cost:
                values, errors, cost = trial, trial_errors, trial_cost
                damping = max(damping / 5, 1e-6)
                break
            damping *= 5
        if before - cost < 1e-5:
            break
    return Solution(values, float(np.abs(errors).mean())), cost


def _cost(errors: Array, values: Array, prior: Prior | None) -> float:
    cost = float(np.abs(errors).mean())
    if prior is not None:
        cost += prior.strength * float((((values - prior.centre) / prior.spread) ** 2).sum()) / len(errors)
    return cost


def _normal_equations(
    residuals: Callable[[Array], Array], values: Array, errors: Array, step: Array, high: Array, prior: Prior | None
) -> tuple[Array, Array]:
    """Curvature and downhill slope of the mean absolute residual, in steps of each parameter."""
    jacobian = np.empty((len(errors), len(values)))
    for index in range(len(values)):
        size = _DERIVATIVE_STEP * step[index]
        if values[index] + size > high[index]:
            size = -size
        moved = values.copy()
        moved[index] += size
        jacobian[:, index] = (residuals(moved) - errors) / size * step[index]
    weights = 1 / np.maximum(np.abs(errors), _KNEE) / len(errors)
    curvature = jacobian.T @ (jacobian * weights[:, None])
    slope = -(jacobian.T @ (weights * errors))
    if prior is not None:
        share = 2 * prior.strength / len(errors) * (step / prior.spread) ** 2
        curvature = curvature + np.diag(share)
        slope = slope - share * (values - prior.centre) / step
    return curvature, slope


def _bounded_step(curvature: Array, slope: Array, damping: float, values: Array, step: Array, bounds: tuple[Array, Array]) -> Array:
    """The damped step among parameters that are not held by a bound."""
    low, high = bounds
    free = np.ones(len(values), dtype=bool)
    change = np.zeros(len(values))
    for _ in range(len(values)):
        part = curvature[np.ix_(free, free)]
        damped = part + damping * np.diag(np.diag(part)) + 1e-12 * np.eye(len(part))
        change = np.zeros(len(values))
        change[free] = np.linalg.solve(damped, slope[free]) * step[free]
        outward = ((values >= high) & (change > 0)) | ((values <= low) & (change < 0))
        if not (outward & free).any():
            break
        free &= ~outward
        if not free.any():
            return np.zeros(len(values))
    return change
