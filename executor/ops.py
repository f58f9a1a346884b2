"""Communication as dispatcher ops of the ``meshwright`` namespace: functional, so that selective recompute can keep their results,
and with a rule for fake tensors, so that a dry run follows them.

An op's schema has no place for a process group, so what it needs is passed by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_CONTEXTS: dict[str, Any] = {}
COLLECTIVES: set[Any] = set()
"""Ops that selective recompute never runs again."""


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], *, kept: bool = True) -> None:
    """Define ``meshwright::<schema>``. ``fake``: the result's shapes. ``kept``: selective recompute keeps the result."""
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"meshwright::{name}", fake, lib=_LIBRARY)
    if kept:
        COLLECTIVES.add(getattr(torch.ops.meshwright, name).default)


def name_of(axis: str, context: Any) -> str:
    """The name under which an op finds ``context`` again; one per axis and group."""
    key = f"{axis}:{context.group.group_name}"
    _CONTEXTS[key] = context
    return key


def context_of(name: str) -> Any:
    """What :func:`name_of` named."""
    return _CONTEXTS[name]
