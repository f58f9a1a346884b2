"""Process groups and device meshes of one rank. Each rank creates only the groups that it is in, so a plan's size costs nothing."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from executor.layout import Layout, Place


@dataclass(frozen=True)
class Groups:
    """Process groups of one rank; ``None`` where the axis has one member. ``data``: dp and cp together. ``shard_mesh`` and
    ``expert_mesh``: what ``fully_shard`` shards over (two axes for HSDP); ``None`` with zero 0 or nothing to share."""

    pp: ProcessGroup | None = None
    data: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    expert_replicas: ProcessGroup | None = None
    shard_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None


def create_groups(layout: Layout, place: Place, *, device_type: str, zero: int, timeout_s: float) -> Groups:
    """Create the rank's groups. A collective call: ranks meet axis by axis, in the same order everywhere.

    ``timeout_s``: how long a collective may wait for its peers.
    """

    def group(ranks: Sequence[int]) -> ProcessGroup | None:
        return new_group(ranks, timeout_s) if len(ranks) > 1 else None

    def mesh(grid: list[list[int]], whole: ProcessGroup | None) -> DeviceMesh | None:
        return _mesh(grid, whole, place.rank, device_type, timeout_s) if zero and whole is not None else None

    has_experts = layout.ep > 1
    expert_grid = layout.expert_grid(place) if has_experts else [[place.rank]]
    pp, data, cp = group(layout.pp_ranks(place)), group(layout.data_ranks(place)), group(layout.cp_ranks(place))
    tp, ep = group(layout.tp_ranks(place)), group(layout.ep_ranks(place)) if has_experts else None
    replicas = group([rank for row in expert_grid for rank in row])
    return Groups(
        pp, data, cp, tp, ep, replicas, shard_mesh=mesh(layout.shard_grid(place), data), expert_mesh=mesh(expert_grid, replicas)
    )


def new_group(ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
    """The group of ``ranks``; called by its members only."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)


def _mesh(grid: list[list[int]], whole: ProcessGroup, rank: int, device_type: str, timeout_s: float) -> DeviceMesh:
    """Rows are replicas of each other, a row's ranks share one set of shards; one axis, of ``whole``, where there is one row."""
    if len(grid) == 1:
        return DeviceMesh.from_group(whole, device_type, mesh_dim_names=("shard",))
    row = next(row for row in grid if rank in row)
    shard = new_group(row, timeout_s)
    replicate = new_group([ranks[row.index(rank)] for ranks in grid], timeout_s)
    ranks = torch.tensor(grid, dtype=torch.int)
    return DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=("replicate", "shard"))
