"""Captures of decoders on disk: tracing one takes seconds, reading it again a few milliseconds. Torch-free.

A capture is found by the decoder's settings, the sources of this package that decide what a capture holds, and the version of
torch, so a file of other sources is never read. Files live in ``$MESHWRIGHT_HOME/captures``; they may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import profiler
import specs
from profiler.store import home_directory
from specs.errors import InvalidInput
from specs.graph import ModelGraph

MOST_FILES = 256


def stored_capture(settings_json: str, capture: Callable[[], ModelGraph]) -> ModelGraph:
    """The stored graph of these settings, or ``capture()``, which is then stored. A store that cannot be used is passed over."""
    name = hashlib.sha256(f"{_sources()} {settings_json}".encode()).hexdigest()[:32]
    path = home_directory() / "captures" / f"{name}.json"
    try:
        if path.is_file():
            return ModelGraph.load(path)
    except (InvalidInput, OSError):
        pass
    graph = capture()
    with contextlib.suppress(OSError):
        graph.save(path)
        _keep_newest(path.parent)
    return graph


def _keep_newest(directory: Path) -> None:
    files = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[MOST_FILES:]:
        path.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _sources() -> str:
    """Hash of the sources of ``profiler`` and ``specs`` and of torch's version."""
    found = hashlib.sha256(metadata.version("torch").encode())
    for package in (profiler, specs):
        root = Path(next(iter(package.__path__)))
        for path in sorted(root.rglob("*.py")):
            found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()
