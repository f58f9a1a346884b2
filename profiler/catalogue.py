"""Device and node catalogue, and clusters completed from it: every field that a planner needs, with its provenance.

What nobody gave and no preset knows gets a stated default, marked ``assumed`` in the provenance of its field;
``assumptions`` lists those. Look-up rules: ``profiler.library``. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from profiler.library import Library, Paths, library
from specs.base import InvalidInputValue, Spec
from specs.catalogue import CatalogueDevice, CatalogueNode
from specs.cluster import ClusterSpec, DeviceType, Host, Link, NodeGroup
from specs.errors import InvalidInput, Violation
from specs.prediction import Assumption
from specs.units import GB, GIB, format_bytes

Found = TypeVar("Found")

# Defaults for what nobody gave and no preset knows. All are reported as assumptions.
ASSUMED_HOST_BYTES_PER_DEVICE = 64 * GIB
ASSUMED_HOST_BANDWIDTH_BYTES_PER_S = 200 * GB
ASSUMED_CORES_PER_DEVICE = 8
ASSUMED_UPLINK = Link(
    kind="Ethernet",
    bandwidth_bytes_per_s=12.5 * GB,
    latency_s=50e-6,
    provenance=dict.fromkeys(("bandwidth_bytes_per_s", "latency_s"), "assumed: 100 Gbit/s Ethernet, one NIC per node"),
)
ASSUMED_PROCESS_LINK = Link(
    kind="shared memory",
    bandwidth_bytes_per_s=1 * GB,
    latency_s=100e-6,
    provenance=dict.fromkeys(("bandwidth_bytes_per_s", "latency_s"), "assumed: processes on one host, gloo; profile to know"),
)
ASSUMED_PCIE_BYTES_PER_S = 16 * GB
ASSUMED_PCIE_LATENCY_S = 22e-6


def list_devices(catalogue: Paths = None) -> tuple[CatalogueDevice, ...]:
    """All known device types with aliases, notes and the source of each number."""
    return library(catalogue).devices()


def list_presets(catalogue: Paths = None) -> tuple[CatalogueNode, ...]:
    """All known node presets with aliases, notes and the source of each number."""
    return library(catalogue).nodes()


def device(name: str, catalogue: Paths = None) -> DeviceType:
    """The device type of that name or alias. Unknown or ambiguous: :class:`InvalidInput` with the candidates."""
    return _or_invalid(lambda: library(catalogue).find_device(name)).plain()


def node_preset(name: str, catalogue: Paths = None) -> NodeGroup:
    """The node preset of that name or alias as a group of one node, measured curves attached to its links."""
    known = library(catalogue)
    return _preset_group(known, _or_invalid(lambda: known.find_node(name)))


def _or_invalid(find: Callable[[], Found]) -> Found:
    try:
        return find()
    except InvalidInputValue as error:
        raise InvalidInput([error.violation(())], subject="catalogue") from None


def resolve_cluster(spec: ClusterSpec, catalogue: Paths = None) -> ClusterSpec:
    """The cluster with presets expanded, links, hosts and prices filled in, and every used device type described.

    Fields that ``spec`` gives win over a preset's; inline device types win over the catalogue's. Raises
    :class:`InvalidInput` with every violation. Resolving a resolved cluster changes nothing.
    """
    known = library(catalogue)
    violations: list[Violation] = []
    types = {item.name: item for item in spec.device_types}
    if len(types) != len(spec.device_types):
        violations.append(
            Violation(code="duplicate_device_type", message="two device types have the same name", loc=("device_types",))
        )
    groups = []
    for index, group in enumerate(spec.nodes):
        resolved = _resolve_group(known, group, types, ("nodes", index), violations)
        if resolved is not None:
            groups.append(resolved)
    violations += _pair_violations(spec)
    if violations:
        raise InvalidInput(violations, subject=f"cluster {spec.name}")
    return spec.replace(nodes=tuple(groups), device_types=tuple(types.values()))


def _resolve_group(
    known: Library,
    group: NodeGroup,
    types: dict[str, DeviceType],
    loc: tuple[str | int, ...],
    violations: list[Violation],
) -> NodeGroup | None:
    """One group resolved, or ``None`` after adding to ``violations``; adds its device type to ``types``."""
    try:
        preset = _preset_group(known, known.find_node(group.preset)) if group.preset is not None else None
    except InvalidInputValue as error:
        violations.append(error.violation((*loc, "preset")))
        preset = None
    name = group.device or (preset.device if preset else None)
    if name is None:
        if preset is not None:
            message = f"preset '{preset.preset}' names no device; give 'device'"
            violations.append(Violation(code="incomplete_preset", message=message, loc=(*loc, "preset"), actual=preset.preset))
        return None
    try:
        entry, kind = _device_of(known, name, types)
    except InvalidInputValue as error:
        violations.append(error.violation((*loc, "device")))
        return None
    if group.preset is not None and preset is None:
        return None
    types.setdefault(kind.name, kind)
    merged = _merged(known, group, preset, kind, entry)
    violations += _group_violations(merged, kind, loc)
    return merged


def _device_of(known: Library, name: str, types: Mapping[str, DeviceType]) -> tuple[CatalogueDevice | None, DeviceType]:
    """Catalogue entry (``None`` for one that is only inline) and device type; an inline type wins."""
    if name in types:
        try:
            return known.find_device(name), types[name]
        except InvalidInputValue:
            return None, types[name]
    entry = known.find_device(name)
    return entry, types.get(entry.name) or entry.plain()


def _preset_group(known: Library, entry: CatalogueNode) -> NodeGroup:
    group = entry.plain()
    changes: dict[str, Any] = {"preset": entry.name, "name": ""}
    if group.intra is not None and entry.intra_curves:
        changes["intra"] = group.intra.replace(curves=known.curves(entry.intra_curves))
    if group.inter is not None and entry.inter_curves:
        changes["inter"] = group.inter.replace(curves=known.curves(entry.inter_curves))
    return group.replace(**changes)


def _merged(
    known: Library, group: NodeGroup, preset: NodeGroup | None, kind: DeviceType, entry: CatalogueDevice | None
) -> NodeGroup:
    """``group`` over ``preset`` over the device's own link over the assumed defaults."""
    base = preset if preset is not None else NodeGroup(count=1)
    same_device = preset is not None and preset.device == kind.name
    count = group.devices_per_node or base.devices_per_node or 1
    provenance = {**(preset.provenance if preset else {}), **group.provenance}
    for name in ("devices_per_node", "nics_per_node", "price_usd_per_hour"):
        if getattr(group, name) is not None and name not in group.provenance:
            provenance.pop(name, None)
    price = group.price_usd_per_hour
    if price is None and same_device and count == base.devices_per_node:
        price = base.price_usd_per_hour
    if price is None:
        provenance.pop("price_usd_per_hour", None)
        if kind.price_usd_per_hour is not None:
            price = count * kind.price_usd_per_hour
            source = kind.provenance.get("price_usd_per_hour", "given")
            provenance["price_usd_per_hour"] = f"{source}; devices_per_node x device price"
    return group.replace(
        preset=preset.preset if preset else None,
        device=kind.name,
        devices_per_node=count,
        intra=group.intra or (base.intra if same_device else None) or _device_link(known, kind, entry),
        inter=group.inter or base.inter or ASSUMED_UPLINK,
        nics_per_node=group.nics_per_node or base.nics_per_node,
        host=_merged_host(group.host, base.host, count),
        price_usd_per_hour=price,
        provenance=provenance,
    )


