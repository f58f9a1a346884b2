"""Which devices of a folded pipeline move in step, and which only meet when gradients are summed.

A *cell* is what acts as one: the tensor-, context- and expert-parallel neighbours of one data-parallel replica on one pipeline
rank, which wait for one another in every layer. Replicas of a pipeline run on their own until gradients are summed; where
parameters are gathered unit by unit (ZeRO 3) all replicas move in step, and the whole grid of a rank is one cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.cost_model import CostModel
from specs.plan import Pipeline, Stage


@dataclass(frozen=True, slots=True)
class Folding:
    """``devices``, ``cell``, ``node``: the devices of a pipeline, the cell of each (place x ``replicas`` + replica) and its node.
    ``sync_inter``: whether the replicas of a place meet over links between nodes."""

    replicas: int
    num_places: int
    devices: NDArray[np.int64]
    cell: NDArray[np.int64]
    node: NDArray[np.int64]
    sync_inter: tuple[bool, ...]
    messages_inter: bool

    @property
    def num_cells(self) -> int:
        """Cells of the pipeline."""
        return self.replicas * self.num_places

    def text(self) -> str:
        """The folding in a line."""
        size = len(self.devices) // self.num_cells
        if self.replicas == 1:
            return f"{self.num_places} pipeline rank(s) of {size} devices that move in step"
        ranks = f"{self.num_places} pipeline ranks of {size} device(s)"
        return f"{self.replicas} replicas of {ranks}, which meet when gradients are summed"


def fold(model: CostModel, pipeline: Pipeline) -> Folding:
    """The cells of one pipeline of a plan."""
    held = [[stage for stage in pipeline.stages if stage.devices == ranks] for ranks in pipeline.ranks()]
    counts = {_num_cells(stage) for stages in held for stage in stages}
    in_step = len(counts) > 1 or len(held) == 1 or any(_in_step(stage) for stages in held for stage in stages)
    replicas = 1 if in_step else counts.pop()
    places = model.network.places
    devices: list[int] = []
    cells: list[int] = []
    inter: list[bool] = []
    for place, stages in enumerate(held):
        ranks = stages[0].devices
        size = len(ranks) // replicas
        devices += ranks
        cells += [place * replicas + index // size for index in range(len(ranks))]
        inter.append(len({places[rank].node for rank in ranks}) > 1)
    firsts = {places[stages[0].devices[0]].node for stages in held}
    return Folding(
        replicas=replicas, num_places=len(held), devices=np.array(devices), cell=np.array(cells),
        node=np.array([places[rank].node for rank in devices]), sync_inter=tuple(inter), messages_inter=len(firsts) > 1,
    )  # fmt: skip


def _in_step(stage: Stage) -> bool:
    """Whether the data-parallel replicas of a stage wait for one another in every unit."""
    return stage.zero == 3 and stage.mesh.dp > 1


def _num_cells(stage: Stage) -> int:
    """Replicas of a stage whose devices wait for one another in every layer; experts tie several together."""
    mesh = stage.mesh
    size = math.lcm(mesh.tp * mesh.cp, mesh.ep) if mesh.whole_experts else mesh.tp * math.lcm(mesh.cp, mesh.ep)
    return max(1, mesh.size // size)
