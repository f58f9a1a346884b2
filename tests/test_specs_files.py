"""Documents as files: JSON, YAML, TOML, round trips, content hashes, frozen values."""

import json

import pytest
from pydantic import ValidationError

from specs.base import read_mapping
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.training import PRECISIONS, TrainingSpec


def write(path, text):
    path.write_text(text)
    return path


CLUSTER = {
    "name": "two",
    "nodes": [
        {
            "device": "a100_sxm_80gb",
            "devices_per_node": 8,
            "count": 2,
            "intra": {"bandwidth_gbyte_s": 300, "latency_us": 21},
            "slowdown": {"3": 1.5},
        }
    ],
}


def test_three_formats_give_one_document(tmp_path):
    as_json = write(tmp_path / "a.json", json.dumps(CLUSTER))
    as_yaml = write(
        tmp_path / "a.yaml",
        "name: two\nnodes:\n  - device: a100_sxm_80gb\n    devices_per_node: 8\n    count: 2\n"
        "    intra: {bandwidth_gbyte_s: 300, latency_us: 21}\n    slowdown: {3: 1.5}\n",
    )
    as_toml = write(
        tmp_path / "a.toml",
        'name = "two"\n[[nodes]]\ndevice = "a100_sxm_80gb"\ndevices_per_node = 8\ncount = 2\n'
        "intra = {bandwidth_gbyte_s = 300, latency_us = 21}\nslowdown = {3 = 1.5}\n",
    )
    documents = [ClusterSpec.load(path) for path in (as_json, as_yaml, as_toml)]
    assert documents[0] == documents[1] == documents[2]
    assert documents[0].nodes[0].slowdown == {3: 1.5}
    assert len({document.content_hash() for document in documents}) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("1_000", 1000),
        (".5", 0.5),
        ("-2.5e-4", -0.00025),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("010", "010"),  # no octal 8
        ("0x10", 16),
        ("1:30", "1:30"),  # no base-60 90
        ("2024-01-31", "2024-01-31"),  # no date
        ("1.2.3", "1.2.3"),
        ("~", None),
        ("0", 0),
        ("'1e-3'", "1e-3"),
    ],
)
def test_yaml_scalars(tmp_path, text, value):
    read = read_mapping(write(tmp_path / "a.yaml", f"key: {text}\n"))["key"]
    assert read == value
    assert type(read) is type(value)


def test_learning_rate_without_a_dot(tmp_path):
    path = write(tmp_path / "w.yaml", "global_batch: 8\nseq_len: 128\noptimizer: {learning_rate: 1e-3}\n")
    assert TrainingSpec.load(path).optimizer.learning_rate == 0.001


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "name: a\nname: b\n"), ("a.json", '{"name": "a", "name": "b"}'), ("a.toml", 'name = "a"\nname = "b"')],
)
def test_a_key_given_twice(tmp_path, name, text):
    with pytest.raises(InvalidInput) as caught:
        ClusterSpec.load(write(tmp_path / name, text))
    assert caught.value.violations[0].code == "unparsable_file"


def test_yaml_merge_keys_still_work(tmp_path):
    text = "base: &base {a: 1, b: 2}\nother:\n  <<: *base\n  b: 3\n"
    assert read_mapping(write(tmp_path / "a.yaml", text))["other"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(("name", "text"), [("a.json", "{"), ("a.yaml", "a: [1"), ("a.toml", "a = ")])
def test_a_file_that_does_not_parse(tmp_path, name, text):
    path = write(tmp_path / name, text)
    with pytest.raises(InvalidInput, match="does not parse"):
        read_mapping(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidInput, match="No such file"):
        ClusterSpec.load(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match="cannot read"):
        ClusterSpec.load(tmp_path)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InvalidInput, match="not a text file"):
        ClusterSpec.load(path)


def test_byte_order_mark(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(CLUSTER).encode())
    assert ClusterSpec.load(path).name == "two"


