"""Judging a foreign config: what it asks for, put on the given model, cluster and workload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from api.engine import Engine, fits
from specs.calibration import Calibration
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput, Violation
from specs.graph import ModelGraph
from specs.interchange import Imported, Judgement
from specs.profile import Profile
from specs.questions import BrokenRule
from specs.training import TrainingSpec


def broken_rule(violation: Violation) -> BrokenRule:
    """A violation as part of an answer."""
    return BrokenRule(
        code=violation.code, loc=violation.loc, message=violation.message, actual=violation.actual, allowed=violation.allowed,
        nearest=violation.nearest,
    )  # fmt: skip


def model_of(imported: Imported, engine: Engine) -> dict[str, Any] | None:
    """The model that the config itself describes, when it says all that a model needs."""
    if "model_type" not in imported.model:
        return None
    try:
        engine.check_model(imported.model)
    except InvalidInput:
        return None
    return imported.model


def judge(
    engine: Engine,
    imported: Imported,
    *,
    graph: Callable[[], ModelGraph] | None,
    cluster: ClusterSpec | None,
    workload: TrainingSpec | None,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
    strategy: str | None = None,
) -> Judgement:
    """The verdict. ``graph`` is captured only when everything else is there; ``cluster`` is resolved."""
    merged = _merged(imported.strategy, strategy)
    spec, conflicts, missing = _workload(imported, workload)
    if graph is None:
        missing.append("model: the config does not describe it in full")
    if cluster is None:
        missing.append("cluster")
    elif imported.num_devices is not None and imported.num_devices != cluster.num_devices:
        conflicts.append(f"the config starts {imported.num_devices} devices, the cluster has {cluster.num_devices}")
    answer: dict[str, Any] = {"imported": imported, "strategy": merged, "conflicts": conflicts, "missing": missing}
    if graph is None or cluster is None or spec is None:
        return Judgement.model_validate(answer)
    captured = graph()
    try:
        plan = engine.plan_of(merged, captured, cluster, spec)
    except InvalidInput as error:
        return Judgement.model_validate({**answer, "rules": [broken_rule(item) for item in error.violations]})
    prediction = engine.estimate(captured, cluster, spec, plan, profile, calibration)
    return Judgement.model_validate({**answer, "plan": plan, "prediction": prediction, "fits": fits(prediction)})


def _merged(base: str, own: str | None) -> str:
    """The config's strategy with the caller's fields over it."""
    if not own:
        return base
    from planner.strategy_text import ALIASES

    fields = {}
    for part in [*base.split(), *own.replace(";", " ").split()]:
        key, _, value = part.partition("=")
        fields[ALIASES.get(key.lower(), key.lower())] = value
    return " ".join(f"{key}={value}" for key, value in fields.items())


def _workload(imported: Imported, given: TrainingSpec | None) -> tuple[TrainingSpec | None, list[str], list[str]]:
    """The workload to price with, where it differs from the config, and what it lacks."""
    asked = imported.workload
    if given is None:
        missing = [f"workload: the config does not say {key}" for key in ("global_batch", "seq_len") if key not in asked]
        return (None if missing else TrainingSpec.parse(asked)), [], missing
    conflicts = []
    for key in ("global_batch", "seq_len"):
        own = given.max_seq_len if key == "seq_len" else given.global_batch
        if key in asked and asked[key] != own:
            conflicts.append(f"{key}: the config says {asked[key]}, the workload {own}")
    if "precision" in asked:
        said = TrainingSpec.parse({"global_batch": 1, "seq_len": 1, "precision": asked["precision"]}).precision
        unlike = [name for name, value in said if value != getattr(given.precision, name)]
        if unlike:
            conflicts.append(f"precision: the config means {asked['precision']}, the workload differs in {', '.join(unlike)}")
    return given, conflicts, []
