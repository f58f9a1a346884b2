"""Measurement of a real run, and Comparison: prediction and measurement joined term by term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from specs.base import Document, Spec
from specs.plan import Plan
from specs.prediction import FabricLink
from specs.training import TrainingSpec


class RankMeasurement(Spec):
    """One rank. ``terms``: mean exclusive seconds per step by ``specs.terms.TIME_TERMS``."""

    rank: int
    device: str = ""
    terms: dict[str, float]
    step_times_s: tuple[float, ...] = ()
    peak_memory_bytes: float
    baseline_bytes: float = 0.0
    start_probe_s: float | None = Field(default=None, description="the profile's fixed probe, run before the first step")
    probe_s: float | None = Field(default=None, description="the profile's fixed probe, run between steps")


class Measurement(Document):
    """A run of a plan. Times are over the measured steps (warm-up excluded); memory is above each worker's baseline."""

    kind: ClassVar[str] = "measurement"
    plan_hash: str = ""
    plan: Plan | None = Field(default=None, description="what ran")
    model_hash: str = Field(default="", description="content hash of the op graph that ran")
    workload: TrainingSpec | None = None
    cluster: str = Field(default="", description="name of the cluster, where known")
    status: str = Field(default="succeeded", description="succeeded | failed")
    error: str | None = None
    steps: int = 0
    warmup_steps: int = 0
    step_times_s: tuple[float, ...] = ()
    step_time_s: float | None = Field(default=None, description="median")
    step_time_p10_s: float | None = None
    step_time_p90_s: float | None = None
    tokens_per_s: float | None = None
    peak_memory_bytes: float | None = Field(default=None, description="of the fullest rank")
    losses: tuple[float, ...] = ()
    waterfall: dict[str, float] = {}
    ranks: tuple[RankMeasurement, ...] = ()
    start_drift: float | None = Field(default=None, description="probe before the first step over probe in the profile")
    drift: float | None = Field(default=None, description="probe between the steps over probe in the profile; 1 = no drift")
    collectives: dict[str, Any] = Field(default={}, description="calls and bytes per step by kind, where counted")
    environment: Mapping[str, Any] = {}


class Difference(Spec):
    """One quantity. ``relative_error`` = predicted / measured - 1; ``None`` where the measured one is 0."""

    predicted: float
    measured: float
    relative_error: float | None


class Comparison(Document):
    """Predicted against measured, of one plan."""

    kind: ClassVar[str] = "comparison"
    plan_hash: str = ""
    step_time: Difference
    step_time_at_start_speed: Difference | None = Field(
        default=None, description="predicted time multiplied by the drift that the probe saw before the first step"
    )
    step_time_at_profile_speed: Difference | None = Field(default=None, description="measured time divided by the drift")
    peak_memory: Difference
    terms: dict[str, Difference]
    inside_interval: bool
    fabric: tuple[FabricLink, ...] = Field(default=(), description="the links that the prediction rests on")
    notes: tuple[str, ...] = ()
