"""The catalogue: sane figures, names and aliases, the user's own entries."""

import json
import re

import pytest

from profiler.catalogue import device, list_devices, list_presets, node_preset
from profiler.library import ENVIRONMENT_VARIABLE, library, normal_name
from specs.catalogue import CollectiveSet
from specs.cluster import DeviceType, NodeGroup
from specs.errors import InvalidInput

SOURCE = re.compile(r"^(measured|published|datasheet|fitted|assumed)(: .+)?$")


@pytest.fixture(autouse=True)
def _no_user_catalogue(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def refusal(name, find=device, **fields):
    with pytest.raises(InvalidInput) as caught:
        find(name, **fields)
    (violation,) = caught.value.violations
    return violation


def test_sizes():
    assert len(list_devices()) >= 47
    assert len(list_presets()) >= 28
    assert all(len({item.name for item in items}) == len(items) for items in (list_devices(), list_presets()))


@pytest.mark.parametrize("entry", list_devices(), ids=lambda entry: entry.name)
def test_device_figures_are_sane(entry):
    assert re.fullmatch(r"[a-z0-9_]+", entry.name)
    assert 8e9 < entry.memory_bytes < 320e9
    assert 250e9 < entry.memory_bandwidth_bytes_per_s <= 8e12
    assert entry.peak_flop_per_s
    for dtype, peak in entry.peak_flop_per_s.items():
        assert dtype in ("float32", "tf32", "bfloat16", "float16", "float8", "float4")
        assert 5e12 < peak < (6e15 if dtype != "float4" else 16e15)  # 15e15: the datasheet of GB300
        assert entry.matmul_flop_per_s.get(dtype, 0) <= peak * 1.06  # boost above the rated clock exists, doubling does not
    assert set(entry.matmul_flop_per_s) <= set(entry.peak_flop_per_s)
    low, high = entry.peak_flop_per_s.get("bfloat16", 0), entry.peak_flop_per_s.get("float8", float("inf"))
    assert high >= low
    assert entry.peak_flop_per_s.get("float4", float("inf")) >= 2 * entry.peak_flop_per_s.get("float8", 0)


@pytest.mark.parametrize("entry", [*list_devices(), *list_presets()], ids=lambda entry: entry.name)
def test_every_number_has_a_source(entry):
    parts = [entry]
    parts += [part for name in ("peer_link", "intra", "inter", "host") if (part := getattr(entry, name, None)) is not None]
    for part in parts:
        skipped = {"count", "in_network_reduction", "sm_count"}
        for name in type(part).model_fields:
            value = getattr(part, name)
            if name in skipped or isinstance(value, (str, bool, tuple, type(None))) or name == "provenance" or value == {}:
                continue
            if isinstance(value, (int, float, dict)):
                assert name in part.provenance, f"{entry.name}: {name}"
        for key, source in part.provenance.items():
            assert SOURCE.match(source), f"{entry.name}: {source}"
            name, _, sub = key.partition(".")
            value = getattr(part, name)
            assert value is not None, f"{entry.name}: {key} has a source and no value"
            assert not sub or sub in value


def test_known_figures():
    h100 = device("h100_sxm")
    assert type(h100) is DeviceType
    assert h100.peak_flop_per_s["bfloat16"] == 989.4e12
    assert h100.memory_bandwidth_bytes_per_s == 3.35e12
    assert h100.memory_bytes == pytest.approx(85.0e9, rel=0.001)  # what is usable of "80 GB"
    assert device("a100_sxm_40gb").memory_bytes == pytest.approx(42.5e9, rel=0.001)
    assert device("rtx_4090").memory_bytes == pytest.approx(25.4e9, rel=0.001)
    assert device("v100_sxm2_16gb").peak_flop_per_s == {"float32": 15.7e12, "float16": 125e12}
    assert device("a10g").peak_flop_per_s["bfloat16"] == 70e12  # half an A10


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("H100", "h100_sxm"),
        ("H100-SXM5-80GB", "h100_sxm"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
        ("a100-sxm-40gb", "a100_sxm_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80gb"),
        ("Tesla V100-SXM2-16GB", "v100_sxm2_16gb"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("RTX3090", "rtx_3090"),
        ("NVIDIA RTX A6000", "rtx_a6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5e", "tpu_v5e"),
    ],
)
def test_aliases(alias, name):
    assert device(alias).name == name


@pytest.mark.parametrize(
    ("alias", "names"),
    [
        ("A100", ["a100_pcie_40gb", "a100_pcie_80gb", "a100_sxm_40gb", "a100_sxm_80gb"]),
        ("A100-80GB", ["a100_pcie_80gb", "a100_sxm_80gb"]),
        ("MI250X", ["mi250x_gcd", "mi250x_oam"]),
    ],
)
def test_ambiguous_names_list_the_candidates(alias, names):
    violation = refusal(alias)
    assert (violation.code, violation.actual, violation.allowed) == ("ambiguous_device", alias, names)


def test_unknown_names_get_the_nearest_and_the_list():
    violation = refusal("h100_smx")
    assert (violation.code, violation.nearest) == ("unknown_device", "h100_sxm")
    assert len(violation.allowed) == len(list_devices())
    assert refusal("", device).code == "unknown_device"
    assert refusal("nvidia", device).code == "unknown_device"
    assert refusal("DGX-H10", node_preset).nearest == "dgx_h100"


def test_names_are_compared_loosely():
    assert normal_name("NVIDIA A100-SXM4-80GB") == normal_name("a100_sxm4_80gb") == "a100sxm480gb"
    assert normal_name("amdahl") == "amdahl"


def test_presets():
    dgx = node_preset("DGX-H100")
    assert type(dgx) is NodeGroup
    assert (dgx.device, dgx.devices_per_node, dgx.count, dgx.nics_per_node) == ("h100_sxm", 8, 1, 8)
    assert dgx.inter.bandwidth_bytes_per_s == 400e9  # eight NICs of 400 Gbit/s
    assert dgx.intra.allreduce_bus_bandwidth_bytes_per_s == 445e9
    assert dgx.host.memory_bytes == 2048 * 1024**3
    assert {curve.op for curve in dgx.intra.curves} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"}
    assert node_preset("p5.48xlarge").device == "h100_sxm"
    assert node_preset("gb200_nvl72").devices_per_node == 72


def test_presets_name_known_devices_and_curves():
    known = library()
    for entry in list_presets():
        assert known.find_device(entry.device).name == entry.device
        for link, names in ((entry.intra, entry.intra_curves), (entry.inter, entry.inter_curves)):
            for curve in known.curves(names):
                assert link.bandwidth_bytes_per_s > 0
                assert curve.group_size <= max(16, entry.devices_per_node)
    for entry in list_devices():
        known.curves(entry.peer_curves)


def test_measured_curves_agree_with_their_bus_bandwidth():
    """2 (n - 1) / n x bytes / time at the largest size, the convention of nccl-tests."""
    for name, sizes in {"dgx_a100_640gb": (8, 222e9), "dgx_h100": (8, 445e9), "hgx_b200": (8, 693e9)}.items():
        curve = next(c for c in node_preset(name).intra.curves if c.op == "all_reduce" and c.group_size == sizes[0])
        last = curve.points[-1]
        assert 2 * (sizes[0] - 1) / sizes[0] * last.size_bytes / last.time_s == pytest.approx(sizes[1], rel=0.01)
    two_nodes = next(c for c in node_preset("p5").inter.curves if c.op == "all_reduce")
    assert two_nodes.group_size == 16
    assert 2 * 15 / 16 * two_nodes.points[-1].size_bytes / two_nodes.points[-1].time_s == pytest.approx(487e9, rel=0.01)


def test_the_first_measurement_of_a_collective_wins():
    p5 = node_preset("p5.48xlarge").intra.curves
    assert len({(curve.op, curve.group_size) for curve in p5}) == len(p5)
    own = next(curve for curve in p5 if (curve.op, curve.group_size) == ("all_reduce", 8))
    assert own.points[-1].size_bytes == 2**34  # the node's own sweep to 16 GiB, not the general one to 512 MiB


def test_every_set_has_source_and_licence():
    for layer in library().layers:
        for item in layer.collectives:
            assert item.source
            assert item.licence in ("Apache-2.0", "MIT", "MIT-0")
            assert 10 <= len(item.sizes_bytes) <= 16


def test_sets_must_match():
    with pytest.raises(ValueError, match="sizes_bytes must ascend; 1 times for 2 sizes"):
        CollectiveSet.model_validate(
            {"name": "x", "source": "s", "sizes_bytes": [2, 1], "times": [{"op": "all_reduce", "group_size": 2, "times_us": [1]}]}
        )


OWN = {"name": "h100_sxm", "memory_gib": 40, "memory_bandwidth_gbyte_s": 1000, "aliases": ["our card"]}


def test_user_catalogue_by_argument(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"devices": [OWN]}))
    assert device("h100_sxm", catalogue=path).memory_bytes == 40 * 1024**3
    assert device("Our-Card", catalogue=path).name == "h100_sxm"
    assert device("H100", catalogue=path).memory_bytes == device("h100_sxm").memory_bytes  # alias only of the built-in one
    assert device("a10", catalogue=path) == device("a10")
    assert sum(entry.name == "h100_sxm" for entry in list_devices(path)) == 1


