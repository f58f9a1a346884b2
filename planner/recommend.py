"""How many devices of one type does this job need? The best plan at each size, the fewest that fit, and the cost curve."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from planner.search import SearchOptions, search
from planner.strategy_text import parse_fields
from profiler.catalogue import device as find_device
from profiler.catalogue import list_presets, resolve_cluster
from specs.cluster import ClusterSpec, NodeGroup
from specs.errors import InvalidInput, nearest_name
from specs.graph import ModelGraph
from specs.progress import Progress, ProgressSink, ignore
from specs.questions import Recommendation, SizePoint
from specs.training import TrainingSpec

DEVICES_PER_NODE = 8  # where the catalogue has no node of the device


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendOptions:
    """``max_devices``: end of the curve. ``preset``: node type, else one of the catalogue with that device.

    ``time_limit_s``: wall time of all searches together, each gets an equal share. ``strategy``: fields that every plan must have.
    ``efficient_at_least``: share of the best tokens per second and device that an efficient size keeps.
    """

    max_devices: int = 512
    preset: str | None = None
    time_limit_s: float = 120.0
    seed: int = 0
    strategy: str | None = None
    efficient_at_least: float = 0.8


def recommend(
    graph: ModelGraph,
    device: str,
    workload: TrainingSpec,
    options: RecommendOptions = RecommendOptions(),
    progress: ProgressSink = ignore,
) -> Recommendation:
    """Sizes double from one device to ``max_devices``; the fewest that fit lies by halving between the last size that does not
    and the first that does, in whole devices below a node and whole nodes above.

    Raises :class:`InvalidInput` when the device, node or strategy is unknown.
    """
    return _Recommender(graph, device, workload, options, progress).run()


class _Recommender:
    """One recommendation; every size is searched once."""

    def __init__(
        self, graph: ModelGraph, device: str, workload: TrainingSpec, options: RecommendOptions, progress: ProgressSink
    ) -> None:
        self.graph, self.workload, self.options, self.progress = graph, workload, options, progress
        self.device = find_device(device).name
        self.node = _node(self.device, options.preset)
        self.per_node = self.node.devices_per_node or DEVICES_PER_NODE
        fixed = parse_fields(options.strategy) if options.strategy else {}
        self.multiple = int(fixed.get("pp", 1)) * int(fixed.get("tp", 1))
        self.points: dict[int, SizePoint] = {}
        self.deadline = time.monotonic() + options.time_limit_s

    def run(self) -> Recommendation:
        sizes = self._sizes()
        first = None
        for left, size in enumerate(sizes):
            point = self._point(size, len(sizes) - left)
            if first is None and point.strategy:
                first = size
        if first is not None:
            before = max((size for size in sizes if size < first), default=0)
            self._halve(before, first)
        return self._answer()

    def _sizes(self) -> list[int]:
        """1, 2, 4, ... devices of one node, then 1, 2, 4, ... nodes, and the limit itself."""
        limit, sizes = self.options.max_devices, []
        size = 1
        while size < self.per_node:
            sizes.append(size)
            size *= 2
        size = self.per_node
        while size <= limit:
            sizes.append(size)
            size *= 2
        kept = [size for size in sizes if size <= limit and size % self.multiple == 0]
        if not kept:
            raise InvalidInput.single(
                "no_size", f"no size up to {limit} devices is a multiple of {self.multiple}", loc=("max_devices",), actual=limit,
                allowed=f">= {self.multiple}", nearest=self.multiple, subject="recommend",
            )  # fmt: skip
        return kept

    def _halve(self, low: int, high: int) -> None:
        """Search sizes between one that does not fit and one that does."""
        step = self.per_node if low >= self.per_node else 1
        while time.monotonic() < self.deadline:
            middle = (low + high) // 2 // step * step
            if middle <= low or middle >= high:
                return
            if middle % self.multiple:
                middle -= middle % self.multiple
                if middle <= low:
                    return
            if self._point(middle, 2).strategy:
                high = middle
            else:
                low = middle

    def _cluster(self, devices: int) -> ClusterSpec:
        nodes, left = divmod(devices, self.per_node)
        if nodes and left:
            groups: tuple[NodeGroup, ...] = (
                self.node.replace(count=nodes), self.node.replace(count=1, devices_per_node=left, nics_per_node=None),
            )  # fmt: skip
        elif nodes:
            groups = (self.node.replace(count=nodes),)
        else:
            groups = (self.node.replace(count=1, devices_per_node=left),)
        return ClusterSpec(name=f"{devices} x {self.device}", nodes=groups)

    def _point(self, devices: int, searches_left: int) -> SizePoint:
        if devices not in self.points:
            self.progress(Progress(stage="sizes", message=f"{devices} devices", done=len(self.points), data={"devices": devices}))
            share = max(1.0, (self.deadline - time.monotonic()) / max(1, searches_left))
            self.points[devices] = self._search(devices, share)
        return self.points[devices]

    def _search(self, devices: int, seconds: float) -> SizePoint:
        cluster = resolve_cluster(self._cluster(devices))
        # Every device takes part: a plan that leaves some out belongs to a smaller size.
        options = SearchOptions(time_limit_s=seconds, top=1, seed=self.options.seed, strategy=self.options.strategy)
        answer = search(self.graph, cluster, self.workload, options=options)
        if answer.plan is None or answer.prediction is None:
            return SizePoint(devices=devices, status=answer.status, limits=answer.limits)
        predicted = answer.prediction
        used = answer.plan.world_size
        cost = predicted.cost_usd
        tokens = answer.plan.global_batch * answer.plan.seq_len
        return SizePoint(
            devices=devices, status=answer.status, strategy=answer.plan.strategy, step_time_s=predicted.step_time_s,
            tokens_per_s=predicted.tokens_per_s, tokens_per_s_device=predicted.tokens_per_s / devices if used else None,
            peak_bytes=predicted.memory.peak_bytes, capacity_bytes=predicted.memory.capacity_bytes, usd_per_step=cost,
            usd_per_billion_tokens=None if cost is None else cost / tokens * 1e9,
        )  # fmt: skip

    def _answer(self) -> Recommendation:
        fit = [point for _, point in sorted(self.points.items()) if point.strategy]
        rate: Callable[[SizePoint], float] = lambda point: point.tokens_per_s_device or 0.0  # noqa: E731
        best = max(map(rate, fit), default=0.0)
        curve = [
            point.replace(efficiency=rate(point) / best) if point.strategy and best else point
            for _, point in sorted(self.points.items())
        ]
        efficient = [point.devices for point in curve if (point.efficiency or 0.0) >= self.options.efficient_at_least]
        priced = [point for point in fit if point.usd_per_billion_tokens is not None]
        cheapest = min(priced, key=lambda point: (point.usd_per_billion_tokens or 0.0, point.devices)) if priced else None
        if cheapest is None and fit:
            cheapest = max(fit, key=lambda point: (rate(point), -point.devices))
        notes = []
        if not fit:
            notes.append(f"no size up to {self.options.max_devices} devices fits; the limits of the largest say what is missing")
        if time.monotonic() > self.deadline:
            notes.append("the time limit ended some searches early: their plans are the best found so far")
        return Recommendation(
            device=self.device, node=self.node.preset or self.node.name or "described", devices_per_node=self.per_node,
            fewest_devices=min((point.devices for point in fit), default=None),
            cheapest_devices=cheapest.devices if cheapest else None, efficient_devices=max(efficient, default=None),
            efficient_at_least=self.options.efficient_at_least, multiple_of=self.multiple, curve=tuple(curve), notes=tuple(notes),
        )  # fmt: skip


def one_node(device: str, preset: str | None = None) -> ClusterSpec:
    """A cluster of one node of that device type, for checking the names."""
    name = find_device(device).name
    return ClusterSpec(name=f"a node of {name}", nodes=(_node(name, preset),))


def _node(device: str, preset: str | None) -> NodeGroup:
    """A node group of that device: the named preset, the catalogue's first with it (8 devices before others), or a plain one."""
    presets = list_presets()
    if preset is not None:
        known = {item.name: item for item in presets}
        if preset not in known:
            raise InvalidInput.single(
                "unknown_preset", f"there is no node preset '{preset}'", loc=("preset",), actual=preset, allowed=sorted(known),
                nearest=nearest_name(preset, known), subject="recommend",
            )  # fmt: skip
        found = known[preset]
        if found.device != device:
            raise InvalidInput.single(
                "preset_of_other_device", f"node '{preset}' has {found.device}, not {device}", loc=("preset",), actual=preset,
                allowed=[item.name for item in presets if item.device == device], subject="recommend",
            )  # fmt: skip
    else:
        ours = [item for item in presets if item.device == device]
        if not ours:
            return NodeGroup(count=1, device=device, devices_per_node=DEVICES_PER_NODE)
        found = min(ours, key=lambda item: (item.devices_per_node != DEVICES_PER_NODE, item.name))
    return NodeGroup(preset=found.name, count=1, devices_per_node=found.devices_per_node)
