"""The same plan with its replicas listed in another order, so that a certain node's are the ones that the simulator prices.

The step simulation is folded: collectives of a stage are priced on the groups of its first device, messages between stages on its
last ones. Replicas are alike, so which of them stands first changes nothing but that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simulator.cost_model import CostModel
from specs.plan import Pipeline, Plan, Stage


def layouts_for(model: CostModel, plan: Plan, node: int) -> Iterator[Plan]:
    """The plan, and it with each replica that touches ``node`` first and last."""
    yield plan
    for index, pipeline in enumerate(plan.pipelines):
        for shift in sorted(set(_positions(model, pipeline, node))):
            for last in (False, True):
                moved = _rotated(pipeline, shift, last=last)
                if moved is not None:
                    yield plan.replace(pipelines=(*plan.pipelines[:index], moved, *plan.pipelines[index + 1 :]))


def _positions(model: CostModel, pipeline: Pipeline, node: int) -> Iterator[tuple[int, int]]:
    """(dp, cp) index of the first device of ``node`` in each stage that has one."""
    places = model.network.places
    for stage in pipeline.stages:
        mesh = stage.mesh
        found = next((index for index, device in enumerate(stage.devices) if places[device].node == node), None)
        if found is not None:
            yield found // (mesh.cp * mesh.tp), found // mesh.tp % mesh.cp


def _rotated(pipeline: Pipeline, shift: tuple[int, int], *, last: bool) -> Pipeline | None:
    """Every stage with the replica at ``shift`` first or last; ``None`` where stages have unlike meshes."""
    if len({(stage.mesh.dp, stage.mesh.cp) for stage in pipeline.stages}) > 1:
        return None
    return pipeline.replace(stages=tuple(_stage(stage, shift, last=last) for stage in pipeline.stages))


def _stage(stage: Stage, shift: tuple[int, int], *, last: bool) -> Stage:
    """Shard groups are rotated whole and each inside, so that they keep their members."""
    mesh, group = stage.mesh, stage.shard_group or stage.mesh.dp
    ends = 1 if last else 0
    outer = _rotate(range(mesh.dp // group), shift[0] // group + ends)
    rows = [first * group + inner for first in outer for inner in _rotate(range(group), shift[0] % group + ends)]
    columns = _rotate(range(mesh.cp), shift[1] + ends)
    devices = tuple(
        device
        for row in rows
        for column in columns
        for device in stage.devices[(row * mesh.cp + column) * mesh.tp : (row * mesh.cp + column + 1) * mesh.tp]
    )
    shares = {
        name: tuple(getattr(stage, name)[row] for row in rows)
        for name in ("batch_share", "state_share")
        if getattr(stage, name) is not None
    }
    return stage.replace(devices=devices, **shares)


def _rotate(items: Sequence[int], by: int) -> list[int]:
    by %= len(items)
    return [*items[by:], *items[:by]]
