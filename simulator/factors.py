"""The factors of a calibration as the cost model applies them: on every price, at the one place where it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from profiler.opset import OpClass
from specs.calibration import FACTORS, Calibration
from specs.prediction import Assumption

COMPUTE = frozenset({OpClass.GEMM, OpClass.GROUPED_GEMM, OpClass.ATTENTION})


@dataclass(frozen=True, slots=True)
class Factors:
    """One number per name of ``specs.calibration.FACTORS``; all 1 without a calibration. ``origin``: where they come from."""

    compute: float = 1.0
    memory_bound: float = 1.0
    intra_comm: float = 1.0
    inter_comm: float = 1.0
    host: float = 1.0
    optimizer: float = 1.0
    memory: float = 1.0
    origin: Calibration | None = None

    @classmethod
    def of(cls, calibration: Calibration | None) -> Factors:
        """The factors of a calibration, or none."""
        if calibration is None:
            return UNCALIBRATED
        return replace(cls.from_values({name: calibration.value(name) for name in FACTORS}), origin=calibration)

    @classmethod
    def from_values(cls, values: Mapping[str, float]) -> Factors:
        """Factors by name; those that are not given are 1."""
        return replace(UNCALIBRATED, **values)  # type: ignore[arg-type]

    def of_op(self, op_class: OpClass) -> float:
        """On the time of an op or kernel."""
        return self.compute if op_class in COMPUTE else self.memory_bound

    def of_link(self, tier: str) -> float:
        """On the time of a collective whose slowest link is of that tier (intra | inter)."""
        return self.inter_comm if tier == "inter" else self.intra_comm

    def assumptions(self) -> list[Assumption]:
        """What a prediction says about them."""
        if self.origin is None:
            return []
        found = self.origin
        what = (
            f"factors refitted from {found.num_runs} measured run{'s' if found.num_runs != 1 else ''} of cluster '{found.cluster}'"
        )
        value = {name: round(factor.value, 4) for name, factor in found.factors.items()}
        return [Assumption(what=what, value=value, provenance="fitted")]


UNCALIBRATED = Factors()
