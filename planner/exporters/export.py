"""The one door: :func:`export_plan` checks that a target can say what the plan says, then writes its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.exporters import accelerate, csv_rows, deepspeed, megatron, slurm, torchtitan
from planner.exporters.view import View, bare_view, uniform_view
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput, Violation, nearest_name
from specs.graph import ModelGraph
from specs.interchange import TARGETS, Exported
from specs.plan import Plan
from specs.training import TrainingSpec


@dataclass(frozen=True)
class Exporter:
    """A target: ``violations`` names what it cannot express, ``write`` gives files and notes for the rest.

    ``any_shape``: the target needs ranks and schedule only, so no rule about the plan's shape holds for it.
    """

    version: str
    violations: Callable[[View], list[Violation]]
    write: Callable[[View], tuple[dict[str, str], list[str]]]
    any_shape: bool = False


EXPORTERS: dict[str, Exporter] = {
    "megatron": Exporter("Megatron-LM with megatron-core 0.16", megatron.violations, megatron.write),
    "deepspeed": Exporter("DeepSpeed 0.19", deepspeed.violations, deepspeed.write),
    "accelerate": Exporter("accelerate 1.15", accelerate.violations, accelerate.write),
    "torchtitan": Exporter("torchtitan 0.3 (recipe), 0.2 (TOML)", torchtitan.violations, torchtitan.write),
    "slurm": Exporter("Slurm sbatch with torchrun of PyTorch 2.13", slurm.violations, slurm.write, any_shape=True),
    "csv": Exporter("torch.distributed.pipelining of PyTorch 2.13", csv_rows.violations, csv_rows.write, any_shape=True),
}


def export_plan(
    plan: Plan,
    target: str,
    *,
    graph: ModelGraph | None = None,
    workload: TrainingSpec | None = None,
    cluster: ClusterSpec | None = None,
) -> Exported:
    """The plan in the target's own words.

    ``graph``, ``workload`` and ``cluster`` add what a plan does not hold: sizes of the model, precision, optimizer, devices of a
    node. Raises :class:`InvalidInput` with everything that the target cannot express, each thing by name.
    """
    if target not in EXPORTERS:
        raise InvalidInput.single(
            "unknown_target", f"there is no exporter to '{target}'", actual=target, allowed=list(TARGETS),
            nearest=nearest_name(target, TARGETS), subject="export",
        )  # fmt: skip
    exporter = EXPORTERS[target]
    view, found = (
        (bare_view(plan, graph, workload, cluster), []) if exporter.any_shape else uniform_view(plan, graph, workload, cluster)
    )
    if view is not None:
        found = exporter.violations(view)
    if view is None or found:
        named = [replace(item, message=f"{target} cannot express this: {item.message}") for item in found]
        raise InvalidInput(named, subject=f"export to {target}")
    files, notes = exporter.write(view)
    return Exported.model_validate({"target": target, "version": exporter.version, "files": files, "notes": notes})
