"""From measured points to any size: curves, ops at other batch or sequence sizes, collectives. Torch-free.

Every answer says whether it was measured, lies between measurements, or beyond them.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler.opset import PRODUCTS, OpClass, base_name, op_class_of
from profiler.shapes import grad_add_key
from specs.base import Provenance
from specs.errors import InvalidInput
from specs.profile import CollectiveRecord, DeviceProfile, OpRecord, Profile

# Beyond the last point the time grows along the last segment; noise must not make that flat or steep without reason.
LEAST_SLOPE, MOST_SLOPE = 0.5, 2.0


class Curve:
    """Time by size through measured points.

    Between points: straight in log-log. Below the first: along the first segment, never less than in proportion. Above the
    last: along the last segment, at 0.5 to 2 times the average rate of the last point. Non-decreasing where the points are.
    """

    def __init__(self, sizes: Sequence[float], times: Sequence[float]) -> None:
        merged: dict[float, list[float]] = {}
        for size, seconds in zip(sizes, times, strict=True):
            merged.setdefault(float(size), []).append(float(seconds))
        self.sizes = sorted(merged)
        self.times = [max(float(np.mean(merged[size])), 1e-12) for size in self.sizes]
        if not self.sizes or self.sizes[0] <= 0:
            raise InvalidInput.single("bad_curve", "a curve needs at least one point, all at positive sizes", actual=list(sizes))
        self._log_sizes = [math.log(size) for size in self.sizes]
        self._log_times = [math.log(seconds) for seconds in self.times]

    def __call__(self, size: float) -> tuple[float, Provenance]:
        """Seconds at ``size`` and where they come from: measured | interpolated | extrapolated."""
        if size <= 0:
            return 0.0, Provenance.EXTRAPOLATED
        if size < self.sizes[0]:
            return self._below(size), Provenance.EXTRAPOLATED
        if size > self.sizes[-1]:
            return self._above(size), Provenance.EXTRAPOLATED
        index = bisect_left(self.sizes, size)
        if self.sizes[index] == size:
            return self.times[index], Provenance.MEASURED
        left, right = self._log_sizes[index - 1], self._log_sizes[index]
        share = (math.log(size) - left) / (right - left)
        between = self._log_times[index - 1] * (1 - share) + self._log_times[index] * share
        return math.exp(between), Provenance.INTERPOLATED

    def seconds(self, sizes: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Seconds at many sizes, as :meth:`__call__` gives them one by one."""
        wanted = np.asarray(sizes, dtype=np.float64)
        inside = np.exp(np.interp(np.log(np.maximum(wanted, 1e-300)), self._log_sizes, self._log_times))
        outside = (wanted < self.sizes[0]) | (wanted > self.sizes[-1])
        result = np.where(outside, 0.0, inside)
        for index in np.argwhere(outside):
            result[tuple(index)] = self(float(wanted[tuple(index)]))[0]
        return result

    def _below(self, size: float) -> float:
        first, seconds = self.sizes[0], self.times[0]
        proportional = seconds * size / first
        if len(self.sizes) == 1:
            return proportional
        slope = max(0.0, (self.times[1] - seconds) / (self.sizes[1] - first))
        return max(proportional, seconds - slope * (first - size))

    def _above(self, size: float) -> float:
        last, seconds = self.sizes[-1], self.times[-1]
        rate = seconds / last
        slope = rate
        if len(self.sizes) > 1:
            slope = (seconds - self.times[-2]) / (last - self.sizes[-2])
            slope = min(max(slope, LEAST_SLOPE * rate), MOST_SLOPE * rate)
        return seconds + slope * (size - last)


def curve(sizes: Sequence[float], times: Sequence[float]) -> Curve:
    """The curve through ``times`` (seconds) at ``sizes`` (any positive unit, in any order)."""
    return Curve(sizes, times)


