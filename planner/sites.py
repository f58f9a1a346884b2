"""Where a stage sits: its devices, the shapes of its groups, and how much memory it may fill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.layout import Pool
from simulator.cost_model import CostModel
from simulator.exchange import WHOLE, Split
from simulator.network import GroupShape
from simulator.rank_memory import baseline_bytes
from specs.cluster import DevicePlace


@dataclass(frozen=True, slots=True)
class Degrees:
    """How a stage's devices are split: the degrees of :class:`specs.plan.Mesh` but dp, and the shard group."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    whole_experts: bool = False
    shard_group: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """What the prices of a stage's units depend on: device type with slowdown, how its tp group lies, and its other axes."""

    device: tuple[str, float]
    tp_shape: GroupShape
    split: Split = WHOLE


@dataclass(frozen=True, slots=True)
class Site:
    """One stage's place. ``devices``: its device types, each with its largest slowdown factor. ``dp_shape``: ranks that sum their
    gradients, dp and cp together; ``expert_shape``: those that hold the same experts, where these are spread. ``budget_bytes``:
    peak memory that the job may allocate on its smallest device. ``last_device`` stands for the stage in point-to-point messages.
    ``whole``: it is the only stage, so tied parameters are on it once."""

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
    split: Split = WHOLE
    expert_shape: GroupShape | None = None

    @property
    def expert_degree(self) -> int:
        """Ranks over which the states of the rank's experts are sharded."""
        if self.expert_shape is None:
            return self.shard_shape.size
        return max(1, min(self.expert_shape.size, self.shard_shape.size))


def sites(model: CostModel, pool: Pool, degrees: Degrees, *, pp: int) -> list[Site]:
    """The site of each pipeline rank of a layout. Those of a uniform pool that lie on the nodes alike share one computation."""
    size = pool.size // pp
    first = _site(model, pool, 0, size, degrees, whole=pp == 1)
    found = [first]
    for rank in range(1, pp):
        if alike(pool, pp):
            found.append(_moved(first, pool.devices[rank * size], pool.devices[(rank + 1) * size - 1]))
        else:
            found.append(_site(model, pool, rank, size, degrees))
    return found


def _moved(site: Site, first_device: int, last_device: int) -> Site:
    return Site(
        site.devices, site.tp_shape, site.dp_shape, site.shard_shape, site.replica_shape, site.budget_bytes, site.capacity_bytes,
        first_device, last_device, split=site.split, expert_shape=site.expert_shape,
    )  # fmt: skip


def first_site(model: CostModel, pool: Pool, degrees: Degrees, *, pp: int) -> Site:
    """The site of pipeline rank 0."""
    return _site(model, pool, 0, pool.size // pp, degrees, whole=pp == 1)


def alike(pool: Pool, pp: int) -> bool:
    """Whether all pipeline ranks lie on the nodes in the same way."""
    if not pool.uniform:
        return False
    size, nodes = pool.size // pp, pool.node_size
    return nodes is not None and (size % nodes == 0 or nodes % size == 0)


def _site(model: CostModel, pool: Pool, rank: int, size: int, degrees: Degrees, *, whole: bool = False) -> Site:
    places = pool.stage_places(rank, size)
    shape = _shapes(model, pool, places)
    tp, cp, ep = degrees.tp, degrees.cp, degrees.ep
    replicas = size // tp
    group = (degrees.shard_group or replicas // cp) * cp
    slowdowns = _slowdowns(pool, places)
    kinds = {(place.group, place.device) for place in (places[:1] if pool.uniform else places)}
    among = 1 if degrees.whole_experts else tp  # how far apart the ranks are over which experts are spread
    split = WHOLE
    if cp > 1 or ep > 1:
        software = model.software
        split = Split(
            shape(tp, cp) if cp > 1 else None, shape(among, ep) if ep > 1 else None, software.cp_ring, degrees.whole_experts,
            software.sends_tokens_once,
        )  # fmt: skip
    return Site(
        devices=slowdowns, tp_shape=shape(1, tp), dp_shape=shape(tp, replicas), shard_shape=shape(tp, group),
        replica_shape=shape(tp * group, replicas // group),
        budget_bytes=min(budget_bytes(model, group_, device) for group_, device in kinds),
        capacity_bytes=min(capacity_bytes(model, group_, device) for group_, device in kinds),
        first_device=places[0].rank, last_device=places[-1].rank, whole=whole, split=split,
        expert_shape=shape(among * ep, size // (among * ep)) if ep > 1 else None,
    )  # fmt: skip


def _slowdowns(pool: Pool, places: Sequence[DevicePlace]) -> tuple[tuple[str, float], ...]:
    if pool.uniform:
        return ((places[0].device, 1.0),)
    found: dict[str, float] = {}
    for place in places:
        found[place.device] = max(found.get(place.device, 1.0), place.slowdown)
    return tuple(sorted(found.items()))


def _shapes(model: CostModel, pool: Pool, places: Sequence[DevicePlace]) -> Callable[[int, int], GroupShape]:
    """(stride, count) -> shape of the group of every stride-th of ``places``, from the first. On equal nodes a stride that divides
    a node, or is whole nodes, needs no list of ranks."""
    node = pool.node_size
    regular = pool.uniform and node is not None and not model.cluster.pair_links and len(places) in (1, *_whole(node, len(places)))

    def shape(stride: int, count: int) -> GroupShape:
        if count > 1 and regular and node is not None and (node % stride == 0 or stride % node == 0):
            group = places[0].group
            per_node = min(count, max(1, node // stride))
            across = -(-count * stride // node) if stride < node else count
            return GroupShape(count, per_node, across, group, model.cluster.nodes[group].devices_per_node or 1)
        return model.network.shape([place.rank for place in places[: stride * count : stride]])

    return shape


def _whole(node: int, size: int) -> tuple[int, ...]:
    """``size`` where it is whole nodes or an even part of one."""
    return (size,) if size % node == 0 or node % size == 0 else ()


def capacity_bytes(model: CostModel, group: int, device: str) -> float:
    """Memory of a device that a job may take: what is free where that is known."""
    total, free = model.device(device).memory_bytes, model.cluster.nodes[group].free_memory_bytes
    return total if free is None else min(free, total)


def budget_bytes(model: CostModel, group: int, device: str) -> float:
    """Peak that the job's own tensors may reach: capacity without the process baseline, less the allocator's margin."""
    return (capacity_bytes(model, group, device) - baseline_bytes(model, device)) / model.reserve_factor
