"""Captures on disk: read again as they were, traced anew where they cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.capture import capture_config
from profiler.capture_store import stored_capture
from profiler.sources import read_preset
from specs.graph import ModelGraph


@pytest.fixture
def graph() -> ModelGraph:
    return capture_config(read_preset("llama-2-7b"), "llama")


def fail() -> ModelGraph:
    raise AssertionError("captured again")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    return tmp_path


def test_a_stored_capture_is_the_capture(graph: ModelGraph, home: Path) -> None:
    assert stored_capture("settings", lambda: graph) is graph
    found = stored_capture("settings", fail)
    assert found == graph
    assert found.content_hash() == graph.content_hash()
    with pytest.raises(AssertionError, match="again"):
        stored_capture("other settings", fail)


def test_a_broken_file_is_written_anew(graph: ModelGraph, home: Path) -> None:
    stored_capture("settings", lambda: graph)
    (path,) = (home / "captures").glob("*.json")
    path.write_text("{")
    assert stored_capture("settings", lambda: graph) is graph
    assert stored_capture("settings", fail) == graph


def test_no_store_is_no_error(graph: ModelGraph, home: Path) -> None:
    (home / "captures").write_text("a file where the directory should be")
    assert stored_capture("settings", lambda: graph) is graph
