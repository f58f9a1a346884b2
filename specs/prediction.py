"""Prediction: what a plan will do, term by term, and where each number comes from."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from specs.base import Document, Spec


class MemoryPrediction(Spec):
    """Memory of the fullest rank. ``terms`` (keys of ``specs.terms.MEMORY_TERMS``) sum to ``peak_bytes``.

    ``peak_bytes`` counts what the job allocates; what the process needs before (context, libraries) is ``baseline_bytes``.
    """

    peak_bytes: float
    capacity_bytes: float
    reserved_bytes: float | None = None
    baseline_bytes: float = 0.0
    terms: dict[str, float]
    peak_moment: str = Field(default="", description="the action at the peak, e.g. 'rank 0: 0B3'")
    peak_rank: int = 0


class RankPrediction(Spec):
    """One class of ranks that behave alike. ``terms`` sum to the step time."""

    ranks: tuple[int, ...]
    stage: int
    pipeline: int = 0
    device: str
    terms: dict[str, float]
    memory: MemoryPrediction


class PriceSource(Spec):
    """How much of the step rests on one kind of number."""

    source: str
    seconds: float
    num_ops: int
    examples: tuple[str, ...] = ()


class Assumption(Spec):
    """A number or choice that nobody gave or measured."""

    what: str
    value: Any = None
    provenance: str = "assumed"


class Prediction(Document):
    """The prediction of one step. ``waterfall``: mean seconds per rank by ``specs.terms.TIME_TERMS``; sums to the step."""

    kind: ClassVar[str] = "prediction"
    plan_hash: str = ""
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    exposures: dict[str, float] = Field(default={}, description="what the 80 % interval is made of, see simulator.interval")
    tokens_per_s: float
    mfu: float | None = None
    mfu_convention: str = ""
    model_flop: float = 0.0
    waterfall: dict[str, float]
    bubble_fraction: float = 0.0
    memory: MemoryPrediction
    ranks: tuple[RankPrediction, ...] = ()
    link_bytes: dict[str, float] = Field(default={}, description="bytes sent per device and step by axis: tp, pp, dp, ...")
    energy_j: float | None = None
    cost_usd: float | None = None
    provenance: tuple[PriceSource, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    flags: tuple[str, ...] = Field(default=(), description="'memory_above_95_percent', 'tight', ...")
