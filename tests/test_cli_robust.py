"""The verbs robust and diagnose: every violation at once, tables, the example straggler model, and the whole answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from profiler.catalogue import resolve_cluster
from simulator.cost_model import CostModel
from simulator.stragglers.answer import robustness
from specs.base import read_mapping
from specs.errors import InvalidInput
from specs.make_schema import DIRECTORY
from specs.straggler import Robustness, StragglerModel, Timings
from specs.training import TrainingSpec
from tests.api_fake import CLUSTER, WORKLOAD, tiny_graph
from tests.blocks import llama_graph
from tests.plans import gpu_cluster, make_plan
from tests.test_specs_schema import errors

EXAMPLE = Path(__file__).parent.parent / "examples" / "stragglers" / "datacentre.yaml"


def test_help_shows_an_example() -> None:
    for verb in ("robust", "diagnose"):
        text = CliRunner().invoke(app, [verb, "--help"]).stdout
        assert f"Example: meshwright {verb}" in " ".join(text.split())


def test_the_example_is_read_and_follows_its_schema() -> None:
    model = StragglerModel.load(EXAMPLE)
    assert model.failures.device_mtbf_s == 50_000 * 3600
    assert model.spot is not None
    assert model.spot.replacement_s == 600
    schema = json.loads((DIRECTORY / "straggler_model.schema.json").read_text())
    assert list(errors(read_mapping(EXAMPLE), schema, schema)) == []


def test_the_whole_answer() -> None:
    """Deterministic, its parts consistent, and readable back."""
    plan = make_plan(llama_graph(), pp=2, dp=4, num_micro_batches=4)
    cluster = gpu_cluster(8, nodes=2).replace(mean_time_between_failures_s=3.6e6)
    model = CostModel(llama_graph(), cluster, TrainingSpec(global_batch=plan.global_batch, seq_len=plan.seq_len))
    given = StragglerModel.load(EXAMPLE).replace(slowdown={6: 1.5})
    found = robustness(model, plan, given, steps=500)
    assert found == robustness(model, plan, given, steps=500)
    assert Robustness.parse(json.loads(found.to_json())) == found
    assert found.distribution is not None
    assert found.on_demand is not None
    assert found.spot is not None
    assert found.nominal_step_s < found.distribution.p50_s
    assert found.alone_s["chronic slowdowns"] > found.alone_s["device jitter"] > 0
    assert found.on_demand.goodput == pytest.approx(found.on_demand.availability * found.nominal_step_s / found.distribution.mean_s)
    assert found.spot.availability < found.on_demand.availability
    assert found.spot.cost_usd_per_million_tokens < found.on_demand.cost_usd_per_million_tokens  # type: ignore[operator]
    own = given.replace(failures={})
    assert robustness(model, plan, own, steps=100).on_demand.job_mtbf_s == pytest.approx(3.6e6 / 8)  # type: ignore[union-attr]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "model.json").write_text(json.dumps(tiny_graph().to_dict()))
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    (tmp_path / "workload.json").write_text(json.dumps(WORKLOAD))
    names = {"--model": "model.json", "--cluster": "cluster.json", "--workload": "workload.json"}
    return [part for option, name in names.items() for part in (option, str(tmp_path / name))]


def test_wrong_changes_and_wrong_models_are_bad_input(files: list[str], tmp_path: Path) -> None:
    devices = resolve_cluster_devices()
    strategy = ["--strategy", f"dp={devices} micro_batch=1"]
    result = CliRunner().invoke(
        app, ["robust", *files, *strategy, "--what-if", "device 999 x0.8", "--what-if", "nonsense", "--json"]
    )
    assert result.exit_code == 2, result.stdout
    problems = json.loads(result.stdout)["error"]["errors"]
    assert [item["code"] for item in problems] == ["no_such_index", "unreadable_change"]
    (tmp_path / "s.yaml").write_text("device_jitter: {cv: -1}\nslowdown: {0: 0.5}\n")
    result = CliRunner().invoke(app, ["robust", *files, *strategy, "--stragglers", str(tmp_path / "s.yaml"), "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["errors"]


def test_tables(files: list[str]) -> None:
    strategy = ["--strategy", f"dp={resolve_cluster_devices()} micro_batch=1", "--steps", "200"]
    result = CliRunner().invoke(app, ["robust", *files, *strategy, "--stragglers", str(EXAMPLE), "--what-if", "device 0 x0.5"])
    assert result.exit_code == 0, result.stderr
    for part in ("p99", "device jitter", "Goodput on spot capacity", "takes 2 x as long", "assumed:"):
        assert part in result.stdout


def resolve_cluster_devices() -> int:
    from specs.cluster import ClusterSpec

    return resolve_cluster(ClusterSpec.parse(CLUSTER)).num_devices


def test_uneven_timings_say_all_that_is_wrong() -> None:
    with pytest.raises(InvalidInput) as error:
        Timings.parse({"phases": ["a"], "kinds": {"b": "data"}, "seconds": [[[1.0], [1.0, 2.0]], [[1.0]]], "work": [[1.0]]})
    codes = [violation.code for violation in error.value.violations]
    assert codes == ["uneven_timings", "uneven_timings", "uneven_timings", "unknown_phase"]
