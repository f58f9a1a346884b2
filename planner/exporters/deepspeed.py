"""DeepSpeed: a JSON with explicit numbers (no ``auto``), and the launch line."""

from __future__ import annotations

import json
from typing import Any

from planner.exporters.common import (
    STAGES,
    axis_violations,
    compact,
    device_note,
    kv_head_violations,
    loss_violations,
    script,
    whole_recompute_violations,
)
from planner.exporters.view import View, no
from specs.errors import Violation
from specs.graph import DTYPE_BYTES
from specs.plan import RecomputeMode

_WHY = {
    "pp": "stages are code there (PipelineModule), and its pipeline engine needs zero <= 1: gradients stay for all micro-batches",
    "cp": "Ulysses is set up in code",
    "ep": "experts are set up in code",
}


def violations(view: View) -> list[Violation]:
    """What a DeepSpeed JSON cannot say."""
    found = axis_violations(view, ("tp",), _WHY) + whole_recompute_violations(view) + loss_violations(view, ("full",))
    found += kv_head_violations(view)
    if view.tp > 1 and view.zero == 3:
        message = "tensor parallel with zero 3: its automatic tensor parallel runs with zero 0 to 2"
        found.append(no("tp_with_zero_3", message, (*STAGES, 0, "zero"), actual=3, allowed=[0, 1, 2], nearest=2))
    if view.sequence_parallel:
        found.append(no("sequence_parallel", "norms sharded along the sequence", (*STAGES, 0, "sequence_parallel"), nearest=False))
    if view.shard_group is not None:
        message = f"shard_group {view.shard_group}: DeepSpeed has removed its shard groups (MiCS)"
        found.append(no("shard_group", message, (*STAGES, 0, "shard_group"), actual=view.shard_group))
    if view.params_on_host and view.zero != 3:
        found.append(no("params_on_host", "parameters in host memory need zero 3", (*STAGES, 0, "tiers")))
    return found


def write(view: View) -> tuple[dict[str, str], list[str]]:
    """``ds_config.json`` and a launch script."""
    config = compact(
        {
            "train_batch_size": view.plan.global_batch,
            "train_micro_batch_size_per_gpu": view.micro_batch,
            "gradient_accumulation_steps": view.num_micro_batches,
            "zero_optimization": _zero(view),
            "bf16": {"enabled": True} if view.precision() == "bf16" else None,
            "fp16": {"enabled": True} if view.precision() == "fp16" else None,
            "data_types": _data_types(view),
            "tensor_parallel": {"autotp_size": view.tp} if view.tp > 1 else None,
            "activation_checkpointing": _checkpointing(view),
            "optimizer": _optimizer(view),
        }
    )
    notes = device_note(view)
    if view.recompute[0] == RecomputeMode.FULL:
        notes.append("recompute is switched on by the model's code: model.gradient_checkpointing_enable()")
    notes.append(f"the sequence length is the data's: {view.plan.seq_len} tokens")
    files = {"ds_config.json": json.dumps(config, indent=2) + "\n", "launch.sh": _launch(view)}
    return files, notes


def _zero(view: View) -> dict[str, Any]:
    options = view.plan.collectives
    grad = DTYPE_BYTES[view.workload.precision.grad_dtype if view.workload else "bfloat16"]
    zero: dict[str, Any] = {"stage": view.zero, "overlap_comm": options.overlap_grad_reduce, "contiguous_gradients": True}
    zero["reduce_bucket_size"] = round(options.bucket_bytes / grad)
    if view.zero == 3:
        zero["stage3_prefetch_bucket_size"] = 50_000_000 if options.prefetch_units else 0
    if view.optimizer_on_host:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": view.optimizer_on_host}
    if view.params_on_host:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def _data_types(view: View) -> dict[str, str] | None:
    if view.workload is None or view.precision() == "fp32":
        return None
    dtype = view.workload.precision.accumulate_dtype or view.workload.precision.grad_dtype
    return {"grad_accum_dtype": {"float32": "fp32", "float16": "fp16"}.get(dtype, "bf16")}


def _checkpointing(view: View) -> dict[str, Any] | None:
    return {"number_checkpoints": view.num_layers} if view.recompute[0] == RecomputeMode.FULL else None


def _optimizer(view: View) -> dict[str, Any] | None:
    if view.workload is None:
        return None
    given = view.workload.optimizer
    kind = {"adamw": "AdamW", "adam": "Adam"}.get(given.name, "SGD")
    params: dict[str, Any] = {"lr": given.learning_rate, "weight_decay": given.weight_decay}
    if given.name == "momentum":
        params["momentum"] = 0.9
    return {"type": kind, "params": params}


def _launch(view: View) -> str:
    nodes = view.world_size // view.devices_per_node
    # An optimizer on the host is as fast as the cores that run it: each rank keeps to its own.
    bound = "--bind_cores_to_rank " if view.optimizer_on_host or view.params_on_host else ""
    return script(
        f'deepspeed --num_nodes {nodes} --num_gpus {view.devices_per_node} {bound}train.py --deepspeed ds_config.json "$@"'
    )
