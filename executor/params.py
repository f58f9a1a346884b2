"""Where every parameter of a rank comes from: its name, its full shape and which slice of it lives here.

A parameter is found by ``(module, attribute)``, which stays valid when wrappers replace the ``Parameter`` object (FSDP does).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_PLACEMENT = re.compile(r"^S\((\d+)\)$")


@dataclass(slots=True)
class ParamPlace:
    """One parameter of the stage. ``owner``: the name it is initialised under (its own, unless tied). ``unit``: unit number in
    the model. ``tp_dim``: the dim that tensor parallel splits, or ``None``. ``partial_grad``: each tp rank holds a part of the
    gradient, to be summed. ``expert``: stacked weights of experts, split over ep along dim 0."""

    module: nn.Module
    name: str
    fqn: str
    owner: str
    unit: int
    full_shape: tuple[int, ...]
    tp_dim: int | None = None
    partial_grad: bool = False
    expert: bool = False

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is registered now."""
        parameter = self.module._parameters[self.name]
        if parameter is None:
            raise RuntimeError(f"parameter '{self.fqn}' has gone from its module")
        return parameter


def shard_bounds(size: int, index: int, count: int) -> tuple[int, int]:
    """First and one-past-last element of part ``index`` when ``size`` is cut into ``count`` parts of ceil(size / count), the
    last ones smaller (the rule of ``torch.chunk``)."""
    step = -(-size // count)
    return min(index * step, size), min((index + 1) * step, size)


def local_part(full: Tensor, dim: int | None, index: int, count: int) -> Tensor:
    """The part of ``full`` along ``dim`` (all of it when ``dim`` is ``None``)."""
    if dim is None:
        return full
    start, stop = shard_bounds(full.shape[dim], index, count)
    return full.narrow(dim, start, stop - start)


def local_shape(shape: Sequence[int], dim: int | None, index: int, count: int) -> tuple[int, ...]:
    """Shape of :func:`local_part`."""
    if dim is None:
        return tuple(shape)
    start, stop = shard_bounds(shape[dim], index, count)
    return (*shape[:dim], stop - start, *shape[dim + 1 :])


class Placements:
    """``Stage.placements`` looked up by full parameter name; ``{i}`` in a key stands for a number."""

    def __init__(self, placements: Mapping[str, str]) -> None:
        self._exact: dict[str, int | None] = {}
        self._patterns: list[tuple[re.Pattern[str], int | None]] = []
        for key, text in placements.items():
            match = _PLACEMENT.match(text)
            dim = int(match[1]) if match else None
            if "{i}" in key:
                self._patterns.append((re.compile(r"\d+".join(re.escape(part) for part in key.split("{i}")) + "$"), dim))
            else:
                self._exact[key] = dim

    def dim_of(self, fqn: str) -> int | None:
        """The split dim, or ``None`` when the parameter is replicated."""
        if fqn in self._exact:
            return self._exact[fqn]
        return next((dim for pattern, dim in self._patterns if pattern.match(fqn)), None)


def collect_params(model: nn.Module, units: Sequence[tuple[int, nn.Module]], tied: Mapping[str, str]) -> list[ParamPlace]:
    """Every parameter of ``units`` (number and module), a shared one once per unit attribute that names it.

    ``tied``: alias name to owner name, from ``ModelGraph.tied``.
    """
    prefixes = {id(module): prefix for prefix, module in model.named_modules(remove_duplicate=False)}
    places = []
    for unit, module in units:
        for part in module.modules():
            prefix = prefixes[id(part)]
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    fqn = f"{prefix}.{name}" if prefix else name
                    places.append(ParamPlace(part, name, fqn, tied.get(fqn, fqn), unit, tuple(parameter.shape)))
    return places


def unique_params(places: Sequence[ParamPlace]) -> Iterator[ParamPlace]:
    """Places of distinct parameters: a shared parameter (tied within the stage) appears once."""
    seen: set[int] = set()
    for place in places:
        if id(place.parameter) not in seen:
            seen.add(id(place.parameter))
            yield place


def retie(places: Sequence[ParamPlace]) -> None:
    """Make places with the same owner share one parameter again (``to_empty`` gives each its own)."""
    first: dict[str, ParamPlace] = {}
    for place in places:
        owner = first.setdefault(place.owner, place)
        if owner is not place:
            place.module._parameters[place.name] = owner.parameter


class MetaParameters:
    """Replaces parameters by ones of another shape on ``meta``; a shared parameter is replaced once."""

    def __init__(self) -> None:
        self._replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old one is kept so that its id stays taken

    def replace(self, old: nn.Parameter, shape: Sequence[int]) -> nn.Parameter:
        """The parameter that stands for ``old`` from now on."""
        if id(old) not in self._replaced:
            new = nn.Parameter(torch.empty(tuple(shape), dtype=old.dtype, device="meta"), requires_grad=old.requires_grad)
            self._replaced[id(old)] = (old, new)
        return self._replaced[id(old)][1]
