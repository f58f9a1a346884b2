"""Predicted against measured, joined term by term. No torch."""

from __future__ import annotations

from specs.errors import InvalidInput
from specs.measurement import Comparison, Difference, Measurement
from specs.prediction import Prediction
from specs.terms import TIME_TERMS

DRIFT_WORTH_A_NOTE = 0.05
NEGLIGIBLE_SHARE = 0.01


def compare(prediction: Prediction, measurement: Measurement) -> Comparison:
    """Join the two by the keys of ``specs.terms.TIME_TERMS``; a term missing on a side counts as 0.

    Raises :class:`InvalidInput` when the run failed or the two are of different plans.
    """
    if measurement.step_time_s is None or measurement.peak_memory_bytes is None:
        raise InvalidInput.single(
            "no_measurement", f"the run {measurement.status}: {measurement.error or 'no steps were measured'}"
        )
    if prediction.plan_hash and measurement.plan_hash and prediction.plan_hash != measurement.plan_hash:
        raise InvalidInput.single(
            "different_plans",
            f"the prediction is of plan {prediction.plan_hash[:12]}, the measurement of {measurement.plan_hash[:12]}",
        )
    step_time = measurement.step_time_s
    start_drift, drift = measurement.start_drift, measurement.drift
    keys = [*TIME_TERMS, *sorted(set(prediction.waterfall) - set(TIME_TERMS))]
    return Comparison(
        plan_hash=measurement.plan_hash or prediction.plan_hash,
        step_time=difference(prediction.step_time_s, step_time),
        step_time_at_start_speed=None if not start_drift else difference(prediction.step_time_s * start_drift, step_time),
        step_time_at_profile_speed=None if not drift else difference(prediction.step_time_s, step_time / drift),
        peak_memory=difference(prediction.memory.peak_bytes, measurement.peak_memory_bytes),
        terms={key: difference(prediction.waterfall.get(key, 0.0), measurement.waterfall.get(key, 0.0)) for key in keys},
        inside_interval=prediction.step_time_low_s <= step_time <= prediction.step_time_high_s,
        fabric=prediction.fabric,
        notes=tuple(_notes(prediction, measurement, step_time)),
    )


def difference(predicted: float, measured: float) -> Difference:
    """One quantity; no relative error where nothing was measured."""
    return Difference(predicted=predicted, measured=measured, relative_error=predicted / measured - 1 if measured else None)


def _notes(prediction: Prediction, measurement: Measurement, step_time: float) -> list[str]:
    notes = list(measurement.environment.get("flags", ()))
    if measurement.drift is not None and abs(measurement.drift - 1) > DRIFT_WORTH_A_NOTE:
        slower = "slower" if measurement.drift > 1 else "faster"
        notes.append(f"the machine was {abs(measurement.drift - 1):.0%} {slower} beside this run than when it was profiled")
    for term in TIME_TERMS:
        measured = measurement.waterfall.get(term, 0.0)
        if not prediction.waterfall.get(term, 0.0) and measured > NEGLIGIBLE_SHARE * step_time:
            notes.append(f"'{term}' took {measured / step_time:.1%} of the step and was not predicted")
    return notes
