"""A model as one flat list of ops, before folding. No torch.

Tensors are named model-wide: an op's results by the op, parameters and buffers by :func:`param_ref`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specs.graph import TensorSpec


def param_ref(fqn: str) -> str:
    """The trace-wide tensor name of a parameter or buffer."""
    return f"param:{fqn}"


@dataclass(frozen=True, slots=True)
class TracedParam:
    """A parameter or buffer by its full name. ``constant``: a tensor literal of the code, which no module owns."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    buffer: bool
    constant: bool = False


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One call. ``args``/``kwargs`` are plain values with ``{"ref": name}`` and ``{"expr": text}`` in them."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorSpec, ...]
    module_path: str

    def refs(self) -> list[str]:
        """Names of the tensors read, in argument order."""
        return list(iter_refs([*self.args, *self.kwargs.values()]))


@dataclass
class Trace:
    """The whole forward pass. ``tied``: (alias fqn, owner fqn). ``loss``: name of the scalar result."""

    inputs: tuple[TensorSpec, ...]
    params: dict[str, TracedParam]
    ops: list[TracedOp]
    loss: str
    tied: tuple[tuple[str, str], ...] = field(default=())


def iter_refs(values: Any) -> Iterator[str]:
    """Every ``{"ref": name}`` below ``values``, in order."""
    for value in values:
        if isinstance(value, dict) and set(value) == {"ref"}:
            yield value["ref"]
        elif isinstance(value, (list, tuple)):
            yield from iter_refs(value)


def map_refs(value: Any, names: dict[str, str]) -> Any:
    """The same value with every reference renamed."""
    if isinstance(value, dict) and set(value) == {"ref"}:
        return {"ref": names[value["ref"]]}
    if isinstance(value, (list, tuple)):
        return [map_refs(item, names) for item in value]
    return value
