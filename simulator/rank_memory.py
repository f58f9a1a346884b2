"""Memory of a plan's ranks: peak with its terms, margin, baseline and capacity, without simulating any time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from simulator.cost_model import CostModel
from simulator.memory import RankMemory
from simulator.runtime_rules import memory_rules_for
from simulator.stage_cost import StageCost, pipeline_stages, stage_cost
from simulator.step import pipeline_rows
from specs.plan import Plan, RecomputeMode
from specs.prediction import MemoryPrediction
from specs.schedule import Action

# Above this share of the capacity an allocator starts to thrash: a performance risk even though it fits.
RISK_FRACTION = 0.95
TIGHT_FRACTION = 0.90
# Context of a CUDA process with its communicators; published values lie between 1 and 3 GB.
GPU_BASELINE_BYTES = 1.5e9
# Selective recompute that keeps more than this share of the activations is no saver.
SAVES_NOTHING = 0.97


def plan_memory(model: CostModel, plan: Plan) -> list[MemoryPrediction]:
    """Memory of every class of ranks of a valid plan, in the order of pipelines and their ranks."""
    found = []
    model = model.for_plan(plan)
    for index, pipeline in enumerate(plan.pipelines):
        rows = pipeline_rows(plan, pipeline)
        costs = {number: stage_cost(model, plan, pipeline, stage) for number, stage in enumerate(pipeline.stages)}
        for number, held in enumerate(pipeline_stages(pipeline)):
            found.append(rank_memory(model, plan, index, {stage: costs[stage] for stage in held}, rows[number]))
    return found


def rank_memory(
    model: CostModel, plan: Plan, pipeline: int, stages: Mapping[int, StageCost], row: Sequence[Action]
) -> MemoryPrediction:
    """Memory of one pipeline rank that holds ``stages`` and runs ``row``."""
    first = next(iter(stages.values()))
    num_stages, rules = len(plan.pipelines[pipeline].stages), memory_rules_for(model.cluster, model.software)
    peak = RankMemory(
        dict(stages), row, num_stages=num_stages, options=plan.collectives, rules=rules, overlaps=plan.schedule.overlaps
    ).run()
    held = (model.factors.memory - 1) * peak.bytes
    terms = {**peak.terms, "margin": peak.terms.get("margin", 0.0) + held}
    baseline = baseline_bytes(model, first.device)
    return MemoryPrediction(
        peak_bytes=peak.bytes + held,
        capacity_bytes=min(usable_bytes(model, device) for device in first.stage.devices),
        reserved_bytes=peak.bytes * model.reserve_factor + baseline,
        baseline_bytes=baseline,
        margin_fraction=model.workload.limits.memory_margin_fraction,
        terms={name: size for name, size in terms.items() if size > 0},
        saved_by_class={name: size for name, size in peak.saved_by_class.items() if size > 0},
        peak_moment=f"stage {min(stages)}: {peak.moment}",
        peak_rank=first.stage.devices[0],
    )


def baseline_bytes(model: CostModel, device: str) -> float:
    """Memory of the process before the job allocates anything."""
    profile = model.pricer(device).profile
    if profile is not None and profile.baseline_bytes is not None:
        return profile.baseline_bytes
    return 0.0 if model.device(device).kind == "cpu_process" else GPU_BASELINE_BYTES


def usable_bytes(model: CostModel, device: int) -> float:
    """Memory of one device that a job may take: what is free where that is known."""
    place = model.network.places[device]
    free = model.cluster.nodes[place.group].free_memory_bytes
    total = model.device(place.device).memory_bytes
    return total if free is None else min(free, total)


def fill(memory: MemoryPrediction) -> float:
    """Share of the capacity that the rank takes, margin and baseline included."""
    return (memory.reserved_bytes or memory.peak_bytes) / memory.capacity_bytes


def memory_flags(ranks: Iterable[MemoryPrediction]) -> list[str]:
    """Verdict of the fullest rank: does not fit; fits with a performance risk (the allocator frees and retries); tight."""
    worst = max(fill(memory) for memory in ranks)
    if worst > 1:
        return ["does_not_fit"]
    if worst > RISK_FRACTION:
        return ["memory_above_95_percent", "performance_risk"]
    return ["tight"] if worst > TIGHT_FRACTION else []


def recompute_flags(model: CostModel, plan: Plan) -> list[str]:
    """``selective_recompute_saves_nothing`` where the recomputed ops keep (almost) nothing that would be saved by it.

    With flash attention there are no scores to drop: the 5 a s^2 b bytes of arXiv 2205.05198 eq. 2 are not there.
    """
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            runs = [run for run in stage.recompute if run.mode == RecomputeMode.SELECTIVE]
            if not runs:
                continue
            units = [unit for run in runs for unit in range(run.first_unit, run.first_unit + run.num_units)]
            chosen = stage_cost(model, plan, pipeline, stage)
            plain = stage_cost(model, plan, pipeline, stage.replace(recompute=()))
            kept, whole = (sum(cost.units[unit - stage.first_unit].saved_bytes for unit in units) for cost in (chosen, plain))
            if kept > SAVES_NOTHING * whole:
                return ["selective_recompute_saves_nothing"]
    return []
