"""Where a stage sits: its devices, the shapes of its groups, and how much memory it may fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.layout import Pool
from simulator.cost_model import CostModel
from simulator.network import GroupShape
from simulator.rank_memory import baseline_bytes
from specs.cluster import DevicePlace


@dataclass(frozen=True, slots=True)
class Site:
    """One stage's place. ``devices``: its device types, each with its largest slowdown factor. ``budget_bytes``: peak memory that
    the job may allocate on its smallest device. ``last_device`` stands for the stage in point-to-point messages. ``whole``: it is
    the only stage, so tied parameters are on it once."""

    devices: tuple[tuple[str, float], ...]
    tp_shape: GroupShape
    dp_shape: GroupShape
    shard_shape: GroupShape
    replica_shape: GroupShape
    budget_bytes: float
    capacity_bytes: float
    first_device: int
    last_device: int
    whole: bool = False


def sites(model: CostModel, pool: Pool, *, pp: int, tp: int, shard_group: int | None = None) -> list[Site]:
    """The site of each stage of a layout. Stages of a uniform pool that lie on the nodes alike share one computation."""
    size = pool.size // pp
    nodes = sorted(set(pool.node_sizes))
    aligned = len(nodes) == 1 and (size % nodes[0] == 0 or nodes[0] % size == 0)
    first = _site(model, pool.stage_places(0, size), tp, shard_group, whole=pp == 1)
    found = [first]
    for stage in range(1, pp):
        places = pool.stage_places(stage, size)
        if pool.uniform and aligned:
            found.append(_moved(first, places))
        else:
            found.append(_site(model, places, tp, shard_group))
    return found


def _moved(site: Site, places: Sequence[DevicePlace]) -> Site:
    return Site(
        site.devices, site.tp_shape, site.dp_shape, site.shard_shape, site.replica_shape, site.budget_bytes, site.capacity_bytes,
        places[0].rank, places[-1].rank,
    )  # fmt: skip


def _site(model: CostModel, places: Sequence[DevicePlace], tp: int, shard_group: int | None, *, whole: bool = False) -> Site:
    ranks = [place.rank for place in places]
    dp_ranks = ranks[::tp]
    group = shard_group or len(dp_ranks)
    slowdowns: dict[str, float] = {}
    for place in places:
        slowdowns[place.device] = max(slowdowns.get(place.device, 1.0), place.slowdown)
    kinds = {(place.group, place.device) for place in places}
    shape = model.network.shape
    return Site(
        devices=tuple(sorted(slowdowns.items())),
        tp_shape=shape(ranks[:tp]), dp_shape=shape(dp_ranks),
        shard_shape=shape(dp_ranks[:group]), replica_shape=shape(dp_ranks[::group]),
        budget_bytes=min(budget_bytes(model, group_, device) for group_, device in kinds),
        capacity_bytes=min(capacity_bytes(model, group_, device) for group_, device in kinds),
        first_device=ranks[0], last_device=ranks[-1], whole=whole,
    )  # fmt: skip


def capacity_bytes(model: CostModel, group: int, device: str) -> float:
    """Memory of a device that a job may take: what is free where that is known."""
    total, free = model.device(device).memory_bytes, model.cluster.nodes[group].free_memory_bytes
    return total if free is None else min(free, total)


def budget_bytes(model: CostModel, group: int, device: str) -> float:
    """Peak that the job's own tensors may reach: capacity without the process baseline, less the allocator's margin."""
    return (capacity_bytes(model, group, device) - baseline_bytes(model, device)) / model.reserve_factor
