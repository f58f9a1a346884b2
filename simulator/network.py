"""Time of collectives: by group shape over the link tiers, from measured curves where there are any.

Legend: S bytes of the full (unsharded) tensor, n ranks, k ranks per node, N = n / k nodes, B bandwidth [B/s], a latency [s].

Ring all-reduce        2 (n-1)/n S / B + a; all-gather and reduce-scatter half the bytes; all-to-all (n-1)/n S / B
Over nodes, NCCL       rings and trees in NCCL's protocols (``simulator.nccl``)
Over nodes, gloo       reduce-scatter inside the node on S, all-reduce between nodes on S / k, all-gather inside
Point to point         a + S / B

A node's uplink is shared by all groups that cross it at once: a group with k ranks per node gets k / devices-per-node of it
(every device of the node belongs to some such group). Sources: NCCL's ring and hierarchical algorithms; Thakur et al. 2005.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from profiler.interpolate import CollectiveTable, curve
from simulator.factors import UNCALIBRATED, Factors
from simulator.nccl import line_rate_share, ring_s
from specs.base import Provenance
from specs.cluster import ClusterSpec, DevicePlace, Link, NodeGroup, PairLink
from specs.profile import Profile

# Size at which a collective inside a node runs at its bandwidth, and the start-up time of an all-reduce over two nodes of a
# low-latency network, which NCCL's constants already hold.
LARGE_BYTES = 512e6
USUAL_LATENCY_S = 40e-6
# Share of the bytes S that passes through a rank's link, times n/(n-1).
VOLUME = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "broadcast": 1.0, "p2p": 1.0}


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How a group lies on the nodes. ``group``: index of the node group whose links it uses (the slowest, if several).

    ``pair_*``: the slowest link between two nodes next to each other in the group, where the cluster names such pairs.
    """

    size: int
    per_node: int
    num_nodes: int
    group: int
    devices_per_node: int
    pair_bandwidth_bytes_per_s: float | None = None
    pair_latency_s: float = 0.0

    @property
    def tier(self) -> str:
        """The slowest link it crosses."""
        return "intra" if self.num_nodes == 1 else "inter"


@dataclass(frozen=True, slots=True)
class Priced:
    """Seconds and where they come from."""

    seconds: float
    source: Provenance


