"""A cluster document from what people have at hand: a hostfile, ``nvidia-smi topo -m``, the output of nccl-tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from api.engine import Engine
from api.schemas import ClusterTextRequest
from specs.cluster import ClusterSpec, CollectiveCurve, Link, NodeGroup
from specs.errors import InvalidInput, Violation

Read = TypeVar("Read")


class _Reader:
    """Reads texts and keeps what is wrong with them, each at its own place."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def read(self, name: str, text: str | None, parse: Callable[[str], Read]) -> Read | None:
        if not text:
            return None
        try:
            return parse(text)
        except InvalidInput as error:
            self.violations += [replace(item, loc=(name, *item.loc)) for item in error.violations]
            return None


def cluster_from_text(request: ClusterTextRequest, engine: Engine) -> ClusterSpec:
    """The cluster, completed from the catalogue. Raises :class:`InvalidInput` with every line that does not read."""
    from profiler.catalogue import device as find_device
    from profiler.parsers import node_groups, parse_hostfile, parse_nccl_tests, parse_topology

    reader = _Reader()
    hosts = reader.read("hostfile", request.hostfile, parse_hostfile)
    topology = reader.read("topology", request.topology, parse_topology)
    curves = [reader.read("nccl_tests", text, parse_nccl_tests) for text in request.nccl_tests]
    if (request.device is None) == (request.preset is None):
        message = "give exactly one of 'device' and 'preset'"
        reader.violations.append(Violation(code="device_or_preset", message=message, allowed=["device", "preset"]))
    if reader.violations:
        raise InvalidInput(reader.violations, subject="cluster")
    size = topology.num_devices if topology is not None else None
    groups: Sequence[NodeGroup] = (
        node_groups(hosts, device=request.device, preset=request.preset)
        if hosts is not None
        else (NodeGroup(count=request.count, device=request.device, preset=request.preset, devices_per_node=size),)
    )
    if topology is not None and request.device is not None:
        link = topology.link(find_device(request.device))
        groups = [group.replace(intra=link) for group in groups]
    cluster = engine.resolve(ClusterSpec.parse({"name": request.name, "nodes": list(groups)}))
    measured = [curve for curve in curves if curve is not None]
    return cluster.replace(nodes=tuple(_with_curves(group, measured) for group in cluster.nodes))


def _with_curves(group: NodeGroup, curves: Sequence[CollectiveCurve]) -> NodeGroup:
    """Measured curves on the tier whose devices they span."""
    for curve in curves:
        tier = "intra" if curve.group_size <= (group.devices_per_node or 1) else "inter"
        link: Link | None = getattr(group, tier)
        if link is not None:
            group = group.replace(**{tier: link.replace(curves=(*link.curves, curve))})
    return group
