"""From a row's GPU and link columns to a resolved cluster of the catalogue's devices and node presets."""

from __future__ import annotations

import re
from functools import lru_cache

from planner.validate_runs.runs import PublishedRun, SkippedRun
from profiler.catalogue import list_devices, list_presets, resolve_cluster
from specs.base import InvalidInputValue
from specs.cluster import ClusterSpec, Link, NodeGroup
from specs.errors import InvalidInput
from specs.units import GB

# What tables call a device, where the catalogue's look-up does not know it or finds several: first match wins.
SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"a100.*pcie.*40|a100.*40.*pcie", "a100_pcie_40gb"),
    (r"a100.*pcie", "a100_pcie_80gb"),
    (r"a100.*40 ?gb(?!.*not stated)", "a100_sxm_40gb"),
    (r"a100", "a100_sxm_80gb"),
    (r"a800", "a800_sxm_80gb"),
    (r"h100.*96gb", "h100_sxm_96gb_hbm2e"),
    (r"h100.*nvl", "h100_nvl"),
    (r"h100.*pcie", "h100_pcie"),
    (r"h100", "h100_sxm"),
    (r"h800", "h800_sxm"),
    (r"gh200", "gh200_96gb"),
    (r"h200", "h200_sxm"),
    (r"h20\b", "h20"),
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300_sxm"),
    (r"b200", "b200_sxm"),
    (r"v100.*sxm3", "v100_sxm3_32gb"),
    (r"v100.*pcie", "v100_pcie_32gb"),
    (r"v100.*16", "v100_sxm2_16gb"),
    (r"v100", "v100_sxm2_32gb"),
    (r"mi250", "mi250x_gcd"),
    (r"trainium1.*neuroncore", "trainium1_core"),
    (r"4090", "rtx_4090"),
    (r"3090", "rtx_3090"),
    (r"a6000", "rtx_a6000"),
)
# Devices counted in units that the catalogue does not have.
OTHER_UNITS = {r"\btpu\b": "TPU slices are not laid out in nodes"}
# Devices of one NVLink domain of an NVL72 rack.
NVL72_DEVICES = 72
DEFAULT_DEVICES_PER_NODE = 8
# Networks named in a row's words, where they are no RDMA network: the kind that ``simulator.nccl`` knows.
NETWORKS = (("omni-path", "Omni-Path"), ("g4dn", "AWS TCP"), ("g5.", "AWS TCP"), ("ethernet", "Ethernet"), ("efa", "EFA"))
# Gbit/s per device between nodes where neither the row nor a preset of the device says: one NIC per device of its time.
DEFAULT_GBIT_S = {"volta": 25.0, "ampere": 200.0}
NEWER_GBIT_S = 400.0


def cluster_of(run: PublishedRun) -> tuple[ClusterSpec, tuple[str, ...]]:
    """The cluster that ran a row, and the assumptions behind it; raises :class:`SkippedRun` for an unknown device."""
    if run.num_gpus is None:
        raise SkippedRun("cluster_not_given", "the row does not give num_gpus")
    name = device_name(run.gpu)
    per_node = run.gpus_per_node or min(run.num_gpus, DEFAULT_DEVICES_PER_NODE)
    if "nvl72" in run.intra_link.lower():
        per_node = max(size for size in range(1, NVL72_DEVICES + 1) if run.num_gpus % size == 0)
    per_node = min(per_node, run.num_gpus)
    text = f"{run.intra_link} {run.notes}".lower()
    kind = next((kind for word, kind in NETWORKS if word in text), "")
    return _cluster(name, run.num_gpus, per_node, run.inter_link_gbps_per_gpu, "pcie" in run.intra_link.lower(), kind)


def device_name(text: str) -> str:
    """The catalogue's name of a device as tables write it; raises :class:`SkippedRun`."""
    lower = text.lower()
    for pattern, why in OTHER_UNITS.items():
        if re.search(pattern, lower):
            raise SkippedRun("device_not_in_catalogue", f"'{text}': {why}")
    for pattern, name in SPELLINGS:
        if re.search(pattern, lower):
            return name
    from profiler.library import library

    try:
        return library().find_device(text).name
    except InvalidInputValue as error:
        raise SkippedRun("device_not_in_catalogue", str(error)) from None


@lru_cache(maxsize=512)
def _cluster(
    device: str, num_devices: int, per_node: int, gbit_s_per_device: float | None, pcie: bool, network: str
) -> tuple[ClusterSpec, tuple[str, ...]]:
    assumed = []
    preset = None if pcie else _preset(device, per_node)
    nodes = -(-num_devices // per_node)
    group = NodeGroup(count=nodes, preset=preset, device=device, devices_per_node=per_node)
    resolved = _resolved(group)
    inter = resolved.nodes[0].inter
    if inter is None:
        raise SkippedRun("device_not_in_catalogue", f"no link between nodes of '{device}' is known")
    if gbit_s_per_device is None and preset is None and nodes > 1 and not pcie:
        arch = next(kind.arch for kind in resolved.device_types if kind.name == device).lower()
        gbit_s_per_device = DEFAULT_GBIT_S.get(arch, NEWER_GBIT_S)
        assumed.append(f"{gbit_s_per_device:.0f} Gbit/s per device between nodes, usual for its time")
    if gbit_s_per_device is not None:
        bandwidth = gbit_s_per_device * GB / 8 * per_node
        if bandwidth != inter.bandwidth_bytes_per_s:
            kind = network or (inter.kind if preset else "RDMA")
            link = Link(kind=kind, bandwidth_bytes_per_s=bandwidth, latency_s=inter.latency_s)
            resolved = _resolved(group.replace(inter=link))
    elif nodes > 1:
        assumed.append(f"{inter.bandwidth_bytes_per_s / per_node * 8 / GB:.0f} Gbit/s per device between nodes, the preset's")
    return resolved, tuple(assumed)


def _resolved(group: NodeGroup) -> ClusterSpec:
    try:
        return resolve_cluster(ClusterSpec(name="published run", nodes=(group,)))
    except InvalidInput as error:
        raise SkippedRun("device_not_in_catalogue", str(error)) from None


def _preset(device: str, per_node: int) -> str | None:
    """A node preset of that device: one of the same size, else the smallest that is larger."""
    fitting = [item for item in list_presets() if item.device == device and (item.devices_per_node or 0) >= per_node]
    if not fitting:
        return None
    return min(fitting, key=lambda item: ((item.devices_per_node or 0), list_presets().index(item))).name


def known_devices() -> list[str]:
    """Names of the catalogue's devices."""
    return [item.name for item in list_devices()]
