"""The 80 % interval of a step time: what it hangs on, and how far each of those may be off.

A prediction names its *exposures*, shares of the step times how uncertain their prices are; ``traces/intervals.json`` holds one
*width* per exposure, fitted on published runs (``python -m benchmarks.intervals``) or stated. In logarithms, to each side,

    spread = sqrt(sum over exposures x of (width_x * x)^2),    low = T exp(-spread_low), high = T exp(spread_high)

============  ==========================================================================================================
ops           compute priced by efficiency models, and waiting for it, times their expected error: what a laboratory, a site
              or a software version does to all kernels alike; two widths, because predictions tend to be too fast
kernels       the same errors as if every kernel of a block erred on its own: small where many share the time
intra, inter  exposed collectives inside a node, between nodes, priced from links
pipeline      bubbles and waiting for slower ranks
scale         doublings of the number of nodes
measured      whatever a profile or a calibration of this very cluster prices, times the half width of such numbers
============  ==========================================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from simulator.cost_model import CostModel
from simulator.efficiency import defaults
from simulator.rank_step import RankStep
from simulator.unit_cost import UnitCost
from specs.base import Provenance
from specs.plan import Plan

COMM_TERMS = ("tp_comm", "cp_comm", "ep_comm", "dp_comm")
IDLE_TERMS = ("pipeline", "wait")
EXPOSURES = ("ops", "kernels", "intra", "inter", "pipeline", "scale", "measured")
HERE = (Provenance.MEASURED, Provenance.INTERPOLATED, Provenance.EXTRAPOLATED)


@dataclass(frozen=True, slots=True)
class Widths:
    """Half widths of the 80 % interval per unit of exposure, in logarithms. ``low`` and ``high``: of ``ops``, to each side."""

    low: float
    high: float
    kernels: float
    intra: float
    inter: float
    pipeline: float
    scale: float
    measured: float

    def spread(self, exposures: Mapping[str, Any], side: Literal["low", "high"]) -> Any:
        """Half width to one side, in logarithms. Exposures are numbers, or arrays of one entry a prediction."""
        squares = (getattr(self, side) * exposures.get("ops", 0.0)) ** 2
        for name in EXPOSURES[1:]:
            squares = squares + (getattr(self, name) * exposures.get(name, 0.0)) ** 2
        return squares**0.5


@lru_cache(maxsize=1)
def widths() -> Widths:
    """The packaged widths."""
    data = json.loads(resources.files("traces").joinpath("intervals.json").read_text())
    return Widths(**{name: float(item["value"]) for name, item in data["widths"].items()})


def interval(step_s: float, exposures: Mapping[str, float], using: Widths | None = None) -> tuple[float, float]:
    """The least and the longest step time that eight of ten runs keep to."""
    known = using or widths()
    return step_s * math.exp(-known.spread(exposures, "low")), step_s * math.exp(known.spread(exposures, "high"))


def exposures(model: CostModel, plan: Plan, ranks: Sequence[RankStep]) -> dict[str, float]:
    """What a simulated step hangs on; see the module docstring."""
    shares = _shares(ranks)
    busy = shares["compute"] + shares["idle"]
    ops = _ops([unit for rank in ranks for cost in rank.stages.values() for unit in cost.units])
    devices = {device for pipeline in plan.pipelines for stage in pipeline.stages for device in stage.devices}
    found = {
        "ops": busy * ops.modelled, "kernels": shares["compute"] * ops.independent, "intra": shares["intra"],
        "inter": shares["inter"], "pipeline": shares["idle"], "measured": busy * ops.measured,
        "scale": math.log2(len({model.network.places[device].node for device in devices})),
    }  # fmt: skip
    return {name: value for name, value in _known_here(model, found, busy * ops.share, ops.arithmetic).items() if value > 0}


def _shares(ranks: Sequence[RankStep]) -> dict[str, float]:
    """Shares of all ranks' time: compute, idle, and collectives by the slowest link that they cross."""
    found = dict.fromkeys(("compute", "idle", "intra", "inter"), 0.0)
    for rank in ranks:
        cost = next(iter(rank.stages.values()))
        tiers = {"tp_comm": cost.tp_shape.tier}
        for name, seconds in rank.terms.items():
            kind = "idle" if name in IDLE_TERMS else tiers.get(name, cost.dp_shape.tier) if name in COMM_TERMS else "compute"
            found[kind] += seconds * len(cost.stage.devices)
    total = sum(found.values())
    return {name: seconds / total for name, seconds in found.items()}


def _known_here(model: CostModel, found: Mapping[str, float], modelled: float, arithmetic: float) -> dict[str, float]:
    """Moves to ``measured`` what was measured on this cluster, or refitted from its runs. ``modelled``: share of the step that
    efficiency models price; ``arithmetic``: share of that in products and attention."""
    moved = dict(found)
    half = defaults()["interval"][Provenance.INTERPOLATED.value]
    calibration = model.factors.origin

    def learnt(name: str) -> float:
        """Half width of a factor's interval with what single plans scatter besides."""
        factor = calibration.factors.get(name) if calibration is not None else None
        return math.inf if factor is None else math.hypot(math.log(factor.high / factor.low) / 2, half)

    if calibration is not None and calibration.num_runs:
        ops = arithmetic * learnt("compute") + (1 - arithmetic) * learnt("memory_bound")
        known = widths()
        # a run or two leave most to the prior, which must not know less than the specs did
        if modelled * ops * known.measured < found["ops"] * (known.low + known.high) / 2:
            moved["measured"], moved["ops"] = moved["measured"] + modelled * ops, 0.0
    for tier in ("intra", "inter"):
        width = half if model.network.table is not None else learnt(f"{tier}_comm")
        if math.isfinite(width):
            moved["measured"] += moved[tier] * width
            moved[tier] = 0.0
    return moved


@dataclass(frozen=True, slots=True)
class _Ops:
    """Expected relative error of all compute: of what models price erring alike, the same erring independently, of what was
    measured here. ``share``: of compute that models price, ``arithmetic``: of those seconds in products and attention."""

    share: float
    arithmetic: float
    modelled: float
    independent: float
    measured: float


def _ops(units: Sequence[UnitCost]) -> _Ops:
    counts: dict[int, int] = {}
    for unit in units:
        counts[id(unit)] = counts.get(id(unit), 0) + 1
    seconds = arithmetic = modelled = measured = squares = total = 0.0
    for unit in {id(unit): unit for unit in units}.values():
        count = counts[id(unit)]
        for source, item in unit.by_source.items():
            total += count * item.seconds
            if source in HERE:
                measured += count * item.error_s
            else:
                seconds += count * item.seconds
                arithmetic += count * item.arithmetic_s
                modelled += count * item.error_s
                squares += (count**2) * item.error_squares  # equal units err alike
    if total <= 0:
        return _Ops(1.0, 1.0, float(defaults()["interval"]["assumed"]), 0.0, 0.0)
    return _Ops(
        seconds / total,
        arithmetic / seconds if seconds > 0 else 0.0,
        modelled / total,
        math.sqrt(squares) / total,
        measured / total,
    )