@dataclass(frozen=True, slots=True)
class OpLookup:
    """Seconds of an op and where they come from. ``record``: its bytes and saved tensors, scaled where not measured."""

    forward_s: float
    backward_s: float
    provenance: Provenance
    record: OpRecord


@dataclass(frozen=True, slots=True)
class _Family:
    """Records of one op that differ in batch and sequence only, by work."""

    works: tuple[float, ...]
    elements: tuple[float, ...]
    records: tuple[OpRecord, ...]
    forward: Curve
    backward: Curve | None


class OpTable:
    """Measured ops of one device, by the key of ``profiler.shapes.record_key``."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.records = {record.key: record for record in profile.ops}
        self._families = _families(profile.ops)
        self._cache: dict[str, OpLookup | None] = {}

    def lookup(self, key: str) -> OpLookup | None:
        """The op of that key: measured at that very shape, else from the same op at other batch or sequence sizes; ``None`` if
        no measurement of it has the same feature dims."""
        if key not in self._cache:
            self._cache[key] = self._find(key)
        return self._cache[key]

    def grad_add(self, num_elements: int, dtype: str) -> tuple[float, Provenance] | None:
        """Seconds of adding a gradient of ``num_elements`` into an accumulated one."""
        found = self.lookup(grad_add_key(num_elements, dtype))
        return None if found is None else (found.forward_s, found.provenance)

    def _find(self, key: str) -> OpLookup | None:
        exact = self.records.get(key)
        if exact is not None:
            backward = exact.backward.median_s if exact.backward is not None else 0.0
            return OpLookup(exact.forward.median_s, backward, Provenance.MEASURED, exact)
        call = _Call.parse(key)
        family = self._families.get(call.signature())
        if family is None:
            return None
        work = call.work()
        forward_s, provenance = family.forward(work)
        backward_s = family.backward(work)[0] if family.backward is not None else 0.0
        if provenance == Provenance.MEASURED:  # the same work by another batch and sequence length
            provenance = Provenance.INTERPOLATED
        nearest = min(range(len(family.works)), key=lambda index: abs(math.log(family.works[index] / work)))
        record = _scaled(family.records[nearest], call.elements() / family.elements[nearest])
        return OpLookup(forward_s, backward_s, provenance, record)


def _families(records: Sequence[OpRecord]) -> dict[Any, _Family]:
    groups: dict[Any, list[tuple[float, float, OpRecord]]] = {}
    for record in records:
        call = _Call.parse(record.key)
        if call.shapes:
            groups.setdefault(call.signature(), []).append((call.work(), call.elements(), record))
    families = {}
    for signature, points in groups.items():
        works, elements, found = zip(*points, strict=True)
        backward = [(work, record.backward.median_s) for work, _, record in points if record.backward is not None]
        families[signature] = _Family(
            works, elements, found, Curve(works, [record.forward.median_s for record in found]),
            Curve(*zip(*backward, strict=True)) if backward else None,
        )  # fmt: skip
    return families


def _scaled(record: OpRecord, ratio: float) -> OpRecord:
    """The record of a like call with its bytes in proportion to the size of its operands."""
    fields = ("saved_extra_bytes", "forward_workspace_bytes", "backward_workspace_bytes")
    scaled = {name: value * ratio for name in fields if (value := getattr(record, name)) is not None}
    return record.model_copy(update=scaled)


@dataclass(frozen=True, slots=True)
class _Call:
    """A key taken apart again."""

    target: str
    op_class: OpClass
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    static: str

    @classmethod
    def parse(cls, key: str) -> _Call:
        target, tensors, static = key.split("|", 2)
        dtypes, shapes = [], []
        for text in tensors.split(";") if tensors else []:
            dtype, dims = text.rstrip("]").split("[", 1)
            dtypes.append(dtype)
            shapes.append(tuple(int(size) for size in dims.split(",")) if dims else ())
        return cls(target, op_class_of(target), tuple(dtypes), tuple(shapes), json.dumps(json.loads(static), sort_keys=True))

    def signature(self) -> tuple[Any, ...]:
        """What two calls must share to differ in batch and sequence only: feature dims, weights, other arguments."""
        kept: tuple[Any, ...]
        first = self._first()
        if self.op_class in PRODUCTS:
            both_batched = len(self.shapes) > 1 and len(self.shapes[first + 1]) > 2 and self.op_class == OpClass.GEMM
            kept = tuple(
                shape[-2:] if both_batched else (len(shape), shape[-1]) if index == first else shape
                for index, shape in enumerate(self.shapes)
            )
        elif self.op_class == OpClass.ATTENTION:
            kept = tuple((shape[1], shape[3]) if len(shape) == 4 else len(shape) for shape in self.shapes)
        elif self.op_class == OpClass.EMBEDDING:
            kept = (self.shapes[0], len(self.shapes[1]))
        else:
            kept = self._pointwise_signature()
        return (self.target, self.dtypes, kept, self.static)

    def work(self) -> float:
        """What the time of calls of one signature grows with."""
        if self.op_class == OpClass.ATTENTION and len(self.shapes) > 1:
            return float(math.prod(self.shapes[0]) * self.shapes[1][-2])
        return self.elements()

    def elements(self) -> float:
        """Elements of the operand that grows with batch and sequence."""
        if self.op_class in PRODUCTS:
            return float(max(1, math.prod(self.shapes[self._first()])))
        if self.op_class == OpClass.EMBEDDING:
            return float(max(1, math.prod(self.shapes[1])))
        return float(max(1, sum(math.prod(shape) for shape in self.shapes)))

    def _first(self) -> int:
        return 1 if base_name(self.target) == "addmm" else 0

    def _pointwise_signature(self) -> tuple[Any, ...]:
        """Last dims, and which operands are smaller than the largest (broadcast); flat tensors may have any length."""
        largest = max((math.prod(shape) for shape in self.shapes), default=0)
        flat = all(len(shape) <= 1 for shape in self.shapes)
        return tuple(
            (len(shape), math.prod(shape) == largest, None if flat or not shape or self._counts_tokens(index) else shape[-1])
            for index, shape in enumerate(self.shapes)
        )

    def _counts_tokens(self, index: int) -> bool:
        """Labels and index lists: their last dim is a number of tokens."""
        return index > 0 and self.dtypes[index].startswith("int")


class CollectiveTable:
    """Measured collectives of a profile."""

    # Bytes through a rank's link over the tensor's bytes, by group size: what scales a curve to a group not measured.
    _VOLUME = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}

    def __init__(self, profile: Profile) -> None:
        self._curves: dict[tuple[str, str], dict[int, Curve]] = {}
        for record in profile.collectives:
            self._curves.setdefault((record.op, record.tier), {})[record.group_size] = _curve_of(record)

    def lookup(self, op: str, group_size: int, tier: str, size_bytes: float) -> tuple[float, Provenance] | None:
        """Seconds of one collective on ``size_bytes`` (bytes of the full tensor) and their provenance; ``None`` if the op was
        never measured on that tier. A group size not measured is scaled from the nearest one by the bytes on a link."""
        curves = self._curves.get((op, tier))
        if not curves:
            return None
        if group_size in curves:
            return curves[group_size](size_bytes)
        nearest = min(curves, key=lambda size: (abs(math.log(size / group_size)), size))
        seconds, _ = curves[nearest](size_bytes)
        return seconds * self._scale(op, group_size) / self._scale(op, nearest), Provenance.EXTRAPOLATED

    def _scale(self, op: str, group_size: int) -> float:
        return self._VOLUME[op] * (group_size - 1) / group_size if op in self._VOLUME else 1.0


def _curve_of(record: CollectiveRecord) -> Curve:
    return Curve(record.sizes_bytes, [timing.median_s for timing in record.times])
