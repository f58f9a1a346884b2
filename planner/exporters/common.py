"""Rules and lines that several targets share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.exporters.view import View, no
from specs.errors import Violation, nearest_name
from specs.plan import RecomputeMode

STAGES = ("plan", "pipelines", 0, "stages")


def schedule_violations(view: View, names: Mapping[str, str]) -> list[Violation]:
    """The schedule is one that the target has a name for."""
    if view.pp == 1 or view.schedule in names:
        return []
    known = list(names)
    near = nearest_name(view.schedule, known) or "1f1b"
    return [no("schedule", f"schedule '{view.schedule}'", ("plan", "schedule"), actual=view.schedule, allowed=known, nearest=near)]


def axis_violations(view: View, allowed: Sequence[str], why: Mapping[str, str] = {}) -> list[Violation]:
    """Axes that the target does not split along."""
    found = []
    for axis in ("tp", "pp", "cp", "ep"):
        degree = getattr(view, axis)
        if degree > 1 and axis not in allowed:
            reason = why.get(axis, f"it has no {axis}")
            message = f"{axis} {degree}: {reason}"
            found.append(no(f"{axis}_not_expressible", message, (*STAGES, 0, "mesh", axis), actual=degree, allowed=[1], nearest=1))
    return found


def zero_violation(view: View, allowed: Sequence[int], why: str, nearest: int) -> list[Violation]:
    """ZeRO stages that the target runs."""
    if view.zero in allowed:
        return []
    message = f"zero {view.zero}: {why}"
    return [no("zero", message, (*STAGES, 0, "zero"), actual=view.zero, allowed=list(allowed), nearest=nearest)]


def whole_recompute_violations(view: View) -> list[Violation]:
    """Recompute is a switch: none, or every layer in full."""
    mode, classes, first = view.recompute
    loc = (*STAGES, 0, "recompute")
    if mode == RecomputeMode.SELECTIVE:
        return [
            no("selective_recompute", f"selective recompute of {'+'.join(classes)}", loc, actual=mode, allowed=["none", "full"])
        ]
    if mode == RecomputeMode.FULL and first >= 0:
        return [
            no("partial_recompute", f"recompute of the first {first} layers of each stage", loc, allowed=["none", "all layers"])
        ]
    return []


def loss_violations(view: View, names: Sequence[str]) -> list[Violation]:
    """Loss kernels that the target has a switch for."""
    if view.loss() in names:
        return []
    return [no("loss_kernel", f"loss kernel '{view.loss()}'", ("plan", "loss_kernel"), actual=view.loss(), allowed=list(names))]


def host_violations(view: View, *, optimizer: bool, params: bool) -> list[Violation]:
    """States in host memory."""
    found = []
    if view.optimizer_on_host and not optimizer:
        found.append(no("optimizer_on_host", "optimizer states in host memory", (*STAGES, 0, "tiers")))
    if view.params_on_host and not params:
        found.append(no("params_on_host", "parameters in host memory", (*STAGES, 0, "tiers")))
    return found


def kv_head_violations(view: View) -> list[Violation]:
    """A target that does not replicate key/value heads splits them evenly."""
    heads = view.size("kv_heads")
    if heads is None or heads % view.tp == 0:
        return []
    allowed = [value for value in range(1, heads + 1) if heads % value == 0]
    message = f"tp {view.tp} over {heads} key/value heads, which it does not replicate"
    nearest = max(value for value in allowed if value <= view.tp)
    return [no("kv_heads_divisible_by_tp", message, (*STAGES, 0, "mesh", "tp"), actual=view.tp, allowed=allowed, nearest=nearest)]


def torchrun(view: View, script: str, *, master: str = "$MASTER_ADDR:29500") -> str:
    """The launch line of one node."""
    nodes = view.world_size // view.devices_per_node
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {view.devices_per_node} {script}"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {view.devices_per_node} --rdzv-backend c10d --rdzv-endpoint {master} {script}"
    )


def script(*lines: str) -> str:
    """A shell script."""
    return "\n".join(["#!/usr/bin/env bash", "set -euo pipefail", *lines, ""])


def device_note(view: View) -> list[str]:
    """What the launcher must know when some devices stay out."""
    if not view.plan.unused_devices:
        return []
    return [f"start on {view.world_size} devices only; the plan leaves {len(view.plan.unused_devices)} of the cluster out"]


def compact(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without keys whose value is None."""
    return {key: value for key, value in values.items() if value is not None}
