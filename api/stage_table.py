"""The stages of a plan as rows for people: terminal and report show the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specs.plan import Plan, Stage


def stage_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row per stage, for people."""
    return [
        {"pipeline": number, "stage": index, **stage_row(stage)}
        for number, pipeline in enumerate(plan.pipelines)
        for index, stage in enumerate(pipeline.stages)
    ]


def stage_row(stage: Stage) -> dict[str, Any]:
    """A stage in words: devices, units, mesh, sharding, recompute."""
    modes = ", ".join(f"{run.mode} (units {run.first_unit}-{run.first_unit + run.num_units - 1})" for run in stage.recompute)
    mesh = " × ".join(
        f"{axis} {degree}" for axis, degree in (("dp", stage.mesh.dp), ("cp", stage.mesh.cp), ("tp", stage.mesh.tp)) if degree > 1
    )
    return {
        "devices": device_ranges(stage.devices),
        "units": f"{stage.first_unit}-{stage.first_unit + stage.num_units - 1}" if stage.num_units > 1 else str(stage.first_unit),
        "mesh": mesh or "1 device", "zero": stage.zero, "recompute": modes or "none",
    }  # fmt: skip


def device_ranges(devices: Sequence[int]) -> str:
    """``0-7, 16`` instead of every number."""
    parts: list[list[int]] = []
    for device in sorted(devices):
        if parts and device == parts[-1][1] + 1:
            parts[-1][1] = device
        else:
            parts.append([device, device])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