def _device_link(known: Library, kind: DeviceType, entry: CatalogueDevice | None) -> Link:
    """The link between devices of one node where only the device is known."""
    if entry is not None and entry.peer_link is not None:
        return entry.peer_link.replace(curves=known.curves(entry.peer_curves))
    if kind.kind == "cpu_process":
        return ASSUMED_PROCESS_LINK
    if kind.host_link_bytes_per_s is not None:
        bandwidth, source = kind.host_link_bytes_per_s, "assumed: the device's host link, no link between devices known"
    else:
        bandwidth, source = ASSUMED_PCIE_BYTES_PER_S, "assumed: PCIe, no link of this device known"
    return Link(
        kind="PCIe",
        bandwidth_bytes_per_s=bandwidth,
        latency_s=ASSUMED_PCIE_LATENCY_S,
        provenance={"bandwidth_bytes_per_s": source, "latency_s": "assumed: as eight L40S on PCIe"},
    )


def _merged_host(given: Host, preset: Host, num_devices: int) -> Host:
    """Field by field: given, preset, assumed. NVMe is never assumed."""
    assumed = {
        "memory_bytes": (ASSUMED_HOST_BYTES_PER_DEVICE * num_devices, "assumed: 64 GiB of host memory per device"),
        "memory_bandwidth_bytes_per_s": (ASSUMED_HOST_BANDWIDTH_BYTES_PER_S, "assumed: one server socket"),
        "cores": (ASSUMED_CORES_PER_DEVICE * num_devices, "assumed: 8 cores per device"),
    }
    fields: dict[str, Any] = {}
    provenance: dict[str, str] = dict(given.provenance)
    for name in Host.model_fields:
        if name == "provenance":
            continue
        if (value := getattr(given, name)) is None:
            if (value := getattr(preset, name)) is not None:
                source = preset.provenance.get(name)
            else:
                value, source = assumed.get(name, (None, None))
            if source is not None:
                provenance[name] = source
        fields[name] = value
    return Host(**fields, provenance=provenance)


