"""What a training framework does around the same ops: which kernels it fuses, what it overlaps, how it keeps gradients.

The default is the runtime that executes our plans (``simulator.runtime_rules``). Published runs come from other frameworks; each
is one :class:`Software`, read from ``traces/frameworks.json``. Every field is a property of the program that can be read in its
source or documentation, none is a correction factor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

FUSIONS = ("none", "pointwise", "compiler")
TP_OVERLAPS = ("none", "backward", "ring")


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """See the module docstring.

    Kernels. ``fusion``: ``none`` one kernel per op; ``pointwise`` chains of element-wise ops become one kernel (hand-fused bias,
    activation, rotary and dropout kernels); ``compiler`` norms join the chains too. ``launch_s``: host time per kernel, ``None``
    the default, 0 under CUDA graphs. ``caches_positions``: tables that depend on no input are made once. ``dropout``: dropout
    masks are kept after attention probabilities and before both residual additions. ``fused_attention_softmax``: mask,
    scale and softmax are one kernel where attention is not fused as a whole. ``attention_generation``: ``flash1``, ``flash2`` or
    ``latest``, of the fused kernel. ``joint_projections``: weights that multiply the same tensor are one product.
    ``composed_norms``: RMS norms are written out in single ops that work in float32, unless a compiler fuses them.

    Gradients. ``fused_grad_add``: weight gradients are accumulated by the product that makes them. ``overlap_grad_reduce`` and
    ``overlap_param_gather``: they run beside backward and forward; else after backward and after the optimizer.
    ``overlaps_under_pipeline``: replicated gradients of a pipeline's last backwards are reduced beside them as well.
    ``grad_passes``: times that the optimizer step reads or writes every gradient besides the update (unscale, norm, clip).

    ``gathers_by_tensor``: sharded parameters are gathered one tensor at a time instead of a unit at once.

    Communication. ``tp_overlap``: ``backward`` hides tensor-parallel collectives of backward behind weight gradients, ``ring`` also
    pipelines those of forward with the products that need them. ``p2p_blocking``: a pipeline rank waits for its sends and
    receives. ``cp_ring``: keys and values of a split sequence go round beside attention; else they are gathered before.
    ``p2p_split``: tensor-parallel ranks send one part each and gather it after. ``sends_tokens_once``: a token goes once to a node
    (or a rank of one node) that holds several of its experts, instead of once per expert.

    Recompute. ``recompute_stops_early``: a checkpointed unit runs again until the last tensor that backward needs is there, not to
    its end (``torch.utils.checkpoint`` without reentrance).

    Memory. ``regathers_inputs``: what was gathered over tensor-parallel ranks for a product is kept split and gathered again in its
    backward. ``keeps_narrow_inputs``: inputs of products wait for backward in the narrow dtype of the product.
    ``keeps_narrow_shards``: under ZeRO 3 a rank keeps its share of the weights in the compute dtype beside the master weights
    (DeepSpeed), instead of narrowing the master's share for each gather (FSDP). See
    ``simulator.memory.MemoryRules`` for ``extra_grad_bytes``, ``extra_state_bytes``, ``buffer_bytes``.

    Host. ``step_host_s``: work between steps that nothing hides. ``unit_host_s``: host time per unit and pass beside launches.
    """

    name: str = "meshwright"
    fusion: str = "none"
    launch_s: float | None = None
    caches_positions: bool = False
    dropout: bool = False
    fused_attention_softmax: bool = True
    attention_generation: str = "latest"
    joint_projections: bool = False
    composed_norms: bool = False
    fused_grad_add: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    overlaps_under_pipeline: bool = False
    grad_passes: float = 0.0
    gathers_by_tensor: bool = False
    gather_copies: float | None = None
    reduce_copies: float | None = None
    tp_overlap: str = "none"
    p2p_blocking: bool = False
    p2p_split: bool = False
    cp_ring: bool = True
    sends_tokens_once: bool = False
    recompute_stops_early: bool = True
    regathers_inputs: bool = False
    keeps_narrow_inputs: bool = False
    keeps_narrow_shards: bool = True
    extra_grad_bytes: float = 0.0
    extra_state_bytes: float = 0.0
    buffer_bytes: float = 0.0
    step_host_s: float = 0.0
    unit_host_s: float = 0.0


NATIVE = Software()


def attention_slowdown(generation: str, arch: str, *, backward: bool) -> float:
    """Time of a generation of fused attention over the latest one on an architecture; 1 where nothing is published."""
    if generation == "latest":
        return 1.0
    words = arch.lower().split()
    known = _attention_generations()[generation]
    found = next((known[word] for word in words if word in known), None)
    if found is None:
        found = known["hopper"] if "blackwell" in words else {}
    return float(found.get("backward" if backward else "forward", 1.0))


@lru_cache(maxsize=1)
def _attention_generations() -> dict[str, Any]:
    data = json.loads(resources.files("traces").joinpath("efficiency/attention_generations.json").read_text())
    return dict(data["slowdown"])
