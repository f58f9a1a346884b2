"""How the operands of an op lie in memory where it stands in its block.

Queries reach attention transposed, rotary halves are slices, attention's gradient comes back through a transpose. The
strides are found by running the placed block once on fake tensors, forward and backward, so views and the layouts that
kernels choose are the real ones. Where the chain breaks (a collective between, a size that only data decides) the tensor
is taken as contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from profiler.measure.context import TORCH_DTYPES
from profiler.measure.targets import resolve
from profiler.opset import OpClass, Tensor, base_name
from profiler.placed import LocalOp, numeric_tensor
from profiler.placement import place_block
from profiler.shapes import Place, call_arguments
from specs.graph import Block

Strides = tuple[int, ...]
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")


@dataclass(frozen=True, slots=True)
class Layout:
    """Strides of an op's inputs and of the gradients of its outputs, in elements; ``None`` = contiguous."""

    inputs: tuple[Strides | None, ...]
    output_grads: tuple[Strides | None, ...]


def layout_at(blocks: dict[str, Block], place: Place, dtype: str, device_type: str) -> Layout:
    """The layout of the op at ``place``."""
    block = blocks[place.block]
    key = (place.tp, place.sequence_parallel, place.batch, place.seq, dtype, device_type)
    return _layouts(_Hashable(block), *key)[place.op_index]


class _Hashable:
    """A block as a cache key: by identity of its name and content."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def __hash__(self) -> int:
        return hash(self.block.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and (self.block is other.block or self.block == other.block)


@lru_cache(maxsize=256)
def _layouts(key: _Hashable, tp: int, split: bool, batch: int, seq: int, dtype: str, device_type: str) -> tuple[Layout, ...]:
    placed = place_block(key.block, tp, split)
    run = _FakeRun(batch, seq, dtype, torch.device(device_type))
    with FakeTensorMode():
        for op in placed.ops:
            run.step(op)
        run.backward([tensor.name for tensor in placed.outputs])
    return tuple(
        Layout(tuple(inputs), tuple(run.grads.get((index, position)) for position in range(len(op.outputs))))
        for index, (op, inputs) in enumerate(zip(placed.ops, run.inputs, strict=True))
    )


class _FakeRun:
    """One pass over a block's ops on fake tensors."""

    def __init__(self, batch: int, seq: int, dtype: str, device: torch.device) -> None:
        self.batch, self.seq, self.dtype, self.device = batch, seq, dtype, device
        self.live: dict[str, torch.Tensor] = {}
        self.loose: list[torch.Tensor] = []  # ends of the autograd chain: redistributed tensors and block outputs
        self.inputs: list[list[Strides | None]] = []
        self.grads: dict[tuple[int, int], Strides | None] = {}

    def step(self, op: LocalOp) -> None:
        """Run ``op``, or replace its results by contiguous tensors where it cannot run."""
        operands = [self._operand(tensor.name, self._number(tensor)) for tensor in op.inputs]
        self.inputs.append([_strides(operand) for operand in operands])
        try:
            results = self._run(op, operands)
        except Exception:  # whatever a fake kernel does not support
            results = []
        for position, out in enumerate(op.outputs):
            wanted = self._number(out)
            made = results[position] if position < len(results) else None
            if made is None or tuple(made.shape) != wanted.shape:
                if made is not None and made.requires_grad:
                    self.loose.append(made)
                made = self._fresh(wanted)
            if made.requires_grad and made.grad_fn is not None and op.op_class != OpClass.VIEW:
                made.register_hook(partial(self._note_grad, len(self.inputs) - 1, position))
            self.live[out.name] = made

    def backward(self, outputs: Sequence[str]) -> None:
        """Backward from the block's outputs and the loose ends; the hooks note the gradients' strides."""
        ends = [*self.loose, *(self.live[name] for name in outputs if name in self.live)]
        ends = [end for end in ends if end.requires_grad and end.grad_fn is not None]
        try:
            torch.autograd.backward(ends, [torch.empty_like(end, memory_format=torch.contiguous_format) for end in ends])
        except Exception:  # whatever a fake kernel does not support: the remaining gradients count as contiguous
            return

    def _note_grad(self, index: int, position: int, grad: torch.Tensor) -> None:
        self.grads[index, position] = _strides(grad)

    def _run(self, op: LocalOp, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        name = base_name(op.op.target)
        if name in _RESHAPES:
            made: Any = operands[0].reshape(self._number(op.outputs[0]).shape)
        elif name in ("expand", "expand_as"):
            made = operands[0].expand(self._number(op.outputs[0]).shape)
        else:
            args, kwargs = call_arguments(op, self.batch, self.seq)
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
            made = resolve(op.op.target)(*fill(args, operands), **fill(kwargs, operands))
        return list(made) if isinstance(made, (list, tuple)) else [made]

    def _operand(self, name: str, wanted: Tensor) -> torch.Tensor:
        known = self.live.get(name)
        if known is not None and tuple(known.shape) == wanted.shape:
            return known
        if known is not None:
            self.loose.append(known)
        made = self._fresh(wanted)
        self.live.setdefault(name, made)
        return made

    def _fresh(self, wanted: Tensor) -> torch.Tensor:
        made = torch.empty(wanted.shape, dtype=TORCH_DTYPES[wanted.dtype], device=self.device)
        return made.requires_grad_() if wanted.requires_grad and made.is_floating_point() else made

    def _number(self, tensor: Any) -> Tensor:
        return numeric_tensor(tensor, self.batch, self.seq, self.dtype)


def _strides(tensor: torch.Tensor) -> Strides | None:
    return None if tensor.is_contiguous() else tuple(int(step) for step in tensor.stride())


def fill(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Arguments with every ``{"ref": n}`` replaced by ``tensors[n]``, and names of dtypes by dtypes."""
    if isinstance(value, str):
        return TORCH_DTYPES.get(value, value)
    if isinstance(value, dict):
        return tensors[value["ref"]] if set(value) == {"ref"} else {key: fill(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(fill(item, tensors) for item in value)
    return value
