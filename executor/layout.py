"""Who does what: from a plan's device grids to the coordinates of one rank.

Axes, outermost first: ``pp`` (pipeline rank), ``dp``, ``cp``, ``tp``. dp and cp together are the *data* axis: its ranks hold the
same parameters and sum their gradients. Shards of the states lie on the data axis, or in groups of it (HSDP). Experts spread over
``ep`` neighbours of the *expert* axis: the data axis, or with ``whole_experts`` data and tp together. Devices that the plan names
are numbered 0, 1, ... in ascending order; that number is the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specs.plan import Plan, Stage


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of one rank. ``data``: along dp and cp together; ``ep``: which part of the experts it holds."""

    rank: int
    device: int
    pp: int
    dp: int
    tp: int
    cp: int = 0
    data: int = 0
    ep: int = 0


class Layout:
    """The rank grid of a plan with one pipeline and equal meshes (``executor.support`` checks both)."""

    def __init__(self, plan: Plan) -> None:
        self.pipeline = plan.pipelines[0]
        grids = self.pipeline.ranks()
        devices = sorted({device for grid in grids for device in grid})
        self.rank_of_device = {device: rank for rank, device in enumerate(devices)}
        first = self.pipeline.stages[0]
        mesh = first.mesh
        self.pp, self.dp, self.cp, self.tp, self.ep = len(grids), mesh.dp, mesh.cp, mesh.tp, mesh.ep
        self.whole_experts = mesh.whole_experts and mesh.tp > 1
        self.data = mesh.dp * mesh.cp
        self.micro_batches = first.batch_share or (self.pipeline.micro_batch,) * mesh.dp
        self.grid = [
            [[self.rank_of_device[grid[data * self.tp + tp]] for tp in range(self.tp)] for data in range(self.data)]
            for grid in grids
        ]  # [pp][data][tp]
        self._places = {
            rank: Place(rank, devices[rank], pp, data // self.cp, tp, data % self.cp, data, self._expert_index(data, tp) % self.ep)
            for pp, plane in enumerate(self.grid)
            for data, row in enumerate(plane)
            for tp, rank in enumerate(row)
        }
        self.seq_len, self.ring = plan.seq_len, plan.collectives.context_parallel == "ring"
        self._grids = grids
        self._stage = first

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.data * self.tp

    @property
    def shards(self) -> int:
        """Ranks of the data axis that share one set of shards."""
        return (self._stage.shard_group or self.dp) * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.data * (self.tp if self.whole_experts else 1) // self.ep

    @property
    def expert_shards(self) -> int:
        """Ranks that share one set of shards of the same experts."""
        return min(self.expert_replicas, self.shards)

    def place(self, rank: int) -> Place:
        """Coordinates of ``rank``."""
        return self._places[rank]

    def micro_batch(self, place: Place) -> int:
        """Sequences of a rank's micro-batch."""
        return self.micro_batches[place.dp]

    def share(self, place: Place) -> float:
        """The rank's share of the step's tokens (ranks of one tp group and of one pipeline have the same tokens)."""
        return self.micro_batches[place.dp] / (sum(self.micro_batches) * self.cp)

    def positions(self, place: Place) -> Tensor:
        """Positions in the sequence of what a rank holds, ascending. In a ring that is an early and a late part, so that causal
        attention is the same work everywhere."""
        positions = torch.arange(self.seq_len)
        if self.cp == 1:
            return positions
        if not self.ring:
            return positions.chunk(self.cp)[place.cp]
        parts = positions.chunk(2 * self.cp)
        return torch.cat((parts[place.cp], parts[2 * self.cp - 1 - place.cp]))

    def stages_of(self, pp: int) -> list[tuple[int, Stage]]:
        """Index and stage of what pipeline rank ``pp`` holds."""
        return [(index, stage) for index, stage in enumerate(self.pipeline.stages) if stage.devices == self._grids[pp]]

    def pipeline_rank_of(self, stage_index: int) -> int:
        """Pipeline rank that holds a stage."""
        return self._grids.index(self.pipeline.stages[stage_index].devices)

    # --- the ranks of the groups that one rank is in, in the order of their axis --------------------------------

    def pp_ranks(self, place: Place) -> list[int]:
        """Along the pipeline."""
        return [plane[place.data][place.tp] for plane in self.grid]

    def tp_ranks(self, place: Place) -> list[int]:
        """Along tensor parallel."""
        return list(self.grid[place.pp][place.data])

    def cp_ranks(self, place: Place) -> list[int]:
        """That share sequences."""
        first = place.dp * self.cp
        return [self.grid[place.pp][data][place.tp] for data in range(first, first + self.cp)]

    def data_ranks(self, place: Place) -> list[int]:
        """That sum their gradients."""
        return [row[place.tp] for row in self.grid[place.pp]]

    def shard_grid(self, place: Place) -> list[list[int]]:
        """The data axis as replicas (rows) of shards (columns)."""
        return _rows(self.data_ranks(place), self.shards)

    def ep_ranks(self, place: Place) -> list[int]:
        """That share one set of experts."""
        ranks = self._expert_axis(place)
        first = ranks.index(place.rank) // self.ep * self.ep
        return ranks[first : first + self.ep]

    def expert_grid(self, place: Place) -> list[list[int]]:
        """Ranks with the same experts, as replicas (rows) of shards (columns)."""
        return _rows(self._expert_axis(place)[place.ep :: self.ep], self.expert_shards)

    def _expert_axis(self, place: Place) -> list[int]:
        if self.whole_experts:
            return [rank for row in self.grid[place.pp] for rank in row]
        return self.data_ranks(place)

    def _expert_index(self, data: int, tp: int) -> int:
        return data * self.tp + tp if self.whole_experts else data


def _rows(ranks: list[int], width: int) -> list[list[int]]:
    return [ranks[first : first + width] for first in range(0, len(ranks), width)]
