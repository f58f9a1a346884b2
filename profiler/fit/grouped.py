"""Fits of grouped products (one per expert): the dense form with the experts as batch, its two efficiencies scaled.

The public tables time whole mixture layers: two grouped products (gate and up joined, then down) and the traffic of routing,
activation and combination, which other ops carry in Meshwright. Time = floor + products + traffic share x other bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from profiler.fit.forms import SPACES, Products, Space, product_time_s
from profiler.fit.records import Fit
from profiler.fit.samples import choose, error_of, held_out
from profiler.fit.solver import solve
from profiler.fit.tables import AICONFIGURATOR, chip_of, device_type, read_table
from profiler.fit.transfer import scaled

Array = NDArray[np.float64]

SCALE = Space(
    names=("compute", "bandwidth", "floor_s", "traffic"), low=(0.1, 0.3, 0.0, 0.0), high=(1.0, 1.3, 1e-3, 3.0),
    start=(0.9, 1.0, 4e-5, 1.0), step=(0.1, 0.1, 2e-5, 0.3),
)  # fmt: skip
# One kernel per device: CUTLASS grouped GEMM (what torch._grouped_mm is built on) where it was measured, else Triton.
_KERNELS = ("moe_torch_flow_cutlass", "sglang_fused_moe_triton")
_SAMPLE = 1500
_FEWEST = 50
_BANDWIDTH_EFFICIENCY = 0.8


@dataclass(frozen=True, slots=True)
class MixtureTable:
    """Times of mixture layers on one device; sizes as arrays, ``intermediate`` after the tensor-parallel split."""

    device: str
    source: str
    tokens: Array
    hidden: Array
    intermediate: Array
    top_k: Array
    experts: Array
    time_s: Array

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> MixtureTable:
        """Some of the rows."""
        arrays = (self.tokens, self.hidden, self.intermediate, self.top_k, self.experts, self.time_s)
        return MixtureTable(self.device, self.source, *(array[rows] for array in arrays))


def mixture_tables(data: Path) -> list[MixtureTable]:
    """Balanced routing, all experts on one device, gated MLP, bf16."""
    parts = [read_table(path) for path in sorted((data / "aiconfigurator").glob("moe_bf16_*.csv.gz"))]
    if not parts:
        return []
    everything = pd.concat(parts)
    everything = everything[(everything["ep"] == 1) & (everything["dist"] == "balanced")]
    found = []
    for gpu, frame in everything.groupby("gpu", sort=True):
        kernel = next((name for name in _KERNELS if (frame["kernel"] == name).sum() >= _FEWEST), None)
        if kernel is None or str(gpu) not in AICONFIGURATOR:
            continue
        rows = frame[frame["kernel"] == kernel]
        build = ", ".join(sorted(rows["fw"].unique()))
        inter = rows["inter"].to_numpy(dtype=float) / rows["tp"].to_numpy(dtype=float)
        columns = {name: rows[name].to_numpy(dtype=float) for name in ("tokens", "hidden", "topk", "experts")}
        source = f"aiconfigurator 095f58a (NVIDIA, Apache-2.0), balanced mixture layers, {build} {kernel}"
        found.append(
            MixtureTable(
                AICONFIGURATOR[str(gpu)], source, columns["tokens"], columns["hidden"], inter, columns["topk"], columns["experts"],
                rows["latency_us"].to_numpy(dtype=float) * 1e-6,
            )
        )  # fmt: skip
    return found


def grouped_products(rows: Array, n: Array, k: Array, experts: Array) -> Products:
    """``rows`` in all, shared evenly by ``experts`` matrices of k x n (bf16)."""
    each = np.maximum(rows / experts, 1.0)
    return Products(each, n, k, experts, 2.0 * (rows * k + rows * n + experts * k * n))


def fit_grouped(table: MixtureTable, dense: Fit, seed: int = 0) -> Fit | None:
    """Scales of the grouped product against the dense form of the same device, with the layer's error on unseen models."""
    if len(table.time_s) < _FEWEST:
        return None
    rng = np.random.default_rng(seed)
    unseen = held_out(table.hidden * 1e6 + table.intermediate * 10 + table.experts, rng)
    rows = choose(np.flatnonzero(~unseen), _SAMPLE, rng)
    seen = Layers(table.take(rows), dense)
    measured = np.log(table.time_s[rows])
    values = solve(lambda x: np.log(seen.time_s(x)) - measured, SCALE, [np.array(SCALE.start)]).values
    error = error_of(Layers(table.take(unseen), dense).time_s(values), table.time_s[unseen], "a quarter of the models unseen")
    return Fit(form="scale", parameters=SCALE.named(values), source=table.source, points=len(rows), error=error)


class Layers:
    """Whole mixture layers: what of them does not depend on the parameters."""

    def __init__(self, table: MixtureTable, dense: Fit) -> None:
        self.dense, self.chip = dense, chip_of(device_type(table.device), "bfloat16")
        rows = table.tokens * table.top_k
        self.products = (
            grouped_products(rows, 2 * table.intermediate, table.hidden, table.experts),
            grouped_products(rows, table.hidden, table.intermediate, table.experts),
        )
        traffic = 2.0 * (3 * rows * table.hidden + 3 * rows * table.intermediate + table.tokens * table.hidden)
        self.traffic_s = traffic / (_BANDWIDTH_EFFICIENCY * self.chip.bytes_per_s)

    def time_s(self, values: Array) -> Array:
        """Seconds of each layer; the dense floor is part of the layer's own."""
        compute, bandwidth, floor_s, share = values
        parameters = SPACES[self.dense.form].values({**scaled(self.dense, compute, bandwidth), "floor_s": 0.0})
        times = sum(product_time_s(self.dense.form, parameters, shape, self.chip) for shape in self.products)
        result: Array = floor_s + times + share * self.traffic_s
        return result
