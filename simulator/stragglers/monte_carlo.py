"""Distribution of the step time of a plan: seeded Monte Carlo over the speeds of devices and links.

The nominal step is simulated once; draws play its tasks again (``simulator.stragglers.replay``). Of many replicas only the slowest
decides a step. Which one that is, tangent planes say: the time of a replica is a convex function of its factors (a maximum of
sums), so each plane is a lower bound, and the highest bound names the replicas that are then played exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.cost_model import CostModel
from simulator.predict import simulate
from simulator.step import StepResult
from simulator.stragglers.folding import Folding, fold
from simulator.stragglers.replay import COMPUTE, FINISH, INTER, INTRA, NUM_FACTORS, Replay
from simulator.stragglers.speeds import Draw, Speeds
from specs.cluster import ClusterSpec
from specs.plan import Plan
from specs.straggler import StepDistribution, StragglerModel

Array = NDArray[np.float64]
Single = NDArray[np.float32]

_CHUNK = 1000  # steps drawn together
_CANDIDATES = 2  # replicas of a step that are played exactly
_ANCHORS = 48  # points at which planes touch
_NUDGE = 1e-4
NONE = StragglerModel()
# Fields of a straggler model that are one source of lost time each.
SOURCES: dict[str, tuple[str, ...]] = {
    "chronic slowdowns": ("slowdown", "node_slowdown", "position_slowdown"),
    "slow devices of the fleet": ("slow_fleet",),
    "slow nodes": ("slow_nodes",),
    "device jitter": ("device_jitter",),
    "link jitter": ("intra_link_jitter", "inter_link_jitter"),
    "pauses": ("pauses",),
}


def nominal_cluster(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with every device at its nominal speed."""
    return cluster.replace(nodes=tuple(group.replace(slowdown={}) for group in cluster.nodes))


def nominal_model(model: CostModel) -> CostModel:
    """The prices at nominal speeds; the mean wait for the slowest rank that a profile measured is left out, it is drawn instead."""
    profile = model.profile
    if profile is not None:
        profile = profile.replace(devices=tuple(item.replace(rank_skew=()) for item in profile.devices))
    return CostModel(
        model.graph, nominal_cluster(model.cluster), model.workload, profile, software=model.software, factors=model.factors
    )


@dataclass(frozen=True, slots=True)
class _Folded:
    """One pipeline, ready to be drawn."""

    folding: Folding
    replay: Replay
    work_s: Array


class MonteCarlo:
    """Step times of one plan under straggler models. ``model``: prices of the cluster whose chronic slowdowns count."""

    def __init__(self, model: CostModel, plan: Plan) -> None:
        self.cluster = model.cluster
        nominal = nominal_model(model).for_plan(plan)
        result = simulate(nominal, plan)
        self.nominal_s = result.step_time_s
        self._pipelines = [_folded(nominal, plan, result, index) for index in range(len(plan.pipelines))]

    @property
    def folded(self) -> str:
        """What moves in step."""
        return "; ".join(dict.fromkeys(item.folding.text() for item in self._pipelines))

    def step_times(self, stragglers: StragglerModel, *, steps: int = 10_000, seed: int = 0) -> Array:
        """Seconds of ``steps`` independent steps."""
        stragglers.check(self.cluster)
        rng = np.random.default_rng(seed)
        found = np.zeros(steps)
        for item in self._pipelines:
            speeds = Speeds(item.folding, self.cluster, stragglers, item.work_s)
            slowest = _Slowest(item)
            for start in range(0, steps, _CHUNK):
                part = found[start : start + _CHUNK]
                np.maximum(part, slowest.of(speeds.draw(rng, len(part))), out=part)
        return found

    def alone(self, stragglers: StragglerModel, *, steps: int = 2_000, seed: int = 0) -> dict[str, float]:
        """Seconds that each source alone adds to the nominal step, mean. They do not add up: the slowest device hides others."""
        found = {}
        for name, fields in SOURCES.items():
            only = NONE.replace(**{field: getattr(stragglers, field) for field in fields})
            chronic = name == "chronic slowdowns" and any(place.slowdown > 1 for place in self.cluster.device_table())
            if only != NONE or chronic:
                cluster, self.cluster = self.cluster, self.cluster if "slowdown" in fields else nominal_cluster(self.cluster)
                found[name] = float(self.step_times(only, steps=steps, seed=seed).mean()) - self.nominal_s
                self.cluster = cluster
        return found


