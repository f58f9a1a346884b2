"""Parameters that share one value but live on different pipeline ranks (tied embedding and head): their gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from executor.data_parallel import all_reduce_gradients
from executor.groups import new_group
from executor.layout import Layout, Place
from executor.params import ParamPlace
from executor.support import unit_of_params
from executor.timers import Timers
from specs.graph import ModelGraph


def pipeline_ranks_of_owners(graph: ModelGraph, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Owner name -> pipeline ranks that hold a copy, for tied parameters on more than one rank."""
    unit_of = unit_of_params(graph)
    holders: dict[str, set[int]] = {}
    for alias, owner in graph.tied:
        for fqn in (alias, owner):
            stage = next(
                index
                for index, stage in enumerate(layout.pipeline.stages)
                if stage.first_unit <= unit_of[fqn] < stage.first_unit + stage.num_units
            )
            holders.setdefault(owner, set()).add(layout.pipeline_rank_of(stage))
    return {owner: tuple(sorted(ranks)) for owner, ranks in holders.items() if len(ranks) > 1}


class TiedGradients:
    """Sums the gradients of tied copies between pipeline ranks. Creating it is a collective call on all ranks."""

    def __init__(self, graph: ModelGraph, layout: Layout, own: Place, places: Sequence[ParamPlace], timeout_s: float) -> None:
        self._sums: list[tuple[ParamPlace, ProcessGroup]] = []
        column = layout.pp_ranks(own)
        for owner, pipeline_ranks in pipeline_ranks_of_owners(graph, layout).items():
            place = next((place for place in places if place.owner == owner), None)
            if own.pp in pipeline_ranks and place is not None:
                self._sums.append((place, new_group([column[pp] for pp in pipeline_ranks], timeout_s)))

    def reduce(self, timers: Timers) -> None:
        """Sum; every rank that holds a copy ends with the same gradient."""
        for place, group in self._sums:
            with timers.phase("dp_comm"):
                all_reduce_gradients([place.parameter], group, "tied.all_reduce", timers)
