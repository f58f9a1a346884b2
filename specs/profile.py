"""Profile: what was measured on which device, with environment, spread and sample counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from specs.base import Document, Spec


class Timing(Spec):
    """Seconds of one call: median, 10th and 90th percentile over ``samples`` calls."""

    median_s: float
    p10_s: float
    p90_s: float
    samples: int


class OpRecord(Spec):
    """One op at one local shape. ``key`` is :func:`op_key`. Backward is ``None`` where nothing needs a gradient.

    ``saved_extra_bytes``: tensors that autograd keeps for backward and that are neither inputs nor outputs of the op.
    """

    key: str
    op_class: str
    forward: Timing
    backward: Timing | None = None
    saved_inputs: tuple[int, ...] | None = None
    saved_outputs: tuple[int, ...] | None = None
    saved_extra_bytes: float | None = None
    forward_workspace_bytes: float | None = Field(default=None, description="peak temporaries of the call, its outputs excluded")
    backward_workspace_bytes: float | None = None


class CollectiveRecord(Spec):
    """One collective on one group shape: time by per-rank message size (the bytes of the full, unsharded tensor)."""

    op: str
    group_size: int
    tier: str = Field(default="intra", description="intra | inter: the slowest link that the group crosses")
    backend: str = "gloo"
    sizes_bytes: tuple[float, ...]
    times: tuple[Timing, ...]


class CopyRecord(Spec):
    """A copy by size. ``direction``: local (within device memory) | local_fresh (into new memory) | h2d | d2h, or either with
    ``_pageable``."""

    direction: str
    sizes_bytes: tuple[float, ...]
    times: tuple[Timing, ...]


class OptimizerRecord(Spec):
    """An optimizer step by number of parameters (split into ``tensors`` equal tensors)."""

    name: str
    fused: bool
    dtype: str
    num_params: tuple[int, ...]
    tensors: int
    times: tuple[Timing, ...]


class OverlapRecord(Spec):
    """What happens when ``first`` and ``second`` run at once: each one's slowdown factor (1 = none)."""

    first: str
    second: str
    first_slowdown: float
    second_slowdown: float
    provenance: str = "measured"


class ContextFactor(Spec):
    """Whole-block time over the sum of its ops' isolated times, measured on an unsharded block (caches, allocator,
    autograd bookkeeping). Applied to ops of that block priced from isolated measurements; ``block`` '' = any other block."""

    block: str = ""
    forward: float
    backward: float
    samples: int = 1
    provenance: str = "measured"


class RankSkew(Spec):
    """How far the slowest of all ranks falls behind their mean when they do equal work for about ``horizon_s`` seconds.

    ``excess`` = mean over windows of (slowest rank / mean of ranks) - 1. What a collective waits for besides the network.
    """

    horizon_s: float
    excess: float
    samples: int


class DeviceProfile(Spec):
    """All that was measured on one kind of device."""

    device: str
    fingerprint: Mapping[str, Any] = {}
    ops: tuple[OpRecord, ...] = ()
    copies: tuple[CopyRecord, ...] = ()
    optimizers: tuple[OptimizerRecord, ...] = ()
    overlap: tuple[OverlapRecord, ...] = ()
    context_factors: tuple[ContextFactor, ...] = ()
    rank_skew: tuple[RankSkew, ...] = ()
    launch_s: float | None = Field(default=None, description="host time to launch one op")
    baseline_bytes: float | None = Field(default=None, description="memory of a worker before the model is built")
    probe_s: Timing | None = Field(default=None, description="the fixed probe, run again beside every execution to see drift")


class Profile(Document):
    """Measurements of a cluster's devices and links."""

    kind: ClassVar[str] = "profile"
    name: str = ""
    created_utc: str = ""
    cluster: str = Field(default="", description="name of the cluster that was measured")
    devices: tuple[DeviceProfile, ...]
    collectives: tuple[CollectiveRecord, ...] = ()
    environment: Mapping[str, Any] = {}

    def device(self, name: str) -> DeviceProfile | None:
        """The measurements of that device type, if any."""
        return next((item for item in self.devices if item.device == name), None)


def op_key(target: str, tensors: Sequence[tuple[Sequence[int], str]], static_args: Any) -> str:
    """Canonical key of an op at local shapes: target, each tensor input's shape and dtype in order, other arguments."""
    shapes = ";".join(f"{dtype}[{','.join(str(int(size)) for size in shape)}]" for shape, dtype in tensors)
    return f"{target}|{shapes}|{json.dumps(static_args, sort_keys=True, separators=(',', ':'))}"
