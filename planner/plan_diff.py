"""What changes between two plans of one model, and which states each rank must get from elsewhere.

A rank holds of each parameter a box: its tensor-parallel share along the split dimension, and of what is sharded over dp an equal
part of dimension 0 (as ``fully_shard`` cuts it). What moves to a rank is its new box without what its old box already covers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from simulator.states import SPLIT_FROM, StateKind, state_kinds
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput, Violation
from specs.graph import Block, ModelGraph
from specs.plan import Plan, RecomputeRun, Stage
from specs.questions import Change, PlanDiff, RankMove, Resharding
from specs.training import TrainingSpec

_SPLIT = re.compile(r"^S\((\d+)\)$")
_KEPT = ("weights", "master weights", "optimizer states")


def diff_plans(
    before: Plan, after: Plan, graph: ModelGraph, workload: TrainingSpec, cluster: ClusterSpec | None = None
) -> PlanDiff:
    """Settings that change, and bytes of weights, master weights and optimizer states that move, rank by rank.

    Raises :class:`InvalidInput` when a plan is not one of this model, or splits experts (whose boxes are not followed).
    """
    _check(before, graph, "before")
    _check(after, graph, "after")
    old, new = _Holding(before, graph, workload), _Holding(after, graph, workload)
    moves: dict[tuple[float, float], list[int]] = defaultdict(list)
    by_kind: defaultdict[str, float] = defaultdict(float)
    for rank in sorted(new.places):
        needs = held = 0.0
        for kind, needed, had in _states(old, new, rank):
            needs, held = needs + needed, held + had
            by_kind[kind] += needed - had
        moves[(needs, held)].append(rank)
    ranks = [
        RankMove(ranks=tuple(members), needs_bytes=needs, held_bytes=held, moves_bytes=needs - held)
        for (needs, held), members in moves.items()
    ]
    most = max((move.moves_bytes for move in ranks), default=0.0)
    return PlanDiff(
        changes=tuple(_changes(before, after)),
        checkpoint_bytes=sum(new.kind_bytes(kind) for kind in new.kinds),
        moved_bytes=sum(move.moves_bytes * len(move.ranks) for move in ranks),
        most_moved_bytes=most,
        moved_by_kind={kind: size for kind, size in by_kind.items() if size > 0},
        ranks=tuple(sorted(ranks, key=lambda move: move.ranks)),
        move_time_s=_time(most, after, cluster),
        resharding=tuple(_resharding(before, after)),
        notes=("tied parameters count once on each stage that holds a copy",) if graph.tied else (),
    )


def _check(plan: Plan, graph: ModelGraph, name: str) -> None:
    found = []
    units = sum(stage.num_units for stage in plan.pipelines[0].stages)
    if units != graph.num_units():
        message = f"the plan places {units} units, the model has {graph.num_units()}"
        found.append(Violation(code="another_model", message=message, loc=(name,), actual=units, allowed=[graph.num_units()]))
    if any(stage.mesh.ep > 1 for pipeline in plan.pipelines for stage in pipeline.stages):
        found.append(Violation(code="experts_not_followed", message="ep > 1: moves of experts are not followed", loc=(name,)))
    if found:
        raise InvalidInput(found, subject=f"plan '{name}'")


# --- what a rank holds ----------------------------------------------------------------------------------------------

Interval = tuple[float, float]
Box = dict[int, Interval]


@dataclass(frozen=True)
class _Place:
    """A rank's position in one pipeline rank: the stages there, its dp and tp coordinates."""

    stages: tuple[Stage, ...]
    dp: int
    tp: int


