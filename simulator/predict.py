"""From a plan to its Prediction: step time with its waterfall, memory of every rank, traffic, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterable

from simulator.cost_model import CostModel
from simulator.efficiency import defaults, peak_flop_per_s
from simulator.memory import MemoryPeak, MemoryRules, RankMemory
from simulator.runtime_rules import memory_rules_for
from simulator.step import RankStep, StepResult, StepSimulation
from simulator.unit_cost import SourceShare
from specs.base import Provenance
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.prediction import Assumption, MemoryPrediction, Prediction, PriceSource, RankPrediction
from specs.profile import Profile
from specs.schedule import splits_backward
from specs.terms import TIME_TERMS
from specs.training import TrainingSpec

# Above this share of the capacity an allocator starts to thrash: a performance risk even though it fits.
RISK_FRACTION = 0.95
# Context of a CUDA process with its communicators; published values lie between 1 and 3 GB.
GPU_BASELINE_BYTES = 1.5e9

MFU_CONVENTION = "model FLOP (multiply-add = 2, backward 2x, attention not halved for causality, no recompute) / dense peak"


def predict(
    graph: ModelGraph,
    cluster: ClusterSpec,
    workload: TrainingSpec,
    plan: Plan,
    profile: Profile | None = None,
    *,
    cost_model: CostModel | None = None,
) -> Prediction:
    """Predict one step of ``plan``. ``cluster`` is resolved; the plan is taken as valid (``planner.validate`` judges it)."""
    model = cost_model or CostModel(graph, cluster, workload, profile)
    return prediction_of(model, plan, simulate(model, plan))


def simulate(model: CostModel, plan: Plan) -> StepResult:
    """The event simulation of one step."""
    return StepSimulation(model, plan).run()


def prediction_of(model: CostModel, plan: Plan, result: StepResult) -> Prediction:
    """Assemble the document from a simulated step."""
    step = result.step_time_s
    ranks = [_rank_prediction(model, plan, rank) for rank in result.ranks]
    fullest = max(ranks, key=lambda rank: _fill(rank.memory))
    weights = [len(rank.ranks) for rank in ranks]
    waterfall = {
        name: sum(weight * rank.terms.get(name, 0.0) for weight, rank in zip(weights, ranks, strict=True)) / sum(weights)
        for name in TIME_TERMS
    }
    shares = _shares(result.ranks)
    spread = _relative_spread(shares.values())
    flop = model.graph.flop(batch=1, seq=model.seq) * plan.global_batch
    return Prediction(
        plan_hash=plan.content_hash(),
        step_time_s=step,
        step_time_low_s=step * (1 - spread),
        step_time_high_s=step * (1 + spread),
        tokens_per_s=plan.global_batch * plan.seq_len / step,
        mfu=flop / (step * _peak(model, ranks)),
        mfu_convention=MFU_CONVENTION,
        model_flop=flop,
        waterfall={name: seconds for name, seconds in waterfall.items() if seconds > 0},
        bubble_fraction=waterfall["pipeline"] / step,
        memory=fullest.memory,
        ranks=tuple(ranks),
        link_bytes=_link_bytes(result.ranks),
        energy_j=_energy_j(model, ranks, step),
        cost_usd=_cost_usd(model, ranks, step),
        provenance=tuple(
            PriceSource(source=name.value, seconds=shares[name].seconds, num_ops=shares[name].num_ops) for name in sorted(shares)
        ),
        assumptions=(*_assumptions(model, result.ranks), *_schedule_assumptions(model, plan, result.ranks)),
        flags=tuple(_flags(ranks)),
    )


def _rank_prediction(model: CostModel, plan: Plan, rank: RankStep) -> RankPrediction:
    first = next(iter(rank.stages.values()))
    rules: MemoryRules = memory_rules_for(model.cluster, model.software)
    num_stages = len(plan.pipelines[rank.pipeline].stages)
    peak = RankMemory(
        rank.stages, rank.row, num_stages=num_stages, options=plan.collectives, rules=rules, overlaps=plan.schedule.overlaps
    ).run()
    return RankPrediction(
        ranks=first.stage.devices,
        stage=min(rank.stages),
        pipeline=rank.pipeline,
        device=first.device,
        terms={name: seconds for name, seconds in rank.terms.items() if seconds > 0},
        memory=_memory(model, plan, rank, peak),
    )


def _memory(model: CostModel, plan: Plan, rank: RankStep, peak: MemoryPeak) -> MemoryPrediction:
    first = next(iter(rank.stages.values()))
    margin = model.workload.limits.memory_margin_fraction
    baseline = _baseline_bytes(model, first.device)
    terms = {name: size for name, size in peak.terms.items() if size > 0}
    return MemoryPrediction(
        peak_bytes=peak.bytes,
        capacity_bytes=min(usable_bytes(model, device) for device in first.stage.devices),
        reserved_bytes=peak.bytes * (1 + margin) + baseline,
        baseline_bytes=baseline,
        terms=terms,
        peak_moment=f"stage {min(rank.stages)}: {peak.moment}",
        peak_rank=first.stage.devices[0],
    )


def _baseline_bytes(model: CostModel, device: str) -> float:
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


def _fill(memory: MemoryPrediction) -> float:
    return (memory.reserved_bytes or memory.peak_bytes) / memory.capacity_bytes


def fits(prediction: Prediction) -> bool:
    """Whether every rank keeps below its capacity, allocator margin and process baseline included."""
    return _fill(prediction.memory) <= 1.0  # of the fullest rank; a long step that was continued lists no ranks


def _flags(ranks: Iterable[RankPrediction]) -> list[str]:
    worst = max(_fill(rank.memory) for rank in ranks)
    if worst > 1:
        return ["does_not_fit"]
    if worst > RISK_FRACTION:
        return ["memory_above_95_percent"]
    return ["tight"] if worst > 0.90 else []


def _shares(ranks: Iterable[RankStep]) -> dict[Provenance, SourceShare]:
    """Compute of one micro-batch on every folded rank, by the kind of number that it rests on."""
    found: dict[Provenance, SourceShare] = {}
    for rank in ranks:
        for cost in rank.stages.values():
            for unit in cost.units:
                for source, share in unit.by_source.items():
                    found.setdefault(source, SourceShare()).add(share)
    return found


def _relative_spread(shares: Iterable[SourceShare]) -> float:
    """Half width of the interval: expected absolute errors of the ops, as if all erred the same way, over their seconds."""
    listed = list(shares)
    total = sum(item.seconds for item in listed)
    return sum(item.error_s for item in listed) / total if total > 0 else float(defaults()["interval"]["assumed"])


def _peak(model: CostModel, ranks: Iterable[RankPrediction]) -> float:
    dtype = model.precision.compute_dtype
    return sum(len(rank.ranks) * peak_flop_per_s(model.device(rank.device), dtype) for rank in ranks)


def _link_bytes(ranks: list[RankStep]) -> dict[str, float]:
    """Bytes sent per device and step by axis, mean over the folded ranks."""
    names = {name for rank in ranks for name in rank.link_bytes}
    return {name: sum(rank.link_bytes.get(name, 0.0) for rank in ranks) / len(ranks) for name in sorted(names)}


def _energy_j(model: CostModel, ranks: Iterable[RankPrediction], step_s: float) -> float | None:
    powers = [(len(rank.ranks), model.device(rank.device).tdp_w) for rank in ranks]
    if any(power is None for _, power in powers):
        return None
    return step_s * sum(count * (power or 0.0) for count, power in powers)


def _cost_usd(model: CostModel, ranks: Iterable[RankPrediction], step_s: float) -> float | None:
    total = 0.0
    for rank in ranks:
        price = model.device(rank.device).price_usd_per_hour
        if price is None:
            return None
        total += len(rank.ranks) * price * step_s / 3600
    return total


def _schedule_assumptions(model: CostModel, plan: Plan, ranks: list[RankStep]) -> list[Assumption]:
    """What had to be assumed to run backward in two parts, or beside a forward."""
    found: list[Assumption] = []
    if splits_backward([rank.row for rank in ranks]):
        found.append(
            Assumption(
                what="split backward: weight gradients of products and embeddings can wait, those of norms and biases come with "
                "the input's; until they are made, the products' inputs and their results' gradients stay"
            )
        )
        if any(model.pricer(cost.device).table is not None for rank in ranks for cost in rank.stages.values()):
            found.append(
                Assumption(what="split backward: share of weight gradients in the measured backward of a product", value=0.5)
            )
    if plan.schedule.overlaps and any(pipeline.pp > 1 for pipeline in plan.pipelines):
        found.append(
            Assumption(
                what=f"{plan.schedule.name}: expert exchange of a forward hides behind the backward beside it and the other way "
                "round; passes that gather or reduce unit by unit run one after the other"
            )
        )
    return found


def _assumptions(model: CostModel, ranks: list[RankStep]) -> list[Assumption]:
    found: list[Assumption] = []
    devices = sorted({cost.device for rank in ranks for cost in rank.stages.values()})
    for name in devices:
        if model.pricer(name).table is None:
            found.append(
                Assumption(
                    what=f"all op times of '{name}' come from the efficiency model and its specs; nothing was measured on it",
                    provenance="fitted",
                )
            )
            if model.device(name).kind != "cpu_process":
                found.append(
                    Assumption(what=f"process baseline of '{name}' (context and communicators), bytes", value=GPU_BASELINE_BYTES)
                )
    if model.network.table is None:
        found.append(
            Assumption(what="collective times come from link specs or published curves, not measured here", provenance="fitted")
        )
    unknown = sorted({op for rank in ranks for cost in rank.stages.values() for unit in cost.units for op in unit.unknown_ops})
    if unknown:
        found.append(Assumption(what="ops without a rule, priced as memory-bound", value=unknown))
    if model.workload.seq_len_histogram:
        found.append(Assumption(what="time and memory are those of the longest sequence in the histogram", value=model.seq))
    return found
