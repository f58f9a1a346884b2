"""The emulated cluster of one run: namespaces for its nodes and quotas for its ranks, set up before and torn down after.

Whatever ends the run, everything goes: namespaces end with processes that die with this one, control groups are removed on the way
out, and those of a killed process by the next run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from executor.emulate.network import UPLINK, Network
from executor.emulate.quotas import Quotas, core_shares
from profiler.worker_env import allowed_cores
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.plan import Plan


@dataclass(frozen=True)
class NodeOfRun:
    """One node that takes part. ``prefix``: before a command that is to run on it; ``environment``: beside a worker's."""

    num_ranks: int
    address: str
    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """What a run needs to know. ``dilation`` and ``groups`` are empty where ranks are not slowed in that way; else by rank."""

    nodes: tuple[NodeOfRun, ...]
    dilation: tuple[float, ...] = ()
    groups: tuple[str, ...] = ()


def plain_machine(plan: Plan) -> Machine:
    """This machine as it is."""
    return Machine((NodeOfRun(plan.world_size, "127.0.0.1"),))


@contextlib.contextmanager
def emulated_machine(plan: Plan, cluster: ClusterSpec) -> Iterator[Machine]:
    """The cluster of ``cluster.emulation`` for as long as the context lasts. Ranks are the plan's devices in ascending order.

    Raises :class:`InvalidInput` where it asks for what this process may not do.
    """
    emulation = cluster.emulation
    if emulation is None:
        yield plain_machine(plan)
        return
    devices = sorted({device for pipeline in plan.pipelines for stage in pipeline.stages for device in stage.devices})
    places = cluster.device_table()
    if devices[-1] >= len(places):
        message = f"device {devices[-1]} of the plan, but the cluster has {len(places)}"
        raise InvalidInput.single("unknown_device", message, subject="plan")
    counts: dict[int, int] = {}
    for device in devices:
        counts[places[device].node] = counts.get(places[device].node, 0) + 1
    slowdowns = tuple(emulation.slowdown.get(device, 1.0) for device in devices)
    with contextlib.ExitStack() as stack:
        groups: tuple[str, ...] = ()
        if emulation.slow_by == "quota":
            quotas = stack.enter_context(Quotas(core_shares(slowdowns, len(allowed_cores()))))
            groups = tuple(str(group) for group in quotas.groups)
        dilation = slowdowns if emulation.slow_by == "dilation" and max(slowdowns) > 1 else ()
        if not emulation.has_links:
            yield Machine(plain_machine(plan).nodes, dilation, groups)
            return
        network = stack.enter_context(Network(len({place.node for place in places}), emulation))
        nodes = tuple(
            NodeOfRun(count, network.addresses[node], tuple(network.prefix(node)), {"GLOO_SOCKET_IFNAME": UPLINK})
            for node, count in sorted(counts.items())
        )
        yield Machine(nodes, dilation, groups)
