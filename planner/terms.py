"""What a stage's units cost within a step, under the rules of the step simulation: the parts of every lower bound.

Two resources run at once on a device, compute and data-parallel collectives; while both run, compute takes a times and collectives
take b times as long. ``overlap_s`` is the least time for work C and M on the two. Everything here counts what the simulation must
spend at least, so bounds made of it never exceed a simulated step. Arrays: [..., K] per kind of unit, leading axes broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.prices import Floats, Prices, ShardPrices, UnitPrices
from planner.sites import Site
from simulator.runtime_rules import RuntimeRules
from specs.plan import CollectiveOptions


def overlap_s(rules: RuntimeRules, compute_s: Any, comm_s: Any) -> Any:
    """Least time for both: with o seconds of running together, T = C + M - o (1/a + 1/b - 1), o <= a C and o <= b M."""
    return np.maximum(compute_s + hidden_cost(rules) * comm_s, comm_s + hidden_cost(rules, of_compute=True) * compute_s)


def hidden_cost(rules: RuntimeRules, *, of_compute: bool = False) -> float:
    """Seconds that a second of hidden communication costs: b (1 - 1/a), at most 1; with ``of_compute`` the other way round."""
    a, b = rules.compute_slowdown, rules.comm_slowdown
    return min(1.0, a * (1 - 1 / b) if of_compute else b * (1 - 1 / a))


@dataclass(frozen=True)
class PipelineTerms:
    """Per kind, for pp > 1.

    ``forward_s``, ``backward_s`` (gradient addition included, ``add_s`` that part) of each micro-batch;
    ``first_s`` more in the first forward (weights gathered and unpacked), ``wait_s`` more if the unit is the first of its stage.
    ``reduce_s``: reductions of one micro-batch that run beside or after backward; ``tails``: (per kind, constant) pieces, each a
    bound on what a stage does after its last backward; ``both_s``: least seconds of the two resources a micro-batch where
    reductions of every micro-batch run beside compute.
    """

    forward_s: Floats
    backward_s: Floats
    add_s: Floats
    first_s: Floats
    wait_s: Floats
    reduce_s: Floats
    tails: tuple[tuple[Floats, float], ...]
    both_s: Floats | None = None

    @property
    def cost_s(self) -> Floats:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def accumulation_s(shards: ShardPrices, passes: Any, *, zero: int, sharded: bool) -> Any:
    """Adding gradients of later micro-batches, per kind and pass; none where every pass reduces its own."""
    if zero >= 2 and sharded:
        return 0.0 * shards.add_s
    return np.where(np.asarray(passes)[..., None] > 1, shards.add_s, 0.0)


def pipeline_terms(
    prices: Prices, site: Site, device: tuple[str, float], units: UnitPrices, *, zero: int, passes: Any
) -> PipelineTerms:
    """Terms of a stage of a pipeline; ``passes`` = micro-batches, a number or an array over the leading axes."""
    rules, shards = prices.rules.at_tier(site.dp_shape.tier), prices.shards(*device, site)
    sharded = zero > 0 and site.shard_shape.size > 1
    add = accumulation_s(shards, passes, zero=zero, sharded=sharded)
    backward = units.backward_s + add
    none = np.zeros_like(units.forward_s)
    if not sharded:
        reduce = shards.all_reduce_s if zero == 0 else shards.all_reduce_s * 0.0
        return PipelineTerms(units.forward_s, backward, add, none, none, reduce, ((reduce + none, 0.0),))
    gather_wait, reduce_wait = rank_waits_s(prices, site, device, units)
    backward = backward + (reduce_wait if zero >= 2 else 0.0)
    first, wait = _first_forward(prices, rules, shards, units.forward_s)
    first = first + gather_wait
    if rules.reduce_inline:  # on the compute queue, but a stage's last reduction comes after its gradient has been sent on
        both = units.forward_s + backward + shards.reduce_s if zero >= 2 else None
        tails = ((shards.reduce_s + none, 0.0),)
        return PipelineTerms(units.forward_s, backward, add, first, wait, shards.reduce_s, tails, both)
    hidden, back = hidden_cost(rules), hidden_cost(rules, of_compute=True)
    both = None
    if zero >= 2:
        cost = units.forward_s + backward
        comm_bound, compute_bound = shards.reduce_s + back * cost, cost + hidden * shards.reduce_s
        larger = ((comm_bound - compute_bound) @ prices.counts > 0)[..., None]
        both = np.where(larger, comm_bound, compute_bound)
    pieces = (
        (none + hidden * shards.reduce_s, (1 - hidden) * float(shards.reduce_s.min())),
        (shards.reduce_s - (1 - back) * backward, 0.0),
    )
    return PipelineTerms(units.forward_s, backward, add, first, wait, shards.reduce_s, pieces, both)


def _first_forward(prices: Prices, rules: RuntimeRules, shards: ShardPrices, forward_s: Floats) -> tuple[Floats, Floats]:
    """(more in the first forward per kind, wait for a stage's first unit): a stage waits for its first unit's weights, then gathers
    the others beside compute. Of the two linear pieces of ``overlap_s`` the one that is larger over the whole model counts."""
    gather = shards.gather_s
    none = np.zeros_like(forward_s)
    if rules.gather_inline:
        return none + shards.unpack_s + gather, none
    hidden, back = hidden_cost(rules), hidden_cost(rules, of_compute=True)
    compute_bound = none + shards.unpack_s + hidden * gather
    comm_bound = gather + back * (forward_s + shards.unpack_s) - forward_s
    larger = ((comm_bound - compute_bound) @ prices.counts > 0)[..., None]
    return np.where(larger, comm_bound, compute_bound), np.where(larger, 0.0, (1 - hidden) * gather + none)


def single_stage_s(
    prices: Prices,
    site: Site,
    device: tuple[str, float],
    units: UnitPrices,
    *,
    zero: int,
    passes: Any,
    bucket_bytes: float | None = None,
) -> Any:
    """Least step time without a pipeline, from the terms of all units. ``passes``: number or array over the leading axes."""
    rules, shards, counts = prices.rules.at_tier(site.dp_shape.tier), prices.shards(*device, site), prices.counts
    m = np.asarray(passes, dtype=float)
    sharded = zero > 0 and site.shard_shape.size > 1
    forward, first = units.forward_s @ counts, units.backward_s @ counts
    add = accumulation_s(shards, passes, zero=zero, sharded=sharded) @ counts
    last = first + add  # the last backward; with one pass add is 0
    after = partial_grads_s(prices, site, units.partial_grad_elements @ counts)
    trainable = float(prices.sizes(site.tp_shape.size, whole=site.whole).trainable @ counts)
    optimizer = optimizer_s(prices, site, device, trainable, zero=zero)
    before_last = m * forward + np.maximum(m - 1, 0) * first + np.maximum(m - 2, 0) * add  # compute before the last backward
    if zero == 0 and site.dp_shape.size > 1:
        total, final = ddp_buckets_s(prices, site, bucket_bytes or CollectiveOptions().bucket_bytes)
        copied = last + shards.bucket_copy_s @ counts
        after = after + _skew_s(prices, device, site, m * ((units.forward_compute_s + units.backward_compute_s) @ counts))
        end = np.maximum(overlap_s(rules, copied, total - final) + final, copied + after)
        return before_last + end + optimizer
    if not sharded:
        return before_last + last + after + optimizer
    gather_wait, reduce_wait = (wait @ counts for wait in rank_waits_s(prices, site, device, units))
    if zero == 3:
        return _fully_sharded_s(prices, rules, shards, forward + gather_wait, first + reduce_wait, m, after) + optimizer
    gather, first_gather = shards.gather_s @ counts, shards.gather_s[prices.first_kind]
    reduce, last_reduce = shards.reduce_s @ counts, shards.reduce_s[prices.first_kind]
    front = forward + shards.unpack_s @ counts + gather_wait
    front = front + gather if rules.gather_inline else first_gather + overlap_s(rules, front, gather - first_gather)
    if zero == 1:
        rest, last = front + before_last - forward, last + reduce_wait
        if rules.reduce_inline:
            return rest + last + reduce + after + optimizer
        return rest + np.maximum(overlap_s(rules, last, reduce - last_reduce) + last_reduce, last + after) + optimizer
    rest = (m - 1) * forward + m * (first + reduce_wait)
    if rules.reduce_inline:
        return front + rest + m * reduce + after + optimizer
    return front + np.maximum(overlap_s(rules, rest, m * reduce - last_reduce) + last_reduce, rest + after) + optimizer


def _fully_sharded_s(
    prices: Prices, rules: RuntimeRules, shards: ShardPrices, forward: Any, backward: Any, m: Any, after: Any
) -> Any:
    """zero 3: weights gathered for each forward and each backward (the last unit's are still there), reduced in every pass."""
    counts = prices.counts
    twice = 2 * counts
    twice[prices.last_kind] -= 1
    compute, comm = m * (forward + backward + shards.unpack_s @ twice), 0.0 * m
    first = last = 0.0
    if rules.prefetched_gather_inline:
        compute = compute + m * (shards.gather_s @ twice)
    else:
        first = float(shards.gather_s[prices.first_kind])
        comm = comm + m * (shards.gather_s @ twice) - first
    if rules.reduce_inline:
        compute = compute + m * (shards.reduce_s @ counts)
    else:
        last = float(shards.reduce_s[prices.first_kind])
        comm = comm + m * (shards.reduce_s @ counts) - last
    return first + np.maximum(overlap_s(rules, compute, comm) + last, compute + after)


def rank_waits_s(prices: Prices, site: Site, device: tuple[str, float], units: UnitPrices) -> tuple[Floats, Floats]:
    """Waiting for the slowest dp rank at a unit's gather, and at its reduction; zero where skew was not measured."""
    return _skew_s(prices, device, site, units.forward_compute_s / device[1]), _skew_s(
        prices, device, site, units.backward_compute_s
    )


def _skew_s(prices: Prices, device: tuple[str, float], site: Site, work_s: Any) -> Any:
    profile = prices.model.pricer(device[0]).profile
    if profile is None or not profile.rank_skew or site.dp_shape.size < 2:
        return 0.0 * np.asarray(work_s)
    return np.vectorize(lambda work: prices.model.skew_wait_s(device[0], float(work), site.dp_shape.size))(work_s)


def ddp_buckets_s(prices: Prices, site: Site, bucket_bytes: float) -> tuple[float, float]:
    """(all, the last) all-reduce of DDP's buckets, which fill in backward order and close when full."""
    grads = prices.sizes(site.tp_shape.size, whole=site.whole).reduce_bytes[prices.kind_of_unit]
    times, pending = [0.0], 0.0
    for index in reversed(range(len(grads))):
        pending += float(grads[index])
        if pending >= bucket_bytes or index == 0:
            times.append(prices.model.network.collective("all_reduce", pending, site.dp_shape).seconds)
            pending = 0.0
    return sum(times), times[-1]


def partial_grads_s(prices: Prices, site: Site, elements: Any) -> Any:
    """Sequence parallel: summing gradients of whole parameters over tp."""
    if site.tp_shape.size == 1:
        return 0.0 * np.asarray(elements)
    grad_bytes = prices.model.state_bytes_per_param[1]
    flat = np.atleast_1d(elements)
    seconds = {
        value: prices.model.network.collective("all_reduce", value * grad_bytes, site.tp_shape).seconds
        for value in set(flat.tolist())
    }
    return np.array([seconds[value] for value in flat.tolist()]).reshape(np.shape(elements))


def optimizer_s(prices: Prices, site: Site, device: tuple[str, float], trainable: float, *, zero: int) -> float:
    """Optimizer step of a rank that holds ``trainable`` parameters before sharding."""
    degree = site.shard_shape.size if zero else 1
    return device[1] * prices.model.optimizer_s(device[0], trainable / degree)
