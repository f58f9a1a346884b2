"""Profiles are found again by machine, model and workload."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler import store
from profiler.fingerprint import fingerprint_id, machine_fingerprint
from profiler.store import ProfileStore, request_hash
from specs.cluster import ClusterSpec, DeviceType, NodeGroup
from specs.graph import ModelGraph
from specs.profile import DeviceProfile, Profile
from specs.training import TrainingSpec
from tests.blocks import llama_graph

WORKLOAD = TrainingSpec(global_batch=8, seq_len=64, precision="fp32")  # type: ignore[arg-type]


def cluster(kind: str = "cpu_process", device: str = "cpu_worker", profile: str | None = None) -> ClusterSpec:
    kind_of = DeviceType(name=device, kind=kind, memory_bytes=1e9, memory_bandwidth_bytes_per_s=1e9)
    return ClusterSpec(
        name="local", nodes=(NodeGroup(count=1, device=device, devices_per_node=2),), device_types=(kind_of,), profile=profile
    )


def measured(graph: ModelGraph, *, device: str = "cpu_worker", machine: str | None = None, name: str = "local") -> Profile:
    environment = {
        "machine_id": machine or fingerprint_id(machine_fingerprint()),
        "request": request_hash(graph, WORKLOAD),
    }
    return Profile(cluster=name, devices=(DeviceProfile(device=device),), environment=environment)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileStore:
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    monkeypatch.setattr(store, "packaged_directory", lambda: tmp_path / "none")
    return ProfileStore()


def test_a_saved_profile_is_found_for_the_same_question(shelf: ProfileStore, tmp_path: Path) -> None:
    graph = llama_graph(layers=2)
    path = shelf.save(measured(graph))
    assert path.parent == tmp_path / "profiles"
    assert store.find(cluster(), graph, WORKLOAD) == measured(graph)


def test_the_global_batch_does_not_change_what_is_measured(shelf: ProfileStore) -> None:
    graph = llama_graph(layers=2)
    assert request_hash(graph, WORKLOAD) == request_hash(graph, WORKLOAD.replace(global_batch=64))
    assert request_hash(graph, WORKLOAD) != request_hash(graph, WORKLOAD.replace(seq_len=128))
    assert request_hash(graph, WORKLOAD) != request_hash(llama_graph(layers=2, hidden=256), WORKLOAD)


def test_a_profile_of_another_model_helps_unless_the_same_is_asked_for(shelf: ProfileStore) -> None:
    shelf.save(measured(llama_graph(layers=2, hidden=256)))
    graph = llama_graph(layers=2)
    assert shelf.find(cluster(), graph, WORKLOAD) is not None
    assert shelf.find(cluster(), graph, WORKLOAD, same_request=True) is None
    shelf.save(measured(graph))
    found = shelf.find(cluster(), graph, WORKLOAD)
    assert found is not None
    assert found.environment["request"] == request_hash(graph, WORKLOAD)


def test_cpu_profiles_count_on_their_own_machine_only(shelf: ProfileStore) -> None:
    graph = llama_graph(layers=2)
    shelf.save(measured(graph, machine="another"))
    assert shelf.find(cluster(), graph, WORKLOAD) is None


def test_gpu_profiles_count_wherever_the_product_is_the_same(shelf: ProfileStore) -> None:
    graph = llama_graph(layers=2)
    shelf.save(measured(graph, device="h100_sxm", machine="another"))
    assert shelf.find(cluster("gpu", "h100_sxm"), graph, WORKLOAD) is not None
    assert shelf.find(cluster("gpu", "a100_sxm"), graph, WORKLOAD) is None


def test_the_profile_that_a_cluster_names_comes_first(shelf: ProfileStore) -> None:
    graph = llama_graph(layers=2)
    named = measured(graph, machine="another", name="named")
    shelf.save(named)
    shelf.save(measured(graph))
    assert shelf.find(cluster(profile=named.content_hash()), graph, WORKLOAD) == named


def test_unreadable_files_are_passed_over(shelf: ProfileStore) -> None:
    shelf.directory.mkdir(parents=True)
    (shelf.directory / "broken.json").write_text("{")
    assert list(shelf.profiles()) == []


def test_the_fingerprint_ignores_what_changes_by_itself() -> None:
    fingerprint = machine_fingerprint()
    assert fingerprint_id(fingerprint) == fingerprint_id({**fingerprint, "clock_mhz": 1.0, "kernel": "other"})
    assert fingerprint_id(fingerprint) != fingerprint_id({**fingerprint, "cores": 1000})
