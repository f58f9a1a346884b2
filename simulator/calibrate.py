"""Refit the factors of a cluster's cost model from a few measured runs.

Maximum a posteriori by least squares on logarithms. With f the factors, pred(f) the simulated and meas the measured numbers,

    minimise  sum_i (log(meas_i / pred_i(f)) / s_i)^2 + sum_k (log f_k / w_k)^2   within the bounds of each factor,

w_k the prior's widths (``specs.calibration.FACTORS``). i runs over the step time and the peak memory of every run, and where the
run measured them over the terms of its waterfall that are work; waiting (bubbles, slower ranks) follows from the others and is
seen in the step time. Terms enter as log((meas + e) / (pred + e)) with e a small share of the step, so that a term of no weight
has none here. The widths of the factors come from the curvature at the solution. With few runs the prior holds what they do not
tell; a factor that nothing moves stays 1. Gauss-Newton steps with damping; derivatives by differences, for the event simulation
has no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.cost_model import CostModel
from simulator.factors import Factors
from simulator.predict import prediction_of, simulate
from specs.calibration import FACTORS, NORMAL_P90, CalibratedFactor, Calibration, CalibrationRun, hardware_hash, log_interval
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput, Violation
from specs.graph import ModelGraph
from specs.measurement import Measurement
from specs.plan import Plan
from specs.prediction import Prediction
from specs.profile import Profile
from specs.terms import TIME_TERMS
from specs.training import TrainingSpec

Vector = NDArray[np.float64]

# Standard deviations of log(measured / predicted) that one run's own circumstances leave when the factors are right: what several
# plans of one site scatter around their common bias (5 to 20 % on published runs), more for single terms; those of
# one run are not independent.
STEP_WIDTH, TERM_WIDTH, MEMORY_WIDTH = 0.15, 0.3, 0.03
# Terms that are work. The others are waiting, or bookkeeping that is not predicted.
WORK_TERMS = tuple(name for name in TIME_TERMS if name not in ("pipeline", "wait", "other"))
SMALL_SHARE = 0.02
DIFFERENCE = 0.02
MOST_STEPS = 15
SMALL_STEP = 1e-4
# A factor counts as held by its bound where it is this close to it (in logarithms) and the runs pull further.
AT_BOUND = 1e-6


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measured run with what ran."""

    graph: ModelGraph
    workload: TrainingSpec
    plan: Plan
    measurement: Measurement


def calibrate(cluster: ClusterSpec, profile: Profile | None, runs: Sequence[MeasuredRun]) -> Calibration:
    """The calibration of a resolved cluster from ``runs``, in whatever order; without runs all factors are 1.

    Plans are taken as valid. Raises :class:`InvalidInput` for runs without a finite positive step time or with a number that is
    not finite.
    """
    broken = [violation for number, run in enumerate(runs) for violation in _unusable(number, run.measurement)]
    if broken:
        raise InvalidInput(broken, subject="measured runs")
    ordered = sorted(runs, key=lambda run: run.measurement.content_hash())
    return _Fit(cluster, profile, ordered).document()


def _unusable(number: int, measurement: Measurement) -> list[Violation]:
    loc = ("runs", number)
    step = measurement.step_time_s
    if measurement.status != "succeeded" or step is None:
        why = measurement.error or "it has neither a step time nor terms"
        return [Violation(code="no_measurement", message=f"the run is of no use here: {why}", loc=loc)]
    found = []
    numbers = {"step_time_s": step, "peak_memory_bytes": measurement.peak_memory_bytes} | {
        f"waterfall.{name}": value for name, value in measurement.waterfall.items()
    }
    for name, value in numbers.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            found.append(Violation(code="not_a_time", message=f"{name} is {value}", loc=(*loc, name), allowed=">= 0"))
    if step == 0:
        found.append(Violation(code="not_a_time", message="the step time is 0", loc=(*loc, "step_time_s"), allowed="> 0"))
    return found