class Network:
    """Prices collectives of a resolved cluster."""

    def __init__(self, cluster: ClusterSpec, profile: Profile | None = None, factors: Factors = UNCALIBRATED) -> None:
        self.cluster, self.factors = cluster, factors
        self.places: list[DevicePlace] = cluster.device_table()
        self.table = CollectiveTable(profile) if profile is not None and profile.collectives else None
        self._pairs = {frozenset((link.node_a, link.node_b)): link for link in cluster.pair_links}
        self._cache: dict[tuple[str, float, GroupShape], Priced] = {}

    def shape(self, ranks: Sequence[int]) -> GroupShape:
        """Shape of the group of these devices."""
        return self._shape(tuple(ranks))

    @lru_cache(maxsize=65536)  # noqa: B019  (a Network lives as long as one search)
    def _shape(self, ranks: tuple[int, ...]) -> GroupShape:
        per_node: dict[int, int] = {}
        for rank in ranks:
            node = self.places[rank].node
            per_node[node] = per_node.get(node, 0) + 1
        groups = {self.places[rank].group for rank in ranks}
        slowest = min(groups, key=lambda index: self._uplink(self.cluster.nodes[index]).bandwidth_bytes_per_s)
        pair = self._slowest_pair(sorted(per_node))
        return GroupShape(
            len(ranks), max(per_node.values()), len(per_node), slowest, self.cluster.nodes[slowest].devices_per_node or 1,
            pair.bandwidth_bytes_per_s if pair else None, (pair.latency_s or 0.0) if pair else 0.0,
        )  # fmt: skip

    def _slowest_pair(self, nodes: list[int]) -> PairLink | None:
        """The slowest named link on the ring through ``nodes``."""
        steps = {frozenset((nodes[index - 1], node)) for index, node in enumerate(nodes) if len(nodes) > 1}
        found = [self._pairs[step] for step in steps if step in self._pairs]
        return min(found, key=lambda link: link.bandwidth_bytes_per_s) if found else None

    def _uplink(self, group: NodeGroup) -> Link:
        if group.inter is not None:
            return group.inter
        assert group.intra is not None  # resolve_cluster fills both links
        return group.intra

    def collective(self, op: str, size_bytes: float, shape: GroupShape) -> Priced:
        """Time of one collective on ``size_bytes`` (the full tensor's bytes; p2p: the message's)."""
        if shape.size == 1 or size_bytes <= 0:
            return Priced(0.0, Provenance.MEASURED)
        key = (op, size_bytes, shape)
        if key not in self._cache:
            found = self._price(op, size_bytes, shape)
            self._cache[key] = Priced(found.seconds * self.factors.of_link(shape.tier), found.source)
        return self._cache[key]

    def p2p(self, size_bytes: float, source: int, target: int) -> Priced:
        """Time of one message between two devices."""
        return self.collective("p2p", size_bytes, self.shape((source, target)))

    def _price(self, op: str, size_bytes: float, shape: GroupShape) -> Priced:
        if self.table is not None:
            found = self.table.lookup(op, shape.size, shape.tier, size_bytes)
            if found is not None:
                return Priced(found[0], found[1])
        group = self.cluster.nodes[shape.group]
        intra, inter = group.intra, self._uplink(group)
        assert intra is not None
        if shape.num_nodes == 1:
            return self._one_tier(op, size_bytes, shape.size, intra, intra.bandwidth_bytes_per_s)
        uplink = inter.bandwidth_bytes_per_s / self.cluster.oversubscription
        if shape.pair_bandwidth_bytes_per_s is not None:
            uplink = min(uplink, shape.pair_bandwidth_bytes_per_s)
            inter = inter.replace(latency_s=max(inter.latency_s, shape.pair_latency_s))
        share = uplink * shape.per_node / shape.devices_per_node
        if op == "p2p":
            rate = share if self.cluster.backend == "gloo" else share * line_rate_share(inter.kind)
            return Priced(inter.latency_s + size_bytes / rate, Provenance.FITTED)
        if op == "all_to_all":
            return self._all_to_all(size_bytes, shape, intra, inter, share)
        if self.cluster.backend == "gloo":
            return self._two_level(op, size_bytes, shape, intra, inter, share)
        return self._nccl(op, size_bytes, shape, intra, inter, share)

    def _nccl(self, op: str, size_bytes: float, shape: GroupShape, intra: Link, inter: Link, share: float) -> Priced:
        """NCCL's rings and trees over the nodes, see ``simulator.nccl``."""
        inside = math.inf
        if shape.per_node > 1:
            large = LARGE_BYTES
            seconds = self._one_tier(op, large, shape.per_node, intra, intra.bandwidth_bytes_per_s).seconds
            inside = VOLUME[op] * (shape.per_node - 1) / shape.per_node * large / seconds
        through = share * line_rate_share(inter.kind)
        extra_hop_s = max(0.0, inter.latency_s - USUAL_LATENCY_S) / 4
        seconds = ring_s(op, size_bytes, VOLUME[op], shape.size, shape.num_nodes, inside, through, extra_hop_s)
        return Priced(seconds, Provenance.FITTED)

    def _one_tier(self, op: str, size_bytes: float, n: int, link: Link, bandwidth: float) -> Priced:
        measured = next((item for item in link.curves if item.op == op and item.group_size == n), None)
        if measured is not None:
            sizes, times = [p.size_bytes for p in measured.points], [p.time_s for p in measured.points]
            return Priced(curve(sizes, times)(size_bytes)[0], Provenance.PUBLISHED)
        if op == "p2p":
            return Priced(link.latency_s + size_bytes / bandwidth, Provenance.FITTED)
        bus = link.allreduce_bus_bandwidth_bytes_per_s if op == "all_reduce" else None
        latency = link.latency_s * math.log2(n) / 3 if n > 1 else 0.0  # the catalogue's latency is that of 8 ranks
        seconds = latency + VOLUME[op] * (n - 1) / n * size_bytes / min(bus or bandwidth * 0.8, bandwidth)
        return Priced(seconds, Provenance.FITTED)

    def _all_to_all(self, size_bytes: float, shape: GroupShape, intra: Link, inter: Link, share: float) -> Priced:
        outside = size_bytes * (shape.size - shape.per_node) / shape.size
        inside = size_bytes * (shape.per_node - 1) / shape.size
        through = max(outside * shape.per_node / share, inside / intra.bandwidth_bytes_per_s)
        return Priced(inter.latency_s + through, Provenance.FITTED)

    def _two_level(self, op: str, size_bytes: float, shape: GroupShape, intra: Link, inter: Link, share: float) -> Priced:
        k, nodes = shape.per_node, shape.num_nodes
        between = inter.latency_s * (1 + math.log2(nodes)) / 2 + VOLUME[op] * (nodes - 1) / nodes * size_bytes / (share * 0.9)
        if k == 1:
            return Priced(between, Provenance.FITTED)
        inside_ops = ("reduce_scatter", "all_gather") if op == "all_reduce" else (op,)
        inside = sum(self._one_tier(item, size_bytes, k, intra, intra.bandwidth_bytes_per_s).seconds for item in inside_ops)
        return Priced(inside + between, Provenance.FITTED)
