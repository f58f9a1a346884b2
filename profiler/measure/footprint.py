"""What a call keeps for backward and how much it holds at most while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile


@dataclass(frozen=True, slots=True)
class Footprint:
    """Positions of inputs and outputs that autograd keeps, bytes of other kept tensors, and peak temporaries."""

    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    saved_extra_bytes: float = 0.0
    forward_workspace_bytes: float = 0.0
    backward_workspace_bytes: float = 0.0


def footprint(
    forward: Callable[[], Sequence[torch.Tensor]],
    backward: Callable[[Sequence[torch.Tensor]], Any] | None,
    inputs: Sequence[torch.Tensor],
    device: torch.device,
) -> Footprint:
    """Run forward and backward once under observation. ``backward(outputs)`` returns the gradients."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[_address(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs, forward_peak = observed(forward, device)
    entered = {_address(tensor) for tensor in inputs}
    made = {_address(tensor): _bytes(tensor) for tensor in outputs if _address(tensor) not in entered}
    extra = sum(_bytes(tensor) for address, tensor in kept.items() if address not in entered and address not in made)
    saved_inputs = tuple(index for index, tensor in enumerate(inputs) if _address(tensor) in kept)
    saved_outputs = tuple(index for index, tensor in enumerate(outputs) if _address(tensor) in kept and _address(tensor) in made)
    kept.clear()
    backward_workspace = 0.0
    if backward is not None:
        grads, peak = observed(lambda: backward(outputs), device)
        results = {_address(grad): _bytes(grad) for grad in grads if grad is not None}
        backward_workspace = max(0.0, peak - sum(results.values()))
    forward_workspace = max(0.0, forward_peak - sum(made.values()) - extra)
    return Footprint(saved_inputs, saved_outputs, extra, forward_workspace, backward_workspace)


def observed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Result of ``work``, and the most bytes it held above what was there before."""
    if device.type == "cuda":  # not yet seen on a GPU
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, float(torch.cuda.max_memory_allocated(device) - before)
    with profile(use_kineto=True, profile_memory=True) as recorded:
        result = work()
    changes = sorted(
        (event.start_ns(), index, event.nbytes())
        for index, event in enumerate(recorded.kineto_results.events())
        if event.name() == "[memory]"
    )
    held = peak = 0.0
    for _, _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return result, peak


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _bytes(tensor: torch.Tensor) -> float:
    return float(tensor.untyped_storage().nbytes())
