"""Hugging Face accelerate's YAML: FSDP 1 and 2, DDP, DeepSpeed and Megatron plugins."""

from __future__ import annotations

from planner.importers.reading import Reading, flatten
from specs.base import parse_mapping
from specs.interchange import Imported

_FSDP_1 = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2, "_HYBRID_SHARD_ZERO2": 2}
_BY_NUMBER = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_IRRELEVANT = tuple(
    """
    compute_environment machine_rank main_process main_training_function rdzv_backend same_network tpu_ use_cpu debug
    downcast_bf16 enable_cpu_affinity gpu_ids commands command_file fsdp_config.fsdp_state_dict fsdp_config.fsdp_cpu_ram
    fsdp_config.fsdp_sync_module fsdp_config.fsdp_use_orig fsdp_config.fsdp_version deepspeed_config.zero3_
    deepspeed_config.deepspeed_multinode deepspeed_config.deepspeed_hostfile deepspeed_config.gradient_clipping
    megatron_lm_config.megatron_lm_gradient_clipping dynamo_config fp8_config
    """.split()
)
_WRAPPING = tuple(
    """
    fsdp_config.fsdp_auto_wrap fsdp_config.fsdp_transformer fsdp_config.fsdp_min_num fsdp_config.fsdp_backward_pre
    fsdp_config.fsdp_forward_pre
    """.split()
)


def read(text: str) -> Imported:
    """Keys of the YAML."""
    reading = Reading("accelerate", flatten(parse_mapping(text, ".yaml", subject="accelerate YAML")))
    kind = str(reading.value("distributed_type", "which plugin runs") or "NO").upper()
    reading.num_devices = reading.number("num_processes", "devices")
    reading.number("num_machines")
    _axes(reading)
    {"FSDP": _fsdp, "DEEPSPEED": _deepspeed, "MEGATRON_LM": _megatron}.get(kind, _ddp)(reading)
    _precision(reading)
    _data_parallel(reading)
    accumulation = reading.number("gradient_accumulation_steps", "accumulation")
    if accumulation is None:
        reading.assumed.append("gradient accumulation and per-device batch are arguments of the script, not of this file")
    reading.ignore(_WRAPPING, "one unit a layer is how the planner wraps")
    reading.ignore(_IRRELEVANT)
    return reading.imported()


def _axes(reading: Reading) -> None:
    prefix = "parallelism_config.parallelism_config_"
    for axis in ("tp", "cp"):
        reading.number(f"{prefix}{axis}_size", axis)
    replicas = reading.number(f"{prefix}dp_replicate_size", "replicas of the shards")
    group = reading.number(f"{prefix}dp_shard_size", "ranks that share the shards")
    if (reading.number(f"{prefix}sp_size") or 1) > 1:
        reading.cannot(f"{prefix}sp_size", True, "Ulysses sequence parallelism is not planned")
    if replicas and group:
        reading.fields["dp"] = replicas * group
        if replicas > 1 and group > 1:
            reading.fields["shard_group"] = group
    reading.ignore((prefix,), "settings of context parallelism")


def _data_parallel(reading: Reading) -> None:
    """dp from the number of processes; tensor parallel there never shards norms."""
    taken = 1
    for name in ("tp", "pp", "cp"):
        taken *= reading.fields.get(name, 1)
    if reading.num_devices and "dp" not in reading.fields and reading.num_devices % taken == 0:
        reading.fields["dp"] = reading.num_devices // taken
    if reading.fields.get("tp", 1) > 1:
        reading.fields.setdefault("sequence_parallel", False)


def _ddp(reading: Reading) -> None:
    reading.fields["zero"] = 0
    reading.assumed.append("recompute=none: the file leaves it to the model's code")


def _fsdp(reading: Reading) -> None:
    strategy = reading.value("fsdp_config.fsdp_sharding_strategy")
    reshard = reading.value("fsdp_config.fsdp_reshard_after_forward")
    if strategy is None and isinstance(reshard, str) and reshard.upper() in _FSDP_1:
        strategy = reshard.upper()
    if strategy is not None:
        name = _BY_NUMBER[int(strategy) - 1] if str(strategy) in "12345" else str(strategy).upper()
        if name not in _FSDP_1:
            reading.wrong("fsdp_config.fsdp_sharding_strategy", strategy, f"strategy '{strategy}'", allowed=list(_FSDP_1))
            return
        reading.fields["zero"] = _FSDP_1[name]
        reading.say("fsdp_config.fsdp_sharding_strategy", name, f"zero={_FSDP_1[name]}")
        if name.lstrip("_").startswith("HYBRID"):
            reading.cannot("fsdp_config.fsdp_sharding_strategy", name, "shards inside a node: give shard_group=devices of a node")
    else:
        keeps = reshard is False or str(reshard).lower() == "false"
        reading.fields["zero"] = 2 if keeps else 3
        reading.say("fsdp_config.fsdp_reshard_after_forward", reshard, f"zero={reading.fields['zero']}")
    if reading.flag("fsdp_config.fsdp_activation_checkpointing", "recompute=full"):
        reading.fields["recompute"] = "full"
    if reading.flag("fsdp_config.fsdp_offload_params"):
        reading.cannot("fsdp_config.fsdp_offload_params", True, "parameters in host memory are not part of a strategy's short form")
    reading.assumed.append("gradients are reduced in every micro-batch: GradientAccumulationPlugin(sync_each_batch=True)")


def _deepspeed(reading: Reading) -> None:
    reading.number("deepspeed_config.zero_stage", "zero", least=0)
    reading.fields.setdefault("zero", 2)
    reading.number("deepspeed_config.gradient_accumulation_steps", "accumulation")
    for what in ("optimizer", "param"):
        device = reading.value(f"deepspeed_config.offload_{what}_device")
        if device not in (None, "none"):
            reading.cannot(
                f"deepspeed_config.offload_{what}_device", device, f"{what} states on the {device}: not in a strategy's short form"
            )
    reading.assumed.append("recompute=none: DeepSpeed leaves it to the model's code")


def _megatron(reading: Reading) -> None:
    prefix = "megatron_lm_config.megatron_lm_"
    reading.number(f"{prefix}tp_degree", "tp")
    reading.number(f"{prefix}pp_degree", "pp")
    reading.number(f"{prefix}num_micro_batches", "accumulation")
    if reading.flag(f"{prefix}sequence_parallelism", "sequence_parallel=true"):
        reading.fields["sequence_parallel"] = True
    if reading.flag(f"{prefix}recompute_activations", "recompute=selective:attention"):
        reading.fields["recompute"] = "selective:attention"
    reading.fields["zero"] = 1 if reading.flag(f"{prefix}use_distributed_optimizer", "zero=1") else 0
    reading.fields["schedule"] = "1f1b"


def _precision(reading: Reading) -> None:
    name = str(reading.value("mixed_precision", "dtype of compute") or "no")
    if name == "fp16":
        reading.workload["precision"] = "fp16_mixed"
    elif name == "bf16":
        # accelerate keeps the weights in float32 and casts a copy of them for compute.
        reading.workload["precision"] = "bf16_mixed_fp32_grad"
        reading.assumed.append("float32 weights with a bfloat16 copy, gradients in float32")
    else:
        reading.workload["precision"] = "fp32"
