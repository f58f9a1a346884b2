"""Look-up of device types, node presets and measured collectives by name or alias, in layers (free of torch).

Lookup order, first match wins: the ``catalogue`` argument, the paths in ``MESHWRIGHT_CATALOGUE`` (separated like ``PATH``;
files or directories of files), the built-in catalogue of ``traces/``. In each of them a name beats an alias; an alias of
several entries is refused with their names. Names are compared without case, punctuation and vendor words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TypeVar

from specs.base import InvalidInputValue
from specs.catalogue import Catalogue, CatalogueDevice, CatalogueNode, CollectiveSet
from specs.cluster import CollectiveCurve
from specs.errors import InvalidInput, nearest_name

ENVIRONMENT_VARIABLE = "MESHWRIGHT_CATALOGUE"
BUILT_IN_FILES = ("devices.json", "nodes.json", "collectives.json")
_SUFFIXES = (".json", ".yaml", ".yml", ".toml")
_VENDOR_WORDS = re.compile(r"\b(?:nvidia|tesla|geforce|amd|instinct|intel|google|aws|azure|gcp)\b")

Paths = str | Path | Sequence[str | Path] | None
Entry = TypeVar("Entry", bound=CatalogueDevice | CatalogueNode | CollectiveSet)


@dataclass(frozen=True, slots=True)
class Library:
    """Catalogues in lookup order."""

    layers: tuple[Catalogue, ...]

    def devices(self) -> tuple[CatalogueDevice, ...]:
        """All device types; of entries with one name the first."""
        return tuple({item.name: item for layer in reversed(self.layers) for item in layer.devices}.values())

    def nodes(self) -> tuple[CatalogueNode, ...]:
        """All node presets; of entries with one name the first."""
        return tuple({item.name: item for layer in reversed(self.layers) for item in layer.nodes}.values())

    def find_device(self, name: str) -> CatalogueDevice:
        """The device of that name or alias; raises :class:`InvalidInputValue`."""
        return _find("device", name, [layer.devices for layer in self.layers])

    def find_node(self, name: str) -> CatalogueNode:
        """The node preset of that name or alias; raises :class:`InvalidInputValue`."""
        return _find("preset", name, [layer.nodes for layer in self.layers])

    def curves(self, names: Iterable[str]) -> tuple[CollectiveCurve, ...]:
        """Curves of the named sets; where two sets measured the same collective on the same group size, the first one's."""
        found: dict[tuple[str, int], CollectiveCurve] = {}
        for name in names:
            for curve in _find("collective_set", name, [layer.collectives for layer in self.layers]).curves():
                found.setdefault((curve.op, curve.group_size), curve)
        return tuple(found.values())


def library(catalogue: Paths = None) -> Library:
    """The user's catalogues and the built-in one; raises :class:`InvalidInput` when a file is wrong."""
    if catalogue is None:
        given: list[Path] = []
    elif isinstance(catalogue, (str, Path)):
        given = [Path(catalogue)]
    else:
        given = [Path(item) for item in catalogue]
    given += [Path(item) for item in os.environ.get(ENVIRONMENT_VARIABLE, "").split(os.pathsep) if item]
    return Library((*(_layer(path) for path in given), _built_in()))


def normal_name(name: str) -> str:
    """How names are compared: ``NVIDIA A100-SXM4-80GB`` and ``a100_sxm4_80gb`` are one."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower())
    return _VENDOR_WORDS.sub("", words).replace(" ", "")


def _find(what: str, name: str, layers: Sequence[Sequence[Entry]]) -> Entry:
    wanted = normal_name(name)
    for items in layers:
        by_name = [item for item in items if normal_name(item.name) == wanted]
        by_alias = [item for item in items if any(normal_name(alias) == wanted for alias in _aliases(item))]
        for found in (by_name, by_alias):
            if len(found) == 1:
                return found[0]
            if found:
                names = sorted(item.name for item in found)
                message = f"{what} '{name}' is ambiguous: {len(names)} are called so; name one of them"
                raise InvalidInputValue(f"ambiguous_{what}", message, actual=name, allowed=names)
    everything = [item for items in layers for item in items]
    names = sorted({item.name for item in everything})
    spellings = {normal_name(text): item.name for item in everything for text in (item.name, *_aliases(item))}
    near = nearest_name(wanted, spellings)
    message = f"{what} '{name}' is not in the catalogue"
    raise InvalidInputValue(f"unknown_{what}", message, actual=name, allowed=names, nearest=spellings[near] if near else None)


def _aliases(item: CatalogueDevice | CatalogueNode | CollectiveSet) -> tuple[str, ...]:
    return () if isinstance(item, CollectiveSet) else item.aliases


@lru_cache(maxsize=1)
def _built_in() -> Catalogue:
    root = resources.files("traces")
    parts = []
    for name in BUILT_IN_FILES:
        with resources.as_file(root / name) as path:
            parts.append(Catalogue.load(path))
    return _joined(parts)


def _layer(path: Path) -> Catalogue:
    files = sorted(item for item in path.iterdir() if item.suffix in _SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise InvalidInput.single("empty_catalogue", f"no catalogue file in {path}", subject=f"catalogue {path}")
    return _joined([Catalogue.load(item) for item in files])


def _joined(parts: Sequence[Catalogue]) -> Catalogue:
    return Catalogue(
        devices=tuple(item for part in parts for item in part.devices),
        nodes=tuple(item for part in parts for item in part.nodes),
        collectives=tuple(item for part in parts for item in part.collectives),
    )
