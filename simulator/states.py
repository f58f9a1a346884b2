"""Model states in closed form: which bytes a parameter needs, on how many devices each kind is split, at every ZeRO stage.

The same rules that ``simulator.memory`` walks (a test holds them equal), written out term by term for people. Sources: Rajbhandari
et al., arXiv 1910.02054 §3 and §5 (ZeRO), Zhao et al., arXiv 2304.11277 §4 (FSDP), and for what goes to the host DeepSpeed's
``runtime/zero/stage3.py`` (``estimate_zero3_model_states_mem_needs``).
"""

from __future__ import annotations

from dataclasses import dataclass

from specs.graph import DTYPE_BYTES
from specs.memory import OffloadStates, StateTerm, ZeroStates
from specs.training import Optimizer, Precision

ZERO_PAPER = "arXiv 1910.02054 section 3"
# Stage from which a kind of state is split over the devices.
SPLIT_FROM = {"weights": 3, "gradients": 2, "gradient accumulation": 2, "master weights": 1, "optimizer states": 1}


@dataclass(frozen=True, slots=True)
class StateKind:
    """One kind of state: its bytes per parameter, and why they are there."""

    what: str
    dtype: str
    bytes_per_param: float
    source: str


def state_kinds(precision: Precision, optimizer: Optimizer) -> list[StateKind]:
    """The states of a trainable parameter under this convention, in the order weights, gradients, optimizer."""
    kinds = [
        StateKind("weights", precision.param_dtype, DTYPE_BYTES[precision.param_dtype], "precision.param_dtype"),
        StateKind("gradients", precision.grad_dtype, DTYPE_BYTES[precision.grad_dtype], "precision.grad_dtype"),
    ]
    if precision.accumulate_dtype is not None:
        dtype = precision.accumulate_dtype
        kinds.append(StateKind("gradient accumulation", dtype, DTYPE_BYTES[dtype], "precision.accumulate_dtype"))
    if precision.master_dtype is not None:
        dtype = precision.master_dtype
        kinds.append(StateKind("master weights", dtype, DTYPE_BYTES[dtype], "precision.master_dtype"))
    if optimizer.states_per_param:
        size = optimizer.states_per_param * DTYPE_BYTES[optimizer.state_dtype]
        source = f"optimizer {optimizer.name}: {optimizer.states_per_param} x {optimizer.state_dtype}"
        kinds.append(StateKind("optimizer states", optimizer.state_dtype, size, source))
    return kinds


def recipe(precision: Precision, optimizer: Optimizer) -> tuple[str, float]:
    """The convention in words, and its bytes per parameter when nothing is split."""
    kinds = state_kinds(precision, optimizer)
    total = sum(kind.bytes_per_param for kind in kinds)
    parts = " + ".join(f"{kind.what} {kind.bytes_per_param:g} ({kind.dtype})" for kind in kinds)
    return f"{total:g} bytes per parameter: {parts}", total


def zero_states(
    zero: int, *, trainable: float, frozen: float, shards: int, precision: Precision, optimizer: Optimizer
) -> ZeroStates:
    """States of one device of ``shards`` that split them; frozen parameters have weights only."""
    terms = []
    for kind in state_kinds(precision, optimizer):
        split = shards if zero >= SPLIT_FROM[kind.what] else 1
        source = f"{kind.source}; {'split' if split > 1 else 'whole'} at ZeRO {zero} ({ZERO_PAPER})"
        if zero == 0 and kind.what == "gradients" and shards > 1:
            source += "; DDP's buckets hold them, a second copy is there while micro-batches accumulate"
        terms.append(_term(kind, trainable, split, source))
        if kind.what == "weights" and frozen:
            dtype = precision.frozen_dtype or precision.param_dtype
            held = StateKind("frozen weights", dtype, DTYPE_BYTES[dtype], "precision.frozen_dtype")
            terms.append(_term(held, frozen, split, f"{held.source}; no gradient, no optimizer state"))
    if zero in (1, 2) and precision.master_dtype is None:
        kind = state_kinds(precision, optimizer)[0]
        own = StateKind("own shard of weights", kind.dtype, kind.bytes_per_param, "no master weights: the shard is updated itself")
        terms.append(_term(own, trainable + frozen, shards, f"{own.source} (arXiv 2304.11277 section 4)"))
    return ZeroStates(zero=zero, terms=tuple(terms), device_bytes=sum(term.device_bytes for term in terms))


def _term(kind: StateKind, params: float, shards: int, source: str) -> StateTerm:
    return StateTerm(
        what=kind.what, dtype=kind.dtype, bytes_per_param=kind.bytes_per_param, params=params, shards=shards,
        device_bytes=params * kind.bytes_per_param / shards, source=source,
    )  # fmt: skip


def optimizer_offload_bytes(trainable: float, precision: Precision, optimizer: Optimizer) -> float:
    """Host memory of all nodes together that the optimizer's states and master weights need."""
    kinds = state_kinds(precision, optimizer)
    return trainable * sum(kind.bytes_per_param for kind in kinds if SPLIT_FROM[kind.what] == 1)


def offload_states(
    *,
    num_params: float,
    largest_layer_params: float,
    devices: int,
    nodes: int,
    precision: Precision,
    optimizer: Optimizer,
    host_buffer_factor: float = 1.0,
) -> list[OffloadStates]:
    """ZeRO 3 on ``devices`` of ``nodes``: nothing, the optimizer (with gradients), or weights too in host memory.

    One layer's weights and gradients are gathered on the device in the parameters' dtype. Without offload the host loads one layer
    a process in float32. ``host_buffer_factor`` multiplies host bytes: pinned copies and buffers (DeepSpeed's estimator: 1.5).
    """
    kinds = {kind.what: kind.bytes_per_param for kind in state_kinds(precision, optimizer)}
    weight, whole = kinds["weights"], sum(kinds.values())
    updated = whole - weight
    layer = 2 * weight * largest_layer_params
    gathered = f"{2 * weight:g} B x {largest_layer_params / 1e6:.0f} M of the largest layer (weights and gradients)"
    load = 4.0 * largest_layer_params * devices / nodes
    factor = "" if host_buffer_factor == 1 else f" x {host_buffer_factor:g} for buffers"
    rows = [
        ("none", whole, load, f"4 B x {largest_layer_params / 1e6:.0f} M x {devices // nodes} processes that load a layer"),
        ("optimizer", weight, updated * num_params / nodes, f"{updated:g} B x {num_params / 1e6:.0f} M / {nodes} nodes"),
        ("optimizer and weights", 0.0, whole * num_params / nodes, f"{whole:g} B x {num_params / 1e6:.0f} M / {nodes} nodes"),
    ]
    return [
        OffloadStates(
            offload=name, device_bytes=layer + kept * num_params / devices, host_bytes=host * host_buffer_factor,
            host_buffer_factor=host_buffer_factor, formula_host=words + factor,
            formula_device=gathered + (f" + {kept:g} B x {num_params / 1e6:.0f} M / {devices} devices" if kept else ""),
        )
        for name, kept, host, words in rows
    ]  # fmt: skip
