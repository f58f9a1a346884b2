"""Prove that a plan materialises, for any number of ranks in one process: a fake process group and parameters on ``meta``.

Groups, tensor parallel shapes, recompute, sharding, tied parameters and the lowered schedule are built as in a run; no memory
is allocated and nothing is sent. On request two steps are rehearsed on fake tensors, which tells the rank's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from pydantic import Field
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.data_parallel import local_tensor
from executor.layout import Layout
from executor.materialize import Program, materialize
from executor.params import unique_params
from executor.rehearsal import RehearsedMemory, rehearse
from profiler.sources import model_from_graph
from specs.base import Spec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.training import TrainingSpec


class DryRunReport(Spec):
    """What one rank would hold. ``params``: local shape by parameter name (a tied one under its owner)."""

    rank: int
    world_size: int
    pp: int
    dp: int
    tp: int
    units: tuple[int, ...]
    num_params: int
    param_bytes: float
    params: dict[str, tuple[int, ...]]
    cp: int = 0
    ep: int = 0
    actions: tuple[str, ...] = Field(default=(), description="this rank's schedule with its sends and receives")
    memory: RehearsedMemory | None = Field(default=None, description="of a rehearsed step, on request")


def dry_run(
    plan: Plan, graph: ModelGraph, rank: int, workload: TrainingSpec | None = None, *, allow_factory: bool = False,
    memory: bool = False,
) -> DryRunReport:  # fmt: skip
    """Materialise ``rank`` of ``plan``. ``workload`` sets the precision (default: that of :class:`TrainingSpec`). ``memory``:
    rehearse a step as well.

    Use a process that does not train afterwards: torch keeps device meshes, and with them the names of the fake groups.

    Raises :class:`InvalidInput` when the plan cannot be executed, and when this process is in a process group already.
    """
    world_size = plan.world_size
    if not 0 <= rank < world_size:
        raise InvalidInput.single("rank_of_plan", f"rank {rank} of a plan for {world_size}", subject="dry run", actual=rank)
    workload = workload or TrainingSpec(global_batch=plan.global_batch, seq_len=plan.seq_len)
    model = model_from_graph(graph, allow_factory=allow_factory)
    with _fake_group(rank, world_size):
        report = _report(materialize(plan, model, graph, workload, rank, draw=None), world_size)
        if not memory:
            return report
        return report.replace(memory=rehearse(plan, graph, workload, rank, allow_factory=allow_factory))


@contextlib.contextmanager
def _fake_group(rank: int, world_size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise InvalidInput.single("in_process_group", "a dry run needs a process that is in no process group", subject="dry run")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _report(program: Program, world_size: int) -> DryRunReport:
    place = program.place
    shards = {param.owner: local_tensor(param.parameter) for param in unique_params(program.params)}
    stages = Layout(program.plan).stages_of(place.pp)
    lowered = program.runner.lowered() if program.runner is not None else []
    return DryRunReport(
        rank=place.rank, world_size=world_size, pp=place.pp, dp=place.dp, tp=place.tp, cp=place.cp,
        ep=place.ep,
        units=tuple(unit for _, stage in stages for unit in range(stage.first_unit, stage.first_unit + stage.num_units)),
        num_params=sum(shard.numel() for shard in shards.values()), param_bytes=sum(shard.nbytes for shard in shards.values()),
        params={name: tuple(shard.shape) for name, shard in shards.items()},
        actions=tuple(lowered[place.pp].split(",")) if lowered else (),
    )  # fmt: skip
