"""Hugging Face accelerate: a YAML for FSDP (version 2), DDP, or DeepSpeed where only that runs the plan's ZeRO stage."""

from __future__ import annotations

from typing import Any

import yaml

from planner.exporters.common import (
    STAGES,
    axis_violations,
    compact,
    device_note,
    host_violations,
    kv_head_violations,
    loss_violations,
    script,
    whole_recompute_violations,
)
from planner.exporters.view import View, no
from specs.errors import Violation
from specs.plan import RecomputeMode

_WHY = {"pp": "only its Megatron plugin has pipelines: export to megatron", "ep": "it has no expert parallelism"}


def violations(view: View) -> list[Violation]:
    """What an accelerate YAML cannot say."""
    found = axis_violations(view, ("tp", "cp"), _WHY) + whole_recompute_violations(view) + loss_violations(view, ("full",))
    found += kv_head_violations(view)
    if view.zero == 1 and view.tp * view.cp > 1:
        message = "zero 1 beside tp or cp: it runs zero 1 through DeepSpeed alone"
        found.append(no("zero", message, (*STAGES, 0, "zero"), actual=1, allowed=[2, 3], nearest=2))
    if view.zero == 1 and view.shard_group is not None:
        found.append(no("shard_group", "zero 1 with a shard group", (*STAGES, 0, "shard_group"), actual=view.shard_group))
    if view.sequence_parallel:
        found.append(no("sequence_parallel", "norms sharded along the sequence", (*STAGES, 0, "sequence_parallel"), nearest=False))
    if view.zero == 0 and view.tp * view.cp > 1 and view.dp > 1:
        message = f"zero 0 beside tp {view.tp}: it combines tensor parallel with sharded data parallel (FSDP 2) only"
        found.append(no("ddp_with_tp", message, (*STAGES, 0, "zero"), actual=0, allowed=[2, 3], nearest=2))
    if view.optimizer_on_host or view.params_on_host:
        found += host_violations(view, optimizer=view.zero == 1, params=False)
    return found


def write(view: View) -> tuple[dict[str, str], list[str]]:
    """``accelerate.yaml`` and a launch script."""
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": _kind(view),
        "mixed_precision": "no" if view.precision() == "fp32" else view.precision(),
        "num_machines": view.world_size // view.devices_per_node, "num_processes": view.world_size, "machine_rank": 0,
        "main_training_function": "main", "use_cpu": False,
    }  # fmt: skip
    if _kind(view) == "DEEPSPEED":
        config["deepspeed_config"] = _deepspeed(view)
    if _kind(view) == "FSDP":
        config["fsdp_config"] = _fsdp(view)
    sizes = _axes(view)
    if sizes:
        config["parallelism_config"] = sizes
    header = f"# per-device batch {view.micro_batch}, gradient accumulation {view.num_micro_batches}, {view.plan.seq_len} tokens\n"
    launch = script(
        f"accelerate launch --config_file accelerate.yaml train.py --per_device_train_batch_size {view.micro_batch} "
        f'--gradient_accumulation_steps {view.num_micro_batches} "$@"'
    )
    return {"accelerate.yaml": header + yaml.safe_dump(config, sort_keys=False), "launch.sh": launch}, _notes(view)


def _kind(view: View) -> str:
    if view.zero == 1:
        return "DEEPSPEED"
    return "FSDP" if view.zero >= 2 or view.tp * view.cp > 1 else "MULTI_GPU"


def _deepspeed(view: View) -> dict[str, Any]:
    return compact(
        {
            "zero_stage": 1, "gradient_accumulation_steps": view.num_micro_batches, "zero3_init_flag": False,
            "offload_optimizer_device": "cpu" if view.optimizer_on_host else "none", "offload_param_device": "none",
        }
    )  # fmt: skip


def _fsdp(view: View) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": view.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": view.recompute[0] == RecomputeMode.FULL,
        "fsdp_cpu_ram_efficient_loading": True,
    }


def _axes(view: View) -> dict[str, int]:
    """The mesh, where it is more than one sharded data-parallel axis."""
    group = view.shard_group or view.dp
    sharded = group if view.zero >= 2 else 1
    sizes = {"dp_replicate": view.dp // sharded, "dp_shard": sharded, "tp": view.tp, "cp": view.cp}
    if view.zero < 2 and view.tp * view.cp == 1:
        return {}
    if view.tp * view.cp == 1 and sizes["dp_replicate"] == 1:
        return {}
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


def _notes(view: View) -> list[str]:
    notes = device_note(view)
    if view.zero >= 2 and view.num_micro_batches > 1:
        notes.append(
            "pass GradientAccumulationPlugin(sync_each_batch=True): by default gradients stay whole on every device between "
            "micro-batches, which is not the memory that was predicted"
        )
    if view.recompute[0] == RecomputeMode.FULL and _kind(view) != "FSDP":
        notes.append("recompute is switched on by the model's code: model.gradient_checkpointing_enable()")
    notes.append("batch and accumulation are arguments of your script, see launch.sh")
    return notes
