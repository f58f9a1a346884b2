"""A straggler model from measured times: who is slow for good, how much devices jitter, how often they pause.

The times are those of each rank's own work in each step (compute phases): step times are alike on all ranks, since they wait for
one another. Of each rank's times the median is its chronic speed; what remains around it, common swings of all ranks taken out, is
jitter, of the shape (lognormal or gamma) that makes the times likelier; far outliers are pauses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specs.errors import InvalidInput
from specs.straggler import Jitter, Pauses, SlowNodes, StragglerModel

Array = NDArray[np.float64]

LEAST_STEPS = 20
_PAUSE_SIGMAS = 8.0
_MAD_TO_STD = 1.4826
_CHRONIC_SIGMAS = 4.0  # of a median, beyond which a rank differs from its peers
_LEAST_CHRONIC = 1.01
_NODE_SIGMAS = 5.0


def fit_stragglers(
    times_s: Array, *, nodes: Sequence[int] | None = None, devices: Sequence[int] | None = None, name: str = ""
) -> StragglerModel:
    """The model of ranks that do the same work. ``times_s``: seconds (steps x ranks); ``nodes``: the node of each rank, where
    slowdowns of whole nodes are to be told apart; ``devices``: the device (global rank) of each rank, else its number."""
    if times_s.ndim != 2 or times_s.shape[0] < LEAST_STEPS or times_s.shape[1] < 2 or not (times_s > 0).all():
        raise InvalidInput.single(
            "bad_times", f"a fit needs positive seconds of steps x ranks, these are {times_s.shape}", subject="times",
            allowed=f"at least {LEAST_STEPS} steps of 2 ranks",
        )  # fmt: skip
    logs = np.log(times_s)
    logs = logs - np.median(logs, axis=1, keepdims=True)  # what all ranks share in a step
    usual = np.median(logs, axis=0)
    rest = logs - usual
    sigma = max(_MAD_TO_STD * float(np.median(np.abs(rest))), 1e-9)
    rest, slow_nodes = _without_slow_nodes(rest, nodes, sigma)
    paused = rest > _PAUSE_SIGMAS * sigma
    extra = (np.exp(rest) - 1) * np.exp(usual) * np.median(times_s)
    return StragglerModel(
        name=name, slowdown=_chronic(usual, sigma / math.sqrt(len(logs)), devices), device_jitter=fit_jitter(np.exp(rest[~paused])),
        slow_nodes=slow_nodes,
        pauses=Pauses(probability=float(paused.mean()), mean_s=float(extra[paused].mean()) if paused.any() else 0.0),
        provenance=dict.fromkeys(
            ("slowdown", "device_jitter", "pauses"), f"fitted: {times_s.shape[0]} steps of {times_s.shape[1]} ranks"
        ),
    )  # fmt: skip


def fit_jitter(factors: Array) -> Jitter:
    """The jitter of positive factors: its cv by the moments, its shape by the likelihood."""
    values = np.ravel(factors)
    values = values / values.mean()
    cv = float(values.std())
    if cv < 1e-9:
        return Jitter()
    shape = "lognormal" if _lognormal_likelihood(values) >= _gamma_likelihood(values, cv) else "gamma"
    return Jitter(shape=shape, cv=min(cv, 3.0))  # type: ignore[arg-type]


def fit_link_jitter(transfers_s: Array) -> Jitter:
    """The jitter of a link from the pure transfer times (steps x groups) of equal collectives: the shortest of each group's
    ranks in each step. Each group is taken against its own mean."""
    return fit_jitter(transfers_s / transfers_s.mean(axis=0))


def _chronic(usual: Array, error: float, devices: Sequence[int] | None) -> dict[int, float]:
    """Factors of the ranks that are slower than their peers by more than the medians' error."""
    least = max(math.log(_LEAST_CHRONIC), _CHRONIC_SIGMAS * 1.2533 * error)  # a median's error is sqrt(pi / 2) of a mean's
    names = range(len(usual)) if devices is None else devices
    return {int(names[rank]): float(np.exp(level)) for rank, level in enumerate(usual) if level > least}


def _without_slow_nodes(rest: Array, nodes: Sequence[int] | None, sigma: float) -> tuple[Array, SlowNodes]:
    """Steps in which the middle rank of a node is slow, and the times without what the ranks of each node share then: a slow node
    moves the median of all ranks, and so every rank's distance from it."""
    if nodes is None:
        return rest, SlowNodes()
    found, total, middles = [], 0, []
    for node in sorted(set(nodes)):
        members = [rank for rank, other in enumerate(nodes) if other == node]
        if len(members) < 3:
            continue
        middle = np.median(rest[:, members], axis=1)
        is_slow = middle > _NODE_SIGMAS * 1.2533 * sigma / math.sqrt(len(members))
        found += list(middle[is_slow])
        total += len(middle)
        middles.append((members, middle, is_slow))
    if not found:
        return rest, SlowNodes()
    cleaned, disturbed = rest.copy(), np.any([is_slow for *_, is_slow in middles], axis=0)
    for members, middle, _ in middles:
        cleaned[np.ix_(np.flatnonzero(disturbed), np.array(members))] -= middle[disturbed, None]
    return cleaned, SlowNodes(share=len(found) / total, factor=float(np.exp(np.mean(found))))


def _lognormal_likelihood(values: Array) -> float:
    """Mean log-likelihood with the fitted mean and variance of the logs."""
    logs = np.log(values)
    return float(-logs.mean() - np.log(logs.std()) - 0.5 - 0.5 * np.log(2 * np.pi))


def _gamma_likelihood(values: Array, cv: float) -> float:
    """The same of a gamma distribution of mean 1, its shape by Minka's start from the mean of the logs."""
    gap = -float(np.log(values).mean())  # log of the mean, which is 0, less the mean of the logs
    k = (3 - gap + math.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap) if gap > 0 else cv**-2
    return k * math.log(k) - math.lgamma(k) - (k - 1) * gap - k
