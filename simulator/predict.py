"""From a plan to its Prediction: step time with its waterfall, memory of every rank, traffic, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterable

from simulator.cost_model import CostModel
from simulator.efficiency import peak_flop_per_s
from simulator.interval import exposures, interval
from simulator.rank_memory import GPU_BASELINE_BYTES, fill, memory_flags, rank_memory, recompute_flags
from simulator.rank_step import RankStep
from simulator.step import StepResult, StepSimulation
from simulator.unit_cost import SourceShare
from specs.base import Provenance
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.prediction import Assumption, FabricLink, Prediction, PriceSource, RankPrediction
from specs.profile import Profile
from specs.schedule import splits_backward
from specs.terms import TIME_TERMS
from specs.training import TrainingSpec

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
    model = (cost_model or CostModel(graph, cluster, workload, profile)).for_plan(plan)
    return prediction_of(model, plan, simulate(model, plan))


def simulate(model: CostModel, plan: Plan) -> StepResult:
    """The event simulation of one step."""
    return StepSimulation(model, plan).run()


def prediction_of(model: CostModel, plan: Plan, result: StepResult) -> Prediction:
    """Assemble the document from a simulated step."""
    step = result.step_time_s
    ranks = [_rank_prediction(model, plan, rank) for rank in result.ranks]
    fullest = max(ranks, key=lambda rank: fill(rank.memory))
    waterfall = waterfall_of(result)
    shares = _shares(result.ranks)
    hangs_on = exposures(model, plan, result.ranks)
    low, high = interval(step, hangs_on)
    flop = model.graph.flop(batch=1, seq=model.seq) * plan.global_batch
    return Prediction(
        plan_hash=plan.content_hash(),
        step_time_s=step,
        step_time_low_s=low,
        step_time_high_s=high,
        exposures=hangs_on,
        tokens_per_s=plan.global_batch * plan.seq_len / step,
        mfu=flop / (step * _peak(model, ranks)),
        mfu_convention=MFU_CONVENTION,
        model_flop=flop,
        waterfall=waterfall,
        bubble_fraction=waterfall.get("pipeline", 0.0) / step,
        memory=fullest.memory,
        ranks=tuple(ranks),
        link_bytes=_link_bytes(result.ranks),
        energy_j=_energy_j(model, ranks, step),
        cost_usd=_cost_usd(model, ranks, step),
        provenance=tuple(
            PriceSource(source=name.value, seconds=shares[name].seconds, num_ops=shares[name].num_ops) for name in sorted(shares)
        ),
        assumptions=(*_assumptions(model, result.ranks), *_schedule_assumptions(model, plan, result.ranks)),
        flags=(*memory_flags([rank.memory for rank in ranks]), *recompute_flags(model, plan)),
        fabric=tuple(fabric_of(model, plan)),
    )


def waterfall_of(result: StepResult) -> dict[str, float]:
    """Mean seconds per rank by time term, those of no time left out; they sum to the step."""
    weights = [len(next(iter(rank.stages.values())).stage.devices) for rank in result.ranks]
    found = {
        name: sum(weight * rank.terms.get(name, 0.0) for weight, rank in zip(weights, result.ranks, strict=True))
        for name in TIME_TERMS
    }
    return {name: seconds / sum(weights) for name, seconds in found.items() if seconds > 0}


def _rank_prediction(model: CostModel, plan: Plan, rank: RankStep) -> RankPrediction:
    first = next(iter(rank.stages.values()))
    return RankPrediction(
        ranks=first.stage.devices,
        stage=min(rank.stages),
        pipeline=rank.pipeline,
        device=first.device,
        terms={name: seconds for name, seconds in rank.terms.items() if seconds > 0},
        memory=rank_memory(model, plan, rank.pipeline, rank.stages, rank.row),
    )


def fits(prediction: Prediction) -> bool:
    """Whether the fullest rank keeps below its capacity, allocator margin and process baseline included. A long step that is
    continued from a short one has no ranks of its own, but its fullest one's memory."""
    return fill(prediction.memory) <= 1.0


def fabric_of(model: CostModel, plan: Plan) -> list[FabricLink]:
    """The links that the plan's devices talk over, as they were priced: no time means anything without them."""
    used = [model.network.places[device] for item in plan.pipelines for stage in item.stages for device in stage.devices]
    nodes = {place.node for place in used}
    found = []
    for index in sorted({place.group for place in used}):
        group = model.cluster.nodes[index]
        per_node = max(sum(1 for place in used if place.node == node) for node in {p.node for p in used if p.group == index})
        links = [("intra", group.intra)] if per_node > 1 else []
        links += [("inter", group.inter)] if len(nodes) > 1 else []
        for tier, link in links:
            if link is not None:
                found.append(
                    FabricLink(
                        tier=tier, nodes=group.name or group.preset or f"{group.count} x {group.devices_per_node} {group.device}",
                        kind=link.kind, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s,
                        oversubscription=model.cluster.oversubscription if tier == "inter" else 1.0,
                        source=link.provenance.get("bandwidth_bytes_per_s", "given"),
                        measured=model.network.table is not None or bool(link.curves),
                    )
                )  # fmt: skip
    return found


def _shares(ranks: Iterable[RankStep]) -> dict[Provenance, SourceShare]:
    """Compute of one micro-batch on every folded rank, by the kind of number that it rests on."""
    found: dict[Provenance, SourceShare] = {}
    for rank in ranks:
        for cost in rank.stages.values():
            for unit in cost.units:
                for source, share in unit.by_source.items():
                    found.setdefault(source, SourceShare()).add(share)
    return found


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
    found = model.factors.assumptions()
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
    if model.precision.frozen_dtype == "int4":
        found.append(
            Assumption(what="frozen 4-bit weights: scales of their blocks and unpacked copies during products are not counted")
        )
    if model.workload.seq_len_histogram:
        found.append(Assumption(what="time and memory are those of the longest sequence in the histogram", value=model.seq))
    return found
