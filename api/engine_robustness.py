"""The part of the engine that answers about slow and failing devices."""

from __future__ import annotations

from collections.abc import Sequence

from api.engine_questions import cost_model, reporting
from specs.calibration import Calibration
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.measurement import Measurement
from specs.plan import Plan
from specs.profile import Profile
from specs.straggler import Diagnosis, PhaseSpread, Robustness, StragglerModel, Timings
from specs.training import TrainingSpec


class RobustnessEngine:
    """Distributions of the step time, goodput, what-if, and who is slow in a run."""

    @reporting
    def robustness(
        self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, plan: Plan, stragglers: StragglerModel, *,
        profile: Profile | None = None, calibration: Calibration | None = None, what_if: Sequence[str] = (), steps: int = 10_000,
        seed: int = 0,
    ) -> Robustness:  # fmt: skip
        """How a valid plan's step and throughput hold up; ``what_if``: changes in words."""
        from simulator.stragglers.answer import robustness
        from simulator.stragglers.what_if import parse_changes

        changes = parse_changes(list(what_if), cluster)
        model = cost_model(graph, cluster, workload, profile, calibration)
        return robustness(model, plan, stragglers, changes=changes, steps=steps, seed=seed)

    @reporting
    def diagnose(self, timings: Timings, plan: Plan | None = None) -> Diagnosis:
        """Who is slow, in which phase, since when. Without ``plan`` all ranks are taken to do the same work."""
        import numpy as np

        from simulator.stragglers.detect import diagnose
        from simulator.stragglers.phases import KINDS, phases_of, phases_of_equal_ranks

        seconds = np.array(timings.seconds)
        work = None if timings.work is None else np.array(timings.work)
        kinds = {**KINDS, **timings.kinds}
        ranks = seconds.shape[1] if seconds.ndim == 3 else 0
        if plan is None:
            return diagnose(seconds, phases_of_equal_ranks(timings.phases, ranks, kinds), work=work)
        return diagnose(seconds, phases_of(plan, timings.phases, kinds), work=work)

    @reporting
    def phase_spreads(self, measurement: Measurement) -> tuple[PhaseSpread, ...]:
        """Least, middle and largest seconds of each phase of a run over its ranks, with the worst ranks."""
        import numpy as np

        from simulator.stragglers.detect import spreads
        from specs.terms import TIME_TERMS

        if not measurement.ranks:
            raise InvalidInput.single("no_ranks", "the measurement holds no times of single ranks", subject="measurement")
        names = [name for name in TIME_TERMS if any(rank.terms.get(name) for rank in measurement.ranks)]
        seconds = np.array([[rank.terms.get(name, 0.0) for name in names] for rank in measurement.ranks])
        found = spreads(names, seconds)
        return tuple(item.replace(worst_ranks=tuple(measurement.ranks[index].rank for index in item.worst_ranks)) for item in found)
