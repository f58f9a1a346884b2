"""From an op's target text to something that can be called: ATen functions only, and none that touch files or handles.

A posted graph is data; nothing but these names is ever resolved from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from profiler.opset import BUILDERS, ELEMENTWISE_SAVES, VIEWS, base_name
from profiler.shapes import GRAD_ADD_TARGET
from specs.errors import InvalidInput

_KNOWN = {*VIEWS, *ELEMENTWISE_SAVES, *BUILDERS, "einsum"}
# Types of arguments that plain data cannot fill or that reach outside the process (file names are strings).
_REFUSED_TYPES = ("str", "Storage", "Generator", "Stream", "Layout", "Device")


def resolve(target: str) -> Callable[..., Any]:
    """The ATen overload of ``aten.name.overload``; :class:`InvalidInput` for anything else."""
    parts = target.split(".")
    if parts[0] != "aten" or len(parts) not in (2, 3) or not all(part.isidentifier() for part in parts):
        raise _refused(target, "only targets of the form aten.name.overload are run")
    packet = getattr(torch.ops.aten, parts[1], None)
    overload = getattr(packet, parts[2] if len(parts) == 3 else "default", None) if packet is not None else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise _refused(target, "torch has no such ATen op")
    if target != GRAD_ADD_TARGET and base_name(target) not in _KNOWN and not _takes_plain_data(overload):
        raise _refused(target, "its arguments are more than tensors and numbers")
    return overload


def _takes_plain_data(overload: Any) -> bool:
    schema = overload._schema
    if schema.is_mutable:
        return False
    required = [argument for argument in schema.arguments if not argument.has_default_value()]
    return not any(refused in str(argument.type) for argument in required for refused in _REFUSED_TYPES)


def _refused(target: str, why: str) -> InvalidInput:
    return InvalidInput.single("op_not_allowed", f"op '{target}' is not run: {why}", subject="graph", actual=target)
