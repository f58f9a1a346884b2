"""Readers of nvidia-smi topologies, hostfiles and nccl-tests tables."""

import pytest

from profiler.catalogue import device, resolve_cluster
from profiler.parsers import HostEntry, node_groups, parse_hostfile, parse_nccl_tests, parse_topology
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput

SWITCHED = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-55\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t56-111\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t56-111\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""

CUBE_MESH = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity
GPU0     X      NV1     NV1     NV2     0-19
GPU1    NV1      X      NV2     NV1     0-19
GPU2    NV1     NV2      X      NV2     0-19
GPU3    NV2     NV1     NV2      X      0-19
"""

BRIDGED = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV12    SYS     SYS     0-23            0
GPU1    NV12     X      SYS     SYS     0-23            0
GPU2    SYS     SYS      X      NV12    24-47           1
GPU3    SYS     SYS     NV12     X      24-47           1
"""

PCIE = """\
        GPU0    GPU1    GPU2    CPU Affinity
GPU0     X      PIX     PHB     0-15
GPU1    PIX      X      PHB     0-15
GPU2    PHB     PHB      X      0-15
"""


def refused(parse, text, **fields):
    with pytest.raises(InvalidInput) as caught:
        parse(text, **fields)
    return caught.value.violations


def test_switched_node():
    topology = parse_topology(SWITCHED)
    assert topology.num_devices == 4
    assert topology.nvlink_lanes(0, 3) == 18
    assert topology.islands() == [(0, 1, 2, 3)]
    assert topology.worst_kind() == "NV18"
    assert topology.nics == ("NIC0",)
    assert topology.nic_links[0, "NIC0"] == "PIX"
    assert topology.nic_links[3, "NIC0"] == "SYS"
    link = topology.link(device("h100_sxm"))
    assert link.bandwidth_bytes_per_s == 18 * 25e9 == 450e9
    assert link.provenance["latency_s"].startswith("assumed")
    assert topology.link(device("b200_sxm")).bandwidth_bytes_per_s == 900e9


def test_mesh_without_switch_adds_the_lanes_of_all_peers():
    topology = parse_topology(CUBE_MESH)
    assert topology.worst_kind() == "NV1"
    assert topology.link(device("v100_sxm2_16gb")).bandwidth_bytes_per_s == 4 * 25e9  # GPU0: 1 + 1 + 2 lanes


def test_bridged_pairs_are_two_islands():
    topology = parse_topology(BRIDGED)
    assert topology.islands() == [(0, 1), (2, 3)]
    assert topology.worst_kind() == "SYS"
    link = topology.link(device("a100_pcie_80gb"))
    assert link.kind == "PCIe (SYS)"
    assert link.bandwidth_bytes_per_s == device("a100_pcie_80gb").host_link_bytes_per_s / 2


def test_pcie_node():
    topology = parse_topology(PCIE)
    assert topology.islands() == [(0,), (1,), (2,)]
    assert topology.worst_kind() == "PHB"
    assert topology.link(device("rtx_3090")).bandwidth_bytes_per_s == 25e9


def test_one_device():
    topology = parse_topology("        GPU0    CPU Affinity\nGPU0     X      0-7\n")
    assert (topology.num_devices, topology.islands(), topology.worst_kind()) == (1, [(0,)], "X")


def test_bad_topologies():
    assert refused(parse_topology, "no such command")[0].code == "no_topology"
    assert refused(parse_topology, PCIE.replace("PIX", "PIZ"))[0].loc == ("line", 2)
    assert len(refused(parse_topology, PCIE.replace("PIX", "PIZ"))) == 2
    assert refused(parse_topology, "\n".join(PCIE.splitlines()[:-1]))[0].code == "missing_topology_row"
    one_sided = PCIE.replace("GPU1    PIX", "GPU1    SYS")
    assert refused(parse_topology, one_sided)[0].message == "GPU0 to GPU1 is PIX, back it is SYS"


HOSTS = """\
# the new machines
node-a slots=8
node-b slots=8   # same rack
node-c:4

node-d slots=8
"""


