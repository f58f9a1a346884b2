"""What-if: one change of the cluster in words, and the step that the simulator finds for it.

device 17 x0.8          device 17 at 0.8x          speed of a device (global rank)
node 3 x0.5             node 3 at half speed       speed of all devices of a node
link 3 x0.5             link 3 at half rate        rate of node 3's uplink
link 3-4 x0.5                                      rate of the link between nodes 3 and 4
fabric 3 x0.5                                      rate of the links inside node 3
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from simulator.cost_model import CostModel
from simulator.predict import simulate, waterfall_of
from simulator.stragglers.relayout import layouts_for
from specs.cluster import ClusterSpec, CollectiveCurve, CurvePoint, Link, NodeGroup, PairLink
from specs.errors import InvalidInput, Violation
from specs.plan import Plan
from specs.straggler import WhatIf

FORMS = ("device 17 x0.8", "node 3 x0.5", "link 3 x0.5", "link 3-4 x0.5", "fabric 3 x0.5")
_WORDS = {"half": 0.5, "third": 1 / 3, "quarter": 0.25, "full": 1.0}
_PATTERN = re.compile(
    r"(?P<what>device|rank|gpu|node|link|fabric)\s+(?P<first>\d+)(?:\s*-\s*(?P<second>\d+))?\s*(?:at|:|=)?\s*"
    r"(?:x\s*(?P<after>[\d.]+)|(?P<before>[\d.]+)\s*x|(?P<percent>[\d.]+)\s*%|a?\s*(?P<word>half|third|quarter|full))"
    r"(?:\s+(?:of\s+)?(?:its\s+)?(?:rate|speed|bandwidth))?"
)
_LEAST, _MOST = 1e-3, 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """``what`` (device | node | link | fabric) number ``first`` (to ``second``) runs at ``speed`` of what it did."""

    what: str
    first: int
    second: int | None
    speed: float
    text: str = ""


def parse_changes(texts: list[str], cluster: ClusterSpec) -> list[Change]:
    """The changes in words, checked against the resolved cluster; raises :class:`InvalidInput` with all that is wrong."""
    found, broken = [], []
    for index, text in enumerate(texts):
        try:
            change = _parse(text)
            broken += [] if isinstance(change, Change) else [change]
            if isinstance(change, Change):
                problems = _problems(change, cluster)
                broken += [Violation(code=code, message=f"'{text}': {message}", loc=("what_if", index), allowed=allowed)
                           for code, message, allowed in problems]  # fmt: skip
                found.append(change)
        except ValueError:
            broken.append(_unreadable(text))
    if broken:
        raise InvalidInput(broken, subject="what-if")
    return found


def _parse(text: str) -> Change | Violation:
    match = _PATTERN.fullmatch(text.strip().lower())
    if match is None:
        return _unreadable(text)
    parts = match.groupdict()
    if parts["word"]:
        speed = _WORDS[parts["word"]]
    elif parts["percent"]:
        speed = float(parts["percent"]) / 100
    else:
        speed = float(parts["after"] or parts["before"])
    what = "device" if parts["what"] in ("rank", "gpu") else parts["what"]
    return Change(what, int(parts["first"]), None if parts["second"] is None else int(parts["second"]), speed, text)


def _unreadable(text: str) -> Violation:
    return Violation(code="unreadable_change", message=f"'{text}' is no change that can be simulated", actual=text, allowed=FORMS)


def _problems(change: Change, cluster: ClusterSpec) -> list[tuple[str, str, str]]:
    """(code, message, allowed) of everything that is wrong with a change."""
    found = []
    nodes = sum(group.count for group in cluster.nodes)
    count = cluster.num_devices if change.what == "device" else nodes
    for number in (change.first, change.second):
        if number is not None and number >= count:
            found.append(("no_such_index", f"there is no {change.what} {number}", f"0 to {count - 1}"))
    if not _LEAST <= change.speed <= _MOST:
        found.append(("speed_out_of_bounds", f"{change.speed:g} of the speed", f"{_LEAST:g} to {_MOST:g}"))
    if change.second is not None and (change.what != "link" or change.first == change.second):
        found.append(("not_a_pair", "only two different nodes have a link between them", "link 3-4 x0.5"))
    if change.what == "link" and nodes == 1:
        found.append(("no_uplink", "the cluster has one node, whose uplink carries nothing", "fabric 0 x0.5"))
    return found


def apply(change: Change, cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with the change."""
    factor = 1 / change.speed
    if change.what == "device":
        return _slow_devices(cluster, {change.first}, factor)
    if change.what == "node":
        return _slow_devices(cluster, {place.rank for place in cluster.device_table() if place.node == change.first}, factor)
    if change.second is not None:
        return _slow_pair(cluster, change.first, change.second, change.speed)
    return _slow_link(cluster, change.first, change.speed, tier="inter" if change.what == "link" else "intra")


def meaning(change: Change) -> str:
    """The change in plain words."""
    what = {
        "device": f"device {change.first} takes {1 / change.speed:.4g} x as long to compute",
        "node": f"all devices of node {change.first} take {1 / change.speed:.4g} x as long to compute",
        "link": f"the uplink of node {change.first} carries {change.speed:.4g} of its bytes per second",
        "fabric": f"the links inside node {change.first} carry {change.speed:.4g} of their bytes per second",
    }[change.what]
    if change.second is None:
        return what
    return f"the link between nodes {change.first} and {change.second} carries {change.speed:.4g} of its bytes per second"


