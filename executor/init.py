"""Deterministic initial weights: the full tensor is drawn by name and seed, and each rank keeps its part.

So every plan of a job starts from the same model, whatever its sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from executor.layout import Layout, Place
from executor.params import ParamPlace, local_part, unique_params

Initializer = Callable[[str, Sequence[int], int], Tensor]


@torch.no_grad()
def init_local_parameters(places: Sequence[ParamPlace], place: Place, layout: Layout, seed: int, draw: Initializer) -> None:
    """Fill every parameter of ``places``; ``draw(owner name, full shape, seed)`` gives the full tensor."""
    for param in unique_params(places):
        full = draw(param.owner, param.full_shape, seed)
        if param.expert:
            full = local_part(full, 0, place.ep, layout.ep)
        own = local_part(full, param.tp_dim, place.tp, layout.tp)
        target = param.parameter
        if isinstance(target, DTensor):
            own, local = _shard(own, target), target.to_local()
            local.copy_(own.view_as(local))
        else:
            target.copy_(own)


def _shard(tensor: Tensor, like: DTensor) -> Tensor:
    """This rank's part of ``tensor`` under the placement of ``like`` (the rule of ``torch.chunk``)."""
    for dim, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            tensor = local_part(tensor, placement.dim, like.device_mesh.get_local_rank(dim), like.device_mesh.size(dim))
    return tensor
