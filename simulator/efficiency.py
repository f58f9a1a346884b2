"""Kernel time on a device that was not measured here: the price of last resort.

Per op class the first that exists: a fit on public measurements of this very device (``traces/efficiency/<device>.json``), the
median of the fits of its family, the median over all devices (``prior.json``; both corrected by one published matmul rate of the
device where the catalogue has one, else by its power limit), a stated default. ``source_of`` and ``relative_error`` say which and
how wrong such numbers were on data that they had not seen. The fits are made by ``python -m profiler.fit``; forms and legend in
``profiler.fit.forms``. The launch by the host is not in these times (``simulator.pricing``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from typing import Any

from profiler.opset import Kernel, OpClass
from simulator.efficiency_model import Model, model_of
from specs.base import InvalidInputValue, Provenance
from specs.cluster import DeviceType

_WIDER = ("float4", "float8", "float16", "bfloat16", "tf32", "float32", "float64")
_MOST_MODELS = 256
_models: dict[tuple[int, str], tuple[DeviceType, Model]] = {}


@lru_cache(maxsize=1)
def defaults() -> dict[str, Any]:
    """The packaged stated defaults: what no fit covers."""
    data: dict[str, Any] = json.loads(resources.files("traces").joinpath("efficiency/defaults.json").read_text())
    return data


def rate_dtype(device: DeviceType, dtype: str) -> str:
    """The dtype at whose rate ``dtype`` runs: itself, or the next wider one that the device has."""
    if dtype in device.peak_flop_per_s:
        return dtype
    start = _WIDER.index(dtype) if dtype in _WIDER else 0
    for wider in _WIDER[start:]:
        if wider in device.peak_flop_per_s and not (dtype == "float32" and wider == "tf32"):
            return wider
    raise InvalidInputValue(
        "dtype_not_supported", f"device '{device.name}' has no peak for {dtype} or any wider dtype", actual=dtype,
        allowed=sorted(device.peak_flop_per_s),
    )  # fmt: skip


def peak_flop_per_s(device: DeviceType, dtype: str) -> float:
    """Dense peak for ``dtype``; a dtype that the device lacks runs at the rate of the next wider one that it has."""
    return device.peak_flop_per_s[rate_dtype(device, dtype)]


def _model(device: DeviceType, dtype: str) -> Model:
    """The model of a device and dtype, made once. The device is kept beside it, so that its id stays its own."""
    key = (id(device), dtype)
    found = _models.get(key)
    if found is None:
        if len(_models) >= _MOST_MODELS:
            _models.clear()
        found = (device, model_of(device, rate_dtype(device, dtype)))
        _models[key] = found
    return found[1]


def kernel_time_s(kernel: Kernel, device: DeviceType, dtype: str) -> float:
    """Seconds of one kernel on ``device`` in compute dtype ``dtype``."""
    model = _model(device, dtype)
    if kernel.op_class == OpClass.GEMM:
        m, n, k, batch = kernel.dims
        time = model.product(float(m), float(n), float(k), float(batch), float(kernel.bytes))
        return time * model.backward_factor if kernel.backward else time
    if kernel.op_class == OpClass.ATTENTION:
        return _attention_time_s(kernel, model)
    if kernel.op_class == OpClass.GROUPED_GEMM:
        return _grouped_time_s(kernel, model)
    efficiency_bandwidth, floor_s = model.streams[(kernel.op_class.value, kernel.backward)]
    return floor_s + float(kernel.bytes) / efficiency_bandwidth


def _attention_time_s(kernel: Kernel, model: Model) -> float:
    """The causal kernel executes half of the FLOP that the opset counts."""
    heads, q_len, kv_len, head_dim = (float(size) for size in kernel.dims)
    flop = float(kernel.flop) * (0.5 if kernel.causal else 1.0)
    return model.attention(kernel.backward, head_dim)(flop, float(kernel.bytes), kv_len, q_len, heads)


def _grouped_time_s(kernel: Kernel, model: Model) -> float:
    """Experts share the tokens evenly. The tokens are the rows of the result, or in the weights' gradient the reduced dim."""
    m, n, k, experts = (float(size) for size in kernel.dims)
    if _tokens_are_reduced(m, n, k, experts, float(kernel.bytes)):
        shape = (m, n, max(k / experts, 1.0))
    else:
        shape = (max(m / experts, 1.0), n, k)
    return model.grouped_product(*shape, experts, float(kernel.bytes))


def _tokens_are_reduced(m: float, n: float, k: float, experts: float, moved: float) -> bool:
    """Which of the two meanings of (m, n, k) gives the bytes that the kernel moves with a whole element size."""
    rows = m * k + m * n + experts * k * n
    reduced = m * k + k * n + experts * m * n

    def apart(elements: float) -> float:
        return min(abs(moved / elements / size - 1) for size in (1.0, 2.0, 4.0, 8.0))

    return apart(reduced) < apart(rows)


def optimizer_time_s(num_params: float, bytes_per_param: float, device: DeviceType) -> float:
    """A fused optimizer step: its traffic over the bandwidth, at the share that element-wise ops reach on this device.

    ``bytes_per_param``: state, gradient and weight, reads and writes.
    """
    rate, _ = _model(device, next(iter(device.peak_flop_per_s), "float32")).streams[(OpClass.ELEMENTWISE.value, False)]
    return float(defaults()["optimizer"]["floor_s"] + num_params * bytes_per_param / rate)


def source_of(kernel: Kernel, device: DeviceType, dtype: str) -> Provenance:
    """``FITTED`` on measurements of this device, or ``ASSUMED`` from others and stated defaults."""
    return _judged(kernel, device, dtype)[0]


def relative_error(kernel: Kernel, device: DeviceType, dtype: str) -> float:
    """Mean absolute relative error of such prices on unseen data, another laboratory's spread included."""
    return _judged(kernel, device, dtype)[1]


def _judged(kernel: Kernel, device: DeviceType, dtype: str) -> tuple[Provenance, float]:
    head_dim = float(kernel.dims[3]) if kernel.op_class == OpClass.ATTENTION else 0.0
    judge: Callable[[str, bool, float], tuple[Provenance, float]] = _model(device, dtype).judged
    return judge(kernel.op_class.value, kernel.backward, head_dim)