class _Fit:
    """One fit. x: logarithms of the factors in the order of ``FACTORS``."""

    def __init__(self, cluster: ClusterSpec, profile: Profile | None, runs: Sequence[MeasuredRun]) -> None:
        self.cluster, self.profile, self.runs = cluster, profile, runs
        rules = FACTORS.values()
        self.widths = np.array([rule.prior_width for rule in rules])
        self.low = np.log([rule.low for rule in rules])
        self.high = np.log([rule.high for rule in rules])

    def document(self) -> Calibration:
        """Fit and describe."""
        start = np.zeros(len(FACTORS))
        before = self._predictions(start)
        x = self._solve(start)
        after = self._predictions(x)
        gradient, curvature = self._normal(x)
        spread = np.sqrt(np.diag(np.linalg.inv(curvature)))
        factors = {}
        for index, name in enumerate(FACTORS):
            low, high = log_interval(float(x[index]), float(spread[index]))
            factors[name] = CalibratedFactor(
                value=_bounded(math.exp(float(x[index])), name), low=_bounded(low, name), high=_bounded(high, name),
                at_bound=bool(self._held(x, gradient)[index]),
            )  # fmt: skip
        return Calibration(
            cluster=self.cluster.name, hardware_hash=hardware_hash(self.cluster),
            profile_hash=self.profile.content_hash() if self.profile is not None else "", num_runs=len(self.runs), factors=factors,
            runs=tuple(
                CalibrationRun(
                    plan_hash=run.plan.content_hash(), strategy=run.plan.strategy, measured_s=run.measurement.step_time_s or 0.0,
                    before_s=old.step_time_s, after_s=new.step_time_s,
                    fitted="terms" if has_terms(run.measurement) else "step_time",
                )
                for run, old, new in zip(self.runs, before, after, strict=True)
            ),
            residual_before=self._residual(before), residual_after=self._residual(after), notes=tuple(self._notes(factors)),
        )  # fmt: skip

    def _notes(self, factors: dict[str, CalibratedFactor]) -> list[str]:
        found = [
            f"'{name}' ({FACTORS[name].meaning}) is held at its bound {factor.value:g}: the runs ask for more than it can explain"
            for name, factor in factors.items()
            if factor.at_bound
        ]
        alone = sum(not has_terms(run.measurement) for run in self.runs)
        if alone:
            found.append(f"{alone} of {len(self.runs)} runs measured no terms: their step time alone was fitted")
        if len({run.plan.content_hash() for run in self.runs}) == 1:
            found.append("all runs are of one plan: what only other plans would tell apart is held by the prior")
        return found

    def _residual(self, predictions: Sequence[Prediction]) -> float:
        if not predictions:
            return 0.0
        logs = [
            math.log(item.step_time_s / (run.measurement.step_time_s or 1.0))
            for run, item in zip(self.runs, predictions, strict=True)
        ]
        return math.sqrt(sum(value * value for value in logs) / len(logs))

    # --- least squares ------------------------------------------------------------------------------------------

    def _predictions(self, x: Vector) -> list[Prediction]:
        factors = Factors.from_values({name: math.exp(value) for name, value in zip(FACTORS, x.tolist(), strict=True)})
        models: dict[tuple[int, str, str], CostModel] = {}
        found = []
        for run in self.runs:
            key = (id(run.graph), run.workload.content_hash(), run.plan.loss_kernel)
            if key not in models:
                model = CostModel(run.graph, self.cluster, run.workload, self.profile, factors=factors)
                models[key] = model.for_plan(run.plan)
            found.append(prediction_of(models[key], run.plan, simulate(models[key], run.plan)))
        return found

    def _residuals(self, x: Vector) -> Vector:
        """log(measured / predicted) over its width, of everything that was measured."""
        rows = [_misses(run.measurement, item) for run, item in zip(self.runs, self._predictions(x), strict=True)]
        return np.array([value for row in rows for value in row])

    def _normal(self, x: Vector, residuals: Vector | None = None) -> tuple[Vector, Vector]:
        """(gradient, Gauss-Newton curvature) of half the objective."""
        base = self._residuals(x) if residuals is None else residuals
        prior = np.diag(1 / self.widths**2)
        if not len(base):
            return prior @ x, prior
        columns = []
        for index in range(len(x)):
            # inwards where a bound is near
            step = DIFFERENCE if x[index] + DIFFERENCE <= self.high[index] else -DIFFERENCE
            moved = x.copy()
            moved[index] += step
            columns.append((self._residuals(moved) - base) / step)
        slopes = np.stack(columns, axis=1)
        return slopes.T @ base + prior @ x, slopes.T @ slopes + prior

    def _objective(self, x: Vector, residuals: Vector) -> float:
        return float(residuals @ residuals + ((x / self.widths) ** 2).sum())

    def _held(self, x: Vector, gradient: Vector) -> NDArray[np.bool_]:
        """Factors at a bound that the objective pulls further out."""
        return ((x <= self.low + AT_BOUND) & (gradient > AT_BOUND)) | ((x >= self.high - AT_BOUND) & (gradient < -AT_BOUND))

    def _solve(self, x: Vector) -> Vector:
        residuals = self._residuals(x)
        value, damping = self._objective(x, residuals), 1e-3
        for _ in range(MOST_STEPS):
            gradient, curvature = self._normal(x, residuals)
            free = ~self._held(x, gradient)
            if not free.any():
                return x
            while True:
                damped = curvature + damping * np.diag(np.diag(curvature))
                step = np.zeros_like(x)
                step[free] = -np.linalg.solve(damped[np.ix_(free, free)], gradient[free])
                tried = np.clip(x + step, self.low, self.high)
                tried_residuals = self._residuals(tried)
                tried_value = self._objective(tried, tried_residuals)
                size = float(np.abs(tried - x).max())
                if tried_value <= value or size < SMALL_STEP:
                    break
                damping *= 8
            if tried_value <= value:
                x, residuals, value, damping = tried, tried_residuals, tried_value, damping / 4
            if size < SMALL_STEP:
                break
        return x


