"""Measured profiles on disk, found again by machine, model and workload. Torch-free.

A profile is a JSON file. Its ``environment`` holds what it is found by: ``machine_id`` (``profiler.fingerprint``) and
``request`` (:func:`request_hash`). User profiles live in ``$MESHWRIGHT_HOME/profiles`` (default
``~/.local/share/meshwright/profiles``); those that come with the package in ``traces/profiles``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import traces
from profiler.fingerprint import fingerprint_id, machine_fingerprint
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.profile import Profile
from specs.training import TrainingSpec

HOME_VARIABLE = "MESHWRIGHT_HOME"


def home_directory() -> Path:
    """Where Meshwright keeps a user's data."""
    configured = os.environ.get(HOME_VARIABLE)
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "meshwright"


def packaged_directory() -> Path:
    """Where the package keeps its own measured profiles."""
    return Path(next(iter(traces.__path__))) / "profiles"


def request_hash(graph: ModelGraph, workload: TrainingSpec) -> str:
    """What decides which ops are measured and how: the model's ops, compute dtype, sequence lengths, optimizer."""
    parts = {
        "blocks": [block.model_dump(mode="json") for block in graph.blocks],
        "dtype": workload.precision.compute_dtype,
        "lengths": [workload.seq_len]
        if workload.seq_len is not None
        else sorted(bin_.length for bin_ in workload.seq_len_histogram),
        "optimizer": [workload.optimizer.name, workload.optimizer.state_dtype, workload.optimizer.fused],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class ProfileStore:
    """Profiles under ``directory`` (default: the user's), and those of the package behind them."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory if directory is not None else home_directory() / "profiles"

    def save(self, profile: Profile) -> Path:
        """Write a profile; one of the same cluster name, machine and request is replaced. Returns its path."""
        machine, request = (str(profile.environment.get(name, "any")) for name in ("machine_id", "request"))
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", profile.cluster or "cluster").strip("-.") or "cluster"
        path = self.directory / f"{name}-{machine}-{request}.json"
        profile.save(path)
        return path

    def profiles(self) -> Iterator[Profile]:
        """All readable profiles: the user's, newest first, then the package's by name. Unreadable files are passed over."""
        own = sorted(_files(self.directory), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in (*own, *sorted(_files(packaged_directory()))):
            try:
                yield Profile.load(path)
            except (InvalidInput, OSError):
                continue

    def find(
        self, cluster: ClusterSpec, graph: ModelGraph, workload: TrainingSpec, *, same_request: bool = False
    ) -> Profile | None:
        """The best stored profile for ``cluster``, or ``None``.

        In order: the one that the cluster names (``ClusterSpec.profile``), one of the same model and workload, one of another
        model on the same devices (its collectives, copies and like ops still hold) unless ``same_request``. A profile of CPU
        workers counts only for the machine it was measured on.
        """
        wanted = request_hash(graph, workload)
        same: Profile | None = None
        other: Profile | None = None
        for profile in self.profiles():
            if cluster.profile is not None and profile.content_hash() == cluster.profile:
                return profile
            if not _fits(profile, cluster):
                continue
            if profile.environment.get("request") == wanted:
                same = same or profile
            elif not same_request:
                other = other or profile
        return same or other


def find(cluster: ClusterSpec, graph: ModelGraph, workload: TrainingSpec) -> Profile | None:
    """:meth:`ProfileStore.find` in the user's store."""
    return ProfileStore().find(cluster, graph, workload)


def save(profile: Profile) -> Path:
    """:meth:`ProfileStore.save` into the user's store."""
    return ProfileStore().save(profile)


def _files(directory: Path) -> list[Path]:
    return list(directory.glob("*.json")) if directory.is_dir() else []


def _fits(profile: Profile, cluster: ClusterSpec) -> bool:
    """Whether every device type of the cluster was measured, and on this machine where the type names no product."""
    used = {group.device for group in cluster.nodes}
    if not used or any(name is None or profile.device(name) is None for name in used):
        return False
    bound = any(item.kind == "cpu_process" for item in cluster.device_types if item.name in used)
    return not bound or profile.environment.get("machine_id") == fingerprint_id(machine_fingerprint())
