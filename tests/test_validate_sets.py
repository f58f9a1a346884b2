"""Fit and check sources, the choice of rows, coverage of the interval, and measured columns that no prediction reads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from planner.validate_runs.runs import rows_of
from planner.validate_runs.scores import Judged, coverage
from planner.validate_runs.sets import FIT_SOURCES, chosen_rows, set_of, source_of
from planner.validate_runs.validate import validate_rows
from profiler.decoder_graph import decoder_graph
from specs.errors import InvalidInput
from tests.test_validate_runs import GPT, LLAMA, table

MEASURED = ("measured_step_s", "measured_tokens_per_s_per_gpu", "measured_peak_mem_gib", "measured_mfu", "measured_tflops_per_gpu")
RECORDS = [
    {**GPT, "id": "A-1", "source": "Megatron-LM README", "year": "2021", "notes": ""},
    {**GPT, "id": "A-2", "source": "Megatron-LM README", "year": "2020", "notes": "", "num_gpus": "8", "dp": "2"},
    {**GPT, "id": "A-3", "source": "Somebody's blog", "notes": "", "pp": "1", "dp": "8", "measured_step_s": "0.9"},
    {**LLAMA, "id": "B-1"},
    {**LLAMA, "id": "B-2", "compile": "1", "zero_stage": "hsdp", "measured_tokens_per_s_per_gpu": "4000"},
]
RECORDS = [dict.fromkeys(MEASURED, f"0.{index + 1}") | dict.fromkeys(LLAMA, "") | record for index, record in enumerate(RECORDS)]


def test_sets_by_source_year_and_device() -> None:
    rows = rows_of(RECORDS)
    assert [set_of(row.run) for row in rows] == ["fit", "check", "check", "fit", "fit"]
    assert source_of(rows[0].run) == "Megatron-LM README (2021)"
    v100 = rows_of([{**GPT, "source": "BigScience experiments", "gpu": "V100-SXM2-32GB"}])[0].run
    assert (source_of(v100), set_of(v100)) == ("BigScience experiments (V100)", "check")
    assert len(set(FIT_SOURCES)) == len(FIT_SOURCES)


def test_rows_are_chosen_by_set_and_source() -> None:
    rows = rows_of(RECORDS)

    def ids(**options) -> list[str]:
        return [row.run.id for row in chosen_rows(rows, **options)]

    assert ids() == ["A-1", "A-2", "A-3", "B-1", "B-2"]
    assert ids(which="check") == ["A-2", "A-3"]
    assert ids(sources=("megatron-lm", "Somebody's")) == ["A-1", "A-2", "A-3"]
    assert ids(sources=("Megatron-LM",), which="fit") == ["A-1"]
    with pytest.raises(InvalidInput) as error:
        chosen_rows(rows, sources=("PyTorch torchtitam",), which="chek")
    found = {violation.code: violation.nearest for violation in error.value.violations}
    assert found == {"unknown_set": "check", "unknown_source": "PyTorch torchtitan"}


def test_validate_takes_a_set_and_sources(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(table(*RECORDS))

    def document(*options: str) -> dict:
        result = CliRunner().invoke(app, ["validate", str(path), "--json", *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    assert document("--set", "check")["rows"] == 2
    both = document("--sources", "Megatron-LM README (2021), PyTorch torchtitan")
    assert both["rows"] == 3
    assert 0 <= both["step_time"]["coverage"] <= 1
    assert CliRunner().invoke(app, ["validate", str(path), "--set", "chek"]).exit_code == 2
    text = CliRunner().invoke(app, ["validate", str(path), "--set", "fit"]).stdout
    assert "80 % interval holds" in text


def test_coverage_counts_measured_steps_inside() -> None:
    judged = validate_rows(rows_of(RECORDS), decoder_graph).judged
    moved = []
    for item, factor in zip(judged, (1.0, 10.0, 0.1, 1.0, 1.0), strict=True):
        prediction = item.predicted.prediction
        record = {**RECORDS[0], "measured_step_s": str(prediction.step_time_s * factor)}
        moved.append(Judged(rows_of([record])[0], item.predicted))
    assert [item.inside_interval for item in moved] == [True, False, False, True, True]
    assert coverage(moved) == pytest.approx(0.6)
    unknown = rows_of([{**RECORDS[0], "measured_step_s": ""}])[0]
    assert Judged(unknown, judged[0].predicted).inside_interval is None
    assert coverage([Judged(unknown, judged[0].predicted)]) is None


def test_shuffled_measurements_give_the_same_predictions() -> None:
    """Every measured column is dealt out to other rows; what is predicted, assumed and skipped stays to the last digit."""
    shuffled = [dict(record) for record in RECORDS]
    generator = random.Random(5)
    for name in MEASURED:
        values = [record[name] for record in RECORDS]
        while values == [record[name] for record in RECORDS] and len(set(values)) > 1:
            generator.shuffle(values)
        for record, value in zip(shuffled, values, strict=True):
            record[name] = value
    plain, other = (validate_rows(rows_of(items), decoder_graph) for items in (RECORDS, shuffled))
    assert [item.row.measured for item in plain.judged] != [item.row.measured for item in other.judged]
    assert [item.predicted for item in plain.judged] == [item.predicted for item in other.judged]