def what_if(model: CostModel, plan: Plan, changes: list[Change]) -> list[WhatIf]:
    """The step with each change alone, and with all of them where there are several. Memory does not change."""
    if any(change.what in ("link", "fabric") for change in changes) and model.network.table is not None:
        raise InvalidInput.single(
            "links_are_measured", "the profile's measured collectives hold no single link; ask about links without a profile",
            subject="what-if", allowed="device and node changes",
        )  # fmt: skip
    before = simulate(model.for_plan(plan), plan).step_time_s
    found = [_answer(model, plan, [change], before, change.text) for change in changes]
    if len(changes) > 1:
        found.append(_answer(model, plan, changes, before, "all of them"))
    return found


def _answer(model: CostModel, plan: Plan, changes: list[Change], before_s: float, text: str) -> WhatIf:
    cluster = model.cluster
    for change in changes:
        cluster = apply(change, cluster)
    changed = CostModel(
        model.graph, cluster, model.workload, model.profile, software=model.software, factors=model.factors
    ).for_plan(plan)
    # slow links count wherever they are: each change's own groups take their turn as those that are priced
    nodes = {change.first for change in changes if change.what in ("link", "fabric")}
    layouts = [layout for node in sorted(nodes) for layout in layouts_for(changed, plan, node)] or [plan]
    result = max((simulate(changed, layout) for layout in layouts), key=lambda result: result.step_time_s)
    return WhatIf(
        change=text, meaning="; ".join(meaning(change) for change in changes), step_time_s=result.step_time_s,
        ratio=result.step_time_s / before_s, waterfall=waterfall_of(result),
    )  # fmt: skip


# --- changed clusters -------------------------------------------------------------------------------------------------


def _slow_devices(cluster: ClusterSpec, ranks: set[int], factor: float) -> ClusterSpec:
    groups, first = [], 0
    for group in cluster.nodes:
        size = group.count * (group.devices_per_node or 0)
        inside = {rank - first for rank in ranks if first <= rank < first + size}
        slow = group.slowdown | {local: group.slowdown.get(local, 1.0) * factor for local in sorted(inside)}
        groups.append(group.replace(slowdown=slow))
        first += size
    return cluster.replace(nodes=tuple(groups))


def _slow_link(cluster: ClusterSpec, node: int, speed: float, *, tier: str) -> ClusterSpec:
    """The node in a group of its own, between the nodes before and after it: the numbers of devices and nodes stay."""
    groups: list[NodeGroup] = []
    first = 0
    for group in cluster.nodes:
        local = node - first
        first += group.count
        if not 0 <= local < group.count:
            groups.append(group)
            continue
        link = getattr(group, tier) or group.intra
        changed = group.replace(**{tier: slower(link, speed)}) if link is not None else group
        if tier == "intra" and changed.inter is not None:
            # of groups of nodes with equal uplinks the network prices the first: this one has to be it
            changed = changed.replace(inter=slower(changed.inter, 1 - 1e-9))
        for begin, count, part in ((0, local, group), (local, 1, changed), (local + 1, group.count - local - 1, group)):
            if count > 0:
                groups.append(part.replace(count=count, slowdown=_slow_part(group, begin, count)))
    return cluster.replace(nodes=tuple(groups))


def _slow_part(group: NodeGroup, first: int, count: int) -> dict[int, float]:
    """The slow devices of some nodes of a group, numbered from the first of those nodes."""
    size = group.devices_per_node or 0
    inside = range(first * size, (first + count) * size)
    return {index - inside.start: factor for index, factor in group.slowdown.items() if index in inside}


def slower(link: Link, speed: float) -> Link:
    """A link at ``speed`` of its rate, latency as before; measured times grow by what is not latency."""
    bus = link.allreduce_bus_bandwidth_bytes_per_s
    curves = tuple(
        CollectiveCurve(
            op=curve.op, group_size=curve.group_size, provenance=curve.provenance,
            points=tuple(
                CurvePoint(size_bytes=p.size_bytes, time_s=p.time_s + (1 / speed - 1) * max(0.0, p.time_s - link.latency_s))
                for p in curve.points
            ),
        )
        for curve in link.curves
    )  # fmt: skip
    return link.replace(
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * speed, curves=curves,
        allreduce_bus_bandwidth_bytes_per_s=None if bus is None else bus * speed,
    )  # fmt: skip


def _slow_pair(cluster: ClusterSpec, first: int, second: int, speed: float) -> ClusterSpec:
    pair = {first, second}
    named = next((link for link in cluster.pair_links if {link.node_a, link.node_b} == pair), None)
    if named is None:
        numbers = [group for group in cluster.nodes for _ in range(group.count)]
        links = [numbers[node].inter or numbers[node].intra for node in sorted(pair)]
        rate = min(link.bandwidth_bytes_per_s for link in links if link is not None)
        named = PairLink(node_a=first, node_b=second, bandwidth_bytes_per_s=rate)
    others = tuple(link for link in cluster.pair_links if {link.node_a, link.node_b} != pair)
    return cluster.replace(pair_links=(*others, named.replace(bandwidth_bytes_per_s=named.bandwidth_bytes_per_s * speed)))
