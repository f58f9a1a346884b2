"""How much of a device's peak a training run used, with the convention that the number was counted by."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from specs.base import Document, InvalidInputValue, Spec


class AttentionFlop(StrEnum):
    """What of the attention scores a FLOP count holds: nothing (6N alone), all s x s of them, or the causal half."""

    NONE = "none"
    FULL = "full"
    CAUSAL = "causal"


class FlopConvention(Spec):
    """What counts as model FLOP; backward is twice forward and recompute never counts.

    ``attention``: see :class:`AttentionFlop`. ``embedding_table``: whether 6N counts the input embedding, which multiplies nothing.
    """

    attention: AttentionFlop = AttentionFlop.FULL
    embedding_table: bool = True

    def text(self) -> str:
        """The convention in words."""
        params = "6 x all parameters" if self.embedding_table else "6 x parameters that multiply (no embedding table)"
        scores = {
            AttentionFlop.NONE: "no attention scores",
            AttentionFlop.FULL: "12 x layers x heads x head size x length for attention (non-causal)",
            AttentionFlop.CAUSAL: "6 x layers x heads x head size x length for attention (causal half)",
        }[self.attention]
        return f"{params} + {scores} FLOP per token; multiply-add = 2, backward 2x, recompute not counted; of the dense peak"


class Utilization(Document):
    """Model FLOP utilisation of a run: ``achieved_flop_per_s`` / ``peak_flop_per_s``, both of one device.

    ``flop_per_token`` and ``tokens_per_s`` are ``None`` where the achieved rate was given instead.
    """

    kind: ClassVar[str] = "utilization"
    model: str = ""
    device: str
    dtype: str
    peak_flop_per_s: float = Field(description="dense peak of one device; a peak with sparsity is twice as high and never used")
    peak_source: str = ""
    achieved_flop_per_s: float
    mfu: float
    convention: FlopConvention | None = Field(default=None, description="None: the achieved rate was given, counted by its source")
    formula: str = ""
    seq_len: int | None = None
    tokens_per_s: float | None = Field(default=None, description="of one device")
    flop_per_token: float | None = None


def mfu_ratio(first: Utilization, second: Utilization) -> float:
    """``first.mfu / second.mfu``; raises :class:`InvalidInputValue` when they were counted by different conventions."""
    if first.convention is None or second.convention is None or first.convention != second.convention:
        known = [item.formula or "not stated" for item in (first, second)]
        raise InvalidInputValue(
            "mixed_flop_conventions", f"these utilisations are not comparable: one counts {known[0]}; the other {known[1]}",
            actual=known[1], allowed=[known[0]],
        )  # fmt: skip
    if first.mfu <= 0 or second.mfu <= 0:
        raise InvalidInputValue("no_utilization", "a utilisation of 0 has no ratio", actual=[first.mfu, second.mfu])
    return first.mfu / second.mfu