def test_hostfile():
    entries = parse_hostfile(HOSTS)
    assert entries == (HostEntry("node-a", 8), HostEntry("node-b", 8), HostEntry("node-c", 4), HostEntry("node-d", 8))
    groups = node_groups(entries, device="h100_sxm")
    assert [(group.count, group.devices_per_node) for group in groups] == [(2, 8), (1, 4), (1, 8)]
    spec = resolve_cluster(ClusterSpec(name="hosts", nodes=groups))
    assert spec.num_devices == 28
    assert node_groups(entries[:2], preset="dgx_h100")[0].preset == "dgx_h100"


def test_hostfile_without_slots():
    assert parse_hostfile("a\nb\n", default_slots=2) == (HostEntry("a", 2), HostEntry("b", 2))


def test_bad_hostfiles_name_every_line():
    found = refused(parse_hostfile, "a slots=8\nb slots=eight\na slots=8\nc\nd 8\ne slots=0\n")
    assert [(violation.code, violation.loc[1]) for violation in found] == [
        ("bad_hostfile_line", 2),
        ("duplicate_host", 3),
        ("bad_hostfile_line", 4),
        ("bad_hostfile_line", 5),
        ("bad_hostfile_line", 6),
    ]
    assert refused(parse_hostfile, "# nothing\n")[0].code == "empty_hostfile"


NCCL = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 67108864 step: 8(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid   4101 on     node-a device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid   4102 on     node-a device  1 [0x0b] NVIDIA A100-SXM4-80GB
#  Rank  2 Group  0 Pid   4103 on     node-a device  2 [0x48] NVIDIA A100-SXM4-80GB
#  Rank  3 Group  0 Pid   4104 on     node-a device  3 [0x4c] NVIDIA A100-SXM4-80GB
#
# Collective test starting: all_reduce_perf
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    14.20    0.00    0.00      0    13.90    0.00    0.00      0
     1048576        262144     float     sum      -1    30.00   34.95   52.43      0    29.00   36.16   54.24      0
    67108864      16777216     float     sum      -1    540.0  124.28  186.41      0    530.0  126.62  189.93      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 80.5
"""


def test_nccl_table():
    curve = parse_nccl_tests(NCCL)
    assert (curve.op, curve.group_size) == ("all_reduce", 4)
    assert [(point.size_bytes, point.time_s) for point in curve.points] == [
        (8, 14.2e-6),
        (1048576, 30e-6),
        (67108864, 540e-6),
    ]
    assert parse_nccl_tests(NCCL, in_place=True).points[1].time_s == 29e-6


def test_nccl_table_under_mpirun():
    tagged = "\n".join(f"[1,0]<stdout>:{line}" for line in NCCL.splitlines())
    assert parse_nccl_tests(tagged) == parse_nccl_tests(NCCL)


def test_bare_nccl_table_needs_to_be_told():
    bare = "\n".join(line for line in NCCL.splitlines() if "Rank" not in line and "starting" not in line)
    assert {violation.code for violation in refused(parse_nccl_tests, bare)} == {"unknown_collective", "unknown_group_size"}
    assert parse_nccl_tests(bare, op="all_reduce", group_size=4) == parse_nccl_tests(NCCL)


@pytest.mark.parametrize(("program", "op"), [("alltoall", "all_to_all"), ("sendrecv", "p2p"), ("reduce_scatter", "reduce_scatter")])
def test_collectives_by_program(program, op):
    assert parse_nccl_tests(NCCL.replace("all_reduce_perf", f"{program}_perf")).op == op


def test_bad_nccl_tables():
    assert refused(parse_nccl_tests, "all_reduce", group_size=2)[0].code == "no_table"
    contradicting = NCCL.replace("34.95", "349.5")
    assert [violation.code for violation in refused(parse_nccl_tests, contradicting)] == ["contradicting_row"]
    wrong = NCCL.replace("34.95   52.43      0", "34.95   52.43      7").replace("124.28  186.41      0", "1242.8  186.41      0")
    assert [(violation.code, violation.loc) for violation in refused(parse_nccl_tests, wrong)] == [
        ("wrong_results", ("line", 15)),
        ("contradicting_row", ("line", 16)),
    ]
    short = NCCL.replace(
        "     1048576        262144     float     sum      -1    30.00", "     1048576        262144     float     sum    30.00"
    )
    assert refused(parse_nccl_tests, short)[0].code == "bad_table_row"
    empty = "\n".join(line for line in NCCL.splitlines() if line.startswith("#"))
    assert refused(parse_nccl_tests, empty)[0].code == "empty_table"
