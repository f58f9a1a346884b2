"""The forms of ``profiler.fit.forms`` for one call, in plain floats: a search asks thousands of times, one shape at a time.

Same formulas, same legend; a test holds the two to each other. The tile form skips every (tile, split) whose larger half is
already above the best time found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, log10

from profiler.fit.forms import (
    ATTENTION,
    ATTENTION_BANDWIDTH_EFFICIENCY,
    ATTENTION_ROWS,
    HEAT_DECADES,
    HEAT_FROM_FLOP,
    K_STEP,
    REFERENCE_EDGE,
    SMOOTH,
    SPLITS,
    TILE,
    TILES,
    Chip,
)
from profiler.fit.records import Fit

ProductTime = Callable[[float, float, float, float, float], float]
"""Seconds of a product from m, n, k, batch and bytes moved."""
AttentionTime = Callable[[float, float, float, float], float]
"""Seconds of a fused attention call from FLOP, bytes moved, key length and query blocks (query length / 128 x batch x heads)."""

_DEEPER_SPLITS = SPLITS[1:]
_REMEMBERED = 8192


@dataclass(frozen=True, slots=True)
class Conditions:
    """In what a product runs. ``least_heat_decades``: heat is taken at no less than this. ``load``: time of arithmetic at the clock
    that its surroundings leave over that at the benchmark's clock; in full from ``LOADED_FLOP`` on, below that latency counts.
    """

    least_heat_decades: float = 0.0
    load: float = 1.0

    def slowdown(self, heat: float, flop: float) -> float:
        """Time of a product's arithmetic over that on a cool chip with nothing beside it."""
        decades = max(min(log10(flop / HEAT_FROM_FLOP), HEAT_DECADES) if flop > HEAT_FROM_FLOP else 0.0, self.least_heat_decades)
        return (1 + heat * decades) * (1 + (self.load - 1) * min(1.0, flop / LOADED_FLOP))


ALONE = Conditions()
LOADED_FLOP = 1e9


def product_time(fit: Fit, chip: Chip, conditions: Conditions = ALONE) -> ProductTime:
    """The form of ``fit`` on ``chip``, never above the peak; shapes asked for again are remembered."""
    form = _tile if fit.form == "tile" else _smooth
    return lru_cache(maxsize=_REMEMBERED)(form(fit, chip, conditions))


def _smooth(fit: Fit, chip: Chip, conditions: Conditions) -> ProductTime:
    efficiency, half_m, half_n, half_k, floor_s, heat, bandwidth, sharpness = (fit.parameters[name] for name in SMOOTH.names)
    rate, byte_rate = efficiency * chip.flop_per_s, bandwidth * chip.bytes_per_s
    peak, root = chip.flop_per_s, 1 / sharpness

    def seconds(m: float, n: float, k: float, batch: float, moved: float) -> float:
        flop = 2 * m * n * k * batch
        compute = flop / rate * conditions.slowdown(heat, flop) * (1 + half_m / m) * (1 + half_n / n) * (1 + half_k / k)
        memory = moved / byte_rate
        high, low = (compute, memory) if compute > memory else (memory, compute)
        time: float = floor_s + high * (1 + (low / high) ** sharpness) ** root
        return max(time, flop / peak)

    return seconds


def _tile(fit: Fit, chip: Chip, conditions: Conditions) -> ProductTime:
    efficiency, edge, wave_s, floor_s, heat, bandwidth, sharpness, split_s, fill = (fit.parameters[name] for name in TILE.names)
    units, byte_rate, peak, root = chip.units, bandwidth * chip.bytes_per_s, chip.flop_per_s, 1 / sharpness
    split_rate = 3 * chip.bytes_per_s
    unit_rate = efficiency * (1 + edge * REFERENCE_EDGE) * chip.flop_per_s / units
    # rows, columns, seconds of one K_STEP of one tile on one unit
    tiles = tuple((tm, tn, 2 * tm * tn * K_STEP * (1 + edge * (1 / tm + 1 / tn)) / unit_rate) for tm, tn in TILES)

    def seconds(m: float, n: float, k: float, batch: float, moved: float) -> float:
        flop = 2 * m * n * k * batch
        hot = conditions.slowdown(heat, flop)
        memory_full = moved / byte_rate
        steps = ceil(k / K_STEP)
        result_s = 4 * m * n * batch / split_rate
        best = inf
        for tm, tn, step_s in tiles:
            whole = ceil(m / tm) * ceil(n / tn) * batch
            tile_s = hot * step_s
            compute = ceil(whole / units) * (tile_s * steps + wave_s)
            if compute < best:
                filled = fill * whole / units
                memory = memory_full if filled >= 1 else memory_full / filled
                high, low = (compute, memory) if compute > memory else (memory, compute)
                if high < best:
                    best = min(best, high * (1 + (low / high) ** sharpness) ** root)
            if whole >= units or split_s + max(tile_s * steps * whole / units, memory_full) >= best:
                continue  # no split, or none that could be better even if it filled the chip evenly
            for split in _DEEPER_SPLITS:
                apart = split_s + result_s * split
                count = whole * split
                compute = ceil(count / units) * (tile_s * ceil(k / (K_STEP * split)) + wave_s)
                if compute + apart >= best:
                    continue
                filled = fill * count / units
                memory = memory_full if filled >= 1 else memory_full / filled
                high, low = (compute, memory) if compute > memory else (memory, compute)
                if high + apart < best:
                    best = min(best, apart + high * (1 + (low / high) ** sharpness) ** root)
        return max(floor_s + best, flop / peak)

    return seconds


def attention_time(fit: Fit, chip: Chip) -> AttentionTime:
    """The attention form of ``fit`` on ``chip``, never above the peak."""
    efficiency, half_length, floor_s, wave = (fit.parameters[name] for name in ATTENTION.names)
    rate, peak, units = efficiency * chip.flop_per_s, chip.flop_per_s, chip.units
    byte_rate = ATTENTION_BANDWIDTH_EFFICIENCY * chip.bytes_per_s

    def seconds(flop: float, moved: float, length: float, blocks: float) -> float:
        waves = blocks / units
        quantised = max(1.0, 1 + wave * (ceil(waves) / waves - 1))
        compute = flop / rate * (1 + half_length / length) * quantised
        return max(floor_s + max(compute, moved / byte_rate), flop / peak)

    return seconds


def query_blocks(q_len: float, heads: float) -> float:
    """Blocks of a fused attention call: ``heads`` counts batch x heads."""
    return ceil(q_len / ATTENTION_ROWS) * heads
