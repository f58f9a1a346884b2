"""Times whole units of the real model, unsharded, for the context factors: a unit's time over the sum of its ops' own times.

A short model is run (embedding, a few instances of each layer block, tail), one unit after the other forward, then backward
in reverse, so that caches and allocator are in the state that a training step has.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler.measure.context import TORCH_DTYPES, Deadline, Worker
from profiler.sources import model_from_graph
from specs.errors import InvalidInput
from specs.graph import ModelGraph

INSTANCES = 8  # of each repeated block: enough that one's weights have left the near caches when it comes again
LEAST_REPEATS, MOST_REPEATS = 2, 20


@dataclass(frozen=True, slots=True)
class BlocksJob:
    """Run the model of ``graph`` in ``dtype`` at each of ``micro_batches`` sequences of ``seq`` tokens."""

    graph: ModelGraph
    micro_batches: tuple[int, ...]
    seq: int
    dtype: str
    budget_s: float
    memory_limit_bytes: float
    allow_factory: bool


@dataclass(frozen=True, slots=True)
class BlockSamples:
    """Seconds of one instance of ``block`` at ``micro_batch``."""

    block: str
    micro_batch: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


def measure_blocks(worker: Worker, job: BlocksJob) -> list[BlockSamples] | str:
    """Samples of every block and micro-batch, or why there are none (the graph has no module behind it)."""
    try:
        units = _units(worker, job)
    except InvalidInput as error:
        return error.violations[0].message
    problem = _fits(units, job)
    found: list[BlockSamples] = []
    if problem is None:
        deadline = Deadline(worker, job.budget_s)
        for index, micro_batch in enumerate(job.micro_batches):
            found += _at(worker, job, units, micro_batch, job.budget_s * (index + 1) / len(job.micro_batches), deadline)
    return found if problem is None else problem


def _units(worker: Worker, job: BlocksJob) -> list[tuple[str, nn.Module]]:
    """Block name and materialised module of each unit that is run, in model order."""
    model = model_from_graph(job.graph, allow_factory=job.allow_factory)
    if not callable(getattr(model, "unit_modules", None)):
        raise InvalidInput.single("no_units", "the model has no unit_modules()")
    chosen = []
    for (segment, repetition), module in zip(job.graph.units(), model.unit_modules(), strict=True):
        if repetition < INSTANCES:
            chosen.append((segment.block, module))
    for _, module in chosen:
        module.to_empty(device=worker.device).to(TORCH_DTYPES[job.dtype])
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(0.0, 0.02)
    reset = getattr(model, "reset_buffers", None)
    if callable(reset):
        with torch.no_grad():
            reset()
    return chosen


def _fits(units: list[tuple[str, nn.Module]], job: BlocksJob) -> str | None:
    needed = 2 * sum(parameter.nbytes for _, module in units for parameter in module.parameters())
    return f"whole blocks need {needed / 1e9:.1f} GB" if needed > job.memory_limit_bytes else None


def _at(
    worker: Worker, job: BlocksJob, units: list[tuple[str, nn.Module]], micro_batch: int, until_s: float, deadline: Deadline
) -> list[BlockSamples]:
    vocabulary = int(job.graph.attributes.get("vocab", 2)) if isinstance(job.graph.attributes.get("vocab", 2), int) else 2
    tokens = torch.randint(0, vocabulary, (micro_batch, job.seq)).to(worker.device)
    run = _Pass(worker, units, tokens)
    run.once()
    forward: dict[str, list[float]] = defaultdict(list)
    backward: dict[str, list[float]] = defaultdict(list)
    for repeat in range(MOST_REPEATS):
        (elapsed,) = worker.agree(deadline.elapsed_s())
        if repeat >= LEAST_REPEATS and elapsed > until_s:
            break
        gc.disable()
        for name, forward_s, backward_s in run.once():
            forward[name].append(forward_s)
            backward[name].append(backward_s)
        gc.enable()
        share = (job.micro_batches.index(micro_batch) + min(1.0, (repeat + 1) / LEAST_REPEATS)) / len(job.micro_batches)
        deadline.report(share, f"whole blocks at micro-batch {micro_batch}")
    return [BlockSamples(name, micro_batch, tuple(forward[name]), tuple(backward[name])) for name in forward]


class _Pass:
    """One forward and backward through all units, timed unit by unit."""

    def __init__(self, worker: Worker, units: list[tuple[str, nn.Module]], tokens: torch.Tensor) -> None:
        self.worker, self.units, self.tokens = worker, units, tokens

    def once(self) -> list[tuple[str, float, float]]:
        """Block name, forward and backward seconds of each unit."""
        clock = self.worker.clock
        for _, module in self.units:
            for parameter in module.parameters():
                parameter.grad = None
        clock.run_ahead()
        value = self.tokens
        inputs: list[torch.Tensor] = []
        outputs: list[Any] = []
        forward_marks, backward_marks = [], []
        for index, (_, module) in enumerate(self.units):
            value = value.detach().requires_grad_() if value.is_floating_point() else value
            inputs.append(value)
            last = index == len(self.units) - 1
            start = clock.mark()
            value = module(value, self.tokens) if last else module(value)
            forward_marks.append((start, clock.mark()))
            outputs.append(value)
        del value
        grad: torch.Tensor | None = None
        for _ in reversed(self.units):
            output, entered = outputs.pop(), inputs.pop()
            start = clock.mark()
            torch.autograd.backward(output, grad)
            del output
            backward_marks.append((start, clock.mark()))
            grad = entered.grad
        clock.settle()
        return [
            (name, clock.seconds(*forward), clock.seconds(*backward))
            for (name, _), forward, backward in zip(self.units, forward_marks, reversed(backward_marks), strict=True)
        ]
