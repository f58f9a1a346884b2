"""Clusters completed from the catalogue: presets, overrides, assumed defaults, all violations at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from profiler.catalogue import assumptions, list_presets, resolve_cluster
from profiler.library import ENVIRONMENT_VARIABLE
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.training import TrainingSpec

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _no_user_catalogue(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def cluster(*nodes, **fields):
    return ClusterSpec.parse({"name": "c", "nodes": [{"count": 1, **node} for node in nodes], **fields})


def resolved(*nodes, **fields):
    return resolve_cluster(cluster(*nodes, **fields))


def assumed(spec):
    return {item.what: item.value for item in assumptions(spec)}


def test_a_preset_is_expanded():
    spec = resolved({"preset": "DGX-H100", "count": 64})
    (group,) = spec.nodes
    assert (group.preset, group.device, group.devices_per_node, group.count) == ("dgx_h100", "h100_sxm", 8, 64)
    assert spec.num_devices == 512
    assert spec.device_type("h100_sxm").peak_flop_per_s["bfloat16"] == 989.4e12
    assert group.intra.curves
    assert group.price_usd_per_hour == pytest.approx(8 * 2.95)
    assert "devices_per_node x device price" in group.provenance["price_usd_per_hour"]


def test_given_fields_win_over_the_preset():
    spec = resolved(
        {
            "preset": "dgx_a100_640gb",
            "inter": {"bandwidth_gbit_s": 400, "latency_us": 30},
            "host": {"memory_gib": 512},
            "nics_per_node": 2,
            "price_usd_per_hour": 10,
        }
    )
    (group,) = spec.nodes
    assert group.inter.bandwidth_bytes_per_s == 50e9
    assert group.inter.provenance == {}
    assert group.host.memory_bytes == 512 * 1024**3
    assert group.host.cores == 128
    assert "memory_bytes" not in group.host.provenance
    assert group.host.provenance["cores"] == "datasheet"
    assert (group.nics_per_node, group.price_usd_per_hour) == (2, 10)
    assert "price_usd_per_hour" not in group.provenance
    assert group.intra.allreduce_bus_bandwidth_bytes_per_s == 222e9


def test_fewer_devices_of_a_preset_cost_less():
    (group,) = resolved({"preset": "p5.48xlarge", "devices_per_node": 4}).nodes
    assert group.price_usd_per_hour == pytest.approx(4 * 2.95)


def test_another_device_brings_its_own_link():
    (group,) = resolved({"preset": "dgx_a100_640gb", "device": "h100_pcie"}).nodes
    assert group.device == "h100_pcie"
    assert group.intra.kind == "PCIe"
    assert group.intra.curves == ()
    assert group.inter.bandwidth_bytes_per_s == 200e9


def test_a_device_without_preset_gets_its_link_and_stated_defaults():
    spec = resolved({"device": "H100", "devices_per_node": 8, "count": 2})
    (group,) = spec.nodes
    assert group.device == "h100_sxm"
    assert group.intra.bandwidth_bytes_per_s == 450e9
    assert group.intra.curves
    assert group.inter.bandwidth_bytes_per_s == 12.5e9
    assert group.host.memory_bytes == 8 * 64 * 1024**3
    assert group.host.nvme_bytes is None  # never assumed
    found = assumed(spec)
    assert found["nodes[0].inter.bandwidth_bytes_per_s"] == 12.5e9
    assert found["nodes[0].host.cores"] == 64
    assert not any("intra" in what for what in found)


def test_assumptions_leave_out_links_that_nothing_crosses():
    one = assumed(resolved({"device": "rtx_4090", "devices_per_node": 2}))
    assert any("intra" in what for what in one)
    assert not any("inter" in what for what in one)
    single = assumed(resolved({"device": "rtx_4090", "devices_per_node": 1, "count": 2}))
    assert not any("intra" in what for what in single)
    assert any("inter" in what for what in single)


def test_assumptions_name_uncertain_datasheet_values():
    found = {item.what: item for item in assumptions(resolved({"device": "rtx_pro_6000_server", "devices_per_node": 8}))}
    item = found["device rtx_pro_6000_server.peak_flop_per_s.tf32"]
    assert (item.value, item.provenance) == (233.9e12, "assumed: datasheet value uncertain")


def test_a_fully_given_cluster_has_no_assumptions():
    spec = resolved(
        {
            "device": "mine",
            "devices_per_node": 2,
            "intra": {"bandwidth_gbyte_s": 1, "latency_us": 1},
            "inter": {"bandwidth_gbyte_s": 1, "latency_us": 1},
            "host": {"memory_gib": 1, "memory_bandwidth_gbyte_s": 1, "cores": 1},
        },
        device_types=[{"name": "mine", "memory_gib": 1, "memory_bandwidth_gbyte_s": 1}],
    )
    assert assumptions(spec) == []


def test_inline_types_override_the_catalogue():
    inline = {"name": "h100_sxm", "memory_gib": 70, "memory_bandwidth_gbyte_s": 3000}
    spec = resolved({"preset": "dgx_h100"}, {"device": "H100", "devices_per_node": 1}, device_types=[inline])
    assert [group.device for group in spec.nodes] == ["h100_sxm", "h100_sxm"]
    assert spec.device_type("h100_sxm").memory_bytes == 70 * 1024**3
    assert len(spec.device_types) == 1


def test_worker_processes_as_devices():
    inline = {"name": "worker", "kind": "cpu_process", "memory_gib": 4, "memory_bandwidth_gbyte_s": 10}
    spec = resolved({"device": "worker", "devices_per_node": 2}, device_types=[inline], backend="gloo")
    assert spec.nodes[0].intra.kind == "shared memory"
    assert "nodes[0].intra.bandwidth_bytes_per_s" in assumed(spec)


def test_every_violation_at_once():
    with pytest.raises(InvalidInput) as caught:
        resolved(
            {"preset": "dgx_h1000"},
            {"device": "A100", "devices_per_node": 8},
            {"device": "h100_sxm", "devices_per_node": 2, "free_memory_gib": 90, "slowdown": {"2": 1.5, "-1": 2}},
            {"preset": "dgx_h100", "device": "nope"},
            pair_links=[
                {"node_a": 0, "node_b": 4, "bandwidth_gbit_s": 1},
                {"node_a": 1, "node_b": 1, "bandwidth_gbit_s": 1},
            ],
        )
    found = {violation.loc: violation for violation in caught.value.violations}
    assert {loc: violation.code for loc, violation in found.items()} == {
        ("nodes", 0, "preset"): "unknown_preset",
        ("nodes", 1, "device"): "ambiguous_device",
        ("nodes", 2, "free_memory_bytes"): "free_memory_above_total",
        ("nodes", 2, "slowdown", 2): "slowdown_out_of_range",
        ("nodes", 2, "slowdown", -1): "slowdown_out_of_range",
        ("nodes", 3, "device"): "unknown_device",
        ("pair_links", 0, "node_b"): "node_out_of_range",
        ("pair_links", 1): "pair_of_one_node",
    }
    assert found["nodes", 2, "slowdown", -1].nearest == 0
    assert found["pair_links", 0, "node_b"].nearest == 3
    assert "90.00 GiB free of the 79.15 GiB" in str(caught.value)


def test_duplicate_types_are_refused():
    inline = {"name": "x", "memory_gib": 1, "memory_bandwidth_gbyte_s": 1}
    with pytest.raises(InvalidInput, match="same name"):
        resolved({"device": "x", "devices_per_node": 1}, device_types=[inline, inline])


def test_a_preset_without_device_is_refused(tmp_path):
    path = tmp_path / "own.json"
    path.write_text('{"nodes": [{"name": "bare", "devices_per_node": 2}]}')
    with pytest.raises(InvalidInput, match="names no device"):
        resolve_cluster(cluster({"preset": "bare"}), path)
    spec = resolve_cluster(cluster({"preset": "bare", "device": "t4"}), path)
    assert (spec.nodes[0].device, spec.nodes[0].devices_per_node) == ("t4", 2)


@pytest.mark.parametrize("preset", [entry.name for entry in list_presets()])
def test_resolving_twice_changes_nothing(preset):
    once = resolved({"preset": preset, "count": 2, "host": {"cores": 3}, "devices_per_node": 2}, {"preset": preset})
    again = resolve_cluster(once)
    assert again == once
    assert again.content_hash() == once.content_hash()
    assert assumptions(again) == assumptions(once)
    stored = ClusterSpec.parse(once.to_dict())
    assert stored == once
    assert resolve_cluster(stored) == once


@pytest.mark.parametrize("path", sorted((EXAMPLES / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_clusters(path):
    spec = resolve_cluster(ClusterSpec.load(path))
    assert spec.name == path.stem
    assert resolve_cluster(spec) == spec
    assert len(spec.device_table()) == spec.num_devices
    for group in spec.nodes:
        assert group.intra is not None
        assert group.inter is not None
        assert spec.device_type(group.device)


def test_sizes_of_the_examples():
    sizes = {path.stem: resolve_cluster(ClusterSpec.load(path)).num_devices for path in (EXAMPLES / "clusters").glob("*.yaml")}
    assert sizes["64-node-dgx-h100"] == 512
    assert sizes["512-node-dgx-a100"] == 4096
    assert sizes["mixed-a100-v100"] == 16 + 32
    assert sizes["2x3080-2x4090"] == 4
    assert sizes["two-a100-80g-nodes"] == 16


@pytest.mark.parametrize("path", sorted((EXAMPLES / "workloads").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_workloads(path):
    spec = TrainingSpec.load(path)
    assert spec.name == path.stem
    assert TrainingSpec.parse(spec.to_dict()) == spec


def test_catalogue_needs_no_torch():
    code = "import sys, profiler.catalogue, profiler.parsers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
