"""The part of the engine that answers questions about given plans and configs, and what all its parts share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from api.schemas import RecommendOptions
from specs.base import InvalidInputValue
from specs.calibration import Calibration
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.interchange import Exported, Imported
from specs.plan import Plan
from specs.profile import Profile
from specs.progress import ProgressSink, ignore
from specs.questions import PlanDiff, Recommendation, WhyNot
from specs.training import TrainingSpec

if TYPE_CHECKING:
    from simulator.cost_model import CostModel

Params = ParamSpec("Params")
Answer = TypeVar("Answer")


def reporting(call: Callable[Params, Answer]) -> Callable[Params, Answer]:
    """A value that breaks a rule deep inside (a device without a peak for the dtype) is bad input, not a defect."""

    @functools.wraps(call)
    def reported(*args: Params.args, **kwargs: Params.kwargs) -> Answer:
        try:
            return call(*args, **kwargs)
        except InvalidInputValue as error:
            raise InvalidInput([error.violation(())]) from error

    return reported


def cost_model(
    graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, profile: Profile | None, calibration: Calibration | None
) -> CostModel:
    """The prices that every answer about these documents rests on."""
    from planner.calibration import factors_for
    from simulator.cost_model import CostModel

    return CostModel(graph, cluster, workload, profile, factors=factors_for(cluster, profile, calibration))


class QuestionEngine:
    """Export, import, differences, why-not and sizes."""

    @reporting
    def export(
        self, plan: Plan, target: str, graph: ModelGraph | None = None, workload: TrainingSpec | None = None,
        cluster: ClusterSpec | None = None,
    ) -> Exported:  # fmt: skip
        """The plan in another framework's words; raises :class:`InvalidInput` with all that it cannot express."""
        from planner.exporters import export_plan

        return export_plan(plan, target, graph=graph, workload=workload, cluster=cluster)

    @reporting
    def read_config(self, text: str, framework: str) -> Imported:
        """What a framework's config asks for. The text is data."""
        from planner.importers import read_config

        return read_config(text, framework)

    @reporting
    def diff(
        self, before: Plan, after: Plan, graph: ModelGraph, workload: TrainingSpec, cluster: ClusterSpec | None = None
    ) -> PlanDiff:
        """What changes between two plans, and which states move."""
        from planner.plan_diff import diff_plans

        return diff_plans(before, after, graph, workload, cluster)

    @reporting
    def why_not(
        self, asked: str, chosen: Plan, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec,
        profile: Profile | None = None, calibration: Calibration | None = None, *, proven: bool = False,
    ) -> WhyNot:  # fmt: skip
        """A strategy against the chosen plan."""
        from planner.why_not import why_not

        model = cost_model(graph, cluster, workload, profile, calibration)
        return why_not(asked, chosen, graph, cluster, workload, cost_model=model, proven=proven)

    @reporting
    def recommend(
        self, graph: ModelGraph, device: str, workload: TrainingSpec, options: RecommendOptions, progress: ProgressSink = ignore
    ) -> Recommendation:
        """The fewest devices of a type and the cost curve. Isolated: searches at every size."""
        from planner.recommend import RecommendOptions as Options
        from planner.recommend import recommend

        given = Options(
            max_devices=options.max_devices, preset=options.preset, time_limit_s=options.time_limit_s, seed=options.seed,
            strategy=options.strategy, efficient_at_least=options.efficient_at_least,
        )  # fmt: skip
        return recommend(graph, device, workload, given, progress)

    def device_cluster(self, device: str, preset: str | None = None) -> ClusterSpec:
        """One node of a device type, as :meth:`recommend` builds its clusters of; raises when the catalogue knows neither."""
        from planner.recommend import one_node

        return one_node(device, preset)
