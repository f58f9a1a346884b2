"""Whole tensors back from a program: parameters or gradients of the full model on one rank, whatever the sharding."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from executor.materialize import Program
from executor.params import ParamPlace, unique_params


@torch.no_grad()
def gather_full(program: Program, what: Literal["parameter", "gradient"]) -> dict[str, Tensor] | None:
    """Full name -> whole tensor on rank 0, ``None`` elsewhere. A collective call; a tied parameter appears under its owner.

    Gradients are whole after ``finish_gradients`` and until ``zero_grad``.
    """
    own: dict[str, Tensor] = {}
    for place in unique_params(program.params):
        local = place.parameter if what == "parameter" else place.parameter.grad
        if local is not None:
            own[place.owner] = _join_experts(program, place, _join_tp(program, place, _join_shards(local)))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    speaks = program.place.data == 0 and program.place.tp == 0
    parts: list[Any] | None = [None] * dist.get_world_size() if program.place.rank == 0 else None
    dist.gather_object(own if speaks else {}, parts, dst=0)
    if parts is None:
        return None
    whole: dict[str, Tensor] = {}
    for part in parts:
        whole.update(part)
    return whole


def _join_shards(local: Tensor) -> Tensor:
    tensor = local.full_tensor() if isinstance(local, DTensor) else local
    return tensor.detach().clone()


def _join_tp(program: Program, place: ParamPlace, part: Tensor) -> Tensor:
    tp = program.tensor_parallel
    if tp is None or place.tp_dim is None:
        return part
    parts: list[Any] = [None] * tp.size
    dist.all_gather_object(parts, part, group=tp.group)
    return torch.cat(parts, dim=place.tp_dim)


def _join_experts(program: Program, place: ParamPlace, part: Tensor) -> Tensor:
    group = program.groups.ep
    if group is None or not place.expert:
        return part
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, part, group=group)
    return torch.cat(parts, dim=0)
