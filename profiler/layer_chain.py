"""Decoders of many layers from a capture of few: two of each kind are traced, the chain is put together from them. No torch."""

from __future__ import annotations

from itertools import groupby

from profiler.hf import DecoderConfig
from profiler.hf_layers import MIXERS
from specs.errors import MeshwrightError
from specs.graph import ModelGraph, Segment

CAPTURED_LAYERS = 2
_LETTERS = {kind: letter for letter, kind in MIXERS.items()}


def few_layers(settings: DecoderConfig) -> DecoderConfig:
    """The decoder with ``CAPTURED_LAYERS`` layers of each of its kinds, in the order in which they first appear."""
    kinds = tuple(dict.fromkeys(settings.layer_kinds))
    if settings.pattern:
        pattern = "".join(_LETTERS[kind] * CAPTURED_LAYERS for kind in kinds)
        return settings.replace(pattern=pattern, layers=len(pattern), other={})
    return settings.replace(layers=CAPTURED_LAYERS * len(kinds), dense_layers=CAPTURED_LAYERS * ("dense" in kinds), other={})


def all_layers(captured: ModelGraph, settings: DecoderConfig) -> ModelGraph:
    """The graph of all layers of ``settings`` from the capture of :func:`few_layers`; costs are those of the capture.

    Raises :class:`MeshwrightError` where the captured layers did not fold into one block for each kind.
    """
    kinds = tuple(dict.fromkeys(settings.layer_kinds))
    first, *layers, last = captured.segments
    if len(layers) != len(kinds) or any(segment.count != CAPTURED_LAYERS or len(segment.carry) != 1 for segment in layers):
        raise MeshwrightError(f"the layers of {settings.architecture} did not fold into one block for each of {', '.join(kinds)}")
    by_kind = dict(zip(kinds, layers, strict=True))
    segments, hidden, index, taken = [first], next(iter(first.produces.values())), 0, set(first.produces.values())
    for kind, run in groupby(settings.layer_kinds):
        segment, count = _repeated(by_kind[kind], hidden, sum(1 for _ in run), index, taken)
        segments.append(segment)
        hidden, index = next(iter(segment.produces.values())), index + count
    stream = next(iter(layers[-1].produces.values()))
    bind = {name: hidden if value == stream else value for name, value in last.bind.items()}
    return captured.replace(segments=(*segments, last.replace(bind=bind)))


def _repeated(captured: Segment, hidden: str, count: int, index: int, taken: set[str]) -> tuple[Segment, int]:
    """A segment of ``count`` layers from number ``index`` on that reads the value ``hidden``."""
    ((entry, result),) = captured.carry.items()
    stem = name = f"{captured.block}.{result}"
    number = 0
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name)
    carry = captured.carry if count > 1 else {}
    bind = {key: hidden if key == entry else value for key, value in captured.bind.items()}
    return captured.replace(count=count, first_index=index, bind=bind, carry=carry, produces={result: name}), count
