"""Emulated clusters: what is slow is slow, the training is the same, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from executor.emulate import quotas
from executor.emulate.commands import TOOLS
from executor.emulate.dilation import DilatedTimers, DilatedUnit
from executor.emulate.machine import emulated_machine
from executor.emulate.network import Network
from executor.emulate.quotas import Quotas, core_shares
from executor.run import run_plan
from specs.cluster import ClusterSpec, Emulation
from specs.errors import ExecutionFailed, InvalidInput
from specs.plan import Plan
from tests.executor_faults import graph_with
from tests.executor_models import graph_of
from tests.executor_parity import SEQ_LEN, reference, workload_for
from tests.plans import make_plan

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"
can_make_networks = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS), reason="network namespaces need root and iproute2"
)
can_set_quotas = pytest.mark.skipif(
    os.geteuid() != 0 or not (quotas.ROOT / "cpu.shares").exists(), reason="CPU quotas need root and control groups of version 1"
)


def cluster_of(name: str) -> ClusterSpec:
    return ClusterSpec.load(CLUSTERS / f"emulated-{name}.yaml")


def plan_of(**choices: Any) -> Plan:
    return make_plan(graph_of("llama"), seq_len=SEQ_LEN, **choices)


def holders() -> list[psutil.Process]:
    """Processes that hold a namespace for this one."""
    return [child for child in psutil.Process().children() if child.name() == "sleep"]


def assert_trains_like_one(plan: Plan, cluster: ClusterSpec) -> Any:
    measurement = run_plan(plan, graph_of("llama"), workload_for(plan.global_batch), steps=2, warmup_steps=1, cluster=cluster)
    assert measurement.losses == pytest.approx(reference("llama", plan.global_batch).losses, rel=1e-5)
    assert measurement.cluster == cluster.name
    return measurement


# --- dilation -------------------------------------------------------------------------------------------------------


class FakeTime:
    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def compute(self, seconds: float) -> None:
        self.wall += seconds
        self.cpu += seconds

    def pause(self, seconds: float) -> None:
        self.wall += seconds


def dilated(slowdown: float, time_: FakeTime) -> DilatedTimers:
    return DilatedTimers(slowdown, clock=lambda: time_.wall, cpu=lambda: time_.cpu, sleep=time_.pause)


def test_dilation_stretches_compute_and_nothing_else() -> None:
    now = FakeTime()
    timers = dilated(3.0, now)
    timers.start()
    with timers.phase("forward"):
        now.compute(1.0)
        with timers.phase("tp_comm"):
            now.compute(0.5)
            now.pause(2.0)
        now.compute(1.0)
        now.pause(0.25)  # held up, not computing
    record = timers.stop()
    assert record.terms["forward"] == pytest.approx(3 * 2.0 + 0.25)
    assert record.terms["tp_comm"] == pytest.approx(2.5)
    assert record.step_time_s == pytest.approx(8.75)


def test_units_catch_up_at_their_borders() -> None:
    now = FakeTime()
    timers = dilated(2.0, now)
    unit = DilatedUnit(torch.nn.Linear(2, 2), timers)
    timers.start()
    with timers.phase("forward"):
        now.compute(1.0)
        output = unit(torch.ones(1, 2))
        assert now.wall == pytest.approx(2.0)
    with timers.phase("backward"):
        now.compute(1.0)
        output.sum().backward()
        assert now.wall == pytest.approx(4.0)


def test_a_run_without_rights_dilates() -> None:
    measurement = assert_trains_like_one(plan_of(pp=2, micro_batch=2, num_micro_batches=2), cluster_of("1-2"))
    fast, slow = (rank.terms for rank in measurement.ranks)
    assert slow["forward"] + slow["backward"] > fast["forward"] + fast["backward"]


# --- quotas ---------------------------------------------------------------------------------------------------------


def test_shares_of_a_core_keep_the_ratio_and_leave_some_free() -> None:
    shares = core_shares([1, 1, 2, 4], num_cores=2)
    assert shares[0] / shares[2] == pytest.approx(2)
    assert shares[1] / shares[3] == pytest.approx(4)
    assert shares[0] + shares[2] == pytest.approx(quotas.USED_SHARE_OF_CORE)
    assert shares[1] + shares[3] < quotas.USED_SHARE_OF_CORE


@can_set_quotas
def test_quotas_slow_a_process_down_and_go_away() -> None:
    burn = "import time; a = time.perf_counter()\nwhile time.process_time() < 0.3: pass\nprint(time.perf_counter() - a)"
    with Quotas([0.2]) as limited:
        group = limited.groups[0]
        command = f'echo $$ > {group}/cgroup.procs; exec {sys.executable} -c "{burn}"'
        output = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, timeout=30).stdout
        assert float(output) > 1.0  # 0.3 s of CPU time at a fifth of a core, less what starting took
    assert not group.parent.exists()


@can_set_quotas
def test_groups_of_a_dead_process_are_removed() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    left = quotas.ROOT / f"{quotas.NAME}-{gone.pid}-1"
    (left / "rank0").mkdir(parents=True)
    quotas.remove_left_over()
    assert not left.exists()


@can_set_quotas
def test_a_run_under_quotas_trains_the_same() -> None:
    assert_trains_like_one(plan_of(dp=4, batch_share=(3, 3, 1, 1)), cluster_of("1-2-4"))
    assert not list(quotas.ROOT.glob(f"{quotas.NAME}-{os.getpid()}-*"))


# --- links ----------------------------------------------------------------------------------------------------------

SERVER = """
import socket
server = socket.create_server(("", 9000))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(65536): pass
"""
CLIENT = """
import socket, sys, time
c = socket.create_connection((sys.argv[1], 9000)); data = bytes(65536); left = int(sys.argv[2]); start = time.perf_counter()
while left > 0: c.sendall(data); left -= len(data)
c.shutdown(socket.SHUT_WR); c.recv(1); print(time.perf_counter() - start)
"""


def seconds_to_send(network: Network, sender: int, receiver: int, num_bytes: int) -> float:
    """From one node to another, until the receiver has it all."""
    with subprocess.Popen([*network.prefix(receiver), sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        command = [*network.prefix(sender), sys.executable, "-c", CLIENT, network.addresses[receiver], str(num_bytes)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@can_make_networks
def test_links_are_as_fast_as_asked() -> None:
    emulation = cluster_of("two-tiers").emulation
    assert emulation is not None
    with Network(3, emulation) as network:
        slow, fast = seconds_to_send(network, 0, 2, 4_000_000), seconds_to_send(network, 0, 1, 4_000_000)
        assert slow == pytest.approx(4e6 / 12.5e6, rel=0.35)
        assert fast < slow / 3
        assert len(holders()) == 4
    assert not holders()


@can_make_networks
def test_a_run_over_slow_links_trains_the_same_and_takes_as_long_as_the_link() -> None:
    plan = plan_of(dp=4, micro_batch=2)
    measurement = assert_trains_like_one(plan, cluster_of("two-nodes"))
    sent = graph_of("llama").num_params() * 4
    assert measurement.step_time_s > sent / 12.5e6
    assert not holders()


@can_make_networks
def test_a_failed_run_leaves_no_namespace() -> None:
    graph = graph_with("raising")
    with pytest.raises(ExecutionFailed, match=r"rank 1 failed in step 2: ValueError"):
        run_plan(
            plan_of(dp=4, micro_batch=2), graph, workload_for(8), steps=3, warmup_steps=1, allow_factory=True,
            cluster=cluster_of("two-nodes"),
        )  # fmt: skip
    assert not holders()


@can_make_networks
def test_a_network_that_cannot_be_built_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    from executor.emulate import network

    monkeypatch.setattr(network, "_bucket", lambda rate: ["nonsense"])
    with pytest.raises(ExecutionFailed, match="nonsense"), Network(2, Emulation(uplink_bytes_per_s={0: 1e6})):
        pass
    assert not holders()


CALLER = """
import json, sys, time
from executor.emulate.machine import emulated_machine
from specs.cluster import ClusterSpec
from specs.plan import Plan
with emulated_machine(Plan.load(sys.argv[1]), ClusterSpec.load(sys.argv[2])) as machine:
    print(json.dumps({"prefix": machine.nodes[0].prefix, "groups": machine.groups}), flush=True)
    time.sleep(60)