def test_user_catalogue_by_environment_first_match_wins(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second.yaml"
    first.mkdir()
    (first / "a.toml").write_text('[[devices]]\nname = "mine"\nmemory_gib = 1\nmemory_bandwidth_gbyte_s = 1\n')
    (first / "b.yaml").write_text("nodes:\n  - {name: box, device: mine, devices_per_node: 3}\n")
    second.write_text("devices:\n  - {name: mine, memory_gib: 2, memory_bandwidth_gbyte_s: 1}\n")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"{first}:{second}")
    assert device("mine").memory_bytes == 1024**3
    assert node_preset("box").devices_per_node == 3
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"{second}:{first}")
    assert device("mine").memory_bytes == 2 * 1024**3


def test_bad_user_catalogues(tmp_path):
    with pytest.raises(InvalidInput, match="no catalogue file"):
        device("h100_sxm", catalogue=tmp_path)
    with pytest.raises(InvalidInput, match="cannot read"):
        device("h100_sxm", catalogue=tmp_path / "none.json")
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"devices": [{"name": "x", "memory_gib": -1, "aliasses": []}]}))
    with pytest.raises(InvalidInput) as caught:
        device("x", catalogue=path)
    assert {violation.code for violation in caught.value.violations} == {"greater_than", "missing", "unknown_key"}
    assert str(path) in str(caught.value)
