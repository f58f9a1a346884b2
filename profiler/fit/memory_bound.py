"""Fits of memory-bound ops: bytes (counted as ``profiler.opset`` counts them) over a share of the bandwidth, plus a floor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiler.fit.forms import STREAM
from profiler.fit.records import Fit
from profiler.fit.samples import choose, error_of, folds
from profiler.fit.solver import solve
from profiler.fit.tables import device_type, read_table
from profiler.fit.tables_layers import LayerOp, megatron_layer_ops, vidur_layer_ops
from profiler.opset import Call, OpRule, Tensor, describe

Array = NDArray[np.float64]

_FEWEST = 6
_SAMPLE = 1500
_SAMPLE_PER_OP = 400
_CACHES = 1.0  # only ops that move more than so many times the L2 cache: smaller ones run from it

_NEUSIGHT = {
    "Tesla P100-PCIE-16GB": "p100_pcie_16gb", "Tesla V100-PCIE-32GB": "v100_pcie_32gb", "Tesla T4": "t4", "NVIDIA L4": "l4",
    "NVIDIA A100-PCIE-40GB": "a100_pcie_40gb", "NVIDIA A100 80GB PCIe": "a100_pcie_80gb",
    "AMD Instinct MI100": "mi100", "AMD Instinct MI210": "mi210",
}  # fmt: skip
_NEUSIGHT_TARGETS = {
    "add": "add",
    "mul": "mul",
    "relu": "relu",
    "gelu": "gelu",
    "tanh": "tanh",
    "softmax": "softmax",
    "ln": "layer_norm",
}
_CUDNN = {"NVIDIA H200": "h200_sxm", "NVIDIA GB200": "gb200", "NVIDIA GB300": "gb300"}
_CUDNN_SOURCE = "cuDNN frontend 3929da2 (NVIDIA, MIT), its PyTorch eager rows, bf16"
_TWO_OPERANDS = frozenset(("add", "mul"))


@dataclass(frozen=True, slots=True)
class Stream:
    """Bytes and seconds of many calls of one op class on one device."""

    moved: Array
    time_s: Array
    source: str


def streams(data: Path) -> dict[tuple[str, str, str], Stream]:
    """Calls by (device, op class, pass); of several sources for one key the first named in this function."""
    found: dict[tuple[str, str, str], Stream] = {}
    for reader in (_cudnn_norms, megatron_layer_ops, vidur_layer_ops, _neusight):
        for key, stream in _grouped(reader(data)).items():
            found.setdefault(key, stream)
    return found


def _grouped(ops: Iterator[LayerOp]) -> dict[tuple[str, str, str], Stream]:
    rows: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    sources = {}
    for op in ops:
        rule = rule_of(op)
        cache = device_type(op.device).l2_bytes or 0.0
        for name, kernels, time_s in (("forward", rule.forward, op.forward_s), ("backward", rule.backward, op.backward_s)):
            moved = float(sum(kernel.bytes for kernel in kernels))
            if time_s is not None and time_s > 0 and moved > _CACHES * cache:
                key = (op.device, rule.op_class.value, name)
                rows[key].append((moved, time_s))
                sources[key] = op.source
    return {
        key: Stream(np.array([row[0] for row in values]), np.array([row[1] for row in values]), sources[key])
        for key, values in rows.items()
        if len(values) >= _FEWEST
    }


def rule_of(op: LayerOp) -> OpRule:
    """The opset's rule of the call: the same bytes as the simulator will count."""
    if op.target == "embedding":
        table = Tensor((int(op.table_rows), int(op.width)), op.dtype)
        inputs: tuple[Tensor, ...] = (table, Tensor((int(op.rows),), "int64", requires_grad=False))
    else:
        x = Tensor((int(op.rows), int(op.width)), op.dtype)
        inputs = (x, x) if op.target in _TWO_OPERANDS else (x,)
        if op.target in ("layer_norm", "rms_norm"):
            inputs = (x, *(Tensor((int(op.width),), op.dtype) for _ in range(2 if op.target == "layer_norm" else 1)))
    out = Tensor((int(op.rows), int(op.width)), op.dtype)
    return describe(Call(f"aten.{op.target}.default", inputs, (out,)))


def _cudnn_norms(data: Path) -> Iterator[LayerOp]:
    path = data / "cudnn_frontend" / "norms_fwd_bwd.csv"
    if not path.exists():
        return
    frame = read_table(path)
    for row in frame[(frame["backend"] == "pytorch") & frame["gpu_name"].isin(_CUDNN)].itertuples(index=False):
        named = row._asdict()
        device, target = _CUDNN[str(named["gpu_name"])], str(named["norm_type"])
        forward, backward = float(named["fwd_time_ms"]) * 1e-3, float(named["bwd_time_ms"]) * 1e-3
        yield LayerOp(device, "bfloat16", target, named["N"], named["C"], forward, backward, _CUDNN_SOURCE)


def _neusight(data: Path) -> Iterator[LayerOp]:
    path = data / "neusight" / "elementwise_fp32.csv.gz"
    if not path.exists():
        return
    frame = read_table(path)
    frame = frame[frame["device"].isin(_NEUSIGHT) & frame["op"].isin(_NEUSIGHT_TARGETS) & (frame["latency_ms"] > 0.05)]
    frame = frame.sample(frac=1.0, random_state=0).groupby(["device", "op"]).head(_SAMPLE_PER_OP).sort_index()
    for gpu, name, rows, width, time_ms in frame[["device", "op", "B", "H", "latency_ms"]].itertuples(index=False):
        source = "NeuSight 6945927 (MIT), PyTorch eager fp32"
        yield LayerOp(_NEUSIGHT[gpu], "float32", _NEUSIGHT_TARGETS[name], rows, width, time_ms * 1e-3, None, source)


def fit_stream(device: str, stream: Stream, kernel_floor_s: float, seed: int = 0) -> Fit:
    """Share of the bandwidth and floor; the floor kept is a graph kernel's, what exceeds it is launch."""
    bandwidth = device_type(device).memory_bandwidth_bytes_per_s
    rng = np.random.default_rng(seed)
    rows = choose(np.arange(len(stream.moved)), _SAMPLE, rng)
    moved, time_s = stream.moved[rows], stream.time_s[rows]

    def solved(seen: NDArray[np.bool_]) -> Array:
        ideal, measured = moved[seen] / bandwidth, np.log(time_s[seen])
        return solve(lambda x: np.log(x[1] + ideal / x[0]) - measured, STREAM, [np.array(STREAM.start)]).values

    predicted = np.empty(len(rows))
    for fold in folds(moved, rng):
        efficiency, floor_s = solved(~fold)
        predicted[fold] = floor_s + moved[fold] / bandwidth / efficiency
    parameters = STREAM.named(solved(np.ones(len(rows), dtype=bool)))
    parameters["floor_s"] = min(parameters["floor_s"], kernel_floor_s)
    error = error_of(predicted, time_s, "five folds over sizes")
    return Fit(form="stream", parameters=parameters, source=stream.source, points=len(rows), error=error)
