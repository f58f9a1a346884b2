"""Catalogue: device types, node presets and measured collectives by name. The built-in one lives in ``traces/``; a file of
the same form may add to it or override it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from specs.base import Document, InvalidInputValue, InvalidInputValues, Spec
from specs.cluster import CollectiveCurve, CurvePoint, DeviceType, Link, NodeGroup


class CatalogueDevice(DeviceType):
    """A device type with the names people use for it and the link it brings to devices of the same node."""

    aliases: tuple[str, ...] = Field(default=(), description="an alias of several devices is refused with their names")
    note: str = ""
    peer_link: Link | None = Field(default=None, description="to the other devices of a node; None = only the host link")
    peer_curves: tuple[str, ...] = Field(default=(), description="names of collective sets measured over peer_link")

    def plain(self) -> DeviceType:
        """The device type alone."""
        return DeviceType.model_validate({name: getattr(self, name) for name in DeviceType.model_fields})


class CatalogueNode(NodeGroup):
    """A node preset: a node group of one node, with its other names. Curves are sets of ``collectives`` by name."""

    name: str
    count: int = 1
    aliases: tuple[str, ...] = ()
    note: str = ""
    intra_curves: tuple[str, ...] = ()
    inter_curves: tuple[str, ...] = ()

    def plain(self) -> NodeGroup:
        """The node group alone, without curves."""
        return NodeGroup.model_validate({name: getattr(self, name) for name in NodeGroup.model_fields})


class TimesBySize(Spec):
    """Times of one collective on one group size, one for each of the set's ``sizes_bytes``."""

    op: str = Field(description="all_reduce | all_gather | reduce_scatter | all_to_all | broadcast | p2p")
    group_size: int = Field(ge=2)
    times_s: tuple[float, ...]


class CollectiveSet(Spec):
    """Collectives measured on one system. Sizes are nccl-tests 'size': the bytes of the full, unsharded tensor."""

    name: str
    source: str
    licence: str = ""
    note: str = ""
    sizes_bytes: tuple[float, ...] = Field(min_length=2)
    times: tuple[TimesBySize, ...]

    @model_validator(mode="after")
    def _matching(self) -> CollectiveSet:
        broken = []
        if any(low >= high for low, high in zip(self.sizes_bytes, self.sizes_bytes[1:], strict=False)):
            broken.append(InvalidInputValue("sizes_not_ascending", "sizes_bytes must ascend", loc=("sizes_bytes",)))
        for index, item in enumerate(self.times):
            if len(item.times_s) != len(self.sizes_bytes):
                message = f"{len(item.times_s)} times for {len(self.sizes_bytes)} sizes"
                broken.append(InvalidInputValue("times_not_matching_sizes", message, loc=("times", index, "times_s")))
        InvalidInputValues.raise_any(broken)
        return self

    def curves(self) -> tuple[CollectiveCurve, ...]:
        """The same as curves of a link."""
        return tuple(
            CollectiveCurve(
                op=item.op,
                group_size=item.group_size,
                points=tuple(
                    CurvePoint(size_bytes=size, time_s=time) for size, time in zip(self.sizes_bytes, item.times_s, strict=True)
                ),
            )
            for item in self.times
        )


class Catalogue(Document):
    """Any of the three parts; files of a catalogue directory are read together."""

    kind: ClassVar[str] = "catalogue"
    devices: tuple[CatalogueDevice, ...] = ()
    nodes: tuple[CatalogueNode, ...] = ()
    collectives: tuple[CollectiveSet, ...] = ()
