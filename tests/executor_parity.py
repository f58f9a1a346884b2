"""Comparison of a sharded program with the single-process reference: loss, every gradient, parameters after one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from executor.batch import DataSource, vocabulary_size
from executor.gather import gather_full
from executor.materialize import Program, materialize
from executor.reference import ReferenceRun, reference_run
from profiler.sources import model_from_graph
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.training import TrainingSpec
from tests.distributed_helpers import COLLECTIVE_TIMEOUT_S, RankPool
from tests.executor_models import graph_of

SEQ_LEN = 16
STEPS = 3  # DDP settles its buckets in the second


@dataclass(frozen=True)
class Tolerance:
    """``loss`` and ``gradient``: largest error over the largest value of the tensor. ``parameter``: largest error over the
    learning rate, against the unsharded optimizer's step from the same start *on the gradients that the program reduced*.

    An Adam step moves a weight by about the learning rate whatever its gradient's size, so comparing with a step on the
    reference's own gradients would only show how it amplifies rounding of gradients near zero. Gradients are held against the
    reference by themselves; together the two checks leave no room for a wrong optimizer.
    """

    loss: float
    gradient: float
    parameter: float


# Fixed per dtype; a change here needs a reason in the commit.
TOLERANCES = {"float32": Tolerance(1e-6, 1e-5, 1e-3), "bfloat16": Tolerance(2e-3, 4e-2, 1e-3)}


def workload_for(global_batch: int, precision: str = "fp32") -> TrainingSpec:
    return TrainingSpec.parse({"global_batch": global_batch, "seq_len": SEQ_LEN, "precision": precision, "seed": 3})


@lru_cache(maxsize=16)
def reference(model: str, global_batch: int, precision: str = "fp32") -> ReferenceRun:
    torch.set_num_threads(1)
    first = reference_run(graph_of(model), workload_for(global_batch, precision), 1)
    assert set(first.parameters) == set(initial_parameters(model, precision))
    both = reference_run(graph_of(model), workload_for(global_batch, precision), STEPS)
    return ReferenceRun(both.losses, first.gradients, first.parameters)


@lru_cache(maxsize=16)
def initial_parameters(model: str, precision: str) -> dict[str, torch.Tensor]:
    return reference_run(graph_of(model), workload_for(1, precision), 0).parameters


def stepped(model: str, precision: str, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The unsharded parameters after torch's optimizer took one step on ``gradients``, master weights as the precision asks."""
    workload = workload_for(1, precision)
    expected = {}
    for name, start in initial_parameters(model, precision).items():
        weight = start.detach().clone().to(getattr(torch, workload.precision.master_dtype or workload.precision.param_dtype))
        weight.grad = gradients[name].to(weight.dtype)
        torch.optim.AdamW(
            [weight], lr=workload.optimizer.learning_rate, weight_decay=workload.optimizer.weight_decay, foreach=False
        ).step()
        expected[name] = weight.to(start.dtype)
    return expected


def train_step(program: Program, data: DataSource, step: int) -> float:
    """One step; the mean loss over all tokens on every rank."""
    batch = data.local_batch(step, program.place, program.layout, torch.device("cpu"))
    loss = program.forward_backward(batch)
    program.finish_gradients()
    share = torch.zeros(1, dtype=torch.float64)
    if loss is not None and program.place.tp == 0:
        share += float(loss) * program.share
    dist.all_reduce(share)
    return float(share)


def run_program(rank: int, plan: Plan, graph: ModelGraph, workload: TrainingSpec) -> dict[str, Any]:
    program = materialize(plan, model_from_graph(graph), graph, workload, rank, timeout_s=COLLECTIVE_TIMEOUT_S)
    data = DataSource(workload, vocabulary_size(graph))
    losses, gradients, parameters = [], None, None
    for step in range(STEPS):
        program.timers.start()
        losses.append(train_step(program, data, step))
        if step == 0:
            gradients = gather_full(program, "gradient")
        program.optimizer.step()
        program.optimizer.zero_grad()
        if step == 0:
            parameters = gather_full(program, "parameter")
        record = program.timers.stop()
    if rank:
        return {"record": record}
    return {"losses": losses, "gradients": gradients, "parameters": parameters, "record": record}


@lru_cache
def pool_of(world_size: int) -> RankPool:
    """One set of ranks per world size for all parity tests; they end with this process."""
    return RankPool(world_size)


def compare_with_reference(model: str, plan: Plan, precision: str = "fp32") -> dict[str, Any]:
    """Run ``plan`` on its ranks and assert parity; returns rank 0's results, as ``records`` what every rank counted in its last
    step, and as ``errors`` the largest ones."""
    graph, workload = graph_of(model), workload_for(plan.global_batch, precision)
    expected = reference(model, plan.global_batch, precision)
    results = pool_of(plan.world_size).run(run_program, plan, graph, workload)
    got = results[0]
    tolerance = TOLERANCES[workload.precision.param_dtype]
    for step, (value, wanted) in enumerate(zip(got["losses"], expected.losses, strict=True)):
        assert abs(value - wanted) <= tolerance.loss * abs(wanted), f"loss of step {step}: {value} instead of {wanted}"
    problems = _differences(got["gradients"], expected.gradients, tolerance.gradient, None)
    rate = workload.optimizer.learning_rate
    problems += _differences(got["parameters"], stepped(model, precision, got["gradients"]), tolerance.parameter, rate)
    assert not problems, "\n".join(problems[:20])
    errors = {
        "loss": max(abs(value - wanted) / abs(wanted) for value, wanted in zip(got["losses"], expected.losses, strict=True)),
        "gradient": _largest(got["gradients"], expected.gradients, None),
        "parameter": _largest(got["parameters"], stepped(model, precision, got["gradients"]), rate),
    }
    return {**got, "records": [item["record"] for item in results], "errors": errors}


def _error(got: torch.Tensor, wanted: torch.Tensor, largest: float, scale: float | None) -> tuple[float, float]:
    """Largest error, and what it is measured in: ``scale``, or the largest value of the tensor (at least 1e-4 of that of all)."""
    unit = scale if scale is not None else max(float(wanted.abs().max()), 1e-4 * largest)
    return float((got.float() - wanted.float()).abs().max()), unit


def _largest(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], scale: float | None) -> float:
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    found = [_error(got[name], wanted[name], largest, scale) for name in wanted]
    return max(error / unit for error, unit in found)


def _differences(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float, scale: float | None) -> list[str]:
    problems = [f"{name} is missing" for name in wanted if name not in got]
    problems += [f"{name} is unexpected" for name in got if name not in wanted]
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    for name in wanted.keys() & got.keys():
        if got[name].shape != wanted[name].shape:
            problems.append(f"{name} has shape {tuple(got[name].shape)}, not {tuple(wanted[name].shape)}")
            continue
        error, unit = _error(got[name], wanted[name], largest, scale)
        if not error <= tolerance * unit:
            problems.append(f"{name}: largest error {error:.3e}, {error / unit:.2e} of {unit:.3e}")
    return problems
