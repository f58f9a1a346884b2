"""What a stage's units cost within a step, under the rules of the step simulation: the parts of every lower bound.

Two resources run at once on a device, compute and data-parallel collectives; while both run, compute takes a times and collectives
take b times as long. ``overlap_s`` is the least time for work C and M on the two. Everything here counts what the simulation must
spend at least, so bounds made of it never exceed a simulated step. Arrays: [..., K] per kind of unit, leading axes broadcast; of
one number a row, [...].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats, Prices, ShardPrices, UnitPrices
from planner.sites import Site
from simulator.runtime_rules import RuntimeRules
from specs.plan import CollectiveOptions


@dataclass(frozen=True)
class Overlap:
    """Seconds that a second costs when it runs beside the other resource: ``hidden`` of communication, ``back`` of compute."""

    hidden: Any
    back: Any

    @staticmethod
    def of(rules: RuntimeRules, tier: str) -> Overlap:
        """b (1 - 1/a) and the other way round, each at most 1, of collectives on ``tier``."""
        a, b = rules.slowdowns(tier)
        return Overlap(min(1.0, b * (1 - 1 / a)), min(1.0, a * (1 - 1 / b)))

    def least_s(self, compute_s: Any, comm_s: Any) -> Any:
        """Least time for both: with o seconds of running together, T = C + M - o (1/a + 1/b - 1), o <= a C and o <= b M."""
        return np.maximum(compute_s + self.hidden * comm_s, comm_s + self.back * compute_s)

    def per_kind(self) -> Overlap:
        """For arrays with a last axis of kinds."""
        return Overlap(np.asarray(self.hidden)[..., None], np.asarray(self.back)[..., None])


@dataclass(frozen=True)
class DataParallel:
    """Data-parallel work of a stage. ``sharded``: states are sharded over several ranks. ``replicas``: several ranks sum their
    gradients. ``*_wait_s``: waiting for the slowest rank at a unit's gather and reduction (measured skew)."""

    shards: ShardPrices
    overlap: Overlap
    sharded: bool
    replicas: bool
    gather_wait_s: Any
    reduce_wait_s: Any

    def row(self, rows: NDArray[np.int64]) -> DataParallel:
        """Those rows of arrays."""
        overlap = Overlap(self.overlap.hidden[rows], self.overlap.back[rows])
        waits = (self.gather_wait_s[rows], self.reduce_wait_s[rows])
        return DataParallel(self.shards.row(rows), overlap, self.sharded, self.replicas, *waits)


@dataclass(frozen=True)
class PipelineTerms:
    """Per kind, for pp > 1.

    ``forward_s``, ``backward_s`` (gradient addition included, ``add_s`` that part) of each micro-batch; of a split backward
    ``input_s`` and ``weight_s``. ``first_s`` more in the first forward (weights gathered and unpacked), ``wait_s`` more if the unit
    is the first of its stage. ``reduce_s``: reductions of one micro-batch that run beside or after backward; ``tails``: (per kind,
    constant) pieces, each a bound on what a stage does after its last backward; ``both_s``: least seconds of the two resources a
    micro-batch where reductions of every micro-batch run beside compute.
    """

    forward_s: Floats
    backward_s: Floats
    add_s: Floats
    first_s: Floats
    wait_s: Floats
    reduce_s: Floats
    tails: tuple[tuple[Floats, Any], ...]
    input_s: Floats
    weight_s: Floats
    both_s: Floats | None = None

    @property
    def cost_s(self) -> Floats:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    def work_s(self, schedule: str) -> Floats:
        """Least of a micro-batch under a schedule, which may run all backwards in two parts, or some."""
        parts = self.input_s + self.weight_s
        if schedule in ("zb_h1", "zb_v"):
            return self.forward_s + parts
        return self.forward_s + (np.minimum(parts, self.backward_s) if schedule == "dualpipe_v" else self.backward_s)

    def row(self, rows: NDArray[np.int64]) -> PipelineTerms:
        """Those rows of all but ``tails`` and ``both_s``."""
        values = {name: getattr(self, name)[rows] for name in _PER_ROW}
        return PipelineTerms(**values, tails=(), both_s=None)


