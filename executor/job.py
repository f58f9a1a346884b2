"""What the launching process hands to the workers, and what they hand back: files in one folder per run. No torch here.

=====================  ==========================================================================
file                   content
=====================  ==========================================================================
``job.json``           :class:`Job`: the documents and settings of the run
``progress.jsonl``     one line per finished step, written by rank 0
``rank{r}.state``      the step that rank ``r`` is in, for naming a rank that hangs
``rank{r}.result.json``  :class:`RankResult`
``rank{r}.error.json``   :class:`RankError`: why the rank failed, in its own words
``launch{n}.json``     exit codes of failed workers of node ``n``, as torch elastic saw them
``logs/``              what the workers and the launcher wrote to stdout and stderr
=====================  ==========================================================================
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from specs.base import Spec
from specs.graph import ModelGraph
from specs.measurement import RankMeasurement
from specs.plan import Plan
from specs.training import TrainingSpec


class LaunchedNode(Spec):
    """A node of the run: how many ranks, in the order of the nodes, and its address."""

    num_ranks: int = Field(ge=1)
    address: str = "127.0.0.1"


class Job(Spec):
    """One run. ``allow_factory``: the graph may name code on this machine. ``pin``: bind each worker to a core.

    ``nodes``: empty for one. ``dilation``: how much slower each rank shall be. ``groups``: the control group that each rank joins.
    """

    plan: Plan
    graph: ModelGraph
    workload: TrainingSpec
    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=0)
    backend: str = "gloo"
    collective_timeout_s: float = Field(default=180.0, gt=0)
    allow_factory: bool = False
    pin: bool = True
    probe: bool = True
    nodes: tuple[LaunchedNode, ...] = ()
    port: int = Field(default=0, description="where nodes meet, on the first one; 0: any")
    dilation: tuple[float, ...] = ()
    groups: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Job:
        """Read ``job.json``."""
        return cls.model_validate_json((folder / "job.json").read_text())

    def save(self, folder: Path) -> None:
        """Write ``job.json``."""
        (folder / "job.json").write_text(self.model_dump_json(exclude_defaults=True))


class StepResult(Spec):
    """A measured step of one rank. ``traffic``: calls and bytes by ``axis.op``."""

    step_time_s: float
    terms: dict[str, float]
    traffic: dict[str, tuple[int, int]] = {}


class RankResult(Spec):
    """What a rank measured; ``losses`` are global means, of every step from the first, the same on all ranks."""

    rank: int
    steps: tuple[StepResult, ...]
    losses: tuple[float, ...]
    peak_memory_bytes: float
    warmup_peak_memory_bytes: float
    baseline_bytes: float
    probe_s: float | None = None
    start_probe_s: float | None = None
    environment: dict[str, Any] = {}


class RankError(Spec):
    """Why a rank failed. ``time_s``: seconds since the epoch, to find the first."""

    rank: int
    time_s: float
    step: int | None
    error: str
    traceback: str


class LaunchReport(Spec):
    """Exit codes of the workers that failed, by rank (negative: the signal that ended it)."""

    exit_codes: dict[int, int] = {}
    error: str | None = None


def write_json(path: Path, value: Spec) -> None:
    """Write, atomically."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(value.model_dump_json())
    partial.replace(path)


def read_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Complete JSON lines from ``offset`` on, and the offset after them."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    complete = data.rfind(b"\n") + 1
    return [json.loads(line) for line in data[:complete].splitlines()], offset + complete


def rank_measurement(result: RankResult, terms: dict[str, float], device: str) -> RankMeasurement:
    """The document form of a rank's result."""
    return RankMeasurement(
        rank=result.rank, device=device, terms=terms, step_times_s=tuple(step.step_time_s for step in result.steps),
        peak_memory_bytes=result.peak_memory_bytes, baseline_bytes=result.baseline_bytes, start_probe_s=result.start_probe_s,
        probe_s=result.probe_s,
    )  # fmt: skip
