"""torchtitan: TOML of releases up to 0.2, a recipe or command line of 0.3. A recipe is read, never run."""

from __future__ import annotations

import ast
import re
from typing import Any

from planner.importers.reading import Reading, flatten
from specs.base import parse_mapping
from specs.errors import InvalidInput
from specs.interchange import Imported

_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zbvzerobubble": "zb_v", "dualpipev": "dualpipe_v",
}  # fmt: skip
_SECTIONS = {"TrainingConfig": "training", "ParallelismConfig": "parallelism"}
_OPTION = re.compile(r"--((?:training|parallelism|activation_checkpoint)\.[a-z_0-9.\-]+)(?:[=\s]+(?!--)(\[.*?\]|\S+))?", re.DOTALL)
_IRRELEVANT = tuple(
    """
    job. profiling. metrics. model. optimizer. lr_scheduler. checkpoint. validation. comm. experimental. training.steps
    training.max_norm training.gc_ training.dataset training.seed training.deterministic debug. fault_tolerance.
    parallelism.spmd_backend parallelism.context_parallel_ dataloader. compile. memory_estimation.
    activation_checkpoint.early_stop activation_checkpoint.per_op training.warmup training.disable_cuda_graphs
    """.split()
)


def read(text: str) -> Imported:
    """Keys of the TOML, the recipe or the options."""
    reading = Reading("torchtitan", _keys(text))
    _degrees(reading)
    _pipeline(reading)
    _batch(reading)
    _rest(reading)
    reading.ignore(_IRRELEVANT)
    return reading.imported()


