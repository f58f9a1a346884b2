"""MemoryReport: what a training job holds, term by term and with its source, before anything runs."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from specs.base import Document, Spec
from specs.prediction import Assumption, MemoryPrediction


class StateTerm(Spec):
    """One kind of state of one device: ``device_bytes`` = ``params`` x ``bytes_per_param`` / ``shards``."""

    what: str
    dtype: str
    bytes_per_param: float
    params: float
    shards: int
    device_bytes: float
    source: str


class ZeroStates(Spec):
    """States of one device at a ZeRO stage, activations and buffers apart."""

    zero: int
    terms: tuple[StateTerm, ...]
    device_bytes: float


class OffloadStates(Spec):
    """States of ZeRO 3 with some of them in host memory.

    ``host_bytes``: of one node, ``host_buffer_factor`` times what is kept there. ``formula_*`` say the sums in words.
    """

    offload: str = Field(description="none | optimizer | optimizer and weights")
    device_bytes: float
    host_bytes: float
    host_buffer_factor: float
    formula_device: str
    formula_host: str


class LossMemory(Spec):
    """Logits and loss of one micro-batch at its backward: ``logits``, ``log_probabilities`` and ``gradient`` are alive together.

    ``fused`` kernels hold a part of the tokens at a time.
    """

    kernel: str
    tokens: int
    vocabulary: int
    logits_bytes: float
    log_probabilities_bytes: float
    gradient_bytes: float
    total_bytes: float


class UnitMemory(Spec):
    """Units of one kind at the micro-batch of the report: parameters, and what one keeps for backward, by op class."""

    block: str
    count: int
    params: float
    saved_bytes: float
    saved_by_class: dict[str, float]


class MemoryReport(Document):
    """See the module docstring. ``recipe`` is the convention that was used, in words with its bytes per parameter."""

    kind: ClassVar[str] = "memory report"
    model: str
    num_params: float
    num_trainable: float
    devices: int
    device: str = ""
    capacity_bytes: float | None = None
    recipe: str
    bytes_per_param: float
    states: tuple[ZeroStates, ...]
    offload: tuple[OffloadStates, ...] = ()
    seq_len: int | None = None
    micro_batch: int | None = None
    units: tuple[UnitMemory, ...] = ()
    loss: LossMemory | None = None
    strategy: str = ""
    ranks: tuple[MemoryPrediction, ...] = Field(default=(), description="of the strategy, one for each class of ranks")
    fits: bool | None = None
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
