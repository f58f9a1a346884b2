"""All candidates as a table, the Pareto front, and the inverse question."""

from __future__ import annotations

import csv

import pytest

from planner.search import SearchOptions, explore
from planner.table import COLUMNS
from specs.training import TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster
from tests.test_planner_bounds import BIG


@pytest.fixture(scope="module")
def explored():
    workload = TrainingSpec(global_batch=16, seq_len=1024)
    return explore(llama_graph(**BIG), gpu_cluster(8, memory_gib=12.0), workload, options=SearchOptions(top=0, explain=False))


def test_every_candidate_is_listed_with_what_became_of_it(explored, tmp_path) -> None:
    """U127: those that would run out of memory as well, in a file."""
    path = tmp_path / "candidates.csv"
    assert explored.table.write(path) == explored.answer.search.candidates
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == explored.answer.search.candidates
    (chosen,) = [row for row in rows if row["status"] == "chosen"]
    assert float(chosen["step_time_s"]) == pytest.approx(explored.answer.prediction.step_time_s)
    counts = {reason: sum(row["status"] == reason for row in rows) for reason in {row["status"] for row in rows}}
    assert counts.pop("chosen") == 1
    assert counts["memory"] > 0
    assert counts == {reason: count for reason, count in explored.answer.rejected.items() if reason in counts}
    best = float(chosen["step_time_s"])
    assert all(float(row["bound_s"]) >= best * (1 - 1e-9) for row in rows if row["status"] == "bound_above_best")


def test_no_plan_of_the_front_is_beaten_by_another(explored) -> None:
    front = explored.pareto_front()
    assert front[0].step_time_s == pytest.approx(explored.answer.prediction.step_time_s)
    assert len(front) > 1
    for one in front:
        for other in front:
            if one is not other:
                assert (
                    one.step_time_s < other.step_time_s
                    or one.peak_bytes < other.peak_bytes
                    or one.devices < other.devices
                    or (one.cost_usd or 0.0) < (other.cost_usd or 0.0)
                )
