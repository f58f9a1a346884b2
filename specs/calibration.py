"""Calibration: a few named factors of one cluster's cost model, refitted from measured runs, with a prior and bounds."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field, model_validator

from specs.base import Document, InvalidInputValue, InvalidInputValues, Spec
from specs.cluster import ClusterSpec
from specs.errors import nearest_name

# 90th percentile of the standard normal: an 80 % interval reaches so many standard deviations to each side.
NORMAL_P90 = 1.2815515655446004


@dataclass(frozen=True, slots=True)
class FactorRule:
    """What a factor multiplies, the width of its log-normal prior around 1 (standard deviation of the log), and its bounds."""

    meaning: str
    prior_width: float
    low: float
    high: float


# Widths: another laboratory's kernel times on the same device differ by 1 to 18 % (fits on public kernel measurements, see
# traces/efficiency), effective bandwidths of networks and host times by more; the other widths and all bounds are stated.
FACTORS: dict[str, FactorRule] = {
    "compute": FactorRule("time of products and attention", 0.15, 0.5, 2.0),
    "memory_bound": FactorRule("time of all other ops and of copies", 0.2, 0.4, 2.5),
    "intra_comm": FactorRule("time of collectives and messages inside a node", 0.3, 0.3, 3.0),
    "inter_comm": FactorRule("time of collectives and messages between nodes", 0.4, 0.25, 4.0),
    "host": FactorRule("host time: launches and work between steps", 0.4, 0.25, 4.0),
    "optimizer": FactorRule("time of the optimizer step", 0.3, 0.3, 3.0),
    "memory": FactorRule("peak memory: what the allocator holds beyond the tensors", 0.05, 1.0, 1.5),
}


class CalibratedFactor(Spec):
    """A factor, its 80 % interval, and whether the runs pull it beyond one of its bounds."""

    value: float = Field(gt=0, allow_inf_nan=False)
    low: float = Field(gt=0, allow_inf_nan=False)
    high: float = Field(gt=0, allow_inf_nan=False)
    at_bound: bool = False


class CalibrationRun(Spec):
    """A run that a calibration rests on: step time measured, predicted before and after, and which of its numbers were fitted."""

    plan_hash: str
    strategy: str = ""
    measured_s: float
    before_s: float
    after_s: float
    fitted: str = Field(default="terms", description="terms | step_time")


class Calibration(Document):
    """Factors on the prices of one cluster. A factor that is not listed is 1. ``residual_*``: root mean square of log(predicted /
    measured) of the step times."""

    kind: ClassVar[str] = "calibration"
    cluster: str
    hardware_hash: str = Field(description="of device types and links, see hardware_hash(): counts of nodes are free")
    profile_hash: str = Field(default="", description="of the profile that the factors multiply; empty: efficiency models")
    num_runs: int = Field(ge=0)
    factors: dict[str, CalibratedFactor] = {}
    runs: tuple[CalibrationRun, ...] = ()
    residual_before: float = 0.0
    residual_after: float = 0.0
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _known_and_bounded(self) -> Calibration:
        broken = []
        for name, factor in self.factors.items():
            rule = FACTORS.get(name)
            if rule is None:
                broken.append(
                    InvalidInputValue(
                        "unknown_factor", f"factor '{name}' is not known", actual=name, allowed=sorted(FACTORS),
                        nearest=nearest_name(name, FACTORS), loc=("factors", name),
                    )
                )  # fmt: skip
            elif not rule.low <= factor.value <= rule.high:
                broken.append(
                    InvalidInputValue(
                        "factor_out_of_bounds", f"factor '{name}' is {factor.value:g}", actual=factor.value,
                        allowed=f"{rule.low:g} to {rule.high:g}", nearest=min(max(factor.value, rule.low), rule.high),
                        loc=("factors", name, "value"),
                    )
                )  # fmt: skip
        InvalidInputValues.raise_any(broken)
        return self

    def value(self, name: str) -> float:
        """The factor of that name."""
        return self.factors[name].value if name in self.factors else 1.0


def hardware_hash(cluster: ClusterSpec) -> str:
    """What a calibration belongs to: device types, devices per node, kinds of links and backend of a resolved cluster.

    How many nodes there are is free, and so are measured rates, which differ a little each time they are measured.
    """
    groups = sorted(
        {
            (group.device or "", group.devices_per_node or 0, *(link.kind if link else "" for link in (group.intra, group.inter)))
            for group in cluster.nodes
        }
    )
    return hashlib.sha256(json.dumps([cluster.backend, groups]).encode()).hexdigest()


def log_interval(log_value: float, log_width: float) -> tuple[float, float]:
    """The 80 % interval of a log-normal value with that standard deviation of its logarithm."""
    return math.exp(log_value - NORMAL_P90 * log_width), math.exp(log_value + NORMAL_P90 * log_width)