_PER_ROW = ("forward_s", "backward_s", "add_s", "first_s", "wait_s", "reduce_s", "input_s", "weight_s")


def data_parallel(prices: Prices, site: Site, device: tuple[str, float], units: UnitPrices, *, zero: int) -> DataParallel:
    """Of a stage that lies like ``site``."""
    gather_wait, reduce_wait = rank_waits_s(prices, device, units, replicas=site.dp_shape.size)
    return DataParallel(
        prices.shards(*device, site), Overlap.of(prices.rules, site.dp_shape.tier), zero > 0 and site.shard_shape.size > 1,
        site.dp_shape.size > 1, gather_wait, reduce_wait,
    )  # fmt: skip


def accumulation_s(shards: ShardPrices, passes: Any, *, zero: int, sharded: bool) -> Any:
    """Adding gradients of later micro-batches, per kind and pass; none where every pass reduces its own."""
    if zero >= 2 and sharded:
        return 0.0 * shards.add_s
    return np.where(np.asarray(passes)[..., None] > 1, shards.add_s, 0.0)


def pipeline_terms(prices: Prices, dp: DataParallel, units: UnitPrices, *, zero: int, passes: Any) -> PipelineTerms:
    """Terms of a stage of a pipeline; ``passes`` = micro-batches, a number or an array over the leading axes."""
    rules, shards = prices.rules, dp.shards
    add = accumulation_s(shards, passes, zero=zero, sharded=dp.sharded)
    backward, weight = units.backward_s + add, units.weight_grad_s + add
    none = np.zeros_like(backward)
    if not dp.sharded:
        reduce = none + (shards.all_reduce_s if zero == 0 else 0.0)
        tails = ((reduce, 0.0),)
        return PipelineTerms(units.forward_s, backward, add, none, none, reduce, tails, units.input_backward_s, weight)
    reduce = none + shards.reduce_s
    waits = dp.reduce_wait_s if zero >= 2 else 0.0
    backward = backward + waits
    first, wait = _first_forward(prices, dp, units.forward_s)
    first = first + dp.gather_wait_s
    common = (units.forward_s, backward, add, first, wait, reduce)
    if rules.reduce_inline:  # on the compute queue, but a stage's last reduction comes after its gradient has been sent on
        both = units.forward_s + backward + reduce if zero >= 2 else None
        return PipelineTerms(*common, ((reduce, 0.0),), units.input_backward_s, weight, both)
    overlap = dp.overlap.per_kind()
    both = None
    if zero >= 2:
        cost = units.forward_s + backward
        comm_bound, compute_bound = reduce + overlap.back * cost, cost + overlap.hidden * reduce
        larger = ((comm_bound - compute_bound) @ prices.counts > 0)[..., None]
        both = np.where(larger, comm_bound, compute_bound)
    pieces = (
        (overlap.hidden * reduce, (1 - dp.overlap.hidden) * reduce.min(axis=-1)),
        (reduce - (1 - overlap.back) * backward, 0.0),
    )
    return PipelineTerms(*common, pieces, units.input_backward_s, weight, both)


def _first_forward(prices: Prices, dp: DataParallel, forward_s: Floats) -> tuple[Floats, Floats]:
    """(more in the first forward per kind, wait for a stage's first unit): a stage waits for its first unit's weights, then gathers
    the others beside compute. Of the two linear pieces of ``Overlap.least_s`` that which is larger over the whole model counts."""
    shards, overlap = dp.shards, dp.overlap.per_kind()
    gather = shards.gather_s
    none = np.zeros_like(forward_s)
    if prices.rules.gather_inline:
        return none + shards.unpack_s + gather, none
    compute_bound = none + shards.unpack_s + overlap.hidden * gather
    comm_bound = gather + overlap.back * (forward_s + shards.unpack_s) - forward_s
    larger = ((comm_bound - compute_bound) @ prices.counts > 0)[..., None]
    return np.where(larger, comm_bound, compute_bound), np.where(larger, 0.0, (1 - overlap.hidden) * gather + none)


