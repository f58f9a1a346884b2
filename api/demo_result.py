"""What a series of executed plans showed: the runs, their losses against the reference, and the scores. Input of the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from specs.answer import PlanAnswer
from specs.base import Document, Spec
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.measurement import Comparison, Difference, Measurement
from specs.prediction import Prediction
from specs.training import TrainingSpec


class LossCheck(Spec):
    """Losses of a run against those of the unsharded model in one process, step by step on the same data."""

    max_relative_difference: float
    tolerance: float
    agrees: bool


class Run(Spec):
    """One executed plan."""

    label: str = Field(description="its kind in words: 'ZeRO-3', 'pipeline 1F1B'")
    strategy: str
    chosen: bool = False
    prediction: Prediction
    measurement: Measurement
    comparison: Comparison
    losses: LossCheck | None = None


class Subject(Spec):
    """What was planned, in short."""

    model: str
    num_params: int
    num_units: int
    cluster: str
    num_devices: int
    device: str
    workload: dict[str, Any]


class Scores(Spec):
    """How good the predictions were. Errors are absolute relative ones; ``regret`` = measured time of the chosen plan over
    the best measured one, minus 1; ``kendall_tau`` compares the order of predicted and measured step times."""

    num_runs: int
    step_median_error: float
    step_median_error_at_start_speed: float | None = Field(
        default=None, description="predicted times multiplied by the drift that the probe saw before each run"
    )
    step_median_error_without_drift: float | None = Field(
        default=None, description="measured times divided by the drift of the machine since the profile"
    )
    step_worst_error: float
    memory_median_error: float
    kendall_tau: float | None
    regret: float | None
    inside_interval: int


class DemoResult(Document):
    """The whole series."""

    kind: ClassVar[str] = "demo result"
    title: str
    created_utc: str
    subject: Subject
    answer: PlanAnswer | None = None
    runs: tuple[Run, ...] = ()
    scores: Scores | None = None
    reference_losses: tuple[float, ...] = ()
    profile_summary: dict[str, Any] = {}
    durations_s: dict[str, float] = Field(default={}, description="wall time by phase")
    environment: dict[str, Any] = {}


def subject_of(graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec) -> Subject:
    """The short form of the inputs; the cluster is resolved."""
    return Subject(
        model=graph.name, num_params=graph.num_params(), num_units=graph.num_units(), cluster=cluster.name,
        num_devices=cluster.num_devices, device=", ".join(dict.fromkeys(group.device or "" for group in cluster.nodes)),
        workload=workload.model_dump(mode="json", exclude_defaults=True),
    )  # fmt: skip


def check_losses(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> LossCheck:
    """Compare step by step; a run with other than the reference's steps, or with a loss that is no number, does not agree."""
    comparable = len(losses) == len(reference) > 0 and all(math.isfinite(loss) for loss in (*losses, *reference))
    worst = math.inf
    if comparable:
        worst = max(abs(loss - expected) / abs(expected) for loss, expected in zip(losses, reference, strict=True))
    return LossCheck(max_relative_difference=worst, tolerance=tolerance, agrees=worst <= tolerance)


def scores_of(runs: Sequence[Run]) -> Scores | None:
    """Scores of the runs; None without any."""
    if not runs:
        return None
    step_errors = [abs(run.comparison.step_time.relative_error or 0.0) for run in runs]
    memory_errors = [abs(run.comparison.peak_memory.relative_error or 0.0) for run in runs]
    measured = {index: run.comparison.step_time.measured for index, run in enumerate(runs)}
    chosen = next((index for index, run in enumerate(runs) if run.chosen), None)
    return Scores(
        num_runs=len(runs),
        step_median_error=statistics.median(step_errors),
        step_median_error_at_start_speed=_median_error([run.comparison.step_time_at_start_speed for run in runs]),
        step_median_error_without_drift=_median_error([run.comparison.step_time_at_profile_speed for run in runs]),
        step_worst_error=max(step_errors),
        memory_median_error=statistics.median(memory_errors),
        kendall_tau=kendall_tau([run.comparison.step_time.predicted for run in runs], list(measured.values())),
        regret=None if chosen is None else measured[chosen] / min(measured.values()) - 1,
        inside_interval=sum(run.comparison.inside_interval for run in runs),
    )


def _median_error(differences: Sequence[Difference | None]) -> float | None:
    """None where not every run has the figure: a median over others than the rest of the table would mislead."""
    errors = [abs(item.relative_error or 0.0) for item in differences if item is not None]
    return statistics.median(errors) if len(errors) == len(differences) else None


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's rank correlation tau-b (M. G. Kendall, Biometrika 33, 1945); None where it is not defined.

    1 = same order, -1 = reversed. Ties are corrected for; two values or more, not all equal, are needed.
    """
    concordant = discordant = ties_first = ties_second = 0
    for i in range(len(first)):
        for j in range(i):
            a = (first[i] > first[j]) - (first[i] < first[j])
            b = (second[i] > second[j]) - (second[i] < second[j])
            concordant += a * b > 0
            discordant += a * b < 0
            ties_first += a == 0 and b != 0
            ties_second += b == 0 and a != 0
    untied_first = concordant + discordant + ties_second
    untied_second = concordant + discordant + ties_first
    if untied_first == 0 or untied_second == 0:
        return None
    return float((concordant - discordant) / (untied_first * untied_second) ** 0.5)
