"""ClusterSpec: the devices, hosts and links that are there. SI inside; files may use human units (``specs.units``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from specs.base import Document, InvalidInputValue, InvalidInputValues, Provenance, Spec


class DeviceType(Spec):
    """One device SKU and form factor. Peaks are dense. ``None`` = not known (never zero)."""

    name: str
    vendor: str = ""
    arch: str = ""
    kind: str = Field(default="gpu", description="gpu | cpu_process")
    sm_count: int | None = None
    peak_flop_per_s: dict[str, float] = Field(
        default={}, description="dense peak by dtype: float32, tf32, bfloat16, float16, float8, float4"
    )
    matmul_flop_per_s: dict[str, float] = Field(
        default={}, description="measured matmul rate by dtype; best shape or sustained, as its provenance says"
    )
    memory_bytes: float = Field(gt=0)
    memory_bandwidth_bytes_per_s: float = Field(gt=0)
    l2_bytes: float | None = None
    host_link_bytes_per_s: float | None = Field(default=None, description="one direction, one device alone")
    tdp_w: float | None = None
    price_usd_per_hour: float | None = None
    provenance: dict[str, str] = Field(
        default={}, description="field -> 'measured | published | datasheet | fitted | assumed: source'"
    )


class CurvePoint(Spec):
    """One point of a message-size curve: time of one call on ``size_bytes`` (per-rank tensor, as nccl-tests 'size')."""

    size_bytes: float
    time_s: float


class CollectiveCurve(Spec):
    """Measured time of one collective on one tier by message size."""

    op: str = Field(description="all_reduce | all_gather | reduce_scatter | all_to_all | broadcast | p2p")
    group_size: int
    points: tuple[CurvePoint, ...]
    provenance: Provenance = Provenance.MEASURED


class Link(Spec):
    """A link tier. Bandwidth is one direction, per device (``intra``) or per node (``inter``).

    ``latency_s`` is the start-up time α of one small collective over the whole tier (``intra``: all devices of a node,
    ``inter``: two nodes), as a benchmark of the smallest size reads it; it is no per-hop figure.
    """

    kind: str = ""
    bandwidth_bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(ge=0)
    allreduce_bus_bandwidth_bytes_per_s: float | None = Field(default=None, description="measured peak bus bandwidth, if known")
    in_network_reduction: bool = False
    curves: tuple[CollectiveCurve, ...] = ()
    provenance: dict[str, str] = {}


class Host(Spec):
    """The host of a node."""

    memory_bytes: float | None = None
    memory_bandwidth_bytes_per_s: float | None = None
    cores: int | None = None
    nvme_bytes: float | None = None
    nvme_read_bytes_per_s: float | None = None
    nvme_write_bytes_per_s: float | None = None
    shared_copy_bytes_per_s: float | None = Field(
        default=None, description="host link of one device, one direction, while all devices of the node copy"
    )
    provenance: dict[str, str] = {}


class NodeGroup(Spec):
    """``count`` equal nodes. Either ``preset`` names a catalogue node (other fields override it), or ``device``,
    ``devices_per_node`` and ``intra`` say what is there."""

    name: str = ""
    preset: str | None = None
    count: int = Field(ge=1)
    device: str | None = None
    devices_per_node: int | None = Field(default=None, ge=1)
    intra: Link | None = None
    inter: Link | None = Field(default=None, description="the node's uplink, all NICs together, one direction")
    nics_per_node: int | None = Field(default=None, ge=1)
    host: Host = Host()
    free_memory_bytes: float | None = Field(
        default=None, description="usable device memory where less than the device's total is free"
    )
    slowdown: dict[int, float] = Field(default={}, description="device index within the group -> factor >= 1 on its compute time")
    price_usd_per_hour: float | None = Field(default=None, description="of one node")
    provenance: dict[str, str] = {}


class PairLink(Spec):
    """An override of the link between two nodes (by node index)."""

    node_a: int
    node_b: int
    bandwidth_bytes_per_s: float = Field(gt=0)
    latency_s: float | None = None


class Emulation(Spec):
    """How one machine stands for this cluster. Only the emulator reads it: what is predicted comes from measuring inside.

    ``slow_by``: ``quota`` gives each rank a share of its core (needs root), ``dilation`` has each rank sleep after its own compute.
    Uplinks and links between pairs of nodes are limited in both directions (needs root).
    """

    slow_by: Literal["quota", "dilation"] = "dilation"
    slowdown: dict[int, float] = Field(default={}, description="device -> how much slower than this machine; 1 where not named")
    uplink_bytes_per_s: dict[int, float] = Field(default={}, description="node -> rate of its uplink; not limited where not named")
    pair_links: tuple[PairLink, ...] = ()

    @property
    def has_links(self) -> bool:
        """Whether nodes are apart, with links of limited rate."""
        return bool(self.uplink_bytes_per_s or self.pair_links)


class ClusterSpec(Document):
    """A cluster. Devices are numbered node by node in the order of ``nodes``; that number is the global rank of a device."""

    kind: ClassVar[str] = "cluster"
    name: str
    nodes: tuple[NodeGroup, ...] = Field(min_length=1)
    device_types: tuple[DeviceType, ...] = Field(default=(), description="types not in the catalogue, or overriding it")
    oversubscription: float = Field(default=1.0, ge=1.0, description="aggregate uplink over core bandwidth")
    pair_links: tuple[PairLink, ...] = ()
    mean_time_between_failures_s: float | None = Field(default=None, description="of one device")
    backend: str = Field(default="nccl", description="nccl | gloo")
    profile: str | None = Field(default=None, description="content hash of the profile measured on this cluster, if any")
    emulation: Emulation | None = Field(default=None, description="made of one machine in this way; None: a cluster of its own")

    @model_validator(mode="after")
    def _described(self) -> ClusterSpec:
        broken = []
        for index, group in enumerate(self.nodes):
            if group.preset is None and (group.device is None or group.devices_per_node is None):
                message = f"node group {index} needs 'preset', or 'device' and 'devices_per_node'"
                broken.append(InvalidInputValue("incomplete_node_group", message, loc=("nodes", index)))
            for device, factor in group.slowdown.items():
                if not factor >= 1:
                    message = f"slowdown {factor} of node group {index} is below 1"
                    loc = ("nodes", index, "slowdown", device)
                    broken.append(
                        InvalidInputValue("slowdown_below_one", message, actual=factor, allowed=">= 1", nearest=1.0, loc=loc)
                    )
        InvalidInputValues.raise_any(broken)
        return self

    @property
    def num_devices(self) -> int:
        """All devices; needs node groups resolved (``devices_per_node`` known)."""
        return sum(group.count * (group.devices_per_node or 0) for group in self.nodes)

    def device_type(self, name: str) -> DeviceType:
        """The described type of that name (after ``profiler.catalogue.resolve_cluster`` every used type is described)."""
        for device in self.device_types:
            if device.name == name:
                return device
        known = [device.name for device in self.device_types]
        raise InvalidInputValue("unknown_device", f"device '{name}' is not described", actual=name, allowed=known)

    def device_table(self) -> list[DevicePlace]:
        """One entry per device in rank order."""
        places: list[DevicePlace] = []
        node_index = 0
        for group_index, group in enumerate(self.nodes):
            first = len(places)
            for _ in range(group.count):
                for local in range(group.devices_per_node or 0):
                    rank = len(places)
                    slowdown = group.slowdown.get(rank - first, 1.0)
                    places.append(DevicePlace(rank, node_index, group_index, local, group.device or "", slowdown))
                node_index += 1
        return places


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Where one device sits: global ``rank``, ``node``, node ``group``, ``local`` index, type name, slowdown factor."""

    rank: int
    node: int
    group: int
    local: int
    device: str
    slowdown: float = 1.0
