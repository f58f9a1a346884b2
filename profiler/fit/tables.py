"""Public measurements of matrix products, read from the folder that ``python -m profiler.fit --data`` names.

The tables themselves are third parties' and not part of this project: only parameters fitted on them and errors are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from profiler.catalogue import device as catalogue_device
from profiler.fit.forms import Chip, Products, products
from specs.cluster import DeviceType

Array = NDArray[np.float64]
Frame = Any  # a pandas DataFrame: its stubs follow neither group keys nor column types

# Measured but not in the catalogue. Intel datasheet of the Arc Pro B60: 160 XMX engines in 20 Xe2 cores, 456 GB/s, 197 INT8 TOPS.
UNLISTED = {
    "arc_pro_b60": DeviceType(
        name="arc_pro_b60", vendor="Intel", arch="Xe2", sm_count=20, memory_bytes=24 * 2**30, memory_bandwidth_bytes_per_s=456e9,
        peak_flop_per_s={"float32": 12.28e12, "bfloat16": 98.3e12, "float16": 98.3e12, "float8": 197e12}, tdp_w=200,
    ),
}  # fmt: skip

AICONFIGURATOR = {
    "a100_sxm": "a100_sxm_80gb", "h100_sxm": "h100_sxm", "h200_sxm": "h200_sxm", "l40s": "l40s", "b200_sxm": "b200_sxm",
    "rtx_pro_6000_server": "rtx_pro_6000_server", "b300_sxm": "b300_sxm", "gb200": "gb200", "gb300": "gb300", "b60": "arc_pro_b60",
}  # fmt: skip
AICONFIGURATOR_SOURCE = "aiconfigurator 095f58a (NVIDIA, Apache-2.0), sglang and trtllm, CUDA graph, random operands"
NEUSIGHT = {
    "Tesla_P100-PCIE-16GB": "p100_pcie_16gb",
    "Tesla_V100-PCIE-32GB": "v100_pcie_32gb",
    "Tesla_T4": "t4",
    "NVIDIA_L4": "l4",
    "NVIDIA_A100-PCIE-40GB": "a100_pcie_40gb",
    "NVIDIA_A100_80GB_PCIe": "a100_pcie_80gb",
    "NVIDIA_H100_80GB_HBM3": "h100_sxm",
}  # fmt: skip  (MI100 and MI210 left out: their fp32 products run on matrix units, above the catalogue's fp32 peak)
NEUSIGHT_SOURCE = "NeuSight 6945927 (MIT), PyTorch 2.1 (AMD 2.4.1) eager, CUDA events"
_DEEPBENCH = {
    "NV_V100": ("v100_sxm2_16gb", "Results - FP16 ip, Mixed math"),
    "NV_T4": ("t4", "Results - FP16 ip, Mixed math"),
}
_EAGER_FLOOR_S = 100e-6


@dataclass(frozen=True, slots=True)
class ProductTable:
    """Times of products on one device. ``eager``: the launch is part of the time, so short ones were left out. ``backward``:
    ``shape`` is the forward product's, the time covers both products of its backward."""

    device: str
    dtype: str
    laboratory: str
    source: str
    shape: Products
    time_s: Array
    eager: bool = False
    backward: bool = False

    def __len__(self) -> int:
        return len(self.time_s)


def device_type(name: str) -> DeviceType:
    """The catalogue's device, or a measured one that the catalogue lacks."""
    return UNLISTED[name] if name in UNLISTED else catalogue_device(name)


def chip_of(device: DeviceType, dtype: str) -> Chip:
    """Peak, bandwidth and compute units of a device in ``dtype``."""
    return Chip(device.peak_flop_per_s[dtype], device.memory_bandwidth_bytes_per_s, device.sm_count or 1)


def product_tables(data: Path) -> list[ProductTable]:
    """Products timed by themselves under ``data``; sources that are absent are skipped."""
    readers = (_aiconfigurator, _neusight, _deepbench, _llmcompass)
    return [table for reader in readers for table in reader(data) if len(table)]


