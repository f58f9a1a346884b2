"""Times every op call forward and backward, all ranks running the same op at the same time.

The list is gone through in rounds until the time budget is used up, so each op's samples are spread over the whole
measurement and a short disturbance meets few of them. Every op is measured in the first round whatever the budget.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from profiler.measure.context import Deadline, Worker
from profiler.measure.footprint import Footprint, footprint
from profiler.measure.layouts import Layout, layout_at
from profiler.measure.operands import OperandMaker, Operands
from profiler.measure.targets import resolve
from profiler.shapes import OpCall
from specs.errors import InvalidInput
from specs.graph import Block

ROUND_S = 0.025  # per op and round, forward and backward together
LEAST_REPEATS, MOST_REPEATS = 2, 24
LEAST_ROUNDS = 2
OVERHEAD_CALLS = 200


@dataclass(frozen=True, slots=True)
class OperatorsJob:
    """Calls to measure, the blocks they stand in, the compute dtype, seconds to spend, and bytes that operands may take."""

    calls: tuple[OpCall, ...]
    blocks: dict[str, Block]
    dtype: str
    budget_s: float
    memory_limit_bytes: float


@dataclass
class OperatorSamples:
    """What one rank measured of one call. ``error`` says why it was left out."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    footprint: Footprint | None = None
    error: str | None = None


def measure_operators(worker: Worker, job: OperatorsJob) -> tuple[list[OperatorSamples], float]:
    """Samples by call, and the seconds of an autograd call that computes nothing (already taken off backward samples)."""
    bench = _Bench(worker, job)
    found = [OperatorSamples() for _ in job.calls]
    repeats = [0] * len(job.calls)
    deadline = Deadline(worker, job.budget_s)
    rounds = 0
    while rounds < LEAST_ROUNDS or not deadline.passed():
        for index, call in enumerate(job.calls):
            if found[index].error is not None:
                continue
            (late,) = worker.agree(float(deadline.elapsed_s() > job.budget_s))
            if late and rounds > 0:
                return found, bench.overhead_s
            repeats[index] = bench.visit(call, found[index], repeats[index], late=bool(late))
            done = rounds + (index + 1) / len(job.calls)
            deadline.report(min(1.0, done), f"op {index + 1} of {len(job.calls)}, round {rounds + 1}")
        rounds += 1
    return found, bench.overhead_s


