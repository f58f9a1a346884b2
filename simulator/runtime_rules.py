"""How the runtime that executes plans behaves on a backend: what overlaps, what is copied. Data for the step simulation.

Read from the executor's building blocks (PyTorch 2.13): DDP copies each gradient into its bucket inside backward and reduces the
bucket beside it. FSDP2 packs and unpacks flat buffers around its collectives. On gloo its reduce-scatters, and gathers
without prefetch, run on the calling thread; a prefetched gather (zero 3) runs beside compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.memory import MemoryRules
from simulator.software import NATIVE, Software
from specs.cluster import ClusterSpec, Link
from specs.profile import Profile


@dataclass(frozen=True, slots=True)
class RuntimeRules:
    """``copies`` are in units of the collective's full bytes, done by the compute stream. Slowdowns apply while compute and
    collectives run together."""

    gather_inline: bool
    prefetched_gather_inline: bool
    reduce_inline: bool
    gather_copies: float
    reduce_copies: float
    bucket_copies: float
    compute_slowdown: float
    comm_slowdown: float
    step_overhead_s: float = 0.0
    slow_network: bool = False
    source: str = "assumed"

    def slowdowns(self, tier: str) -> tuple[float, float]:
        """(compute, collectives) while both run. Collectives that wait for a slow network between nodes leave the device almost to
        compute: both together take 1.01 to 1.04 times the longer one on A100, V100 and A10G behind 12 Gbit/s per device (Mist's
        interference tables). Behind an RDMA NIC per device or two they keep as many of its units busy as inside the node."""
        if tier == "inter" and self.source == "published" and self.slow_network:
            return SLOW_NETWORK_SLOWDOWN, SLOW_NETWORK_SLOWDOWN
        return self.compute_slowdown, self.comm_slowdown


SLOW_NETWORK_SLOWDOWN = 1.03
# Below this a device's share of its node's uplink is a slow network.
FAST_NETWORK_BYTES_PER_S = 100e9 / 8


# Compute and a collective inside a node, equally long and started together, against one alone (Mist's interference tables, median):
# A100 over NVLink, V100 over NVLink, A10G over PCIe. Newer devices are taken to be like the A100.
TOGETHER, TOGETHER_VOLTA, TOGETHER_PCIE = 1.32, 1.15, 1.21


def _interference(cluster: ClusterSpec) -> float:
    """The largest of the cluster's node groups."""
    found = []
    for group in cluster.nodes:
        volta = group.device is not None and "volta" in cluster.device_type(group.device).arch.lower()
        pcie = isinstance(group.intra, Link) and "pcie" in group.intra.kind.lower()
        found.append(TOGETHER_PCIE if pcie else TOGETHER_VOLTA if volta else TOGETHER)
    return max(found, default=TOGETHER)


def _slow_network(cluster: ClusterSpec) -> bool:
    shares = [
        group.inter.bandwidth_bytes_per_s / (group.devices_per_node or 1)
        for group in cluster.nodes
        if isinstance(group.inter, Link)
    ]
    return bool(shares) and min(shares) < FAST_NETWORK_BYTES_PER_S


def rules_for(cluster: ClusterSpec, profile: Profile | None) -> RuntimeRules:
    """Rules of the cluster's backend, with the interference that the profile measured."""
    measured = None
    if profile is not None:
        pairs = [item for device in profile.devices for item in device.overlap if item.first == "compute"]
        measured = next((item for item in pairs if item.second == "all_reduce"), None)
    if cluster.backend == "gloo":
        return RuntimeRules(
            gather_inline=True, prefetched_gather_inline=False, reduce_inline=True,
            gather_copies=1.0, reduce_copies=1.0, bucket_copies=1.0,
            compute_slowdown=measured.first_slowdown if measured else 2.0,
            comm_slowdown=measured.second_slowdown if measured else 2.0,
            source="measured" if measured else "assumed",
        )  # fmt: skip
    together = _interference(cluster)
    return RuntimeRules(
        gather_inline=False, prefetched_gather_inline=False, reduce_inline=False,
        gather_copies=1.0, reduce_copies=1.0, bucket_copies=1.0,
        compute_slowdown=measured.first_slowdown if measured else together,
        comm_slowdown=measured.second_slowdown if measured else together,
        slow_network=_slow_network(cluster), source="measured" if measured else "published",
    )  # fmt: skip


def memory_rules_for(cluster: ClusterSpec, software: Software = NATIVE) -> MemoryRules:
    """What the runtime holds besides the model's tensors on the cluster's backend."""
    return MemoryRules(
        grads_live_in_buckets=True, flat_copies=1.0, keeps_stage_outputs=True, extra_grad_bytes=software.extra_grad_bytes,
        extra_state_bytes=software.extra_state_bytes, buffer_bytes=software.buffer_bytes,
        narrow_shards=software.keeps_narrow_shards,
    )  # fmt: skip
