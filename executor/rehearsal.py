"""A step of one rank on fake tensors and a fake process group: nothing is computed or sent, but every tensor comes and goes as in
a run, so its memory is known before there is a machine.

Micro-batches beyond those that fill the pipeline repeat what is held already; they are left out.
"""

from __future__ import annotations

import torch

from executor.allocations import Allocations
from executor.batch import LocalBatch
from executor.fused_norms import fused_norms
from executor.materialize import materialize
from executor.timers import Timers
from profiler.sources import model_from_graph
from specs.base import Spec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.training import TrainingSpec

MICRO_BATCHES_OF_ACCUMULATION = 3  # the first, one like all others, the last


class RehearsedMemory(Spec):
    """``peak_bytes``: the most that the rank's tensors take during a step after the first. ``peak_moment``: the term that was
    running. ``resident_bytes``: between steps. ``num_micro_batches``: how many were rehearsed."""

    peak_bytes: float
    peak_moment: str
    resident_bytes: float
    num_micro_batches: int


def rehearse(plan: Plan, graph: ModelGraph, workload: TrainingSpec, rank: int, *, allow_factory: bool = False) -> RehearsedMemory:
    """Two steps of ``rank``, of which the second counts. A fake process group of the plan's size must exist.

    Raises :class:`InvalidInput` when the plan cannot be executed.
    """
    short = shortened(plan)
    workload = workload.replace(global_batch=short.global_batch)
    model = model_from_graph(graph, allow_factory=allow_factory)
    timers = Timers()
    allocations = Allocations(moment=lambda: timers.current)
    program = materialize(short, model, graph, workload, rank, timers=timers, draw=None, allocation=allocations)
    if program.runner is not None:
        program.runner.take_shapes_as_given()
    with allocations, fused_norms():
        rows = program.layout.micro_batch(program.place) * short.pipelines[0].num_micro_batches
        shape = (rows, short.seq_len // program.layout.cp)
        for _ in range(2):
            allocations.reset_peak()
            batch = LocalBatch(torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64))
            loss = program.forward_backward(batch)
            program.finish_gradients()
            with timers.phase("optimizer"):
                program.optimizer.step()
            program.optimizer.zero_grad()
            del loss, batch
        return RehearsedMemory(
            peak_bytes=float(allocations.peak_bytes), peak_moment=allocations.peak_moment,
            resident_bytes=float(allocations.held_bytes), num_micro_batches=short.pipelines[0].num_micro_batches,
        )  # fmt: skip


def shortened(plan: Plan) -> Plan:
    """The plan with as few micro-batches as show its memory: those of accumulation, or two more than fill the pipeline."""
    (pipeline,) = plan.pipelines
    wanted = len(pipeline.stages) + 2 if pipeline.pp > 1 else MICRO_BATCHES_OF_ACCUMULATION
    count = pipeline.num_micro_batches
    if wanted >= count or plan.schedule.name == "custom":
        return plan
    for fewer in range(wanted, count):
        try:
            plan.schedule.actions(num_ranks=pipeline.pp, num_micro_batches=fewer)
        except InvalidInput:
            continue
        batch = plan.global_batch // count * fewer
        return plan.replace(global_batch=batch, pipelines=(pipeline.replace(num_micro_batches=fewer),), workload_hash="")
    return plan
