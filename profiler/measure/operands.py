"""Random operands of an op call, in the layout in which the call meets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from profiler.measure.context import TORCH_DTYPES
from profiler.measure.layouts import Layout, Strides, fill
from profiler.opset import Tensor, base_name
from profiler.shapes import OpCall

# Sets of operands rotate until they are larger than a core's own caches, so that an operand is about as warm as in a step.
ROTATED_BYTES = 16 * 1024 * 1024
MOST_SETS = 6
_POOL_ELEMENTS = 1 << 20
_DIM_INDEXED = ("index_select", "gather", "scatter_add", "index_add")
_SMALL_LIMIT = 8


@dataclass
class Operands:
    """One set: call arguments, the inputs that need gradients (activations and parameters apart), output gradients."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    wanted: list[torch.Tensor]
    output_grads: list[torch.Tensor]


class OperandMaker:
    """Makes operands on one device. Floats are drawn once, normal; integers are valid indices for the op that reads them."""

    def __init__(self, device: torch.device, *, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(_POOL_ELEMENTS, generator=self._generator)

    def sets(self, call: OpCall, layout: Layout, memory_limit_bytes: float) -> list[Operands]:
        """Between one and ``MOST_SETS`` sets, as many as it takes to leave the caches within the memory limit."""
        each = max(call.num_bytes * (2 if call.needs_grad else 1), 1.0)
        count = max(1, min(MOST_SETS, int(ROTATED_BYTES / each) + 1, int(memory_limit_bytes / each)))
        return [self.make(call, layout) for _ in range(count)]

    def make(self, call: OpCall, layout: Layout) -> Operands:
        """One set."""
        tensors = [
            self._tensor(tensor, strides, integer_limit(call, position), offsets=base_name(call.target) == "_grouped_mm")
            for position, (tensor, strides) in enumerate(zip(call.inputs, layout.inputs, strict=True))
        ]
        for tensor, spec in zip(tensors, call.inputs, strict=True):
            if spec.requires_grad and tensor.is_floating_point():
                tensor.requires_grad_()
        grads = []
        if call.needs_grad:
            for out, strides in zip(call.outputs, layout.output_grads, strict=True):
                grads.append(self._tensor(out, strides, _SMALL_LIMIT, offsets=False))
        kwargs = {key: value for key, value in call.kwargs.items() if key != "device"}
        if not call.inputs:
            kwargs["device"] = self.device
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        return Operands(tuple(fill(call.args, tensors)), fill(kwargs, tensors), tensors, wanted, grads)

    def _tensor(self, spec: Tensor, strides: Strides | None, limit: int, *, offsets: bool) -> torch.Tensor:
        dtype = TORCH_DTYPES[spec.dtype]
        shape = [int(size) for size in spec.shape]
        steps = strides if strides is not None else _contiguous(shape)
        length = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        if dtype.is_floating_point:
            flat = self._floats(length, dtype)
        elif offsets:  # ends of the groups of a grouped product: equal groups
            flat = torch.linspace(limit / length, limit, length, dtype=torch.float64).floor().to(self.device, dtype)
        elif dtype == torch.bool:
            flat = (torch.randint(0, 2, (length,), generator=self._generator) > 0).to(self.device)
        else:
            flat = torch.randint(0, max(1, limit), (length,), generator=self._generator, dtype=torch.int64).to(self.device, dtype)
        return flat.as_strided(shape, steps)

    def _floats(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        flat = torch.empty(length, dtype=dtype, device=self.device)
        for start in range(0, length, _POOL_ELEMENTS):
            part = min(_POOL_ELEMENTS, length - start)
            flat[start : start + part].copy_(self._pool[:part])
        return flat


def integer_limit(call: OpCall, position: int) -> int:
    """One more than the largest integer that input ``position`` of the call may hold."""
    name, first = base_name(call.target), call.inputs[0].shape
    if position == 0 or call.inputs[position].dtype.startswith("float"):
        return _SMALL_LIMIT
    if name == "embedding":
        return int(first[0])
    if name in ("cross_entropy_loss", "nll_loss"):
        return int(first[-1])
    if name == "_grouped_mm":
        return int(first[0])
    if name in _DIM_INDEXED:
        dim = next((value for value in call.args if isinstance(value, int) and not isinstance(value, bool)), 0)
        return int(first[dim])
    if name == "index":
        return int(min(first))
    return _SMALL_LIMIT


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))
