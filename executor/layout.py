"""Who does what: from a plan's device grids to the coordinates and process groups of one rank.

Mesh axes, outermost first: ``pp`` (pipeline rank), ``dp`` (or ``replicate`` x ``shard`` when shards are kept by groups smaller
than dp, HSDP), ``tp``. Devices that the plan names are numbered 0, 1, ... in ascending order; that number is the rank.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from specs.plan import Plan, Stage

_WAITING_BACKENDS = ("gloo", "nccl")  # the fake backend of dry runs never waits


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of one rank."""

    rank: int
    device: int
    pp: int
    dp: int
    tp: int


class Layout:
    """The rank grid ``[pp][dp][tp]`` of a plan with one pipeline and equal meshes (``executor.support`` checks both)."""

    def __init__(self, plan: Plan) -> None:
        self.pipeline = plan.pipelines[0]
        grids = self.pipeline.ranks()
        devices = sorted({device for grid in grids for device in grid})
        self.rank_of_device = {device: rank for rank, device in enumerate(devices)}
        mesh = self.pipeline.stages[0].mesh
        self.pp, self.dp, self.tp = len(grids), mesh.dp, mesh.tp
        self.grid = [
            [[self.rank_of_device[grid[dp * self.tp + tp]] for tp in range(self.tp)] for dp in range(self.dp)] for grid in grids
        ]
        self._places = {
            rank: Place(rank, devices[rank], pp, dp, tp)
            for pp, plane in enumerate(self.grid)
            for dp, row in enumerate(plane)
            for tp, rank in enumerate(row)
        }
        self._grids = grids

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def place(self, rank: int) -> Place:
        """Coordinates of ``rank``."""
        return self._places[rank]

    def stages_of(self, pp: int) -> list[tuple[int, Stage]]:
        """Index and stage of what pipeline rank ``pp`` holds."""
        return [(index, stage) for index, stage in enumerate(self.pipeline.stages) if stage.devices == self._grids[pp]]

    def pipeline_rank_of(self, stage_index: int) -> int:
        """Pipeline rank that holds a stage."""
        return self._grids.index(self.pipeline.stages[stage_index].devices)


@dataclass(frozen=True)
class Groups:
    """Process groups of one rank; ``None`` where the axis has one member. ``shard_mesh``: what ``fully_shard`` shards over
    (two axes for HSDP)."""

    pp: ProcessGroup | None
    dp: ProcessGroup | None
    tp: ProcessGroup | None
    shard_mesh: DeviceMesh | None


def create_groups(layout: Layout, *, device_type: str, zero: int, shard_group: int | None, timeout_s: float) -> Groups:
    """Create every group, on all ranks in the same order. ``timeout_s``: how long a collective may wait for its peers."""
    shard = shard_group if zero and shard_group is not None else layout.dp
    hybrid = shard < layout.dp
    sizes = [("pp", layout.pp), *([("replicate", layout.dp // shard), ("shard", shard)] if hybrid else [("dp", layout.dp)])]
    sizes.append(("tp", layout.tp))
    kept = [(name, size) for name, size in sizes if size > 1 or name == "shard"]
    if not kept:
        return Groups(None, None, None, None)
    grid = torch.tensor(layout.grid, dtype=torch.int).reshape([size for _, size in kept])
    mesh = DeviceMesh(device_type, grid, mesh_dim_names=tuple(name for name, _ in kept))
    names = [name for name, _ in kept]
    groups = {name: mesh.get_group(name) for name in names}
    for group in groups.values():
        if dist.get_backend(group) in _WAITING_BACKENDS:
            _set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    shard_mesh = None
    if zero and layout.dp > 1:
        shard_mesh = mesh["replicate", "shard"] if hybrid else mesh["dp"]
    return Groups(groups.get("pp"), groups.get("dp"), groups.get("tp"), shard_mesh)


def new_group(ranks_of_groups: Sequence[Sequence[int]], rank: int, timeout_s: float) -> ProcessGroup | None:
    """Create one group per list of ranks (a collective call); returns the one that ``rank`` is in."""
    own = None
    for ranks in ranks_of_groups:
        group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_s))
        if rank in ranks:
            own = group
    return own