def gathered_first_s(
    rules: RuntimeRules, overlap: Overlap, forward_s: Any, unpack_s: Any, gather_s: Any, first_gather_s: Any
) -> Any:
    """More in the first forward of a stage whose units are known: it waits for its first unit's weights, then gathers the others
    beside compute. All but ``first_gather_s`` of the whole stage."""
    if rules.gather_inline:
        return unpack_s + gather_s
    return first_gather_s + overlap.least_s(forward_s + unpack_s, gather_s - first_gather_s) - forward_s


@dataclass(frozen=True)
class StepEnds:
    """What a stage that holds the whole model does once a step: ``after_s`` its backwards besides reductions (partial gradients,
    skew), ``optimizer_s``, and with DDP the ``buckets_s`` (all, the last)."""

    after_s: Any
    optimizer_s: Any
    buckets_s: tuple[Any, Any] = (0.0, 0.0)


def single_stage_s(prices: Prices, dp: DataParallel, units: UnitPrices, ends: StepEnds, *, zero: int, passes: Any) -> Any:
    """Least step time without a pipeline, from the terms of all units. ``passes``: number or array over the leading axes."""
    rules, shards, counts, overlap = prices.rules, dp.shards, prices.counts, dp.overlap
    m = np.asarray(passes, dtype=float)
    forward, first = units.forward_s @ counts, units.backward_s @ counts
    add = accumulation_s(shards, passes, zero=zero, sharded=dp.sharded) @ counts
    last = first + add  # the last backward; with one pass add is 0
    after, optimizer = ends.after_s, ends.optimizer_s
    before_last = m * forward + np.maximum(m - 1, 0) * first + np.maximum(m - 2, 0) * add  # compute before the last backward
    if zero == 0 and dp.replicas:
        total, final = ends.buckets_s
        copied = last + shards.bucket_copy_s @ counts
        end = np.maximum(overlap.least_s(copied, total - final) + final, copied + after)
        return before_last + end + optimizer
    if not dp.sharded:
        return before_last + last + after + optimizer
    gather_wait, reduce_wait = dp.gather_wait_s @ counts, dp.reduce_wait_s @ counts
    if zero == 3:
        return _fully_sharded_s(prices, dp, forward + gather_wait, first + reduce_wait, m, after) + optimizer
    gather, first_gather = shards.gather_s @ counts, shards.gather_s[..., prices.first_kind]
    reduce, last_reduce = shards.reduce_s @ counts, shards.reduce_s[..., prices.first_kind]
    front = forward + shards.unpack_s @ counts + gather_wait
    front = front + gather if rules.gather_inline else first_gather + overlap.least_s(front, gather - first_gather)
    if zero == 1:
        rest, last = front + before_last - forward, last + reduce_wait
        if rules.reduce_inline:
            return rest + last + reduce + after + optimizer
        return rest + np.maximum(overlap.least_s(last, reduce - last_reduce) + last_reduce, last + after) + optimizer
    rest = (m - 1) * forward + m * (first + reduce_wait)
    if rules.reduce_inline:
        return front + rest + m * reduce + after + optimizer
    return front + np.maximum(overlap.least_s(rest, m * reduce - last_reduce) + last_reduce, rest + after) + optimizer


def _fully_sharded_s(prices: Prices, dp: DataParallel, forward: Any, backward: Any, m: Any, after: Any) -> Any:
    """zero 3: weights gathered for each forward and each backward (the last unit's are still there), reduced in every pass."""
    rules, shards, counts = prices.rules, dp.shards, prices.counts
    twice = 2 * counts
    twice[prices.last_kind] -= 1
    compute, comm = m * (forward + backward + shards.unpack_s @ twice), 0.0 * m
    first: Any = 0.0
    last: Any = 0.0
    if rules.prefetched_gather_inline:
        compute = compute + m * (shards.gather_s @ twice)
    else:
        first = shards.gather_s[..., prices.first_kind]
        comm = comm + m * (shards.gather_s @ twice) - first
    if rules.reduce_inline:
        compute = compute + m * (shards.reduce_s @ counts)
    else:
        last = shards.reduce_s[..., prices.first_kind]
        comm = comm + m * (shards.reduce_s @ counts) - last
    return first + np.maximum(dp.overlap.least_s(compute, comm) + last, compute + after)


