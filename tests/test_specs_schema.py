"""The committed JSON Schemas are current and admit what the readers admit."""

import json
from pathlib import Path

import pytest

from specs.base import read_mapping
from specs.make_schema import DIRECTORY, DOCUMENTS, file_name, main, schema_of, stale_files

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_committed_schemas_are_current():
    assert stale_files() == [], "run: python -m specs.make_schema"
    assert main(["--check"]) == 0


def test_stale_missing_and_leftover_files_are_found(tmp_path):
    for path in DIRECTORY.glob("*.schema.json"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "cluster.schema.json").write_text("{}")
    (tmp_path / "plan.schema.json").unlink()
    (tmp_path / "old.schema.json").write_text("{}")
    assert stale_files(tmp_path) == ["cluster.schema.json", "old.schema.json", "plan.schema.json"]


def test_wrong_arguments():
    assert main(["--chek"]) == 2


def test_every_document_has_a_schema():
    assert {file_name(document) for document in DOCUMENTS} == {path.name for path in DIRECTORY.glob("*.json")}
    for document in DOCUMENTS:
        schema = schema_of(document)
        assert schema["additionalProperties"] is False
        assert schema["properties"]["$schema"]["type"] == "string"


def cluster_part(name):
    return json.loads((DIRECTORY / "cluster.schema.json").read_text())["$defs"][name]


def test_human_units_stand_beside_si():
    properties = cluster_part("DeviceType")["properties"]
    assert properties["memory_bytes"]["x-unit"] == "byte"
    assert (properties["memory_gib"]["x-unit"], properties["memory_gib"]["x-si"]) == ("GiB", "memory_bytes")
    assert properties["memory_gib"]["exclusiveMinimum"] == 0
    assert properties["peak_tflops"]["additionalProperties"] == {"type": "number"}
    assert properties["memory_bandwidth_gbyte_s"]["x-unit"] == "GB/s"
    assert "x-unit" not in properties["price_usd_per_hour"]


def test_a_required_quantity_is_required_in_exactly_one_unit():
    link = cluster_part("Link")
    assert "required" not in link
    alternatives = [{key for option in rule["oneOf"] for key in option["required"]} for rule in link["allOf"]]
    assert {
        "bandwidth_bytes_per_s",
        "bandwidth_gbyte_s",
        "bandwidth_gbit_s",
        "bandwidth_mbyte_s",
        "bandwidth_tbyte_s",
    } in alternatives
    assert any("latency_us" in keys for keys in alternatives)
    assert cluster_part("DeviceType")["required"] == ["name"]


def test_precision_is_a_name_or_an_object():
    precision = schema_of(next(item for item in DOCUMENTS if item.kind == "workload"))["properties"]["precision"]
    assert "bf16_mixed" in precision["anyOf"][0]["enum"]
    assert precision["anyOf"][1] == {"$ref": "#/$defs/Precision"}


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("clusters/*.yaml")) + sorted(EXAMPLES.glob("workloads/*.yaml")), ids=lambda path: path.name
)
def test_examples_follow_the_schema(path):
    kind = "cluster" if path.parent.name == "clusters" else "workload"
    schema = json.loads((DIRECTORY / f"{kind}.schema.json").read_text())
    assert list(errors(read_mapping(path), schema, schema)) == []


def test_the_schema_refuses_what_the_readers_refuse():
    schema = json.loads((DIRECTORY / "cluster.schema.json").read_text())
    node = {"device": "d", "devices_per_node": 8, "count": 1}
    assert list(errors({"name": "c", "nodes": [node]}, schema, schema)) == []
    for wrong in (
        {"name": "c"},
        {"name": "c", "nodes": []},
        {"name": "c", "nodes": [{**node, "count": 0}]},
        {"name": "c", "nodes": [{**node, "colour": "red"}]},
        {"name": "c", "nodes": [{**node, "intra": {"latency_us": 1}}]},
        {"name": "c", "nodes": [{**node, "intra": {"latency_us": 1, "bandwidth_gbit_s": 1, "bandwidth_gbyte_s": 1}}]},
    ):
        assert list(errors(wrong, schema, schema)), wrong


def errors(value, schema, root):
    """A validator of the keywords that our schemas use, enough to test them without another dependency."""
    if "$ref" in schema:
        yield from errors(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
        return
    for name in ("anyOf", "oneOf"):
        if name in schema:
            fitting = sum(not list(errors(value, option, root)) for option in schema[name])
            if fitting == 0 or (name == "oneOf" and fitting != 1):
                yield f"{value!r} fits {fitting} of {name}"
    for part in schema.get("allOf", []):
        yield from errors(value, part, root)
    if "enum" in schema and value not in schema["enum"]:
        yield f"{value!r} not in {schema['enum']}"
    yield from _type_errors(value, schema)
    if isinstance(value, dict):
        yield from (f"{key} is required" for key in schema.get("required", []) if key not in value)
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if inner is False:
                yield f"{key} is not allowed"
            elif isinstance(inner, dict):
                yield from errors(item, inner, root)
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{value!r} is too short"
        for item in value:
            yield from errors(item, schema.get("items", {}), root)


def _type_errors(value, schema):
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "null": type(None),
        "integer": int,
        "number": (int, float),
    }
    wanted = schema.get("type")
    if wanted and (not isinstance(value, kinds[wanted]) or (isinstance(value, bool) and wanted in ("integer", "number"))):
        yield f"{value!r} is no {wanted}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value) or value > schema.get("maximum", value):
            yield f"{value} out of bounds"
        if value <= schema.get("exclusiveMinimum", value - 1) or value >= schema.get("exclusiveMaximum", value + 1):
            yield f"{value} out of bounds"
