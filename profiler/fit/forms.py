"""Forms of kernel time as functions of shape and chip, on arrays: what is fitted, and the reference of the scalar versions.

Legend: P peak [FLOP/s], W bandwidth [B/s], SM compute units, F = 2 m n k batch [FLOP], Q operand and result bytes, times in s.

smooth     t = t0 + (c^q + b^q)^(1/q),  c = heat F / (e_c P) (1 + m0/m) (1 + n0/n) (1 + k0/k),  b = Q / (e_b W)
tile       over tiles (tm, tn) and splits s of k:  tiles = ceil(m/tm) ceil(n/tn) batch s,  w = ceil(tiles / SM)
           c = w (heat 2 tm tn 32 ceil(k / 32 s) / (e P/SM) + d),   e = e_c (1 + a r0) / (1 + a (1/tm + 1/tn)),  r0 = 1/128 + 1/256
           b = Q / (e_b W min(1, f tiles/SM)),   t = t0 + min over (tile, s) of (c^q + b^q)^(1/q) + [s>1] (d_s + 4 m n batch s / 3W)
           a split is tried only where the tiles alone leave compute units idle
attention  t = t0 + max(F / (e P) (1 + s0/S) u, Q / (.8 W)),  u = max(1, 1 + c (ceil(w)/w - 1)),  w = ceil(S/128) batch heads / SM
stream     t = t0 + Q / (e W)

heat = 1 + h clip(log10(F / 1e10), 0, 3.5): long products draw more power, and the clock drops.
No form goes below F/P: nothing runs above the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# Tiles of the vendors' libraries (rows x columns of the result); splits of the reduction dimension.
TILES: tuple[tuple[int, int], ...] = (
    (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (16, 128),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16)
K_STEP = 32
REFERENCE_EDGE = 1 / 128 + 1 / 256
HEAT_FROM_FLOP = 1e10
HEAT_DECADES = 3.5
ATTENTION_ROWS = 128
ATTENTION_BANDWIDTH_EFFICIENCY = 0.8


@dataclass(frozen=True, slots=True)
class Chip:
    """What of a device the forms use, for one dtype."""

    flop_per_s: float
    bytes_per_s: float
    units: int


@dataclass(frozen=True, slots=True)
class Space:
    """Parameters of a form: names, bounds, a typical start and a typical step of each."""

    names: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    start: tuple[float, ...]
    step: tuple[float, ...]

    def named(self, values: ArrayLike) -> dict[str, float]:
        """Values by name, five digits."""
        return {name: float(f"{value:.5g}") for name, value in zip(self.names, np.asarray(values), strict=True)}

    def values(self, named: dict[str, float]) -> Array:
        """The reverse of :meth:`named`."""
        return np.array([named[name] for name in self.names])


TILE = Space(
    names=(
        "compute_efficiency", "tile_edge", "wave_s", "floor_s", "heat", "bandwidth_efficiency", "sharpness", "split_s", "fill",
    ),
    low=(0.2, 0.0, 0.0, 0.0, 0.0, 0.3, 1.2, 0.0, 0.2),
    high=(1.2, 200.0, 2e-5, 6e-5, 0.5, 1.0, 8.0, 2e-5, 8.0),
    start=(0.88, 2.0, 5e-7, 2.3e-6, 0.08, 0.9, 2.5, 2e-6, 2.0),
    step=(0.1, 5.0, 1e-6, 1e-6, 0.05, 0.1, 0.5, 1e-6, 0.5),
)  # fmt: skip
SMOOTH = Space(
    names=("compute_efficiency", "half_m", "half_n", "half_k", "floor_s", "heat", "bandwidth_efficiency", "sharpness"),
    low=(0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2, 1.0),
    high=(1.2, 400.0, 2000.0, 400.0, 6e-5, 0.5, 1.0, 8.0),
    start=(0.75, 50.0, 50.0, 50.0, 4e-6, 0.05, 0.85, 3.0),
    step=(0.1, 30.0, 30.0, 30.0, 1e-6, 0.05, 0.1, 0.5),
)
ATTENTION = Space(
    names=("efficiency", "half_length", "floor_s", "wave"),
    low=(0.02, 0.0, 0.0, 0.0),
    high=(1.0, 6000.0, 2e-4, 1.0),
    start=(0.6, 500.0, 1e-5, 0.5),
    step=(0.1, 200.0, 5e-6, 0.3),
)
STREAM = Space(names=("efficiency", "floor_s"), low=(0.01, 0.0), high=(0.92, 2e-4), start=(0.7, 5e-6), step=(0.1, 3e-6))
SPACES = {"tile": TILE, "smooth": SMOOTH, "attention": ATTENTION, "stream": STREAM}

_COMBINATIONS = [(tm, tn, split) for tm, tn in TILES for split in SPLITS]
_TM, _TN, _SPLIT = (np.array(column, dtype=float) for column in zip(*_COMBINATIONS, strict=True))
_EDGE = 1 / _TM + 1 / _TN
_STEP_FLOP = 2 * _TM * _TN * K_STEP


def _column(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=float).reshape(-1, 1)


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products of shape (m x k)(k x n), ``batch`` times each; ``moved`` bytes. One row a product."""

    m: Array
    n: Array
    k: Array
    batch: Array
    moved: Array

    @property
    def flop(self) -> Array:
        """2 m n k batch."""
        return 2 * self.m * self.n * self.k * self.batch

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Products:
        """Some of the rows."""
        return Products(self.m[rows], self.n[rows], self.k[rows], self.batch[rows], self.moved[rows])


