"""Times optimizer steps by number of parameters, and adding a gradient into an accumulated one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from profiler.measure.context import TORCH_DTYPES, Deadline, Worker, pilot, samples_of

LEAST_REPEATS, MOST_REPEATS = 4, 30


@dataclass(frozen=True, slots=True)
class OptimizerJob:
    """``name`` as in the workload; each of ``num_params`` is split into ``tensors`` equal tensors of ``dtype``.

    ``grad_sizes``: numbers of elements at which the addition of gradients (dtype ``grad_dtype``) is timed.
    """

    name: str
    fused: bool
    dtype: str
    num_params: tuple[int, ...]
    tensors: int
    grad_sizes: tuple[int, ...]
    grad_dtype: str
    budget_s: float


def measure_optimizer(worker: Worker, job: OptimizerJob) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of steps by parameter count, and of gradient additions by size; all ranks at once."""
    deadline = Deadline(worker, job.budget_s)
    cases = [*job.num_params, *job.grad_sizes]
    total = float(sum(cases))
    steps, adds = [], []
    for count in job.num_params:
        share = job.budget_s * (0.4 / len(cases) + 0.6 * count / total)
        steps.append(_step(worker, job, count, share))
        deadline.report(len(steps) / len(cases), f"optimizer on {count:,} parameters")
    for count in job.grad_sizes:
        share = job.budget_s * (0.4 / len(cases) + 0.6 * count / total)
        adds.append(_grad_add(worker, count, job.grad_dtype, share))
    return steps, adds


def make_optimizer(name: str, params: list[torch.Tensor], *, fused: bool) -> torch.optim.Optimizer:
    """The torch optimizer that a workload's name stands for."""
    if name in ("adamw", "adam"):
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        return kind(params, lr=1e-3, fused=fused)
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9 if name == "momentum" else 0.0, fused=fused)


def _step(worker: Worker, job: OptimizerJob, count: int, share_s: float) -> list[float]:
    size = max(1, count // job.tensors)
    dtype = TORCH_DTYPES[job.dtype]
    params = [torch.zeros(size, dtype=dtype, device=worker.device, requires_grad=True) for _ in range(job.tensors)]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    optimizer = make_optimizer(job.name, params, fused=job.fused)
    return _timed(worker, optimizer.step, share_s)


def _grad_add(worker: Worker, count: int, dtype: str, share_s: float) -> list[float]:
    total = torch.zeros(count, dtype=TORCH_DTYPES[dtype], device=worker.device)
    grad = torch.full_like(total, 1e-3)
    return _timed(worker, lambda: total.add_(grad), share_s)


def _timed(worker: Worker, work: Callable[[], Any], share_s: float) -> list[float]:
    first = pilot(work)
    repeats = worker.repeats(first, share_s, LEAST_REPEATS, MOST_REPEATS)
    worker.meet()
    return list(samples_of(worker, work, repeats))
