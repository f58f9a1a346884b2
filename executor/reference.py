"""The same job without any parallelism, in one process: what every plan must reproduce. Plain PyTorch, nothing of the executor
but its data."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from executor.batch import DataSource, vocabulary_size
from executor.optimizer import build_optimizer
from profiler.models import init_tensor, reset_buffers
from profiler.sources import model_from_graph
from specs.graph import ModelGraph
from specs.training import TrainingSpec

SEQUENCES_AT_ONCE = 4


@dataclass
class ReferenceRun:
    """``losses`` of every step; ``gradients`` of the first step and ``parameters`` after the last, by full name."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def reference_losses(graph: ModelGraph, workload: TrainingSpec, steps: int, *, allow_factory: bool = False) -> list[float]:
    """Mean loss of each of ``steps`` steps. ``allow_factory``: the graph may name code on this machine."""
    return reference_run(graph, workload, steps, allow_factory=allow_factory).losses


def reference_run(graph: ModelGraph, workload: TrainingSpec, steps: int, *, allow_factory: bool = False) -> ReferenceRun:
    """Train ``steps`` steps from the deterministic weights on the workload's data."""
    model = model_from_graph(graph, allow_factory=allow_factory)
    dtype: torch.dtype = getattr(torch, workload.precision.param_dtype)
    owners = dict(graph.tied)
    model = model.to(dtype).to_empty(device="cpu")
    if callable(tie := getattr(model, "tie_parameters", None)):
        tie()
    reset_buffers(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_tensor(owners.get(name, name), parameter.shape, workload.seed))
    return _train(model, graph, workload, steps)


def _train(model: nn.Module, graph: ModelGraph, workload: TrainingSpec, steps: int) -> ReferenceRun:
    run = ReferenceRun()
    data = DataSource(workload, vocabulary_size(graph))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    master = workload.precision.master_dtype not in (None, workload.precision.param_dtype)
    updated = [weight.detach().float() for weight in weights] if master else [weight.detach() for weight in weights]
    optimizer = build_optimizer(updated, workload.optimizer)
    for step in range(steps):
        run.losses.append(_step(model, *data.global_batch(step)))
        if step == 0:
            run.gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        with torch.no_grad():
            for weight, target in zip(weights, updated, strict=True):
                target.grad = None if weight.grad is None else weight.grad.to(target.dtype)
                weight.grad = None
            optimizer.step()
            for weight, target in zip(weights, updated, strict=True):
                if master:
                    weight.copy_(target)
    run.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return run


def _step(model: nn.Module, tokens: Tensor, labels: Tensor) -> float:
    """Gradients of the mean loss over all tokens, a few sequences at a time; returns that loss."""
    total = 0.0
    for part, targets in zip(tokens.split(SEQUENCES_AT_ONCE), labels.split(SEQUENCES_AT_ONCE), strict=True):
        share = part.shape[0] / tokens.shape[0]
        loss = model(part, targets) * share
        loss.backward()
        total += float(loss.detach())
    return total
