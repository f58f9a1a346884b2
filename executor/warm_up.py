"""What a process allocates once, whatever part of the model it holds, so that it counts as baseline and not as the job's memory.

Library code pages, the matrix library's buffers (they follow the shapes it is called with), autograd, the probe's operands and
gloo's buffers. One unit of each block runs at the job's shapes, and is freed before the baseline is taken.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiler.models import reset_buffers
from profiler.probe import run_probe
from specs.graph import ModelGraph
from specs.plan import Plan

COLLECTIVE_ELEMENTS = 65_536
MAX_UNIT_BYTES = 512 * 2**20  # a larger unit is not built whole just to warm up


def warm_up(model: nn.Module, graph: ModelGraph, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
    """Run the probe, one unit of each block, an optimizer step and a collective. ``model``: on ``meta``; its units are used up."""
    run_probe()
    dist.all_reduce(torch.ones(COLLECTIVE_ELEMENTS, device=device))
    first_units = {
        segment.block: unit for unit, (segment, repetition) in reversed(list(enumerate(graph.units()))) if not repetition
    }
    modules = model.unit_modules()  # type: ignore[operator]
    stage = plan.pipelines[0].stages[0]
    shape = (max(stage.batch_share or (plan.pipelines[0].micro_batch,)), plan.seq_len // stage.mesh.cp)
    hidden: Tensor | None = None
    for unit in sorted(first_units.values()):
        module = modules[unit].to(dtype)
        if sum(parameter.nbytes for parameter in module.parameters()) > MAX_UNIT_BYTES:
            break
        hidden = _run_unit(module, hidden, shape, unit == graph.num_units() - 1, device)
    del hidden, modules
    gc.collect()
    dist.barrier()


def _run_unit(module: nn.Module, hidden: Tensor | None, shape: tuple[int, int], is_last: bool, device: torch.device) -> Tensor:
    """Forward, backward and one optimizer step of a unit with zero weights; returns its output."""
    module.to_empty(device=device)
    reset_buffers(module)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    inputs = tokens if hidden is None else hidden.requires_grad_()
    output = module(inputs, tokens) if is_last else module(inputs)
    output.sum().backward()
    torch.optim.AdamW(module.parameters(), fused=True).step()
    return output.detach()