@pytest.mark.parametrize("text", ["", "- 1\n- 2\n", "just text\n"])
def test_a_file_that_is_no_mapping(tmp_path, text):
    with pytest.raises(InvalidInput):
        ClusterSpec.load(write(tmp_path / "a.yaml", text))


def test_round_trip_through_a_file(tmp_path):
    cluster = ClusterSpec.parse(CLUSTER)
    cluster.save(tmp_path / "deep" / "c.json")
    again = ClusterSpec.load(tmp_path / "deep" / "c.json")
    assert again == cluster
    assert again.content_hash() == cluster.content_hash()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["c.json"]


def test_json_keeps_the_version_and_drops_defaults():
    cluster = ClusterSpec.parse(CLUSTER)
    data = json.loads(cluster.to_json())
    assert data["schema_version"] == 1
    assert "oversubscription" not in data
    assert data["nodes"][0]["intra"] == {"bandwidth_bytes_per_s": 300e9, "latency_s": 21e-6}


def test_schema_key_for_editors_is_let_be():
    assert ClusterSpec.parse({"$schema": "cluster.schema.json", **CLUSTER}) == ClusterSpec.parse(CLUSTER)


def test_hash_does_not_depend_on_order_or_unit():
    reversed_keys = {key: CLUSTER[key] for key in reversed(CLUSTER)}
    node = {key: CLUSTER["nodes"][0][key] for key in reversed(CLUSTER["nodes"][0])}
    in_si = {**node, "intra": {"latency_s": 21e-6, "bandwidth_bytes_per_s": 300_000_000_000}}
    first = ClusterSpec.parse(CLUSTER).content_hash()
    assert ClusterSpec.parse({**reversed_keys, "nodes": [node]}).content_hash() == first
    assert ClusterSpec.parse({**CLUSTER, "nodes": [in_si]}).content_hash() == first
    assert ClusterSpec.parse({**CLUSTER, "name": "three"}).content_hash() != first


def test_hash_does_not_depend_on_given_defaults():
    plain = ClusterSpec.parse(CLUSTER)
    assert ClusterSpec.parse({**CLUSTER, "oversubscription": 1, "backend": "nccl"}).content_hash() == plain.content_hash()


def test_known_hash():
    """Fixed across versions of Python and of the dependencies; changes only with the schema."""
    workload = TrainingSpec.parse({"global_batch": 8, "seq_len": 128})
    assert workload.to_json() == '{"schema_version":1,"global_batch":8,"seq_len":128}'
    assert workload.content_hash() == "6238da393fc6f49b5d8338c27dba45f40279cf86ca88e6380c6e9555349f5340"


def test_precision_presets_round_trip():
    for name, precision in PRECISIONS.items():
        workload = TrainingSpec.parse({"global_batch": 8, "seq_len": 128, "precision": name})
        assert workload.precision == precision
        assert TrainingSpec.parse(json.loads(workload.to_json())) == workload


def test_documents_are_frozen():
    cluster = ClusterSpec.parse(CLUSTER)
    with pytest.raises(ValidationError):
        cluster.name = "other"
    changed = cluster.replace(name="other")
    assert (cluster.name, changed.name) == ("two", "other")
    with pytest.raises(ValidationError):
        cluster.replace(oversubscription=0.5)


def test_device_table_numbers_devices_node_by_node():
    cluster = ClusterSpec.parse(
        {
            "name": "c",
            "nodes": [
                {"device": "x", "devices_per_node": 2, "count": 2, "slowdown": {"3": 2.0}},
                {"device": "y", "devices_per_node": 1, "count": 2, "slowdown": {"0": 1.25}},
            ],
        }
    )
    places = [(p.rank, p.node, p.group, p.local, p.device, p.slowdown) for p in cluster.device_table()]
    assert cluster.num_devices == 6
    assert places == [
        (0, 0, 0, 0, "x", 1.0),
        (1, 0, 0, 1, "x", 1.0),
        (2, 1, 0, 0, "x", 1.0),
        (3, 1, 0, 1, "x", 2.0),
        (4, 2, 1, 0, "y", 1.25),
        (5, 3, 1, 0, "y", 1.0),
    ]
