"""The demo's flow over a real HTTP service with a fake engine: phases, files, scores, and what happens when losses disagree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from api import demo
from api.client import Client
from api.demo import DemoOptions, other_strategies, run_demo
from api.demo_result import DemoResult, check_losses
from specs.errors import ExecutionFailed, InvalidInput
from specs.progress import Progress
from specs.training import TrainingSpec
from tests.api_fake import CONFIG, FakeEngine
from tests.test_api_crash import RealService
from tests.test_report import result as demo_result
from tests.test_report import run as demo_run


class QuietView:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.events: list[Progress] = []

    def phase(self, title: str) -> None:
        self.phases.append(title)

    def note(self, text: str) -> None:
        pass

    def progress(self, event: Progress) -> None:
        self.events.append(event)


class SteadyEngine(FakeEngine):
    """Its reference has the losses of the fake runs."""

    loss = 5.5

    def reference_losses(self, graph: Any, workload: TrainingSpec, steps: int, progress: Any = None) -> list[float]:
        return [self.loss] * steps


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoOptions:
    @contextmanager
    def service(folder: Path, *, num_devices: int) -> Iterator[Client]:
        folder.mkdir(parents=True, exist_ok=True)
        real = RealService(folder)
        try:
            yield real.start()
        finally:
            if real.process is not None:
                real.process.terminate()
                real.process.wait(20)

    monkeypatch.setattr(demo, "local_service", service)
    monkeypatch.setattr(demo, "Engine", SteadyEngine)
    (tmp_path / "model.json").write_text(json.dumps(CONFIG))
    return DemoOptions(output_dir=tmp_path / "out", steps=3, model=tmp_path / "model.json")


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_whole_flow(options: DemoOptions) -> None:
    view = QuietView()
    result = run_demo(options, view)
    assert len(result.runs) >= 6
    assert [run.chosen for run in result.runs] == [True] + [False] * (len(result.runs) - 1)
    assert all(run.losses is not None and run.losses.agrees for run in result.runs)
    assert result.scores is not None
    assert result.scores.num_runs == len(result.runs)
    stored = DemoResult.parse(json.loads((options.output_dir / "result.json").read_text()))
    assert stored == result
    html = (options.output_dir / "report.html").read_text()
    assert all(run.label in html for run in result.runs)
    assert any(event.stage == "work" for event in view.events)
    assert len(view.phases) == 5 + len(result.runs)


def test_losses_that_disagree_fail_the_demo() -> None:
    good = demo_run("good", 0.3, 0.3)
    bad = good.replace(label="bad", losses=check_losses((2.0, 1.0), (2.0, 1.1), 1e-3))
    demo._require_agreement(demo_result(good))
    with pytest.raises(ExecutionFailed, match=r"(?s)bad.*largest relative difference 9\.09e-02") as caught:
        demo._require_agreement(demo_result(good, bad))
    assert caught.value.exit_code == 5


def test_strategies_are_of_different_kinds() -> None:
    workload = TrainingSpec.parse(demo.WORKLOAD)
    two = other_strategies(workload, 2)
    assert two["pipeline 1F1B"] == "pp=2 tp=1 dp=1 micro_batch=2 zero=0 recompute=none schedule=1f1b"  # four micro-batches
    assert {"zero=0", "zero=2", "zero=3"} <= {part for text in two.values() for part in text.split()}
    assert len({text.split("micro_batch=")[1].split()[0] for text in two.values() if "tp=1 dp=2" in text}) >= 2
    four = other_strategies(workload, 4)
    assert four["tensor parallel"] == "pp=1 tp=2 dp=2 micro_batch=4 zero=0 recompute=none"


def test_devices_that_do_not_share_the_batch(options: DemoOptions) -> None:
    with pytest.raises(InvalidInput, match="do not share"):
        run_demo(DemoOptions(output_dir=options.output_dir, num_devices=6), QuietView())
