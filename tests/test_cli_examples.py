"""Every verb's help shows one example, and the examples run as they are printed."""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from api.cli.main import app
from api.engine import Engine
from specs.calibration import Calibration
from specs.graph import ModelGraph
from specs.measurement import Measurement
from specs.prediction import Prediction
from specs.profile import DeviceProfile, Profile
from tests.api_fake import FakeEngine
from tests.test_validate_runs import GPT, table

ROOT = Path(__file__).parent.parent
GROUP: Any = typer.main.get_command(app)
# They run until they are stopped, or for minutes; other tests start them.
ELSEWHERE = ("serve", "demo")
# Plans before what reads plan.json.
FIRST = ("capture", "plan", "profile", "run")


def example(verb: str) -> str:
    """The example in a verb's help."""
    text = " ".join((GROUP.commands[verb].help or "").split())
    assert text.count("Example: meshwright ") == 1, verb
    return text.split("Example: ")[1]


@cache
def captured(name: str) -> ModelGraph:
    from profiler.sources import load_model

    return load_model(name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples; models are captured once, and nothing is measured or run on this machine."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Engine, "load_model", lambda self, text: captured(text))
    monkeypatch.setattr(Engine, "local_cluster", lambda self, count, **_: FakeEngine().local_cluster(count))
    profile = Profile(name="fake", cluster="this machine", devices=(DeviceProfile(device="core"),))
    monkeypatch.setattr(Engine, "profile", lambda self, *args, **kwargs: profile)
    measurement = Measurement(steps=1, warmup_steps=1, step_times_s=(0.31,), step_time_s=0.31, peak_memory_bytes=1e8, waterfall={})
    monkeypatch.setattr(Engine, "execute", lambda self, *args, **kwargs: measurement)
    fitted = Calibration.parse({"cluster": "this machine", "hardware_hash": "0", "num_runs": 1})
    monkeypatch.setattr(Engine, "calibrate", lambda self, *args, **kwargs: fitted)
    (tmp_path / "answer.json").write_text(json.dumps({"prediction": prediction().to_dict()}))
    times = [[[0.01 * (1 + 0.001 * ((step + rank) % 3))] for rank in range(8)] for step in range(40)]
    (tmp_path / "timings.json").write_text(json.dumps({"phases": ["forward"], "seconds": times}))
    (tmp_path / "runs.csv").write_text(table(GPT, {**GPT, "id": "A-2", "source": "another source"}))
    return tmp_path


def prediction() -> Prediction:
    return FakeEngine().estimate(None, None, None, None, None)  # type: ignore[arg-type]


def test_every_verb_has_one_example() -> None:
    for verb in GROUP.commands:
        assert example(verb).split()[1] == verb


def test_examples_run(folder: Path) -> None:
    verbs = [*FIRST, *[verb for verb in GROUP.commands if verb not in (*FIRST, *ELSEWHERE)]]
    for verb in verbs:
        words = shlex.split(example(verb))[1:]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.stdout, result.stderr, result.exception)
        assert result.stdout


def test_completion_scripts() -> None:
    """``meshwright --show-completion``, and what a shell asks for when Tab is pressed."""
    environment = {"_MESHWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": "meshwright re", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], prog_name="meshwright", env=environment)
    assert "recommend" in result.output.split()