"""


@can_make_networks
@can_set_quotas
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_caller_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    cluster = cluster_of("two-nodes")
    assert cluster.emulation is not None
    plan_of(dp=4, micro_batch=2).save(tmp_path / "plan.json")
    cluster.replace(emulation=cluster.emulation.replace(slow_by="quota")).save(tmp_path / "cluster.json")
    command = [sys.executable, "-c", CALLER, str(tmp_path / "plan.json"), str(tmp_path / "cluster.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as caller:
        assert caller.stdout is not None
        made = json.loads(caller.stdout.readline())
        namespace = Path(made["prefix"][1].removeprefix("--net="))
        group = Path(made["groups"][0])
        assert namespace.exists()
        assert group.exists()
        caller.send_signal(number)
        caller.wait(timeout=20)
    deadline = time.monotonic() + 5
    while namespace.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not namespace.exists()
    if number is signal.SIGKILL:
        quotas.remove_left_over()  # as the next run does
    assert not group.exists()


# --- refusals -------------------------------------------------------------------------------------------------------


def test_without_root_links_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    with (
        pytest.raises(InvalidInput, match="network namespaces, which need root"),
        emulated_machine(plan_of(dp=4), cluster_of("two-nodes")),
    ):
        pass


def test_without_control_groups_quotas_are_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quotas, "ROOT", tmp_path)
    with pytest.raises(InvalidInput, match="CPU quotas need root"), emulated_machine(plan_of(dp=4), cluster_of("1-2-4")):
        pass


def test_a_plan_for_more_devices_is_refused() -> None:
    with pytest.raises(InvalidInput, match="device 3 of the plan, but the cluster has 2"):
        run_plan(plan_of(dp=4), graph_of("llama"), workload_for(4), steps=1, warmup_steps=0, cluster=cluster_of("1-2"))