def products(m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike = 1.0, *, dtype_bytes: float = 2.0) -> Products:
    """Products with operands and results of ``dtype_bytes`` each."""
    m, n, k, batch = (np.array(x, dtype=float) for x in np.broadcast_arrays(*np.atleast_1d(m, n, k, batch)))
    return Products(m, n, k, batch, (m * k + k * n + m * n) * batch * dtype_bytes)


def joined(*parts: Products) -> Products:
    """Rows of several sets, one after another."""
    columns = zip(*((part.m, part.n, part.k, part.batch, part.moved) for part in parts), strict=True)
    return Products(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The part of the tile form that does not depend on parameters: one row a product, one column a (tile, split)."""

    waves: Array
    fill: Array
    work: Array
    split_traffic: Array
    impossible: NDArray[np.bool_]
    log_flop: Array
    moved: Array


def tile_grid(shape: Products, chip: Chip) -> TileGrid:
    """Tiles, waves and work of each product under each tile and split."""
    m, n, k, batch = (_column(size) for size in (shape.m, shape.n, shape.k, shape.batch))
    whole = np.ceil(m / _TM) * np.ceil(n / _TN) * batch
    tiles = whole * _SPLIT
    decades = np.clip(np.log10(np.maximum(shape.flop, 1.0) / HEAT_FROM_FLOP), 0, HEAT_DECADES)
    return TileGrid(
        waves=np.ceil(tiles / chip.units),
        fill=tiles / chip.units,
        work=_STEP_FLOP * np.ceil(k / (K_STEP * _SPLIT)),
        split_traffic=np.where(_SPLIT > 1, 4 * m * n * batch * _SPLIT / (3 * chip.bytes_per_s), 0.0),
        impossible=(_SPLIT > 1) & (whole >= chip.units),
        log_flop=_column(decades),
        moved=_column(shape.moved),
    )


def soft_max(first: Array, second: Array, sharpness: float) -> Array:
    """(a^q + b^q)^(1/q) without overflow."""
    high = np.maximum(first, second)
    result: Array = high * (1 + (np.minimum(first, second) / high) ** sharpness) ** (1 / sharpness)
    return result


def tile_time_s(parameters: Array, grid: TileGrid, chip: Chip) -> Array:
    """Seconds of each product, tile form; parameters in the order of ``TILE``."""
    efficiency, edge, wave_s, floor_s, heat, bandwidth, sharpness, split_s, fill = parameters
    rate = efficiency * (1 + edge * REFERENCE_EDGE) / (1 + edge * _EDGE) * chip.flop_per_s / chip.units
    compute = grid.waves * ((1 + heat * grid.log_flop) * grid.work / rate + wave_s)
    memory = grid.moved / (bandwidth * chip.bytes_per_s) / np.minimum(1.0, fill * grid.fill)
    time = soft_max(compute, memory, sharpness) + np.where(_SPLIT > 1, split_s, 0.0) + grid.split_traffic
    best: Array = floor_s + np.where(grid.impossible, np.inf, time).min(axis=1)
    return best


def smooth_time_s(parameters: Array, shape: Products, chip: Chip) -> Array:
    """Seconds of each product, smooth form; parameters in the order of ``SMOOTH``."""
    efficiency, half_m, half_n, half_k, floor_s, heat, bandwidth, sharpness = parameters
    decades = np.clip(np.log10(np.maximum(shape.flop, 1.0) / HEAT_FROM_FLOP), 0, HEAT_DECADES)
    compute = shape.flop / (efficiency * chip.flop_per_s) * (1 + heat * decades)
    compute = compute * (1 + half_m / shape.m) * (1 + half_n / shape.n) * (1 + half_k / shape.k)
    memory = shape.moved / (bandwidth * chip.bytes_per_s)
    return floor_s + soft_max(compute, memory, sharpness)


def product_time_s(form: str, parameters: Array, shape: Products, chip: Chip) -> Array:
    """Seconds of each product under ``form`` (``tile`` or ``smooth``), never above the peak."""
    time = tile_time_s(parameters, tile_grid(shape, chip), chip) if form == "tile" else smooth_time_s(parameters, shape, chip)
    return np.maximum(time, shape.flop / chip.flop_per_s)


@dataclass(frozen=True, slots=True)
class Attentions:
    """Fused attention calls. ``flop`` is what the kernel executes (a causal one half); ``blocks`` = ceil(S/128) batch heads."""

    flop: Array
    moved: Array
    length: Array
    blocks: Array

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Attentions:
        """Some of the rows."""
        return Attentions(self.flop[rows], self.moved[rows], self.length[rows], self.blocks[rows])


def attention_time_s(parameters: Array, shape: Attentions, chip: Chip) -> Array:
    """Seconds of each call; parameters in the order of ``ATTENTION``; never above the peak."""
    efficiency, half_length, floor_s, wave = parameters
    waves = shape.blocks / chip.units
    quantised = np.maximum(1.0, 1 + wave * (np.ceil(waves) / waves - 1))
    compute = shape.flop / (efficiency * chip.flop_per_s) * (1 + half_length / shape.length) * quantised
    memory = shape.moved / (ATTENTION_BANDWIDTH_EFFICIENCY * chip.bytes_per_s)
    return np.maximum(floor_s + np.maximum(compute, memory), shape.flop / chip.flop_per_s)
