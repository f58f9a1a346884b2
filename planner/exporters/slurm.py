"""Slurm: an sbatch script that starts one torchrun a node, and the hostfile's shape."""

from __future__ import annotations

from planner.exporters.common import device_note, torchrun
from planner.exporters.view import View
from specs.errors import Violation

_TEMPLATE = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={devices}
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# {strategy}
set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1

# Ranks follow the order of nodes: rank = node * {devices} + local device.
srun --kill-on-bad-exit=1 {launch}
"""


def violations(view: View) -> list[Violation]:
    """Ranks and nodes are all that the script says."""
    return []


def write(view: View) -> tuple[dict[str, str], list[str]]:
    """``job.sbatch``."""
    launch = torchrun(view, '"${TRAIN_SCRIPT:-train.py}" "$@"')
    nodes = view.world_size // view.devices_per_node
    if nodes == 1:  # srun starts it on the one node; the rendezvous is local
        launch = launch.replace("--standalone", "--standalone --nnodes 1")
    name = "".join(char if char.isalnum() or char in "-_" else "-" for char in view.plan.name)[:40].strip("-") or "meshwright"
    text = _TEMPLATE.format(name=name, nodes=nodes, devices=view.devices_per_node, strategy=view.plan.strategy, launch=launch)
    notes = device_note(view)
    notes.append("TRAIN_SCRIPT names your program; account, partition and time limit are your site's")
    if len({len(devices) for pipeline in view.plan.pipelines for devices in pipeline.ranks()}) > 1:
        notes.append("pipeline ranks hold unlike numbers of devices: the program must follow the plan's device lists")
    return {"job.sbatch": text}, notes