class _Bench:
    """Sets up and times one call after the other on this rank."""

    def __init__(self, worker: Worker, job: OperatorsJob) -> None:
        self.worker, self.job = worker, job
        self.maker = OperandMaker(worker.device, seed=worker.rank)
        self.overhead_s = self._autograd_overhead() if worker.device.type == "cpu" else 0.0

    def visit(self, call: OpCall, found: OperatorSamples, repeats: int, *, late: bool) -> int:
        """One round of one call; ``repeats`` 0 = not known yet. All ranks take the same path, also around errors."""
        problem, run, sets = self._prepare(call, found)
        (failed,) = self.worker.agree(0.0 if problem is None else 1.0)
        if failed or run is None:
            found.error = problem or "failed on another rank"
            return 0
        gc.disable()
        if repeats == 0:
            seconds = self._take(run, sets[1:] + sets[:1], 1, found)
            repeats = self.worker.repeats(seconds, 0.0 if late else ROUND_S, LEAST_REPEATS, MOST_REPEATS)
            self._take(run, sets, repeats - 1, found)
        else:
            self._take(run, sets, repeats, found)
        gc.enable()
        return repeats

    def _take(self, run: _Runner, sets: Sequence[Operands], repeats: int, found: OperatorSamples) -> float:
        """Add samples; returns their sum in seconds."""
        forward, backward = run.samples(sets, repeats)
        backward = [max(seconds - self.overhead_s, 0.1 * seconds) for seconds in backward]
        found.forward_s += forward
        found.backward_s += backward
        return sum(forward) + sum(backward)

    def _prepare(self, call: OpCall, found: OperatorSamples) -> tuple[str | None, _Runner | None, list[Operands]]:
        """Operands, and one run to warm up; on the first visit that run is watched for what it keeps."""
        if 3 * call.num_bytes > self.job.memory_limit_bytes:
            return f"needs about {3 * call.num_bytes / 1e9:.1f} GB", None, []
        try:
            run = _Runner(call, resolve(call.target), self.worker)
            sets = self.maker.sets(call, self._layout(call), self.job.memory_limit_bytes / 3)
            if found.footprint is None:
                found.footprint = run.footprint(sets[0])
            else:
                run.once(sets[0])
        except InvalidInput as error:
            return error.violations[0].message, None, []
        except Exception as error:  # an op of a posted graph may fail in any way; it is left out and named
            return f"{type(error).__name__}: {error}".splitlines()[0][:300], None, []
        return None, run, sets

    def _layout(self, call: OpCall) -> Layout:
        if call.place.block not in self.job.blocks:
            return Layout((None,) * len(call.inputs), (None,) * len(call.outputs))
        return layout_at(self.job.blocks, call.place, self.job.dtype, self.worker.device.type)

    def _autograd_overhead(self) -> float:
        """Seconds that entering and leaving the autograd engine takes: the gradient of a view of one number."""
        leaf = torch.zeros(1, requires_grad=True)
        grad = torch.ones(1)
        clock = self.worker.clock
        seconds = []
        for _ in range(OVERHEAD_CALLS):
            out = leaf.view(1)
            start = clock.mark()
            torch.autograd.grad(out, leaf, grad)
            seconds.append(clock.seconds(start, clock.mark()))
        return sorted(seconds)[OVERHEAD_CALLS // 2]


class _Runner:
    """Forward and backward of one call."""

    def __init__(self, call: OpCall, function: Callable[..., Any], worker: Worker) -> None:
        self.call, self.function, self.worker = call, function, worker
        self.params = [
            tensor.is_param for tensor in call.inputs if tensor.requires_grad and tensor.dtype.startswith(("float", "bf"))
        ]

    def once(self, operands: Operands) -> None:
        """One forward and backward, untimed."""
        outputs = self._forward(operands)
        if self.call.needs_grad:
            self._backward(operands, outputs)

    def samples(self, sets: Sequence[Operands], repeats: int) -> tuple[list[float], list[float]]:
        """Seconds of ``repeats`` forwards and backwards. Freeing the results counts to backward, as in a step."""
        clock = self.worker.clock
        clock.run_ahead()
        marks = []
        for index in range(repeats):
            operands = sets[index % len(sets)]
            start = clock.mark()
            outputs = self._forward(operands)
            middle = clock.mark()
            if not self.call.needs_grad:
                del outputs
                marks.append((start, middle, middle))
                continue
            grads = self._backward(operands, outputs)
            kept = [grad for grad, is_param in zip(grads, self.params, strict=True) if is_param]
            del grads, outputs
            end = clock.mark()
            del kept  # gradients of parameters live on until the optimizer has seen them
            marks.append((start, middle, end))
        clock.settle()
        forward = [clock.seconds(start, middle) for start, middle, _ in marks]
        return forward, [clock.seconds(middle, end) for _, middle, end in marks] if self.call.needs_grad else []

    def footprint(self, operands: Operands) -> Footprint:
        """What the call keeps and holds."""
        backward = (lambda outputs: self._backward(operands, outputs)) if self.call.needs_grad else None
        return footprint(lambda: self._forward(operands), backward, operands.tensors, self.worker.device)

    def _forward(self, operands: Operands) -> list[torch.Tensor]:
        made = self.function(*operands.args, **operands.kwargs)
        return list(made) if isinstance(made, (list, tuple)) else [made]

    def _backward(self, operands: Operands, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        pairs = [(out, grad) for out, grad in zip(outputs, operands.output_grads, strict=False) if out.requires_grad]
        return torch.autograd.grad([out for out, _ in pairs], operands.wanted, [grad for _, grad in pairs], allow_unused=True)