class _Holding:
    """Who holds what under one plan."""

    def __init__(self, plan: Plan, graph: ModelGraph, workload: TrainingSpec) -> None:
        self.plan, self.graph = plan, graph
        self.kinds = [kind for kind in state_kinds(workload.precision, workload.optimizer) if kind.what in _KEPT]
        self.block_of_unit = [segment.block for segment, _ in graph.units()]

    @cached_property
    def places(self) -> dict[int, _Place]:
        found: dict[int, _Place] = {}
        for pipeline in self.plan.pipelines:
            for devices in pipeline.ranks():
                stages = tuple(stage for stage in pipeline.stages if stage.devices == devices)
                mesh = stages[0].mesh
                for index, device in enumerate(devices):
                    found[device] = _Place(stages, index // (mesh.cp * mesh.tp), index % mesh.tp)
        return found

    def stage_of(self, place: _Place, unit: int) -> Stage | None:
        return next((stage for stage in place.stages if stage.first_unit <= unit < stage.first_unit + stage.num_units), None)

    def kind_bytes(self, kind: StateKind) -> float:
        params = self.graph.num_params(trainable_only=kind.what != "weights")
        return params * kind.bytes_per_param


def _states(old: _Holding, new: _Holding, rank: int) -> Iterable[tuple[str, float, float]]:
    """(kind, bytes that the rank needs, bytes of them that it holds already)."""
    place, had = new.places[rank], old.places.get(rank)
    pairs: Counter[tuple[str, int, int]] = Counter()
    for index, stage in enumerate(place.stages):
        for unit in range(stage.first_unit, stage.first_unit + stage.num_units):
            before = old.stage_of(had, unit) if had is not None else None
            pairs[(new.block_of_unit[unit], index, had.stages.index(before) if had and before else -1)] += 1
    for kind in new.kinds:
        needs = held = 0.0
        for (block, index, before_index), count in pairs.items():
            before_place = None if had is None or before_index < 0 else (had, had.stages[before_index])
            for need, have in _boxes(new.graph.block(block), kind, (place, place.stages[index]), before_place):
                needs, held = needs + count * need, held + count * have
        yield kind.what, needs, held


def _boxes(
    block: Block, kind: StateKind, new: tuple[_Place, Stage], old: tuple[_Place, Stage] | None
) -> Iterable[tuple[float, float]]:
    for param in block.params:
        if param.buffer or not (param.trainable or kind.what == "weights"):
            continue
        size = param.num_elements * kind.bytes_per_param
        box = _box(param.fqn, kind.what, *new)
        need = size * _volume(box)
        have = 0.0 if old is None else size * _volume(_cut(box, _box(param.fqn, kind.what, *old)))
        yield need, have


def _box(fqn: str, kind: str, place: _Place, stage: Stage) -> Box:
    shards = (stage.shard_group or stage.mesh.dp) if stage.zero >= SPLIT_FROM[kind] else 1
    return _box_of(stage.placements.get(fqn, "R"), stage.mesh.tp, place.tp, shards, place.dp % shards)


@cache
def _box_of(placement: str, tp: int, tp_index: int, shards: int, shard: int) -> Box:
    box: Box = {0: (0.0, 1.0)}
    match = _SPLIT.match(placement)
    if match:
        box[int(match[1])] = (tp_index / tp, (tp_index + 1) / tp)
    low, high = box[0]
    width = (high - low) / shards
    box[0] = (low + shard * width, low + (shard + 1) * width)
    return box


def _cut(first: Box, second: Box) -> Box:
    whole = (0.0, 1.0)
    cut: Box = {}
    for dim in first.keys() | second.keys():
        (low, high), (other_low, other_high) = first.get(dim, whole), second.get(dim, whole)
        cut[dim] = (max(low, other_low), max(max(low, other_low), min(high, other_high)))
    return cut


def _volume(box: Box) -> float:
    volume = 1.0
    for low, high in box.values():
        volume *= high - low
    return volume


# --- settings -------------------------------------------------------------------------------------------------------


def _settings(plan: Plan) -> dict[str, object]:
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    first = stages[0]
    shared: dict[str, object] = {
        "devices": plan.world_size,
        "pipelines": len(plan.pipelines),
        "pp": plan.pipelines[0].pp,
        "dp": _one(stage.mesh.dp for stage in stages),
        "cp": _one(stage.mesh.cp for stage in stages),
        "tp": _one(stage.mesh.tp for stage in stages),
        "zero": _one(stage.zero for stage in stages),
        "shard group": _one(stage.shard_group or stage.mesh.dp for stage in stages) if first.zero else None,
        "sequence parallel": _one(stage.sequence_parallel for stage in stages),
        "recompute": _one(_recompute(stage.recompute) for stage in stages),
        "units of the stages": [stage.num_units for stage in stages],
        "micro-batch": _one(pipeline.micro_batch for pipeline in plan.pipelines),
        "micro-batches": _one(pipeline.num_micro_batches for pipeline in plan.pipelines),
        "global batch": plan.global_batch,
        "sequence length": plan.seq_len,
        "schedule": plan.schedule.name if plan.pipelines[0].pp > 1 else None,
        "stages per rank": plan.schedule.stages_per_rank,
        "loss kernel": plan.loss_kernel or None,
        "devices left out": list(plan.unused_devices),
    }
    return shared


def _one(values: Iterable[object]) -> object:
    """The value that all share, or the list of them."""
    listed = list(values)
    return listed[0] if all(value == listed[0] for value in listed) else listed


def _recompute(runs: Iterable[RecomputeRun]) -> str:
    parts = {f"{run.mode.value}{':' + '+'.join(run.op_classes) if run.op_classes else ''}" for run in runs}
    return ", ".join(sorted(parts)) or "none"


def _changes(before: Plan, after: Plan) -> Iterable[Change]:
    old, new = _settings(before), _settings(after)
    for name, value in new.items():
        if old[name] != value:
            yield Change(what=name, before=old[name], after=value)
    devices = [[list(ranks) for ranks in pipeline.ranks()] for pipeline in before.pipelines]
    moved = [[list(ranks) for ranks in pipeline.ranks()] for pipeline in after.pipelines]
    if devices != moved and old["devices"] == new["devices"] and old["pp"] == new["pp"]:
        yield Change(what="devices of the pipeline ranks", before=devices, after=moved)


def _time(most: float, after: Plan, cluster: ClusterSpec | None) -> float | None:
    """Seconds of the fullest rank over its share of a node's uplink."""
    if cluster is None:
        return None
    group = cluster.nodes[0]
    link = group.inter or group.intra
    if link is None:
        return None
    share = group.devices_per_node or 1 if group.inter else 1
    return most / (link.bandwidth_bytes_per_s / share)


def _resharding(before: Plan, after: Plan) -> Iterable[Resharding]:
    """What the frameworks' own checkpoint formats do with the change."""
    old, new = _settings(before), _settings(after)
    split = any(old[name] != new[name] for name in ("tp", "pp", "units of the stages"))
    sharded = any(old[name] != new[name] for name in ("dp", "zero", "shard group"))
    same = "the same layout loads as it is"
    dcp = "distributed checkpoints (torch.distributed.checkpoint) reshard when they load" if split or sharded else same
    yield Resharding(framework="torchtitan", loads=True, how=dcp)
    yield Resharding(framework="accelerate (FSDP, SHARDED_STATE_DICT)", loads=True, how=dcp)
    megatron = "--ckpt-format torch_dist reshards tp, pp and dp when it loads; the legacy 'torch' format does not"
    yield Resharding(framework="megatron", loads=True, how=megatron if split or sharded else same)
    universal = "convert once with ds_to_universal.py, then load as universal checkpoint"
    yield Resharding(framework="deepspeed", loads=not (split or sharded), how=universal if split or sharded else same)
    tp_changes = old["tp"] != new["tp"]
    nanotron = (
        "a change of tp does not load: convert the weights, the optimizer starts anew" if tp_changes else "dp and pp may change"
    )
    yield Resharding(framework="nanotron", loads=not tp_changes, how=nanotron)
