"""Human units in files become SI once, exactly, whatever unit was used."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specs.base import Spec
from specs.cluster import ClusterSpec, DeviceType, Link
from specs.errors import InvalidInput
from specs.units import HUMAN_SUFFIXES, format_bytes, format_seconds, human_index, human_names, scale


def device(**fields):
    return DeviceType.model_validate({"name": "d", "memory_bytes": 1, "memory_bandwidth_bytes_per_s": 1, **fields})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("memory_gib", 80, 85_899_345_920),
        ("memory_gb", 80, 80_000_000_000),
        ("memory_mib", 1, 1_048_576),
        ("memory_kib", 1, 1024),
        ("memory_mb", 1, 1_000_000),
        ("memory_tib", 1, 1_099_511_627_776),
        ("memory_tb", 1, 1_000_000_000_000),  # fails if TB were 1024^4
    ],
)
def test_memory_units(key, value, expected):
    built = DeviceType.model_validate({"name": "d", key: value, "memory_bandwidth_bytes_per_s": 1})
    assert built.memory_bytes == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("bandwidth_gbyte_s", 3350, 3.35e12),
        ("bandwidth_tbyte_s", 3.35, 3.35e12),
        ("bandwidth_mbyte_s", 5, 5e6),
        ("bandwidth_gbit_s", 400, 50e9),  # bits, not bytes
    ],
)
def test_bandwidth_units(key, value, expected):
    assert Link.model_validate({key: value, "latency_s": 0}).bandwidth_bytes_per_s == expected


@pytest.mark.parametrize(("key", "value", "expected"), [("latency_us", 10, 1e-5), ("latency_ms", 2.5, 0.0025)])
def test_time_units(key, value, expected):
    assert Link.model_validate({"bandwidth_bytes_per_s": 1, key: value}).latency_s == expected


def test_hours_of_a_cluster():
    cluster = ClusterSpec.parse({"name": "c", "nodes": [{"preset": "p", "count": 1}], "mean_time_between_failures_hours": 50_000})
    assert cluster.mean_time_between_failures_s == 180_000_000


def test_mapping_of_peaks():
    built = device(peak_tflops={"bfloat16": 989.4, "float8": 1978.9})
    assert built.peak_flop_per_s == {"bfloat16": 989.4e12, "float8": 1978.9e12}
    assert built.model_dump()["peak_flop_per_s"]["bfloat16"] == 989_400_000_000_000


def test_list_of_times():
    assert scale([1, [2.5]], 1e-6) == [1e-6, [2.5e-6]]
    assert scale(True, 1e3) is True
    assert scale("12", 1e3) == "12"
    assert math.isinf(scale(math.inf, 1e3))


def test_conversion_happens_once():
    built = DeviceType.model_validate({"name": "d", "memory_gib": 80, "memory_bandwidth_gbyte_s": 2039})
    again = DeviceType.model_validate(built.model_dump(mode="json"))
    assert again == built
    assert again.replace(name="e").memory_bytes == built.memory_bytes


@given(st.decimals(min_value="0.001", max_value="100000", places=3))
def test_unit_does_not_change_the_number(value):
    in_us = Link.model_validate({"bandwidth_bytes_per_s": 1, "latency_us": float(value)})
    in_s = Link.model_validate({"bandwidth_bytes_per_s": 1, "latency_s": float(value / 1_000_000)})
    assert in_us == in_s


def test_two_units_are_refused_and_the_rest_is_checked():
    with pytest.raises(InvalidInput) as caught:
        ClusterSpec.parse(
            {
                "name": "c",
                "nodes": [{"device": "d", "devices_per_node": 8, "count": 0, "free_memory_gib": 70, "free_memory_bytes": 7e10}],
            }
        )
    codes = {violation.loc: violation.code for violation in caught.value.violations}
    assert codes == {("nodes", 0, "free_memory_bytes"): "two_units", ("nodes", 0, "count"): "greater_than_equal"}
    assert "free_memory_gib, free_memory_bytes" in str(caught.value)


def test_two_human_units_are_refused():
    with pytest.raises(InvalidInput, match="two units"):
        ClusterSpec.parse(
            {"name": "c", "nodes": [{"device": "d", "devices_per_node": 1, "count": 1, "free_memory_gib": 7, "free_memory_mib": 7}]}
        )


def test_rates_are_no_durations():
    assert human_names("tokens_per_s") == {}
    assert set(human_names("memory_bandwidth_bytes_per_s")) == {
        f"memory_bandwidth_{unit}" for unit in HUMAN_SUFFIXES["bytes_per_s"]
    }
    assert human_names("price_usd_per_hour") == {}


def test_no_human_key_is_ambiguous():
    for spec in _all_specs(Spec):
        names = set(spec.model_fields)
        index = human_index(names)
        assert not names & set(index), spec
        assert len(index) == sum(len(human_names(name)) for name in names), spec


def _all_specs(base):
    for child in base.__subclasses__():
        yield child
        yield from _all_specs(child)


def test_formats_for_people():
    assert format_bytes(85_899_345_920) == "80.00 GiB"
    assert format_bytes(1_572_864) == "1.5 MiB"
    assert format_seconds(1.5) == "1.500 s"
    assert format_seconds(0.0125) == "12.50 ms"
    assert format_seconds(16e-6) == "16.0 us"