def _group_violations(group: NodeGroup, kind: DeviceType, loc: tuple[str | int, ...]) -> list[Violation]:
    found = []
    if group.free_memory_bytes is not None and not 0 < group.free_memory_bytes <= kind.memory_bytes:
        found.append(
            Violation(
                code="free_memory_above_total",
                message=f"{format_bytes(group.free_memory_bytes)} free of the {format_bytes(kind.memory_bytes)} of {kind.name}",
                loc=(*loc, "free_memory_bytes"),
                actual=group.free_memory_bytes,
                allowed=f"> 0, <= {kind.memory_bytes:.0f}",
                nearest=kind.memory_bytes,
            )
        )
    num_devices = group.count * (group.devices_per_node or 0)
    for index in group.slowdown:
        if not 0 <= index < num_devices:
            found.append(
                Violation(
                    code="slowdown_out_of_range",
                    message=f"the group has {num_devices} devices",
                    loc=(*loc, "slowdown", index),
                    actual=index,
                    allowed=f"0 to {num_devices - 1}",
                    nearest=min(max(index, 0), num_devices - 1),
                )
            )
    return found


def _pair_violations(spec: ClusterSpec) -> list[Violation]:
    found = []
    num_nodes = sum(group.count for group in spec.nodes)
    for index, pair in enumerate(spec.pair_links):
        for name in ("node_a", "node_b"):
            node = getattr(pair, name)
            if not 0 <= node < num_nodes:
                found.append(
                    Violation(
                        code="node_out_of_range",
                        message=f"the cluster has {num_nodes} nodes",
                        loc=("pair_links", index, name),
                        actual=node,
                        allowed=f"0 to {num_nodes - 1}",
                        nearest=min(max(node, 0), num_nodes - 1),
                    )
                )
        if pair.node_a == pair.node_b:
            message = f"a link of node {pair.node_a} to itself; what is inside a node stands in 'intra'"
            found.append(Violation(code="pair_of_one_node", message=message, loc=("pair_links", index)))
    return found


def assumptions(cluster: ClusterSpec) -> list[Assumption]:
    """Every number of a resolved cluster that is assumed or an uncertain datasheet value, once each.

    Links that nothing crosses (``intra`` of single-device nodes, ``inter`` of a single node) are left out.
    """
    found: dict[str, Assumption] = {}
    one_node = sum(group.count for group in cluster.nodes) == 1
    for index, group in enumerate(cluster.nodes):
        where = f"nodes[{index}]" + (f" ({group.preset or group.name})" if group.preset or group.name else "")
        parts: list[tuple[str, Spec | None]] = [(where, group), (f"{where}.host", group.host)]
        if group.devices_per_node != 1:
            parts.append((f"{where}.intra", group.intra))
        if not one_node:
            parts.append((f"{where}.inter", group.inter))
        for name, part in parts:
            found.update({item.what: item for item in _assumed(name, part)})
    for kind in cluster.device_types:
        found.update({item.what: item for item in _assumed(f"device {kind.name}", kind)})
    return list(found.values())


def _assumed(where: str, part: Spec | None) -> Iterator[Assumption]:
    for key, source in getattr(part, "provenance", {}).items():
        if source.startswith("assumed"):
            name, _, entry = key.partition(".")
            value = getattr(part, name, None)
            if entry and isinstance(value, dict):
                value = value.get(entry)
            yield Assumption(what=f"{where}.{key}", value=value, provenance=source)