def rank_waits_s(prices: Prices, device: tuple[str, float], units: UnitPrices, *, replicas: int) -> tuple[Floats, Floats]:
    """Waiting for the slowest of ``replicas`` ranks at a unit's gather, and at its reduction; zero where skew was not measured."""
    return (
        skew_s(prices, device, units.forward_compute_s / device[1], replicas),
        skew_s(prices, device, units.backward_compute_s, replicas),
    )


def skew_s(prices: Prices, device: tuple[str, float], work_s: Any, replicas: int) -> Any:
    """Waiting for the slowest of ``replicas`` ranks once after ``work_s``."""
    profile = prices.model.pricer(device[0]).profile
    if profile is None or not profile.rank_skew or replicas < 2:
        return 0.0 * np.asarray(work_s)
    return np.vectorize(lambda work: prices.model.skew_wait_s(device[0], float(work), replicas))(work_s)


def step_ends(prices: Prices, site: Site, device: tuple[str, float], units: UnitPrices, *, zero: int, passes: Any) -> StepEnds:
    """Ends of a step on a stage that holds the whole model."""
    counts = prices.counts
    after = partial_grads_s(prices, site, units.partial_grad_elements @ counts)
    sizes = prices.sizes(site)
    optimizer = optimizer_s(prices, device, float((sizes.trainable * sizes.state_share(site, zero)) @ counts))
    if zero or site.dp_shape.size == 1:
        return StepEnds(after, optimizer)
    work_s = np.asarray(passes, dtype=float) * ((units.forward_compute_s + units.backward_compute_s) @ counts)
    buckets = ddp_buckets_s(prices, site, CollectiveOptions().bucket_bytes)
    return StepEnds(after + skew_s(prices, device, work_s, site.dp_shape.size), optimizer, buckets)


def ddp_buckets_s(prices: Prices, site: Site, bucket_bytes: float) -> tuple[float, float]:
    """(all, the last) all-reduce of DDP's buckets, which fill in backward order and close when full."""
    kind, sizes = prices.kind_of_unit, prices.sizes(site)
    experts = sizes.expert_reduce_bytes[kind] if site.expert_shape is not None else np.zeros(len(kind))
    dense = sizes.reduce_bytes[kind] - experts
    network = prices.model.network
    times, pending = [0.0], [0.0, 0.0]
    for index in reversed(range(len(kind))):
        pending = [pending[0] + float(dense[index]), pending[1] + float(experts[index])]
        if sum(pending) >= bucket_bytes or index == 0:
            seconds = network.collective("all_reduce", pending[0], site.dp_shape).seconds
            if pending[1] and site.expert_shape is not None:
                seconds += network.collective("all_reduce", pending[1], site.expert_shape).seconds
            times.append(seconds)
            pending = [0.0, 0.0]
    return sum(times), times[-1]


def partial_grads_s(prices: Prices, site: Site, elements: Any) -> Any:
    """Sequence parallel: summing gradients of whole parameters over tp."""
    if site.tp_shape.size == 1:
        return 0.0 * np.asarray(elements)
    grad_bytes = prices.model.state_bytes_per_param[1]
    return _each(elements, lambda value: prices.model.network.collective("all_reduce", value * grad_bytes, site.tp_shape).seconds)


def _each(values: Any, function: Callable[[float], float]) -> Any:
    flat = np.atleast_1d(values)
    found = {value: function(value) for value in set(flat.tolist())}
    return np.array([found[value] for value in flat.tolist()]).reshape(np.shape(values))


def optimizer_s(prices: Prices, device: tuple[str, float], local: float) -> float:
    """Optimizer step of a rank that keeps the states of ``local`` parameters."""
    return device[1] * prices.model.optimizer_s(device[0], local)
