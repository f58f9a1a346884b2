"""What the planner minimises. Each objective is non-decreasing in step time for given devices, so a bound of time bounds it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.layout import Pool
from planner.space import Space
from specs.cluster import ClusterSpec, DevicePlace
from specs.errors import InvalidInput, Violation
from specs.training import Objective, TrainingSpec

# Weight of a device against seconds when devices are to be few: step times stay below it.
DEVICE_WEIGHT = 1e9


class ObjectiveFunction:
    """Value of a step time on a pool: seconds, dollars, joules, or devices first and seconds second."""

    def __init__(self, cluster: ClusterSpec, workload: TrainingSpec) -> None:
        self.cluster, self.kind = cluster, workload.objective
        self._rates: dict[tuple[int, ...], float] = {}
        if self.kind in (Objective.COST, Objective.ENERGY):
            self._check()

    def value(self, step_time_s: float, pool: Pool) -> float:
        """What is minimised."""
        if self.kind == Objective.FEWEST_DEVICES:
            return pool.size * DEVICE_WEIGHT + step_time_s
        if self.kind in (Objective.COST, Objective.ENERGY):
            return step_time_s * self._rate(pool)
        return step_time_s  # the global batch is fixed: time to a target is steps x step time

    def _rate(self, pool: Pool) -> float:
        key = pool.devices
        if key not in self._rates:
            self._rates[key] = sum(self._of(place) for place in pool.places)
        return self._rates[key]

    def _of(self, place: DevicePlace) -> float:
        """Dollars a second, or watts, of one device."""
        if self.kind == Objective.ENERGY:
            return self.cluster.device_type(place.device).tdp_w or 0.0
        return _usd_per_s(self.cluster, place) or 0.0

    def _check(self) -> None:
        """Every device has the number that the objective needs; raises :class:`InvalidInput`."""
        places = {(place.group, place.device): place for place in self.cluster.device_table()}
        violations = [self._missing(place) for place in places.values() if self._of(place) <= 0]
        if violations:
            raise InvalidInput(violations, subject=f"objective {self.kind.value}")

    def _missing(self, place: DevicePlace) -> Violation:
        key = "tdp_w" if self.kind == Objective.ENERGY else "price_usd_per_hour"
        return Violation(
            code="missing_for_objective", loc=("cluster", "nodes", place.group), actual=None,
            message=f"objective {self.kind.value} needs '{key}' of '{place.device}'",
        )  # fmt: skip


def price_usd_per_s(cluster: ClusterSpec, pool: Pool) -> float | None:
    """Dollars a second of a pool, ``None`` where the price of some device is not given."""
    kinds: dict[tuple[int, str], int] = {}
    for place in pool.places:
        kinds[place.group, place.device] = kinds.get((place.group, place.device), 0) + 1
    one_of = {(place.group, place.device): place for place in pool.places}
    prices = [(_usd_per_s(cluster, one_of[kind]), count) for kind, count in kinds.items()]
    if any(price is None for price, _ in prices):
        return None
    return sum((price or 0.0) * count for price, count in prices)


def _usd_per_s(cluster: ClusterSpec, place: DevicePlace) -> float | None:
    group, device = cluster.nodes[place.group], cluster.device_type(place.device)
    if group.price_usd_per_hour is not None:
        return group.price_usd_per_hour / (group.devices_per_node or 1) / 3600
    return None if device.price_usd_per_hour is None else device.price_usd_per_hour / 3600


class RowValues:
    """Values of the objective for rows of a space: per layout a factor of the step time and something to add."""

    def __init__(self, objective: ObjectiveFunction, space: Space) -> None:
        self._layout = space.rows["layout"]
        zero = [objective.value(0.0, layout.pool) for layout in space.layouts]
        one = [objective.value(1.0, layout.pool) for layout in space.layouts]
        self._offset = np.array(zero)
        self._factor = np.array(one) - self._offset

    def of_rows(self, step_time_s: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of several rows."""
        layout = self._layout[rows]
        return np.asarray(step_time_s * self._factor[layout] + self._offset[layout])

    def of(self, step_time_s: float, row: int) -> float:
        """Of one."""
        layout = self._layout[row]
        return float(step_time_s * self._factor[layout] + self._offset[layout])