def _keys(text: str) -> dict[str, Any]:
    if "ParallelismConfig(" in text or "TrainingConfig(" in text:
        return _recipe(text)
    if "--parallelism." in text or "--training." in text:
        plain = text.replace("\\\n", " ")
        return {name.replace("-", "_"): _literal(value.strip("'\"")) if value else True for name, value in _OPTION.findall(plain)}
    return flatten(parse_mapping(text, ".toml", subject="torchtitan TOML"))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _recipe(text: str) -> dict[str, Any]:
    """Literal keywords of the config classes in a Python file; its code does not run."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidInput.single("unparsable_file", "the recipe is no Python", subject="torchtitan recipe") from None
    keys: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _name(node.func)
            for keyword in node.keywords if name in _SECTIONS else ():
                if keyword.arg is not None:
                    keys[f"{_SECTIONS[name]}.{keyword.arg}"] = _value(keyword.value)
            if name in ("FullAC", "SelectiveAC"):
                keys["activation_checkpoint.mode"] = "full" if name == "FullAC" else "selective"
    return keys


def _name(node: ast.expr) -> str:
    """``X`` of ``X(...)``, ``X.Config(...)`` and ``module.X(...)``."""
    if isinstance(node, ast.Attribute):
        return _name(node.value) if node.attr == "Config" else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _degrees(reading: Reading) -> None:
    reading.number("parallelism.tensor_parallel_degree", "tp")
    reading.number("parallelism.pipeline_parallel_degree", "pp")
    reading.number("parallelism.context_parallel_degree", "cp")
    reading.number("parallelism.expert_parallel_degree", "ep")
    if reading.fields.get("tp", 1) > 1:
        given = reading.value("parallelism.enable_sequence_parallel", "sequence_parallel")
        reading.fields["sequence_parallel"] = given is not False
    replicas = reading.number("parallelism.data_parallel_replicate_degree", "replicas of the shards") or 1
    shards = reading.value("parallelism.data_parallel_shard_degree", "ranks that share the shards, -1 = the rest")
    reshard = reading.value("parallelism.fsdp_reshard_after_forward", "when gathered parameters are freed") or "default"
    pipeline = reading.fields.get("pp", 1) > 1
    if shards == 1:
        reading.fields["zero"] = 0
    elif pipeline:
        reading.fields["zero"] = 1 if reshard != "always" else 3
    else:
        reading.fields["zero"] = 2 if reshard == "never" else 3
    if isinstance(shards, int) and shards > 0:
        reading.fields["dp"] = replicas * shards
        if replicas > 1 and shards > 1:
            reading.fields["shard_group"] = shards
    elif replicas > 1:
        reading.cannot("parallelism.data_parallel_shard_degree", shards, f"the rest after {replicas} replicas: give shard_group")


def _pipeline(reading: Reading) -> None:
    names = reading.value("parallelism.module_fqns_per_model_part")
    schedule = reading.value("parallelism.pipeline_parallel_schedule", "schedule")
    per_stage = reading.value("parallelism.pipeline_parallel_layers_per_stage")
    pp = reading.fields.get("pp", 1)
    reading.ignore(("parallelism.pipeline_parallel_first", "parallelism.pipeline_parallel_last"), "the split is taken as balanced")
    if reading.value("parallelism.pipeline_parallel_schedule_csv"):
        reading.cannot("parallelism.pipeline_parallel_schedule_csv", True, "a schedule in a file beside this one")
    if pp == 1:
        return
    text = str(schedule or "1F1B")
    if text.lower() not in _SCHEDULES:
        reading.cannot("parallelism.pipeline_parallel_schedule", text, "no such schedule here; taken as 1f1b")
    reading.fields["schedule"] = _SCHEDULES.get(text.lower(), "1f1b")
    if isinstance(names, list):
        reading.split_layers(
            "parallelism.module_fqns_per_model_part", [sum(str(name).startswith("layers.") for name in part) for part in names]
        )
        if reading.fields["schedule"] == "interleaved":
            reading.fields["chunks"] = len(names) // pp
    elif reading.fields["schedule"] == "interleaved":
        reading.fields["chunks"] = 2
        reading.assumed.append("chunks=2: torchtitan's default for looped schedules")
    if per_stage is not None:
        reading.cannot(
            "parallelism.pipeline_parallel_layers_per_stage", per_stage, "needs the number of layers; the split is balanced"
        )


def _batch(reading: Reading) -> None:
    local = reading.number("training.local_batch_size", "sequences of a dp rank") or reading.number(
        "training.batch_size", "sequences"
    )
    micro_batch = reading.number("parallelism.pipeline_parallel_microbatch_size", "sequences of a pipeline micro-batch")
    total = reading.value("training.global_batch_size", "global batch, -1 = one accumulation step")
    pipeline = reading.fields.get("pp", 1) > 1
    if local is not None:
        reading.fields["micro_batch"] = (micro_batch or 1) if pipeline else local
    if isinstance(total, int) and total > 0:
        reading.workload["global_batch"] = total
    elif local is not None and "dp" in reading.fields:
        reading.workload["global_batch"] = local * reading.fields["dp"]
    length = reading.number("training.seq_len", "sequence length")
    if length is not None:
        reading.workload["seq_len"] = length


def _rest(reading: Reading) -> None:
    mode = reading.value("activation_checkpoint.mode")
    option = reading.value("activation_checkpoint.selective_ac_option")
    if mode in ("full", "none"):
        reading.fields["recompute"] = mode
        reading.say("activation_checkpoint.mode", mode, f"recompute={mode}")
    elif mode is not None:
        reading.cannot(
            "activation_checkpoint.mode", f"{mode} {option or ''}".strip(), "its list of saved ops has no class here; taken as none"
        )
    own = reading.value("training.dtype", "dtype of weights and states")
    compute = reading.value("training.mixed_precision_param", "dtype of compute") or "bfloat16"
    reading.value("training.mixed_precision_reduce", "dtype of reductions")
    if own == "bfloat16":
        reading.workload["precision"] = "bf16_pure"
    else:
        reading.workload["precision"] = "fp32" if compute == "float32" else "bf16_mixed_fp32_grad"
    if reading.flag("training.enable_cpu_offload"):
        reading.cannot("training.enable_cpu_offload", True, "states in host memory are not part of a strategy's short form")
