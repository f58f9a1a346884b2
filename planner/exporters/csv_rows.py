"""The pipeline's actions as torch.distributed.pipelining reads them: a row per rank, ``0F0,0F1,0B0``."""

from __future__ import annotations

from planner.exporters.view import View, no
from specs.errors import Violation


def violations(view: View) -> list[Violation]:
    """One pipeline of at least two ranks."""
    found = []
    if len(view.plan.pipelines) > 1:
        found.append(no("several_pipelines", f"{len(view.plan.pipelines)} pipelines have no one table", ("plan", "pipelines")))
    if view.pp == 1:
        found.append(no("no_pipeline", "the plan has one pipeline rank and so no schedule", ("plan", "schedule"), actual=1))
    return found


def write(view: View) -> tuple[dict[str, str], list[str]]:
    """``schedule.csv``."""
    rows = view.plan.schedule.actions(num_ranks=view.pp, num_micro_batches=view.num_micro_batches)
    text = "\n".join(",".join(str(action) for action in row) for row in rows) + "\n"
    return {"schedule.csv": text}, ["load it with PipelineScheduleMulti._load_csv, format 'compute_only'"]
