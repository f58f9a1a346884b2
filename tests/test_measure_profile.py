"""A tiny real profile on two workers, and what happens when a worker dies."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from profiler.capture import capture_config
from profiler.interpolate import CollectiveTable, OpTable
from profiler.measure import local_cluster, profile_cluster
from profiler.measure.assemble import collective_records
from profiler.measure.collectives import CollectivesJob
from profiler.measure.pool import WorkerPool
from profiler.opset import OpClass
from profiler.placement import place_block
from profiler.shapes import record_key
from specs.base import Provenance
from specs.cluster import ClusterSpec, DeviceType, NodeGroup
from specs.errors import ExecutionFailed, InvalidInput
from specs.graph import ModelGraph
from specs.profile import Profile
from specs.progress import Progress
from specs.training import TrainingSpec

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "vocab_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 256,
}  # fmt: skip
WORKLOAD = TrainingSpec(global_batch=8, seq_len=32, precision="fp32")  # type: ignore[arg-type]


def described(num_devices: int, kind: str = "cpu_process") -> ClusterSpec:
    device = DeviceType(name="worker", kind=kind, memory_bytes=2e9, memory_bandwidth_bytes_per_s=1e10)
    return ClusterSpec(
        name="test",
        nodes=(NodeGroup(count=1, device="worker", devices_per_node=num_devices),),
        device_types=(device,),
        backend="gloo",
    )


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return capture_config(CONFIG, "tiny")


@pytest.fixture(scope="module")
def measured(graph: ModelGraph) -> tuple[Profile, list[Progress]]:
    seen: list[Progress] = []
    profile = profile_cluster(
        graph, described(2), WORKLOAD, tps=(1, 2), micro_batches=(1, 4), progress=seen.append, time_budget_s=12.0
    )
    return profile, seen


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_every_op_is_measured_on_two_workers(graph: ModelGraph, measured: tuple[Profile, list[Progress]]) -> None:
    profile, _ = measured
    device = profile.device("worker")
    assert device is not None
    assert profile.environment["not_measured"] == {}
    table = OpTable(device)
    for tp in (1, 2):
        for block in graph.blocks:
            for op in place_block(block, tp).ops:
                if op.op_class == OpClass.VIEW:
                    continue
                found = table.lookup(record_key(op, 4, 32, "float32"))
                assert found is not None, op.op.target
                assert found.provenance == Provenance.MEASURED
                assert found.forward_s > 0
                assert found.record.forward.samples >= 4  # two ranks, at least two each
    assert all(record.forward.p10_s <= record.forward.median_s <= record.forward.p90_s for record in device.ops)


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_all_parts_of_the_profile_are_there(measured: tuple[Profile, list[Progress]]) -> None:
    profile, _ = measured
    device = profile.device("worker")
    assert device is not None
    assert {item.op for item in profile.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "p2p", "all_to_all"}
    for item in profile.collectives:
        assert item.group_size == 2
        assert len(item.sizes_bytes) == len(item.times) >= 10
        assert all(point.median_s > 0 for point in item.times)
    found = CollectiveTable(profile).lookup("all_reduce", 2, "intra", 5000.0)
    assert found is not None
    assert found[0] > 0
    assert {factor.block for factor in device.context_factors} == {"embed", "layers", "tail"}
    assert all(factor.forward > 0 and factor.backward > 0 for factor in device.context_factors)
    (optimizer,) = device.optimizers
    assert (optimizer.name, optimizer.fused, optimizer.dtype) == ("adamw", True, "float32")
    assert {item.second for item in device.overlap} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert all(item.first_slowdown >= 1 and item.second_slowdown >= 1 for item in device.overlap)
    assert device.copies[0].direction == "local"
    assert device.launch_s is not None
    assert 0 < device.launch_s < 1e-3
    assert device.baseline_bytes is not None
    assert device.baseline_bytes > 50e6
    assert device.probe_s is not None
    assert device.probe_s.samples == 30  # three times five on each rank
    assert OpTable(device).grad_add(1000, "float32") is not None
    assert Profile.parse(profile.to_dict()) == profile


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_progress_rises_to_the_end(measured: tuple[Profile, list[Progress]]) -> None:
    _, seen = measured
    done = [event.done for event in seen]
    assert done == sorted(done)
    assert done[-1] == 100
    assert all(event.eta_s is not None for event in seen)


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_this_machine_as_a_cluster() -> None:
    cluster = local_cluster(2, "here", device_kind="cpu")
    assert cluster.num_devices == 2
    device = cluster.device_type("cpu_worker")
    assert device.kind == "cpu_process"
    assert device.peak_flop_per_s["float32"] > 1e8
    assert device.memory_bandwidth_bytes_per_s > 1e8
    link = cluster.nodes[0].intra
    assert link is not None
    assert 1e-6 < link.latency_s < 1
    assert link.bandwidth_bytes_per_s > 1e6


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_killed_worker_is_named_and_none_is_left() -> None:
    pids: list[int] = []

    def work_until_killed() -> None:
        with WorkerPool(2) as pool:
            pids.extend(pool.pids)
            threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
            while True:
                pool.call("probe", 5)

    with pytest.raises(ExecutionFailed, match=r"profiling worker 1 was killed by SIGKILL"):
        work_until_killed()
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_failing_task_brings_the_workers_own_words_and_cancelling_leaves_none(graph: ModelGraph) -> None:
    def call_nothing() -> None:
        with WorkerPool(1) as pool:
            pool.call("no such task")

    with pytest.raises(ExecutionFailed, match=r"profiling worker 0 failed: KeyError: 'no such task'"):
        call_nothing()
    assert _workers() == []

    def cancel(event: Progress) -> None:
        if event.data.get("part") == "operators":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_cluster(graph, described(1), WORKLOAD, tps=(1,), micro_batches=(1,), progress=cancel, time_budget_s=5.0)
    deadline = time.monotonic() + 5
    while _workers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _workers() == []


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_rank_that_no_group_takes_waits_for_the_others() -> None:
    job = CollectivesJob(("all_reduce", "p2p"), (2,), (1024, 4096), "float32", 0.1)
    with WorkerPool(3) as pool:
        ranks = pool.call("collectives", job)
    assert [len(samples.spans) > 0 for samples in (rank[0] for rank in ranks)] == [True, True, False]
    records = collective_records(job, ranks, "gloo")
    assert [(record.op, record.group_size, len(record.times)) for record in records] == [("all_reduce", 2, 2), ("p2p", 2, 2)]


def _workers() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "profiler.measure.worker" in " ".join(child.cmdline())]


def test_devices_that_are_not_here_are_refused(graph: ModelGraph) -> None:
    with pytest.raises(InvalidInput, match="this machine has"):
        profile_cluster(graph, described(4096, kind="gpu"), WORKLOAD)
    with pytest.raises(InvalidInput, match="device kind 'tpu'"):
        local_cluster(2, device_kind="tpu")
    with pytest.raises(InvalidInput, match="0 devices"):
        local_cluster(0)