class _Slowest:
    """The slowest replica of each step of a draw."""

    def __init__(self, item: _Folded) -> None:
        self.item = item
        self._planes: tuple[Single, Single] | None = None
        self._used: NDArray[np.int64] = np.zeros(0, dtype=int)

    def of(self, draw: Draw) -> Array:
        """Step times, seconds."""
        replicas, steps = self.item.folding.replicas, draw.compute.shape[2]
        if replicas == 1:
            return self.item.replay.run(draw.at(np.zeros(steps, dtype=int)))
        if self._planes is None:
            self._planes = self._few_planes(*self._touch(draw))
        slopes, offsets = self._planes
        features = draw.features().reshape(-1, replicas * steps)
        bound = (slopes @ features[self._used] + offsets[:, None]).max(axis=0).reshape(replicas, steps)
        count = min(_CANDIDATES, replicas)
        chosen = np.argpartition(bound, replicas - count, axis=0)[replicas - count :]
        times = [self.item.replay.run(draw.at(row)) for row in chosen]
        return np.max(times, axis=0)

    def _few_planes(self, slopes: Array, offsets: Array) -> tuple[Single, Single]:
        """Planes that differ, over the features that matter."""
        self._used = np.flatnonzero(np.abs(slopes).max(axis=0))
        planes = np.unique(np.column_stack([slopes[:, self._used], offsets]).round(9), axis=0)
        return planes[:, :-1].astype(np.float32), planes[:, -1].astype(np.float32)

    def _touch(self, draw: Draw) -> tuple[Array, Array]:
        """Tangent planes (slopes, offsets) at the replicas of the draw that have the slowest devices, and at others."""
        replicas, steps = draw.compute.shape[1:]
        work = draw.compute.sum(axis=0) + draw.compute.max(axis=0)  # long where the pipeline's sum or its slowest rank is
        number = min(_ANCHORS, steps)
        replica = np.where(np.arange(number) % 4 < 3, work[:, :number].argmax(axis=0), np.arange(number) % replicas)
        full = np.zeros(steps, dtype=int)
        full[:number] = replica
        base = _with_slow_places(draw.at(full)[:, :, :number])
        number = base.shape[2]
        own = base[: INTER + 1].reshape(-1, number)
        count = len(own)
        columns = np.repeat(base, count + 1, axis=2).reshape(*base.shape[:2], number, count + 1)
        for index in range(count):
            kind, place = divmod(index, base.shape[1])
            columns[kind, place, :, index + 1] += _NUDGE
        times = self.item.replay.run(columns.reshape(*base.shape[:2], -1)).reshape(number, count + 1)
        slopes = (times[:, 1:] - times[:, :1]) / _NUDGE
        slopes[np.abs(slopes) < 1e-9 * times.max()] = 0.0
        return slopes, times[:, 0] - np.einsum("kf,fk->k", slopes, own)


def _with_slow_places(base: Array) -> Array:
    """The points and as many with each place in turn slower than all others: by chance alone some place may be missing."""
    slow = base.copy()
    places = np.arange(base.shape[2]) % base.shape[1]
    slow[COMPUTE, places, np.arange(base.shape[2])] = base[COMPUTE].max(axis=0) * np.where(np.arange(base.shape[2]) % 3, 1.05, 1.3)
    return np.concatenate([base, slow], axis=2)


def _folded(model: CostModel, plan: Plan, result: StepResult, index: int) -> _Folded:
    folding = fold(model, plan.pipelines[index])
    replay = Replay(result, index, INTER if folding.messages_inter else INTRA)
    work = np.array([replay.seconds(COMPUTE, place) + replay.seconds(FINISH, place) for place in range(replay.num_places)])
    return _Folded(folding, replay, work)


def distribution_of(times: Array, seed: int) -> StepDistribution:
    """Mean and quantiles of step times."""
    p50, p95, p99 = np.percentile(times, [50, 95, 99])
    return StepDistribution(
        steps=len(times), seed=seed, mean_s=float(times.mean()), std_s=float(times.std()), min_s=float(times.min()),
        p50_s=float(p50), p95_s=float(p95), p99_s=float(p99), max_s=float(times.max()),
    )  # fmt: skip


def ones(num_places: int, draws: int = 1) -> Array:
    """Nominal factors of a replay."""
    return np.ones((NUM_FACTORS, num_places, draws))
