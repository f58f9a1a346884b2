"""What one stage of a plan costs on one of its ranks: units priced, parameters counted, groups laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from simulator.cost_model import CostModel, UnitParams
from simulator.exchange import WHOLE, Split
from simulator.network import GroupShape
from simulator.unit_cost import RecomputeChoice, UnitCost
from specs.graph import DTYPE_BYTES
from specs.plan import Pipeline, Plan, Stage


@dataclass(frozen=True)
class StageCost:
    """A stage on its slowest rank. Units are in model order; ``slowdown`` >= 1 multiplies compute times.

    ``tied_owner``: the unit whose ``tied_params`` another unit of the stage uses as well (``None``: none here).
    """

    stage: Stage
    device: str
    slowdown: float
    units: tuple[UnitCost, ...]
    params: tuple[UnitParams, ...]
    tp_shape: GroupShape
    shard_shape: GroupShape
    replica_shape: GroupShape
    dp_shape: GroupShape
    weight_bytes: float
    grad_bytes: float
    state_bytes: float
    has_master: bool
    reduce_bytes: float = 0.0
    frozen_bytes: float = 0.0
    tied_owner: int | None = None
    tied_params: float = 0.0
    expert_shape: GroupShape | None = None

    @property
    def shard_degree(self) -> int:
        """Ranks over which states are sharded (1 with zero 0)."""
        return self.shard_shape.size if self.stage.zero > 0 else 1

    @property
    def expert_degree(self) -> int:
        """Ranks over which the states of the rank's experts are sharded: those that hold the same experts."""
        if self.expert_shape is None or self.stage.zero == 0:
            return self.shard_degree
        return max(1, min(self.expert_shape.size, self.shard_degree))

    def share(self, unit: UnitParams) -> float:
        """Share of a unit's trainable parameters whose states this rank keeps."""
        if not unit.trainable or not unit.expert:
            return 1.0 / self.shard_degree
        dense = (unit.trainable - unit.expert) / self.shard_degree
        return (dense + unit.expert / self.expert_degree) / unit.trainable

    @cached_property
    def state_share(self) -> float:
        """The same over the whole stage."""
        if not self.num_trainable:
            return 1.0 / self.shard_degree
        return sum(item.trainable * self.share(item) for item in self.params) / self.num_trainable

    @cached_property
    def num_trainable(self) -> float:
        """Local trainable parameters before sharding over dp."""
        return sum(item.trainable for item in self.params)

    @cached_property
    def local_weight_bytes(self) -> float:
        """Bytes of all local parameters, gathered."""
        return sum(self.unit_weight_bytes(index) for index in range(len(self.params)))

    def unit_weight_bytes(self, index: int) -> float:
        """Bytes of a unit's gathered parameters."""
        return self.params[index].trainable * self.weight_bytes + self.params[index].frozen * self.frozen_bytes

    def unit_grad_bytes(self, index: int) -> float:
        """Bytes of a unit's full gradients."""
        return self.params[index].trainable * self.grad_bytes

    def unit_reduce_parts(self, index: int) -> tuple[float, float]:
        """The same: of what all of dp holds, and of the rank's experts."""
        unit = self.params[index]
        return (unit.trainable - unit.expert) * self.reduce_bytes, unit.expert * self.reduce_bytes

    def unit_reduce_bytes(self, index: int) -> float:
        """Bytes of a unit's full gradients as they are sent."""
        return self.params[index].trainable * self.reduce_bytes


def axis_ranks(stage: Stage, axis: str) -> tuple[int, ...]:
    """Devices of the group along ``axis`` that contains the stage's first device (grid dp x cp x tp, tp fastest)."""
    mesh = stage.mesh
    if axis == "tp":
        return stage.devices[: mesh.tp]
    if axis == "cp":
        return stage.devices[: mesh.cp * mesh.tp : mesh.tp]
    return stage.devices[:: mesh.cp * mesh.tp]


def shard_ranks(stage: Stage) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ranks that share one set of shards, ranks that hold replicas of the same shard)."""
    ranks = gradient_ranks(stage)
    size = (stage.shard_group or stage.mesh.dp) * stage.mesh.cp
    return ranks[:size], ranks[::size]


def gradient_ranks(stage: Stage) -> tuple[int, ...]:
    """Ranks that hold the same parameters (experts aside) and sum their gradients: dp and cp together."""
    return stage.devices[:: stage.mesh.tp]


def expert_ranks(stage: Stage) -> tuple[int, ...]:
    """Ranks over which the stage's experts are spread, those that share experts a multiple of ep apart."""
    return stage.devices if stage.mesh.whole_experts else gradient_ranks(stage)


