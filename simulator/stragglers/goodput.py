"""Expected goodput and cost of a job that checkpoints, fails and is revoked, and the best time between checkpoints.

Failures come at rate L (exponential times between them). A segment is T seconds of useful work and one checkpoint of C seconds; a
failure in it loses the segment and takes R_k seconds of recovery by its kind k (share p_k of the failures), during which the next
failure may come. By renewal (Daly 2006 for one kind) the expected wall-clock time of a segment is

    W(T) = (exp(L (T + C)) - 1) / (L phi),   phi = sum_k p_k exp(-L R_k)

and ``availability`` = T / W(T). Revocations with notice enough for a checkpoint lose no work: each costs C and its recovery.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specs.cluster import ClusterSpec
from specs.plan import Plan
from specs.straggler import Goodput, StragglerModel

HOUR_S = 3600.0
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Interruption:
    """Events of one kind: how many per second of the whole job, and seconds from the event until training goes on."""

    rate_per_s: float
    recovery_s: float


def segment_wall_s(*, work_s: float, save_s: float, losing: tuple[Interruption, ...]) -> float:
    """Expected wall-clock seconds of ``work_s`` of useful work and its checkpoint; infinite where failures never let it end."""
    rate = sum(item.rate_per_s for item in losing)
    if rate == 0:
        return work_s + save_s
    # exponents are kept apart from one another: each alone may be beyond a float
    phi = sum(item.rate_per_s / rate * math.exp(-min(rate * item.recovery_s, 700.0)) for item in losing)
    exponent = rate * (work_s + save_s)
    return math.inf if exponent > 700 else math.expm1(exponent) / (rate * phi)


def availability(
    *, interval_s: float, save_s: float, losing: tuple[Interruption, ...], noticed: tuple[Interruption, ...] = ()
) -> float:
    """Useful over wall-clock time with a checkpoint every ``interval_s`` of useful work."""
    wall = segment_wall_s(work_s=interval_s, save_s=save_s, losing=losing)
    orderly = sum(item.rate_per_s * (save_s + item.recovery_s) for item in noticed)
    return interval_s / (wall * (1 + orderly))


def best_interval_s(*, save_s: float, losing: tuple[Interruption, ...]) -> float:
    """The interval of the highest availability, by golden section over its logarithm (the availability has one peak)."""
    rate = sum(item.rate_per_s for item in losing)
    if rate == 0 or save_s == 0:
        raise ValueError("without failures or with free checkpoints there is no best interval")

    def value(log_interval: float) -> float:
        return availability(interval_s=math.exp(log_interval), save_s=save_s, losing=losing)

    guess = math.log(young_interval_s(save_s, 1 / rate))
    low, high = guess - 8, guess + 2
    while high - low > 1e-9:
        span = _GOLDEN * (high - low)
        if value(high - span) > value(low + span):
            high = low + span
        else:
            low = high - span
    return math.exp((low + high) / 2)


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """First-order optimum sqrt(2 C M) (Young 1974)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Higher-order optimum (Daly 2006, eq. 37): useful work between checkpoints; M where C >= 2 M."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


@dataclass(frozen=True, slots=True)
class Job:
    """What a plan occupies. ``nodes`` are paid whole, even where some of their devices are unused."""

    devices: int
    nodes: int
    tokens_per_step: float
    price_usd_per_hour: float | None


def job_of(plan: Plan, cluster: ClusterSpec, stragglers: StragglerModel) -> Job:
    """The devices and nodes that a plan trains on, and their on-demand price."""
    used = {device for pipeline in plan.pipelines for stage in pipeline.stages for device in stage.devices}
    group_of = {place.node: place.group for place in cluster.device_table() if place.rank in used}
    prices = [_node_price(cluster, stragglers, group) for group in group_of.values()]
    price = None if any(item is None for item in prices) else sum(item or 0.0 for item in prices)
    return Job(len(used), len(group_of), plan.global_batch * plan.seq_len, price)


def _node_price(cluster: ClusterSpec, stragglers: StragglerModel, group_index: int) -> float | None:
    """USD of one node per hour: of the straggler model, else of the cluster's node, else of its devices."""
    group = cluster.nodes[group_index]
    for price in (stragglers.node_price_usd_per_hour, group.price_usd_per_hour):
        if price is not None:
            return price
    device = cluster.device_type(group.device or "").price_usd_per_hour
    return None if device is None else device * (group.devices_per_node or 0)


def goodput(job: Job, stragglers: StragglerModel, *, nominal_step_s: float, mean_step_s: float, spot: bool = False) -> Goodput:
    """What remains of the nominal throughput and what a token costs, on demand or on spot capacity."""
    losing, noticed = _interruptions(job, stragglers, spot=spot)
    save_s, given = stragglers.checkpoints.save_s, stragglers.checkpoints.interval_s
    rate = sum(item.rate_per_s for item in losing)
    interval = given
    if interval is None and rate > 0:
        # checkpoints that cost nothing are made after every step
        interval = best_interval_s(save_s=save_s, losing=losing) if save_s > 0 else mean_step_s
        interval = max(1, round(interval / mean_step_s)) * mean_step_s
    share = availability(interval_s=interval or math.inf, save_s=save_s, losing=losing, noticed=noticed) if interval else 1.0
    if interval is None and noticed:
        share = 1 / (1 + sum(item.rate_per_s * (save_s + item.recovery_s) for item in noticed))
    price = _hourly_price(job, stragglers, spot=spot)
    tokens = share * job.tokens_per_step / mean_step_s
    return Goodput(
        job_mtbf_s=1 / rate if rate else None, checkpoint_interval_s=interval, interval_is_best=given is None,
        interval_steps=None if interval is None else max(1, round(interval / mean_step_s)),
        availability=share, goodput=share * nominal_step_s / mean_step_s, tokens_per_s=tokens,
        young_interval_s=young_interval_s(save_s, 1 / rate) if rate and save_s else None,
        daly_interval_s=daly_interval_s(save_s, 1 / rate) if rate and save_s else None,
        cost_usd_per_hour=price,
        cost_usd_per_million_tokens=None if price is None or tokens == 0 else price / HOUR_S / tokens * 1e6,
    )  # fmt: skip


def _interruptions(
    job: Job, stragglers: StragglerModel, *, spot: bool
) -> tuple[tuple[Interruption, ...], tuple[Interruption, ...]]:
    """Events that lose work, and those with notice enough to save it."""
    failures = stragglers.failures
    rate = job.devices / failures.device_mtbf_s if failures.device_mtbf_s else 0.0
    rate += job.nodes / failures.node_mtbf_s if failures.node_mtbf_s else 0.0
    losing = [Interruption(rate, failures.restart_s)] if rate else []
    noticed: list[Interruption] = []
    if spot and stragglers.spot is not None and stragglers.spot.revocations_per_hour:
        revoked = Interruption(job.nodes * stragglers.spot.revocations_per_hour / HOUR_S, stragglers.spot.replacement_s)
        (noticed if stragglers.spot.notice_s >= stragglers.checkpoints.save_s else losing).append(revoked)
    return tuple(losing), tuple(noticed)


def _hourly_price(job: Job, stragglers: StragglerModel, *, spot: bool) -> float | None:
    if spot and stragglers.spot is not None and stragglers.spot.price_usd_per_hour is not None:
        return job.nodes * stragglers.spot.price_usd_per_hour
    return job.price_usd_per_hour
