"""torchtitan: the TOML of releases up to 0.2 and a recipe for 0.3, whose config classes have the same keys."""

from __future__ import annotations

import json
from typing import Any

from planner.exporters.common import (
    device_note,
    host_violations,
    kv_head_violations,
    loss_violations,
    schedule_violations,
    script,
    torchrun,
    whole_recompute_violations,
    zero_violation,
)
from planner.exporters.view import View
from specs.errors import Violation
from specs.plan import RecomputeMode

SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV",
}  # fmt: skip
Sections = dict[str, dict[str, Any]]


def violations(view: View) -> list[Violation]:
    """What torchtitan has no key for."""
    found = schedule_violations(view, SCHEDULES) + whole_recompute_violations(view) + loss_violations(view, ("full", "fused"))
    found += kv_head_violations(view) + host_violations(view, optimizer=False, params=False)
    if view.dp == 1:
        return found
    if view.pp > 1:
        why = "under a pipeline it reduces gradients once, after the last micro-batch, and keeps parameters gathered"
        return found + zero_violation(view, (0, 1), why, 1)
    if view.num_micro_batches > 1:
        return found + zero_violation(view, (0, 2, 3), "it reduces gradients in every micro-batch", 2)
    return found


def write(view: View) -> tuple[dict[str, str], list[str]]:
    """``train.toml`` (to 0.2), ``recipe.py`` (from 0.3) and a launch script."""
    sections = {"training": _training(view), "parallelism": _parallelism(view), "activation_checkpoint": {"mode": _recompute(view)}}
    notes = device_note(view)
    notes.append("model, tokenizer, data and steps are those of your own config: merge these sections into it")
    files = {"recipe.py": _recipe(view, sections)}
    if view.tp == 1 or view.sequence_parallel:
        files = {"train.toml": _toml(sections), **files}
        files["launch.sh"] = script(torchrun(view, '-m torchtitan.train --job.config_file train.toml "$@"'))
    else:
        notes.append("releases up to 0.2 always shard norms beside tensor parallel, so there is no TOML of this plan")
    if view.pp > 1:
        notes.append(
            "modules of a stage are named as in Llama models: tok_embeddings, layers.N, norm and output (0.2) or lm_head (0.3)"
        )
    if view.workload is not None and view.workload.precision.grad_dtype != "float32":
        notes.append("gradients are reduced in float32 there: twice the bytes of the workload's bfloat16")
    if view.loss() == "fused":
        notes.append("the chunked loss is ChunkedLossWrapper in the recipe's 'loss'; releases up to 0.2 have none")
    return files, notes


def _training(view: View) -> dict[str, Any]:
    values: dict[str, Any] = {
        # Under a pipeline this is what the pipeline splits into micro-batches, else one accumulation step.
        "local_batch_size": view.per_rank if view.pp > 1 else view.micro_batch,
        "global_batch_size": view.plan.global_batch,
        "seq_len": view.plan.seq_len,
    }
    if view.workload is not None:
        precision = view.workload.precision
        values["dtype"] = "bfloat16" if precision.master_dtype is None and view.precision() == "bf16" else "float32"
        values["mixed_precision_param"] = "bfloat16" if view.precision() == "bf16" else "float32"
        values["mixed_precision_reduce"] = "float32"
    return values


def _parallelism(view: View) -> dict[str, Any]:
    sharded = (view.shard_group or view.dp) if view.zero else 1
    values: dict[str, Any] = {
        "data_parallel_replicate_degree": view.dp // sharded,
        "data_parallel_shard_degree": sharded,
        "fsdp_reshard_after_forward": "always" if view.zero == 3 else "never",
        "tensor_parallel_degree": view.tp,
        "pipeline_parallel_degree": view.pp,
        "context_parallel_degree": view.cp,
        "expert_parallel_degree": view.ep,
    }
    if view.tp > 1:
        values["enable_sequence_parallel"] = view.sequence_parallel
    if view.pp > 1:
        values["pipeline_parallel_schedule"] = SCHEDULES[view.schedule]
        values["pipeline_parallel_microbatch_size"] = view.micro_batch
        values["module_fqns_per_model_part"] = module_names(view)
    return values


def module_names(view: View, head: tuple[str, str] = ("norm", "output")) -> list[list[str]]:
    """Modules of each stage."""
    parts: list[list[str]] = []
    first = 0
    for count in view.layers:
        parts.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1].extend(head)
    return parts


def _recompute(view: View) -> str:
    return "full" if view.recompute[0] == RecomputeMode.FULL else "none"


def _toml(sections: Sections) -> str:
    blocks = []
    for name, values in sections.items():
        # TOML's strings, numbers, booleans and arrays of them are written as JSON writes them.
        rows = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key != "enable_sequence_parallel"]
        blocks.append(f"[{name}]\n" + "\n".join(rows) + "\n")
    return "\n".join(blocks)


def _recipe(view: View, sections: Sections) -> str:
    parallelism = dict(sections["parallelism"])
    if "module_fqns_per_model_part" in parallelism:
        parallelism["module_fqns_per_model_part"] = module_names(view, ("norm", "lm_head"))
    checkpoint = "FullAC.Config()" if _recompute(view) == "full" else "None"
    lines = [
        '"""Parallelism of the plan for torchtitan 0.3: apply it to the config of your model."""',
        "",
        "from torchtitan.config import ParallelismConfig, TrainingConfig",
        *(["from torchtitan.distributed.activation_checkpoint import FullAC"] if _recompute(view) == "full" else []),
        "",
        "TRAINING = TrainingConfig(",
        *(f"    {key}={value!r}," for key, value in sections["training"].items()),
        ")",
        "PARALLELISM = ParallelismConfig(",
        *(f"    {key}={value!r}," for key, value in parallelism.items()),
        ")",
        "",
        "",
        "def apply(config):",
        '    """Set the parallelism, batch and recompute of the plan on a Trainer.Config."""',
        "    config.training, config.parallelism = TRAINING, PARALLELISM",
        f"    config.activation_checkpoint = {checkpoint}",
        "    return config",
        "",
    ]
    return "\n".join(lines)