def split_of(model: CostModel, stage: Stage) -> Split:
    """The stage's context and expert parallelism as a unit's price takes it."""
    mesh = stage.mesh
    if mesh.cp == 1 and mesh.ep == 1:
        return WHOLE
    cp = model.network.shape(axis_ranks(stage, "cp")) if mesh.cp > 1 else None
    ep = model.network.shape(expert_ranks(stage)[: mesh.ep]) if mesh.ep > 1 else None
    return Split(cp, ep, model.software.cp_ring, mesh.whole_experts, model.software.sends_tokens_once)


def stage_cost(model: CostModel, plan: Plan, pipeline: Pipeline, stage: Stage) -> StageCost:
    """Price every unit of ``stage`` at its micro-batch on its slowest device."""
    places = [model.network.places[device] for device in stage.devices]
    tp_shape = model.network.shape(axis_ranks(stage, "tp"))
    split = split_of(model, stage)
    batch = max(stage.batch_share) if stage.batch_share else pipeline.micro_batch
    priced: dict[str, tuple[float, tuple[UnitCost, ...]]] = {}
    wanted = [(model.unit_blocks[unit], recompute_choice(stage, unit)) for unit in unit_range(stage)]
    for name in sorted({place.device for place in places}):
        known = {
            (block, recompute): model.unit(
                block, device=name, tp_shape=tp_shape, sequence_parallel=stage.sequence_parallel, batch=batch, recompute=recompute,
                split=split,
            )
            for block, recompute in dict.fromkeys(wanted)
        }  # fmt: skip
        units = tuple(known[item] for item in wanted)
        slow = max(place.slowdown for place in places if place.device == name)
        priced[name] = (slow * sum(unit.total_forward_s + unit.total_backward_s for unit in units), units)
    slowest = max(priced, key=lambda name: priced[name][0])
    shard, replica = shard_ranks(stage)
    weight, grad, states = model.state_bytes_per_param
    whole = stage.num_units == model.num_units  # then tied parameters are there once
    mesh = stage.mesh
    held = {
        block: model.params(block, mesh.tp, mesh.ep, whole_experts=mesh.whole_experts, with_owner=whole)
        for block in dict.fromkeys(block for block, _ in wanted)
    }
    params = tuple(held[block] for block, _ in wanted)
    return StageCost(
        stage=stage, device=slowest, slowdown=max(place.slowdown for place in places if place.device == slowest),
        units=priced[slowest][1],
        params=params, tied_owner=model.tied_owner_unit if whole else None,
        tied_params=sum(item.tied_alias for item in params) if whole else 0.0,
        tp_shape=tp_shape, shard_shape=model.network.shape(shard), replica_shape=model.network.shape(replica),
        dp_shape=model.network.shape(gradient_ranks(stage)), weight_bytes=weight, grad_bytes=grad, state_bytes=states,
        has_master=model.precision.master_dtype is not None, reduce_bytes=DTYPE_BYTES[model.precision.reduce_dtype],
        expert_shape=model.network.shape(expert_ranks(stage)[:: stage.mesh.ep]) if stage.mesh.ep > 1 else None,
        frozen_bytes=model.frozen_bytes_per_param,
    )  # fmt: skip


def recompute_choice(stage: Stage, unit: int) -> RecomputeChoice:
    """The recompute of a unit as the unit's price takes it."""
    run = stage.recompute_of(unit)
    return RecomputeChoice() if run is None else RecomputeChoice(run.mode, run.op_classes)


def unit_range(stage: Stage) -> range:
    """Unit numbers of the stage."""
    return range(stage.first_unit, stage.first_unit + stage.num_units)


def pipeline_stages(pipeline: Pipeline) -> list[list[int]]:
    """For each pipeline rank the stage numbers that it holds."""
    ranks: Sequence[tuple[int, ...]] = pipeline.ranks()
    return [[index for index, stage in enumerate(pipeline.stages) if stage.devices == devices] for devices in ranks]
