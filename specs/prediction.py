"""Prediction: what a plan will do, term by term, and where each number comes from."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from specs.base import Document, Spec
from specs.units import GB, format_seconds


class MemoryPrediction(Spec):
    """Memory of the fullest rank. ``terms`` (keys of ``specs.terms.MEMORY_TERMS``) sum to ``peak_bytes``.

    ``peak_bytes`` counts what the job allocates; what the process needs before (context, libraries) is ``baseline_bytes``.
    ``reserved_bytes`` = peak x (1 + ``margin_fraction`` for the allocator) + baseline is what must fit. ``saved_by_class``: the
    activations at the peak by the class of the op that keeps them.
    """

    peak_bytes: float
    capacity_bytes: float
    reserved_bytes: float | None = None
    baseline_bytes: float = 0.0
    margin_fraction: float = Field(default=0.0, description="of the peak, added for the allocator")
    terms: dict[str, float]
    saved_by_class: dict[str, float] = {}
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


class FabricLink(Spec):
    """A link that the plan's devices talk over. ``bandwidth_bytes_per_s``: one direction, of a device (``intra``) or a node."""

    tier: str = Field(description="intra | inter")
    nodes: str = Field(description="the node group whose link it is")
    kind: str = ""
    bandwidth_bytes_per_s: float
    latency_s: float
    oversubscription: float = 1.0
    source: str = Field(default="", description="where the bandwidth comes from")
    measured: bool = Field(default=False, description="priced from measured curves rather than from these numbers")

    def text(self) -> str:
        """The link in a line."""
        rate = f"{self.bandwidth_bytes_per_s / GB:.4g} GB/s per {'device' if self.tier == 'intra' else 'node'}"
        shared = f", oversubscribed {self.oversubscription:g} x" if self.oversubscription > 1 else ""
        source = "measured curves" if self.measured else self.source
        return f"{self.tier} {self.kind or 'link'} {rate}, {format_seconds(self.latency_s)}{shared} ({self.nodes}; {source})"


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
    flags: tuple[str, ...] = Field(
        default=(),
        description="does_not_fit | memory_above_95_percent with performance_risk | tight; selective_recompute_saves_nothing",
    )
    fabric: tuple[FabricLink, ...] = Field(default=(), description="the links that the times rest on")
