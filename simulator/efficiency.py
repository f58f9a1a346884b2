"""Kernel time from a device's specs: the price of last resort, where nothing was measured on this device.

Legend: P dense peak [FLOP/s], W memory bandwidth [B/s], F = FLOP, Q = bytes moved, m n k the product's sizes,
e_c compute efficiency, e_b bandwidth efficiency, m0 n0 k0 sizes at which a dim reaches half, t0 floor [s], q smoothness.

GEMM        t = t0 + (c^q + b^q)^(1/q),  c = F / (e_c P) (1 + m0/m) (1 + n0/n) (1 + k0/k),  b = Q / (e_b W)
Attention   t = t0 + max(F / (e P) (1 + s0/S), Q / (e_b W)); a causal kernel does half of F
Others      t = t0 + Q / (e W)

Form and parameter ranges: fits on public measurements of nine GPUs (bf16, held-out shapes: 6-7 % mean error with own data, 11 %
for a device never measured); values in ``traces/efficiency/defaults.json``.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any

from profiler.opset import Kernel, OpClass
from specs.base import InvalidInputValue
from specs.cluster import DeviceType


@lru_cache(maxsize=1)
def defaults() -> dict[str, Any]:
    """The packaged parameters."""
    data: dict[str, Any] = json.loads(resources.files("traces").joinpath("efficiency/defaults.json").read_text())
    return data


def peak_flop_per_s(device: DeviceType, dtype: str) -> float:
    """Dense peak for ``dtype``; a dtype that the device lacks runs at the rate of the next wider one that it has."""
    order = ["float8", "float16", "bfloat16", "tf32", "float32", "float64"]
    if dtype in device.peak_flop_per_s:
        return device.peak_flop_per_s[dtype]
    start = order.index(dtype) if dtype in order else 0
    for wider in order[start:]:
        if wider in device.peak_flop_per_s and not (dtype == "float32" and wider == "tf32"):
            return device.peak_flop_per_s[wider]
    raise InvalidInputValue(
        "dtype_not_supported", f"device '{device.name}' has no peak for {dtype} or any wider dtype", actual=dtype,
        allowed=sorted(device.peak_flop_per_s),
    )  # fmt: skip


def _sustained_flop_per_s(device: DeviceType, dtype: str) -> float:
    """The rate of a large product: a measured one where the catalogue has it, else an assumed share of the peak."""
    parameters = defaults()["gemm"]
    peak = peak_flop_per_s(device, dtype)
    best = device.matmul_flop_per_s.get(dtype)
    if best is not None:
        return float(min(best, peak) * parameters["sustained_of_best"])
    return float(peak * parameters["efficiency_without_measurement"])


def kernel_time_s(kernel: Kernel, device: DeviceType, dtype: str) -> float:
    """Seconds of one kernel on ``device`` in compute dtype ``dtype``."""
    if kernel.op_class in (OpClass.GEMM, OpClass.GROUPED_GEMM):
        return _gemm_time_s(kernel, device, dtype)
    if kernel.op_class == OpClass.ATTENTION:
        return _attention_time_s(kernel, device, dtype)
    parameters = defaults()["memory_bound"][kernel.op_class.value]
    efficiency = parameters["backward" if kernel.backward else "forward"]
    return float(parameters["floor_s"] + kernel.bytes / (efficiency * device.memory_bandwidth_bytes_per_s))


def _gemm_time_s(kernel: Kernel, device: DeviceType, dtype: str) -> float:
    parameters = defaults()["gemm"]
    m, n, k, batch = (float(size) for size in kernel.dims)
    rate = _sustained_flop_per_s(device, dtype)
    if kernel.op_class == OpClass.GROUPED_GEMM:
        grouped = defaults()["grouped_gemm"]
        rate *= grouped["of_gemm"] / (1 + grouped["tokens_per_expert_half"] * batch / max(m, k))
    compute = kernel.flop / rate
    for size, half in ((m, parameters["half_m"]), (n, parameters["half_n"]), (k, parameters["half_k"])):
        compute *= 1 + half / size
    memory = kernel.bytes / (parameters["bandwidth_efficiency"] * device.memory_bandwidth_bytes_per_s)
    smooth = parameters["smooth"]
    return float(parameters["floor_s"] + (compute**smooth + memory**smooth) ** (1 / smooth))


def _attention_time_s(kernel: Kernel, device: DeviceType, dtype: str) -> float:
    parameters = defaults()["attention"]
    efficiency = parameters["backward_efficiency" if kernel.backward else "forward_efficiency"]
    length = float(kernel.dims[1])
    flop = kernel.flop * (0.5 if kernel.causal else 1.0)
    compute = flop / (efficiency * peak_flop_per_s(device, dtype)) * (1 + parameters["half_length"] / length)
    memory = kernel.bytes / (parameters["bandwidth_efficiency"] * device.memory_bandwidth_bytes_per_s)
    return float(parameters["floor_s"] + max(compute, memory))


def optimizer_time_s(num_params: float, bytes_per_param: float, device: DeviceType) -> float:
    """A fused optimizer step: its traffic over the bandwidth. ``bytes_per_param``: state, gradient and weight, reads and writes."""
    parameters = defaults()["optimizer"]
    traffic = num_params * bytes_per_param
    return float(parameters["floor_s"] + traffic / (parameters["bandwidth_efficiency"] * device.memory_bandwidth_bytes_per_s))
