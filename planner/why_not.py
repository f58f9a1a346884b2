"""Why not this strategy: the rule that forbids it, the memory that it misses, or the terms that make it slower."""

from __future__ import annotations

from planner.strategy import plan_from_strategy
from planner.validate import validate
from simulator.cost_model import CostModel
from simulator.predict import fits, predict
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.prediction import Prediction, RankPrediction
from specs.questions import BrokenRule, TermDelta, WhyNot
from specs.terms import MEMORY_TERMS, TIME_TERMS
from specs.training import TrainingSpec
from specs.units import format_bytes, format_seconds

# Steps closer than this share are called the same.
SAME = 0.002


def why_not(
    asked: str,
    chosen: Plan,
    graph: ModelGraph,
    cluster: ClusterSpec,
    workload: TrainingSpec,
    *,
    cost_model: CostModel | None = None,
    proven: bool = False,
) -> WhyNot:
    """The strategy text ``asked`` against the chosen plan. ``proven``: the chosen plan carries a certificate of its space."""
    model = cost_model or CostModel(graph, cluster, workload)
    try:
        plan = plan_from_strategy(asked, graph, cluster, workload, model)
        violations = validate(plan, graph, cluster, workload)
    except InvalidInput as error:
        violations = list(error.violations)
        plan = None
    if plan is None or violations:
        rules = tuple(
            BrokenRule(
                code=item.code, loc=item.loc, message=item.message, actual=item.actual, allowed=item.allowed, nearest=item.nearest
            )
            for item in violations
        )  # fmt: skip
        reason = f"forbidden: {violations[0].render()}" + (f" (and {len(violations) - 1} more)" if len(violations) > 1 else "")
        return WhyNot(asked=asked, chosen=chosen.strategy, verdict="forbidden", reason=reason, rules=rules)
    other = predict(graph, cluster, workload, plan, cost_model=model)
    best = predict(graph, cluster, workload, chosen, cost_model=model)
    return _compared(plan, other, chosen, best, proven)


def _compared(plan: Plan, other: Prediction, chosen: Plan, best: Prediction, proven: bool) -> WhyNot:
    terms = _deltas(best.waterfall, other.waterfall, TIME_TERMS)
    memory_terms = _deltas(best.memory.terms, other.memory.terms, MEMORY_TERMS)
    seconds = other.step_time_s - best.step_time_s
    share = seconds / best.step_time_s
    cost = f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))} ({share:+.1%})"
    largest = ", ".join(
        f"{item.term} {'+' if item.delta >= 0 else '-'}{format_seconds(abs(item.delta))}"
        for item in terms[:3]
        if abs(item.delta) > 1e-3 * best.step_time_s
    )
    missing, notes = None, []
    if not fits(other):
        worst = max(other.ranks, key=_over)
        missing = _over(worst)
        term = max(worst.memory.terms, key=lambda name: worst.memory.terms[name])
        verdict = "does_not_fit"
        reason = (
            f"does not fit: stage {worst.stage} misses {format_bytes(missing)}, most of it is {term} "
            f"({format_bytes(worst.memory.terms[term])} of {format_bytes(worst.memory.capacity_bytes)})"
        )
        notes.append(f"if it did fit, the step would be {cost}")
    elif abs(share) < SAME:
        verdict, reason = "same", f"the same step within {SAME:.1%}: {cost}"
    elif seconds > 0:
        verdict, reason = "slower", f"slower by {cost}" + (f": {largest}" if largest else "")
    else:
        verdict, reason = "faster", f"faster by {cost}" + (f": {largest}" if largest else "")
        notes.append(_why_not_found(plan, proven))
    flags = [flag.replace("_", " ") for flag in other.flags if flag not in best.flags]
    return WhyNot.model_validate(
        {
            "asked": plan.strategy, "chosen": chosen.strategy, "verdict": verdict, "reason": reason, "terms": terms,
            "step_time": TermDelta(term="step", chosen=best.step_time_s, asked=other.step_time_s),
            "memory": TermDelta(term="peak", chosen=best.memory.peak_bytes, asked=other.memory.peak_bytes),
            "memory_terms": memory_terms, "missing_bytes": missing, "notes": [*notes, *(f"warning: {flag}" for flag in flags)],
        }
    )  # fmt: skip


def _why_not_found(plan: Plan, proven: bool) -> str:
    if proven:
        return "the search proved its plan best of the space it searched; this one lies outside it (schedule, split or recompute)"
    return f"the search had not reached it: give it more time, or fix '{plan.strategy}'"


def _over(rank: RankPrediction) -> float:
    return (rank.memory.reserved_bytes or rank.memory.peak_bytes) - rank.memory.capacity_bytes


def _deltas(chosen: dict[str, float], asked: dict[str, float], order: dict[str, str]) -> list[TermDelta]:
    found = [TermDelta(term=name, chosen=chosen.get(name, 0.0), asked=asked.get(name, 0.0)) for name in order]
    shown = [item for item in found if item.chosen or item.asked]
    return sorted(shown, key=lambda item: -abs(item.delta))
