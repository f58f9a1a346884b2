"""What a plan rests on that nobody gave or measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.candidates import Confirmed
from planner.prices import Prices
from profiler.opset import OpClass
from profiler.placement import place_block
from specs.base import Provenance
from specs.cluster import Link
from specs.prediction import Assumption


def assumptions(prices: Prices, chosen: Confirmed) -> list[Assumption]:
    """The prediction's own, then assumed numbers of devices and links, then op classes priced from specs alone."""
    found = list(chosen.prediction.assumptions)
    found += _devices(prices, chosen.pool.device_types)
    found += _links(prices, sorted({place.group for place in chosen.pool.places}))
    for device in chosen.pool.device_types:
        classes = _unmeasured_classes(prices, device, chosen)
        if classes:
            what = f"op classes of '{device}' priced by the efficiency model from its specs"
            found.append(Assumption(what=what, value=classes, provenance=Provenance.FITTED.value))
    if chosen.strategy.recompute.value != "none":
        found.append(Assumption(what="recompute covers the repeated layers; embedding and head keep what they save"))
    return found


def _devices(prices: Prices, names: Iterable[str]) -> Iterator[Assumption]:
    for name in names:
        device = prices.model.device(name)
        for key, source in device.provenance.items():
            if source.startswith(Provenance.ASSUMED.value) and getattr(device, key, None) is not None and _used(key):
                yield Assumption(what=f"{key} of '{name}'", value=getattr(device, key), provenance=source)


def _used(key: str) -> bool:
    return key in ("peak_flop_per_s", "matmul_flop_per_s", "memory_bytes", "memory_bandwidth_bytes_per_s")


def _links(prices: Prices, groups: Iterable[int]) -> Iterator[Assumption]:
    for index in groups:
        group = prices.model.cluster.nodes[index]
        for name, link in (("link inside a node", group.intra), ("link between nodes", group.inter)):
            if isinstance(link, Link):
                for key, source in link.provenance.items():
                    if source.startswith(Provenance.ASSUMED.value):
                        what = f"{key} of the {name} of '{group.name or group.device}'"
                        yield Assumption(what=what, value=getattr(link, key, None), provenance=source)


def _unmeasured_classes(prices: Prices, device: str, chosen: Confirmed) -> list[str]:
    """Classes of this model's ops for which no measurement of the device was found."""
    model, strategy = prices.model, chosen.strategy
    pricer = model.pricer(device)
    found: set[str] = set()
    for name in dict.fromkeys(block for block, _ in prices.kinds):
        placed = place_block(model.graph.block(name), strategy.tp, strategy.sequence_parallel)
        for op in placed.ops:
            if op.op_class == OpClass.VIEW:
                continue
            price = pricer.price(op, strategy.micro_batch, model.seq, name)
            if price.source in (Provenance.FITTED, Provenance.ASSUMED):
                found.add(op.op_class.value)
    return sorted(found)
