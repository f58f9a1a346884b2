"""This machine as a cluster: CPU worker processes, or its CUDA devices. What can be measured is measured, at once on all."""

from __future__ import annotations

import re
import statistics

import torch

from profiler.fingerprint import host_memory_bytes, machine_fingerprint
from profiler.measure.basics import LINK_SIZES_BYTES, Rates
from profiler.measure.pool import WorkerPool
from profiler.worker_env import allowed_cores
from specs.cluster import ClusterSpec, DeviceType, Host, Link, NodeGroup
from specs.errors import InvalidInput
from specs.progress import Progress, ProgressSink, ignore

CPU_DEVICE = "cpu_worker"
MEMORY_FRACTION = 0.8  # of the host's, shared by the workers; the rest is the system's and the launcher's
RATES_BUDGET_S = 1.5
MEASURED = "measured: on this machine, all devices at once"


def local_cluster(
    num_devices: int | None = None, name: str = "local", *, device_kind: str = "auto", progress: ProgressSink = ignore
) -> ClusterSpec:
    """This machine as one node of ``num_devices`` devices (default: all CUDA devices, or 2 CPU workers).

    ``device_kind``: auto (CUDA where there is any) | cpu | cuda. Starts short-lived worker processes (a few seconds). Raises
    :class:`InvalidInput` when the devices asked for are not here, :class:`ExecutionFailed` when a worker fails.
    """
    cuda_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _check(num_devices, device_kind, cuda_devices)
    cuda = cuda_devices > 0 if device_kind == "auto" else device_kind == "cuda"
    count = num_devices if num_devices is not None else (cuda_devices if cuda else 2)
    progress(Progress(stage="cluster", message=f"measuring {count} {'GPUs' if cuda else 'CPU workers'}", done=0, total=1))
    with WorkerPool(count, device_type="cuda" if cuda else "cpu") as pool:
        rates: list[Rates] = pool.call("rates", RATES_BUDGET_S)
    cluster = _describe(rates, name, cuda=cuda)
    progress(Progress(stage="cluster", message=f"{cluster.name}: {count} x {cluster.nodes[0].device}", done=1, total=1))
    return cluster


def _check(num_devices: int | None, device_kind: str, cuda_devices: int) -> None:
    if device_kind not in ("auto", "cpu", "cuda"):
        raise InvalidInput.single(
            "unknown_device_kind", f"device kind '{device_kind}'", subject="local cluster", actual=device_kind,
            allowed=["auto", "cpu", "cuda"],
        )  # fmt: skip
    if num_devices is not None and num_devices < 1:
        raise InvalidInput.single(
            "device_count", f"{num_devices} devices", subject="local cluster", actual=num_devices, allowed=">= 1", nearest=1
        )
    wants_cuda = device_kind == "cuda" or (device_kind == "auto" and cuda_devices > 0)
    if wants_cuda and (num_devices or 1) > cuda_devices:
        raise InvalidInput.single(
            "devices_not_here", f"{num_devices or 1} CUDA devices wanted, {cuda_devices} are here", subject="local cluster",
            actual=num_devices, nearest=cuda_devices,
        )  # fmt: skip


def _describe(rates: list[Rates], name: str, *, cuda: bool) -> ClusterSpec:
    device = _device_type(rates, cuda=cuda)
    latency_s, bandwidth = _link(rates)
    host_bytes = host_memory_bytes()
    link = Link(
        kind="nccl" if cuda else "gloo over loopback", bandwidth_bytes_per_s=bandwidth, latency_s=latency_s,
        provenance={"bandwidth_bytes_per_s": MEASURED, "latency_s": MEASURED},
    )  # fmt: skip
    host = Host(
        memory_bytes=host_bytes, memory_bandwidth_bytes_per_s=None if cuda else device.memory_bandwidth_bytes_per_s * len(rates),
        cores=len(allowed_cores()), provenance={"memory_bytes": MEASURED, "memory_bandwidth_bytes_per_s": MEASURED},
    )  # fmt: skip
    group = NodeGroup(name=name, count=1, device=device.name, devices_per_node=len(rates), intra=link, host=host)
    return ClusterSpec(name=name, nodes=(group,), device_types=(device,), backend="nccl" if cuda else "gloo")


def _device_type(rates: list[Rates], *, cuda: bool) -> DeviceType:
    dtypes = set.intersection(*(set(item.flop_per_s) for item in rates))
    peak = {dtype: statistics.median(item.flop_per_s[dtype] for item in rates) for dtype in sorted(dtypes)}
    bandwidth = statistics.median(item.memory_bandwidth_bytes_per_s for item in rates)
    memory = min((item.memory_bytes for item in rates if item.memory_bytes is not None), default=None)
    fingerprint = machine_fingerprint()
    return DeviceType(
        name=re.sub(r"[^a-z0-9]+", "_", rates[0].name.lower()).strip("_") if cuda else CPU_DEVICE,
        arch="" if cuda else str(fingerprint["cpu_model"]),
        kind="gpu" if cuda else "cpu_process",
        peak_flop_per_s=peak, matmul_flop_per_s=peak,
        memory_bytes=memory if memory is not None else host_memory_bytes() * MEMORY_FRACTION / len(rates),
        memory_bandwidth_bytes_per_s=bandwidth,
        provenance={
            "peak_flop_per_s": MEASURED + ", best matrix product",
            "matmul_flop_per_s": MEASURED,
            "memory_bandwidth_bytes_per_s": MEASURED + ", copy",
            "memory_bytes": "measured: device total" if cuda else f"assumed: {MEMORY_FRACTION} of the host's, shared equally",
        },
    )  # fmt: skip


def _link(rates: list[Rates]) -> tuple[float, float]:
    """Latency and bandwidth from the median messages of two sizes between ranks 0 and 1; one device has no link but its memory."""
    if len(rates) < 2:
        return 0.0, rates[0].memory_bandwidth_bytes_per_s
    small, large = LINK_SIZES_BYTES
    seconds = {
        size: statistics.median(
            max(a_end, b_end) - max(a_start, b_start)
            for (a_start, a_end), (b_start, b_end) in zip(rates[0].messages[size], rates[1].messages[size], strict=True)
        )
        for size in (small, large)
    }
    return seconds[small], (large - small) / max(seconds[large] - seconds[small], 1e-9)