def _bounded(value: float, name: str) -> float:
    """Within the factor's bounds to the last digit."""
    return min(max(value, FACTORS[name].low), FACTORS[name].high)


def has_terms(measurement: Measurement) -> bool:
    """Whether the run measured any term that is work."""
    return any(measurement.waterfall.get(name, 0.0) > 0 for name in WORK_TERMS)


def _misses(measurement: Measurement, prediction: Prediction) -> list[float]:
    """log(measured / predicted) over its width: step time, peak memory, terms."""
    step = measurement.step_time_s or 0.0
    noise = _noise(measurement)
    found = [math.log(step / prediction.step_time_s) / math.hypot(STEP_WIDTH, noise)]
    if measurement.peak_memory_bytes:
        found.append(math.log(measurement.peak_memory_bytes / prediction.memory.peak_bytes) / MEMORY_WIDTH)
    if has_terms(measurement):
        floor = SMALL_SHARE * step
        for name in WORK_TERMS:
            measured, predicted = measurement.waterfall.get(name, 0.0), prediction.waterfall.get(name, 0.0)
            found.append(math.log((measured + floor) / (predicted + floor)) / math.hypot(TERM_WIDTH, noise))
    return found


def _noise(measurement: Measurement) -> float:
    """Standard deviation of the logarithm of a step's time within the run, from its 10th and 90th percentile."""
    low, high = measurement.step_time_p10_s, measurement.step_time_p90_s
    if not low or not high or not math.isfinite(low) or not math.isfinite(high) or high <= low:
        return 0.0
    return math.log(high / low) / (2 * NORMAL_P90)
