"""From measurement documents to a calibration, and from a calibration to the factors of a cost model: what belongs to what."""

from __future__ import annotations

from collections.abc import Sequence

from planner.validate import validate
from simulator.calibrate import MeasuredRun, calibrate
from simulator.factors import UNCALIBRATED, Factors
from specs.calibration import Calibration, hardware_hash
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput, Violation
from specs.graph import ModelGraph
from specs.measurement import Measurement
from specs.plan import Plan
from specs.profile import Profile
from specs.training import TrainingSpec


def calibrate_measurements(
    graph: ModelGraph,
    cluster: ClusterSpec,
    profile: Profile | None,
    measurements: Sequence[Measurement],
    *,
    plans: Sequence[Plan] = (),
    workload: TrainingSpec | None = None,
) -> Calibration:
    """Refit the factors of a resolved cluster from runs of one model.

    A measurement that does not hold its plan takes the one of ``plans`` with its hash, one without workload takes ``workload``.
    Raises :class:`InvalidInput` with everything that does not belong together, and when there is no run at all.
    """
    if not measurements:
        raise InvalidInput.single("no_runs", "a calibration needs at least one measured run", subject="measured runs")
    by_hash = {plan.content_hash(): plan for plan in plans}
    runs: list[MeasuredRun] = []
    broken: list[Violation] = []
    seen: list[Measurement] = []
    for number, measurement in enumerate(measurements):
        plan = measurement.plan or by_hash.get(measurement.plan_hash)
        spec = measurement.workload or workload
        found = _foreign(number, measurement, graph, cluster)
        if measurement in seen:
            what = f"run {seen.index(measurement)} is the same: one run counts once"
            found.append(Violation(code="same_run_twice", message=what, loc=("runs", number)))
        seen.append(measurement)
        if plan is None:
            what = f"the plan {measurement.plan_hash[:12]} that ran is neither in the measurement nor among the given plans"
            found.append(Violation(code="plan_not_given", message=what, loc=("runs", number)))
        if spec is None:
            what = "the workload that ran is not in the measurement and none is given"
            found.append(Violation(code="workload_not_given", message=what, loc=("runs", number)))
        if plan is not None and spec is not None and not found:
            found = [_in_run(number, violation) for violation in validate(plan, graph, cluster, spec)]
            runs.append(MeasuredRun(graph, spec, plan, measurement))
        broken += found
    if broken:
        raise InvalidInput(broken, subject="measured runs")
    calibration = calibrate(cluster, profile, runs)
    silent = sum(not measurement.cluster for measurement in measurements)
    if silent:
        note = f"{silent} of {len(runs)} runs do not say on which cluster they ran: taken as runs of '{cluster.name}'"
        calibration = calibration.replace(notes=(*calibration.notes, note))
    return calibration


def _foreign(number: int, measurement: Measurement, graph: ModelGraph, cluster: ClusterSpec) -> list[Violation]:
    """Runs of another model or cluster, as far as the measurement says."""
    found = []
    if measurement.model_hash and measurement.model_hash != graph.content_hash():
        what = f"the run is of another model than '{graph.name}'"
        found.append(Violation(code="measurement_of_another_model", message=what, loc=("runs", number)))
    if measurement.cluster and measurement.cluster != cluster.name:
        what = f"the run is of cluster '{measurement.cluster}', not of '{cluster.name}'"
        found.append(Violation(code="measurement_of_another_cluster", message=what, loc=("runs", number), nearest=cluster.name))
    return found


def _in_run(number: int, violation: Violation) -> Violation:
    return Violation(
        code=violation.code, message=violation.message, loc=("runs", number, *violation.loc), actual=violation.actual,
        allowed=violation.allowed, nearest=violation.nearest,
    )  # fmt: skip


def factors_for(cluster: ClusterSpec, profile: Profile | None, calibration: Calibration | None) -> Factors:
    """The factors on prices of a resolved cluster. Raises :class:`InvalidInput` when the calibration is of other hardware, or
    multiplies other prices (those of another profile, or of none)."""
    if calibration is None:
        return UNCALIBRATED
    broken = []
    if calibration.hardware_hash != hardware_hash(cluster):
        what = f"the calibration is of cluster '{calibration.cluster}', whose devices or links are not those of '{cluster.name}'"
        broken.append(Violation(code="calibration_of_another_cluster", message=what))
    given = profile.content_hash() if profile is not None else ""
    if calibration.profile_hash != given:
        names = [f"profile {text[:12]}" if text else "efficiency models alone" for text in (calibration.profile_hash, given)]
        what = f"its factors multiply prices of {names[0]}, these are of {names[1]}; calibrate again"
        broken.append(Violation(code="calibration_of_other_prices", message=what))
    if broken:
        raise InvalidInput(broken, subject="calibration")
    return Factors.of(calibration)
