"""Write the JSON Schema of every document to ``specs/schema/``; ``--check`` only compares.

The schema describes what a file may hold: beside each SI field its human-unit alternatives stand (``memory_gib`` for
``memory_bytes``), every quantity names its unit in ``x-unit``, and a required quantity is required in exactly one unit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from specs.accounting import Utilization
from specs.answer import PlanAnswer
from specs.base import Document
from specs.calibration import Calibration
from specs.catalogue import Catalogue
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.interchange import Exported, Imported, Judgement
from specs.measurement import Comparison, Measurement
from specs.memory import MemoryReport
from specs.op_sharding import OpSharding
from specs.plan import Plan
from specs.prediction import Prediction
from specs.profile import Profile
from specs.questions import PlanDiff, Recommendation, WhyNot
from specs.straggler import Diagnosis, Robustness, StragglerModel, Timings
from specs.training import TrainingSpec
from specs.units import HUMAN_SUFFIXES, human_names

DOCUMENTS: tuple[type[Document], ...] = (
    ModelGraph, ClusterSpec, TrainingSpec, Profile, Plan, Prediction, PlanAnswer, Measurement, Comparison, Calibration,
    Catalogue, MemoryReport, Utilization, Exported, Imported, Judgement,
    PlanDiff, WhyNot, Recommendation,
    StragglerModel, Robustness, Timings, Diagnosis,
    PlanDiff, WhyNot, Recommendation, OpSharding,
)  # fmt: skip
DIRECTORY = Path(__file__).parent / "schema"
UNIT_NAMES = {
    "bytes": "byte", "bytes_per_s": "byte/s", "s": "s", "flop_per_s": "FLOP/s", "hz": "Hz",
    "gib": "GiB", "mib": "MiB", "kib": "KiB", "tib": "TiB", "gb": "GB", "mb": "MB", "tb": "TB",
    "gbyte_s": "GB/s", "mbyte_s": "MB/s", "tbyte_s": "TB/s", "gbit_s": "Gbit/s",
    "us": "us", "ms": "ms", "minutes": "min", "hours": "h", "tflops": "TFLOP/s", "gflops": "GFLOP/s", "ghz": "GHz", "mhz": "MHz",
}  # fmt: skip
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def schema_of(document: type[Document]) -> dict[str, Any]:
    """JSON Schema (2020-12) of one kind of document, human units included."""
    schema = document.model_json_schema(mode="validation")
    for part in (schema, *schema.get("$defs", {}).values()):
        _add_human_units(part)
    schema["properties"]["$schema"] = {"type": "string", "description": "where this schema is, for editors"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _add_human_units(part: dict[str, Any]) -> None:
    properties: dict[str, Any] = part.get("properties", {})
    required = part.get("required", [])
    one_of = []
    for name, field in list(properties.items()):
        humans = human_names(name)
        if not humans:
            continue
        field["x-unit"] = UNIT_NAMES[_suffix(name, HUMAN_SUFFIXES)]
        for human, factor in humans.items():
            unit = UNIT_NAMES[_suffix(human, UNIT_NAMES)]
            kept = {key: value for key, value in field.items() if key not in ("title", "default", "x-unit", "description")}
            kept.update({key: kept[key] / factor for key in _BOUNDS if kept.get(key)})
            properties[human] = {**kept, "description": f"'{name}' in {unit}", "x-unit": unit, "x-si": name}
        if name in required:
            required.remove(name)
            one_of.append({"oneOf": [{"required": [key]} for key in (name, *humans)]})
    if one_of:
        part["allOf"] = [*part.get("allOf", []), *one_of]
    if not required:
        part.pop("required", None)


def _suffix(name: str, known: dict[str, Any]) -> str:
    """The longest known unit suffix of a key."""
    return max((suffix for suffix in known if name == suffix or name.endswith("_" + suffix)), key=len)


def file_name(document: type[Document]) -> str:
    """``model graph`` -> ``model_graph.schema.json``."""
    return document.kind.replace(" ", "_") + ".schema.json"


def schema_text(document: type[Document]) -> str:
    """The schema as the committed file holds it."""
    return json.dumps(schema_of(document), indent=1, sort_keys=True) + "\n"


def stale_files(directory: Path = DIRECTORY) -> list[str]:
    """Names of schema files that are missing, differ from the documents, or belong to none."""
    wanted = {file_name(document): schema_text(document) for document in DOCUMENTS}
    there = {path.name: path.read_text() for path in directory.glob("*.schema.json")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def main(arguments: list[str]) -> int:
    """Write the schemas, or with ``--check`` report stale ones; the exit status."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python -m specs.make_schema [--check]\n")
        return 2
    stale = stale_files()
    if arguments:
        for name in stale:
            sys.stderr.write(f"{name} is not current: run python -m specs.make_schema\n")
        return 1 if stale else 0
    DIRECTORY.mkdir(exist_ok=True)
    for document in DOCUMENTS:
        (DIRECTORY / file_name(document)).write_text(schema_text(document))
    for name in set(stale) - {file_name(document) for document in DOCUMENTS}:
        (DIRECTORY / name).unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
