"""Draws of the speeds of a folded pipeline's devices and links in many steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.stragglers.folding import Folding
from simulator.stragglers.jitter import JitterSampler
from specs.cluster import ClusterSpec
from specs.straggler import StragglerModel

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draw:
    """Factors of a number of steps: of each place and replica (``compute``, ``intra``, ``inter``: places x replicas x steps), and
    of what replicas do together (``sync``: places x steps)."""

    compute: Array
    intra: Array
    inter: Array
    sync: Array

    def at(self, replica: NDArray[np.int64]) -> Array:
        """Factors for :meth:`simulator.stragglers.replay.Replay.run` with one replica for each step."""
        steps = np.arange(self.compute.shape[2])
        own = [part[:, replica, steps] for part in (self.compute, self.intra, self.inter)]
        return np.stack([*own, self.sync, self.compute.max(axis=1)])

    def features(self) -> NDArray[np.float32]:
        """What differs between replicas: (features, replicas, steps)."""
        return np.concatenate([self.compute, self.intra, self.inter], dtype=np.float32, casting="same_kind")


class Speeds:
    """Draws the factors of one pipeline's cells. ``work_s``: compute seconds of each place, over which a pause is spread."""

    def __init__(self, folding: Folding, cluster: ClusterSpec, stragglers: StragglerModel, work_s: Array) -> None:
        self.folding, self.stragglers, self.work_s = folding, stragglers, work_s
        self._device = JitterSampler(stragglers.device_jitter)
        self._intra = JitterSampler(stragglers.intra_link_jitter)
        self._inter = JitterSampler(stragglers.inter_link_jitter)
        self._groups, self._device_group = _groups(folding, chronic_factors(cluster, stragglers))
        self._nodes, self._node_index = np.unique(folding.node, return_inverse=True)
        self._node_cells = _pairs(folding.cell, self._node_index)
        self._sizes = np.bincount(folding.cell, minlength=folding.num_cells).astype(float)

    def draw(self, rng: np.random.Generator, steps: int) -> Draw:
        """The factors of ``steps`` independent steps."""
        folding = self.folding
        shape = (folding.num_places, folding.replicas, steps)
        compute = self._compute(rng, steps)
        self._add_pauses(rng, compute)
        intra = self._intra.largest(rng, self._sizes, steps).reshape(shape)
        by_node = self._inter.largest(rng, np.ones(len(self._nodes)), steps)
        cells, nodes = self._node_cells
        inter = _largest_by(cells, by_node[nodes]).reshape(shape)
        sync = np.stack([(inter if crosses else intra)[place].max(axis=0) for place, crosses in enumerate(folding.sync_inter)])
        return Draw(compute.reshape(shape), intra, inter, sync)

    def _compute(self, rng: np.random.Generator, steps: int) -> Array:
        """The slowest device of each cell, (cells, steps)."""
        cell, node, factor, count = self._groups
        fleet, slow = self.stragglers.slow_fleet, self.stragglers.slow_nodes
        if fleet.share > 0 and fleet.factor > 1:
            slowest = self._with_fleet(rng, count, steps)
        else:
            slowest = self._device.largest(rng, count, steps)
        slowest *= factor[:, None]
        if slow.share > 0 and slow.factor > 1:
            is_slow = rng.random((int(node.max()) + 1, steps)) < slow.share
            slowest *= np.where(is_slow, slow.factor, 1.0)[node]
        return _largest_by(cell, slowest)

    def _with_fleet(self, rng: np.random.Generator, count: Array, steps: int) -> Array:
        """The slowest of each group of devices when each is a slow one by chance; steps are of different fleets."""
        fleet, device_group = self.stragglers.slow_fleet, self._device_group
        largest = self._device.largest(rng, count, steps)
        hits = _bernoulli(rng, fleet.share, len(device_group) * steps)
        where, slow = np.unique(device_group[hits // steps] * steps + hits % steps, return_counts=True)
        rest = count[where // steps] - slow
        key = np.log(rng.standard_exponential((2, len(where))))
        others = np.where(rest > 0, self._device.at(key[0] - np.log(np.maximum(rest, 1))), 0.0)
        largest.reshape(-1)[where] = np.maximum(others, fleet.factor * self._device.at(key[1] - np.log(slow)))
        return largest

    def _add_pauses(self, rng: np.random.Generator, compute: Array) -> None:
        """Pauses of devices, as slower compute of their cell over that step."""
        pauses, folding = self.stragglers.pauses, self.folding
        if pauses.probability * pauses.mean_s == 0:
            return
        steps = compute.shape[1]
        number = rng.binomial(len(folding.devices) * steps, pauses.probability)
        cell = folding.cell[rng.integers(len(folding.devices), size=number)]
        seconds = pauses.mean_s * rng.standard_exponential(number)
        work = np.maximum(self.work_s[cell // folding.replicas], 1e-9)
        np.add.at(compute, (cell, rng.integers(steps, size=number)), seconds / work)


def chronic_factors(cluster: ClusterSpec, stragglers: StragglerModel) -> Array:
    """Factor >= 1 of every device: of the cluster document, its own, its node's and its position's."""
    found = []
    for place in cluster.device_table():
        own = stragglers.slowdown.get(place.rank, 1.0) * stragglers.node_slowdown.get(place.node, 1.0)
        found.append(place.slowdown * own * stragglers.position_slowdown.get(place.local, 1.0))
    return np.array(found)


def _groups(
    folding: Folding, chronic: Array
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64], Array, Array], NDArray[np.int64]]:
    """Devices of the same cell, node and chronic factor, in order of cells: (cell, node, factor, how many), and each device's."""
    keys = np.stack([folding.cell, folding.node, chronic[folding.devices]], axis=1)
    found, group, count = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    return (found[:, 0].astype(int), found[:, 1].astype(int), found[:, 2], count.astype(float)), group.reshape(-1)


def _bernoulli(rng: np.random.Generator, share: float, trials: int) -> NDArray[np.int64]:
    """The trials that succeed, by the geometric gaps between them: few draws where few succeed."""
    found = np.zeros(0, dtype=np.int64)
    last = -1
    while last < trials:
        gaps = rng.geometric(share, size=max(16, int(1.1 * share * (trials - last))))
        found = np.concatenate([found, last + np.cumsum(gaps)])
        last = int(found[-1])
    return found[found < trials]


def _pairs(cell: NDArray[np.int64], node: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The nodes of each cell, in order of cells."""
    found = np.unique(np.stack([cell, node], axis=1), axis=0)
    return found[:, 0], found[:, 1]


def _largest_by(cell: NDArray[np.int64], values: Array) -> Array:
    """The largest value of each cell in a sorted list."""
    starts = np.flatnonzero(np.r_[True, cell[1:] != cell[:-1]])
    return values if len(starts) == len(cell) else np.maximum.reduceat(values, starts)
