"""Why nothing fits, by how much, and the cheapest ways around it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from planner.bounds import compute_bounds
from planner.candidates import Candidates
from planner.layout import Pool, whole_cluster
from planner.prices import Prices
from planner.refine import DoesNotFit, Refiner
from planner.space import enumerate_space
from planner.strategy_text import recompute_text
from simulator.cost_model import CostModel
from simulator.memory_report import loss_memory, memory_notes
from simulator.rank_memory import plan_memory
from simulator.states import optimizer_offload_bytes, zero_states
from specs.answer import BrokenLimit
from specs.cluster import ClusterSpec
from specs.training import TrainingSpec
from specs.units import GB, format_bytes, format_seconds

# Strategies, least full first, whose exact memory is looked at before a cluster counts as too small.
TRIES = 24
# Node counts beyond this many times what is there are no relaxation.
MOST_TIMES = 64


def broken_limits(candidates: Candidates, fixed: Mapping[str, Any], *, fastest_s: float) -> list[BrokenLimit]:
    """The limits that no candidate keeps."""
    if not len(candidates.space.rows):
        return _rules(candidates, fixed)
    limit_s = candidates.prices.model.workload.limits.max_step_time_s
    if limit_s is not None and np.isfinite(fastest_s):
        message = f"the fastest plan needs at least {format_seconds(fastest_s)} a step, the limit is {format_seconds(limit_s)}"
        relaxation = f"max_step_time_s of {fastest_s:.4g} or more, or more devices"
        return [
            BrokenLimit(
                limit="max_step_time_s", message=message, needed=fastest_s, available=limit_s, unit="s", relaxations=(relaxation,)
            )
        ]
    return [_memory(candidates, fixed)]


def _rules(candidates: Candidates, fixed: Mapping[str, Any]) -> list[BrokenLimit]:
    """No strategy keeps the rules: each broken one (of the given fields, if they break any), with its nearest allowed value."""
    examples = candidates.space.examples
    given = {code: item for code, item in examples.items() if item.loc and item.loc[-1] in fixed}
    found = []
    for code, violation in sorted((given or examples).items()):
        relaxations = [f"{'.'.join(map(str, violation.loc))}={violation.nearest}"] if violation.nearest is not None else []
        if code.startswith("batch_divisible"):
            relaxations.append(f"a global batch that is a multiple of {violation.actual}")
        if violation.allowed is not None:
            relaxations.append(f"allowed: {violation.allowed}")
        needed = float(violation.actual) if isinstance(violation.actual, (int, float)) else None
        found.append(BrokenLimit(limit=code, message=violation.message, needed=needed, relaxations=tuple(relaxations)))
    if not found:
        message = "no strategy uses these devices: pp x dp x tp does not match any choice of them"
        found.append(BrokenLimit(limit="devices", message=message))
    return found


# --- memory ---------------------------------------------------------------------------------------------------------


def _memory(candidates: Candidates, fixed: Mapping[str, Any]) -> BrokenLimit:
    """The candidate that comes closest, what it needs and has."""
    row, missed = _closest(candidates)
    strategy, needed = candidates.space.strategy(row), missed.budget_bytes + missed.missing_bytes
    label = recompute_text(strategy.recompute, strategy.op_classes)
    model = candidates.prices.model
    devices = f"{candidates.pool(row).size} devices"
    message = (
        f"no plan fits: the least memory is that of '{strategy.text()}' on {devices}, whose fullest device needs "
        f"{format_bytes(needed)} of {format_bytes(missed.budget_bytes)} usable (margin and process baseline taken off), "
        f"{format_bytes(missed.missing_bytes)} too much, at zero {strategy.zero} and recompute {label}"
    )
    states, fewest, host_bytes = _states(model, missed.budget_bytes)
    message += (
        f"; weights, gradients and optimizer states alone are {states * model.cluster.num_devices / GB:.0f} GB, "
        f"{states / GB:.1f} GB a device when split over all {model.cluster.num_devices}, and need {fewest} devices"
    )
    relaxations = list(_relaxations(model, fixed, missed))
    relaxations.append(_offload_text(model, host_bytes))
    return BrokenLimit(
        limit="memory", message=message, needed=needed, available=missed.budget_bytes, unit="bytes",
        relaxations=tuple(relaxations), state_bytes=states, devices_for_states=fewest, offload_host_bytes=host_bytes,
    )  # fmt: skip


def _states(model: CostModel, budget_bytes: float) -> tuple[float, int, float]:
    """(bytes of states of one device when all split everything, fewest devices that hold them, bytes of optimizer states)."""
    total, trainable = model.graph.num_params(), model.graph.num_params(trainable_only=True)
    precision, optimizer, devices = model.precision, model.workload.optimizer, model.cluster.num_devices
    states = zero_states(
        3, trainable=trainable, frozen=total - trainable, shards=devices, precision=precision, optimizer=optimizer
    ).device_bytes
    return states, math.ceil(states * devices / budget_bytes), optimizer_offload_bytes(trainable, precision, optimizer)


def _offload_text(model: CostModel, host_bytes: float) -> str:
    """The last resort: slow, and not planned by this version."""
    nodes = sum(group.count for group in model.cluster.nodes)
    known = [group.host.memory_bytes for group in model.cluster.nodes for _ in range(group.count)]
    there = f"{sum(size for size in known if size) / GB:.0f} GB there" if all(known) else "host memory not known"
    return (
        f"optimizer states in host memory: {host_bytes / GB:.0f} GB on {nodes} node{'s' if nodes > 1 else ''} ({there}); "
        "slowest of all, and no plan of this version offloads"
    )


def closest_notes(candidates: Candidates) -> list[str]:
    """What fills the candidate that comes closest, in words: terms, the op classes behind them, logits."""
    row, _ = _closest(candidates)
    strategy, pool, model = candidates.space.strategy(row), candidates.pool(row), candidates.prices.model
    passes = int(candidates.space.rows[row]["num_micro_batches"])
    found = candidates.refiner.refine(strategy, pool, passes, ignore_memory=True)
    if isinstance(found, DoesNotFit):
        return []
    ranks = plan_memory(model, candidates.assembler.plan(found.strategy, pool))
    return [f"closest: {strategy.text()}", *memory_notes(model, ranks, loss_memory(model, strategy.micro_batch))]


def _closest(candidates: Candidates) -> tuple[int, DoesNotFit]:
    """The row with the fewest missing bytes among the least full ones."""
    fill = candidates.bounds.fill
    order = np.argsort(fill, kind="stable")[:TRIES].tolist()
    rows = {*order, *candidates.memory_misses}
    found = {row: candidates.refine(row) for row in sorted(rows)}
    misses = {row: item for row, item in found.items() if isinstance(item, DoesNotFit)}
    misses.update(candidates.memory_misses)
    best = min(misses, key=lambda row: (misses[row].missing_bytes / misses[row].budget_bytes, row))
    return best, misses[best]


def _relaxations(model: CostModel, fixed: Mapping[str, Any], missed: DoesNotFit) -> Iterator[str]:
    """Ways around, those that change least first."""
    cluster, workload = model.cluster, model.workload
    for name in fixed:
        if name not in ("op_classes", "loss") and _fits(
            model, cluster, workload, {key: value for key, value in fixed.items() if key != name}
        ):
            yield f"leave '{name}' to the search"
    if workload.limits.max_devices is not None:
        freed = workload.replace(limits=workload.limits.replace(max_devices=None))
        if _fits(model, cluster, freed, fixed):
            yield f"allow all {cluster.num_devices} devices"
    if workload.micro_batches and _fits(model, cluster, workload.replace(micro_batches=()), fixed):
        yield "allow smaller micro-batches"
    nodes = _nodes_needed(model, fixed)
    if nodes is not None:
        times, devices = nodes
        yield f"at least {devices} devices of this kind ({times} x the nodes)" if times > 1 else f"{devices} devices"
    yield f"devices with {format_bytes(missed.missing_bytes)} more memory each"
    if workload.seq_len is not None and workload.seq_len >= 256:
        half = workload.replace(seq_len=workload.seq_len // 2)
        if _fits(model, cluster, half, fixed):
            yield f"sequences of {workload.seq_len // 2}"
    if workload.precision.master_dtype is not None:
        lean = workload.precision.replace(master_dtype=None)
        if _fits(model, cluster, workload.replace(precision=lean), fixed):
            yield "no fp32 master weights (precision bf16_pure)"
    yield from _lighter_kernels(model, fixed)


def _lighter_kernels(model: CostModel, fixed: Mapping[str, Any]) -> Iterator[str]:
    """Kernels and dtypes that hold less for the same job."""
    cluster, workload = model.cluster, model.workload
    if workload.attention_kernel == "math" and _fits(model, cluster, workload.replace(attention_kernel="flash"), fixed):
        yield "attention that keeps no scores (attention_kernel flash)"
    if workload.loss_kernel == "full" and _fits(model, cluster, workload.replace(loss_kernel="fused"), fixed):
        yield "logits in parts (loss_kernel fused)"
    if workload.adapters is not None and workload.precision.frozen_dtype != "int4":
        packed = workload.precision.replace(frozen_dtype="int4")
        if _fits(model, cluster, workload.replace(precision=packed), fixed):
            yield "frozen weights in 4 bits (precision.frozen_dtype int4)"


def _nodes_needed(model: CostModel, fixed: Mapping[str, Any]) -> tuple[int, int] | None:
    """The smallest multiple of the nodes that fits (doubling, then halving the gap), and its devices."""
    cluster, workload = model.cluster, model.workload
    if workload.limits.max_devices is not None or fixed.get("dp") is not None:
        return None

    def enough(times: int) -> bool:
        return _fits(model, _multiplied(cluster, times), workload, fixed)

    high = 2
    while high <= MOST_TIMES and not enough(high):
        high *= 2
    if high > MOST_TIMES:
        return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high, _multiplied(cluster, high).num_devices


def _multiplied(cluster: ClusterSpec, times: int) -> ClusterSpec:
    groups = tuple(group.model_copy(update={"count": group.count * times}) for group in cluster.nodes)
    return cluster.model_copy(update={"nodes": groups})


def _fits(model: CostModel, cluster: ClusterSpec, workload: TrainingSpec, fixed: Mapping[str, Any]) -> bool:
    """Whether some strategy on all devices of the cluster fits their memory."""
    pool = whole_cluster(cluster)
    limit = workload.limits.max_devices
    if limit is not None:
        pool = Pool(pool.places[:limit], pool.label)
    space = enumerate_space(model.graph, workload, [pool], fixed)
    if not len(space.rows):
        return False
    prices = Prices(CostModel(model.graph, cluster, workload, model.profile, factors=model.factors))
    bounds = compute_bounds(prices, space)
    refiner = Refiner(prices)
    rows = np.flatnonzero(bounds.fits)
    for row in rows[np.argsort(bounds.fill[rows], kind="stable")][:TRIES].tolist():
        found = refiner.refine(space.strategy(row), pool, int(space.rows[row]["num_micro_batches"]))
        if not isinstance(found, DoesNotFit):
            return True
    return False