def table_of(
    device: str, dtype: str, laboratory: str, source: str, shape: Products, time_s: Array, *, eager: bool, backward: bool = False
) -> ProductTable:
    """A table without rows that cannot be: above the peak, or so short that the launch is most of an eager time."""
    peak = chip_of(device_type(device), dtype).flop_per_s
    possible = (time_s > 0) & (shape.flop * (2 if backward else 1) / np.maximum(time_s, 1e-12) <= 1.1 * peak)
    if eager:
        possible &= time_s >= _EAGER_FLOOR_S
    return ProductTable(device, dtype, laboratory, source, shape.take(possible), time_s[possible], eager, backward)


def read_table(path: Path) -> Frame:
    """A CSV, gzipped or not."""
    return pd.read_csv(path)


def _aiconfigurator(data: Path) -> Iterator[ProductTable]:
    for short, device in AICONFIGURATOR.items():
        for dtype, suffix, operand_bytes in (("bfloat16", "bf16", 2), ("float8", "fp8", 1)):
            path = data / "aiconfigurator" / f"gemm_{short}_{suffix}.csv.gz"
            if not path.exists():
                continue
            frame = read_table(path)
            shape = products(frame["m"], frame["n"], frame["k"], dtype_bytes=2)
            if operand_bytes == 1:  # one byte an operand element, the result in bf16
                shape = Products(
                    shape.m, shape.n, shape.k, shape.batch, shape.m * shape.k + shape.k * shape.n + 2 * shape.m * shape.n
                )
            column, build = ("latency_us", "median over builds") if operand_bytes == 2 else _quickest(frame)
            time_s = frame[column].to_numpy(dtype=float) * 1e-6
            yield table_of(device, dtype, "aiconfigurator", f"{AICONFIGURATOR_SOURCE}, {build}", shape, time_s, eager=False)


def _quickest(frame: Frame) -> tuple[str, str]:
    """fp8 builds differ in how much dynamic quantisation surrounds the product; training fuses it into the ops before."""
    return ("min_us", "quickest build") if "min_us" in frame else ("latency_us", "one build")


def _neusight(data: Path) -> Iterator[ProductTable]:
    for short, device in NEUSIGHT.items():
        path = data / "neusight" / f"matmul_fp32_{short}.csv.gz"
        if path.exists():
            frame = read_table(path)  # their (B, M, N) x (B, N, K): N is the reduction
            shape = products(frame["M"], frame["K"], frame["N"], frame["B"], dtype_bytes=4)
            time_s = frame["latency_ms"].to_numpy(dtype=float) * 1e-3
            yield table_of(device, "float32", "NeuSight", NEUSIGHT_SOURCE, shape, time_s, eager=True)


def _deepbench(data: Path) -> Iterator[ProductTable]:
    path = data / "deepbench" / "gemm.csv"
    if not path.exists():
        return
    everything = read_table(path)
    for gpu, (device, sheet) in _DEEPBENCH.items():
        frame = everything[(everything["gpu"] == gpu) & (everything["sheet"] == sheet)]
        shape = products(frame["m"], frame["n"], frame["k"])
        time_s = frame["time_ms"].to_numpy(dtype=float) * 1e-3
        source = "DeepBench da81ba7 (Baidu, Apache-2.0), cuBLAS 2018"
        yield table_of(device, "float16", "DeepBench", source, shape, time_s, eager=True)


def _llmcompass(data: Path) -> Iterator[ProductTable]:
    path = data / "llmcompass" / "matmul_fp16.csv"
    if not path.exists():
        return
    everything = read_table(path)
    for gpu, device in (("A100", "a100_sxm_80gb"), ("MI210", "mi210")):
        frame = everything[everything["gpu"] == gpu]
        shape = products(frame["m"], frame["n"], frame["k"])
        time_s = frame["latency_ms"].to_numpy(dtype=float) * 1e-3
        source = "LLMCompass 2e015fd (Princeton, BSD-3-Clause)"
        yield table_of(device, "float16", "LLMCompass", source, shape, time_s, eager=True)
