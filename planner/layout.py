"""Device grids: which devices take part, and which of them each stage owns.

A :class:`Pool` is an ordered choice of devices. Stages own consecutive devices of the pool; inside a stage the grid is
``dp x tp`` with tp fastest. So tp groups lie inside a node, data-parallel groups come next and pipelines cross nodes, the
order of Megatron (arXiv 2104.04473 §3.5); of unlike device types each stage gets one type wherever the sizes allow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations

from specs.cluster import ClusterSpec, DevicePlace

# Node counts of a group beyond which only powers of two and the full count are tried.
ALL_COUNTS_UP_TO = 8


@dataclass(frozen=True)
class Pool:
    """Devices that a plan uses, in the order in which stages take them. ``label`` says it in words."""

    places: tuple[DevicePlace, ...]
    label: str

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.places)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Global device numbers."""
        return tuple(place.rank for place in self.places)

    @cached_property
    def node_sizes(self) -> tuple[int, ...]:
        """Devices used of each node, in order."""
        counts: dict[int, int] = {}
        for place in self.places:
            counts[place.node] = counts.get(place.node, 0) + 1
        return tuple(counts.values())

    @cached_property
    def node_size(self) -> int | None:
        """Devices used of each node where that is one number, else ``None``."""
        sizes = set(self.node_sizes)
        return sizes.pop() if len(sizes) == 1 else None

    @cached_property
    def device_types(self) -> tuple[str, ...]:
        """The device types in it, in order."""
        return tuple(dict.fromkeys(place.device for place in self.places))

    @cached_property
    def uniform(self) -> bool:
        """Whether all devices are of one node group and none is slowed down."""
        return len({place.group for place in self.places}) == 1 and all(place.slowdown == 1.0 for place in self.places)

    def stage_places(self, stage: int, stage_size: int) -> tuple[DevicePlace, ...]:
        """The devices of one stage."""
        return self.places[stage * stage_size : (stage + 1) * stage_size]


def whole_cluster(cluster: ClusterSpec) -> Pool:
    """All devices in rank order."""
    return Pool(tuple(cluster.device_table()), "all devices")


def pools(cluster: ClusterSpec, max_devices: int | None = None) -> list[Pool]:
    """The device choices that a search tries, largest first: groups of nodes alone and together, fewer nodes, parts of one node (of
    small groups), and the healthy nodes without those that hold slow devices."""
    table = cluster.device_table()
    found: dict[tuple[int, ...], Pool] = {}
    for pool in [*_together(cluster, table), *_single_groups(cluster, table), *_without_slow(table)]:
        if pool.size and (max_devices is None or pool.size <= max_devices):
            found.setdefault(pool.devices, pool)
    if max_devices is not None and max_devices < len(table):
        cut = Pool(tuple(table[:max_devices]), f"the first {max_devices} devices")
        found.setdefault(cut.devices, cut)
    return sorted(found.values(), key=lambda pool: (-pool.size, pool.devices))


def _together(cluster: ClusterSpec, table: Sequence[DevicePlace]) -> Iterator[Pool]:
    """Two or more node groups with all their nodes, in several orders (the order of the stages)."""
    indices = range(len(cluster.nodes))
    for count in range(len(cluster.nodes), 1, -1):
        for subset in combinations(indices, count):
            orders: Iterable[tuple[int, ...]] = permutations(subset) if count <= 3 else (subset, subset[::-1])
            for order in orders:
                places = tuple(place for group in order for place in table if place.group == group)
                yield Pool(places, " then ".join(_group_name(cluster, group) for group in order))


def _group_name(cluster: ClusterSpec, index: int) -> str:
    group = cluster.nodes[index]
    return f"{group.count} x {group.devices_per_node} {group.device}"


def _single_groups(cluster: ClusterSpec, table: Sequence[DevicePlace]) -> Iterator[Pool]:
    for index, group in enumerate(cluster.nodes):
        places = [place for place in table if place.group == index]
        per_node = group.devices_per_node or 1
        for count in _node_counts(group.count):
            yield Pool(tuple(places[: count * per_node]), f"{count} x {per_node} {group.device}")
        for part in range(per_node - 1 if group.count <= ALL_COUNTS_UP_TO else 0, 0, -1):
            yield Pool(tuple(places[:part]), f"{part} of {per_node} {group.device} of one node")


def _node_counts(count: int) -> list[int]:
    if count <= ALL_COUNTS_UP_TO:
        return list(range(count, 0, -1))
    return [count, *(2**power for power in range(count.bit_length() - 1, -1, -1) if 2**power < count)]


def _without_slow(table: Sequence[DevicePlace]) -> Iterator[Pool]:
    slow_nodes = {place.node for place in table if place.slowdown > 1}
    if not slow_nodes:
        return
    yield Pool(tuple(place for place in table if place.node not in slow_nodes), "all nodes without slow devices")
    yield Pool(tuple(place for place in table if place.slowdown == 1), "all devices that are not slow")
