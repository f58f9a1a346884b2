"""DeepSpeed JSON."""

from __future__ import annotations

from typing import Any

from planner.importers.reading import Reading, flatten
from specs.base import parse_mapping
from specs.interchange import Imported

_IRRELEVANT = tuple(
    """
    steps_per_print wall_clock_breakdown dump_state scheduler gradient_clipping optimizer.params tensorboard wandb
    csv_monitor flops_profiler comms_logger fp16. bf16. prescale_gradients gradient_predivide_factor checkpoint
    data_efficiency zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type elasticity
    monitor_config memory_breakdown seq_parallel_communication_data_type
    """.split()
)
_BUCKETS = tuple(
    """
    zero_optimization.reduce_bucket zero_optimization.allgather zero_optimization.overlap zero_optimization.contiguous
    zero_optimization.reduce_scatter zero_optimization.stage3_ zero_optimization.sub_group zero_optimization.round_robin
    zero_optimization.load_from zero_optimization.ignore_unused zero_optimization.elastic zero_optimization.prefetch
    """.split()
)


def read(text: str) -> Imported:
    """Keys of the JSON."""
    reading = Reading("deepspeed", flatten(parse_mapping(text, ".json", subject="DeepSpeed JSON")))
    read_batches(reading)
    read_sharding(reading)
    read_precision(reading)
    if reading.has("tensor_parallel.autotp_size"):
        reading.number("tensor_parallel.autotp_size", "tp", least=0)
        reading.fields["tp"] = reading.fields.get("tp") or 1
    if reading.fields.get("tp", 1) > 1:
        reading.fields["sequence_parallel"] = False
    if any(name.startswith("activation_checkpointing.") for name in reading.keys):
        reading.fields["recompute"] = "full"
        reading.say("activation_checkpointing", True, "recompute=full, where the model's code calls it")
        reading.assumed.append("recompute=full: activation_checkpointing is set up, and the model is taken to call it")
        reading.ignore(("activation_checkpointing.",), "settings of the recompute above")
    else:
        reading.assumed.append("recompute=none: DeepSpeed leaves it to the model's code (gradient_checkpointing_enable)")
    kind = reading.value("optimizer.type", "optimizer")
    if isinstance(kind, str) and kind.lower() == "sgd":
        reading.workload["optimizer"] = {"name": "momentum" if reading.has("optimizer.params.momentum") else "sgd"}
    reading.ignore(_IRRELEVANT)
    return reading.imported()


def read_batches(reading: Reading) -> None:
    """The three batch keys, of which two give the third."""
    total = reading.number("train_batch_size", "global batch")
    micro_batch = reading.number("train_micro_batch_size_per_gpu", "micro_batch")
    accumulation = reading.number("gradient_accumulation_steps", "accumulation")
    reading.batches(total=total, micro_batch=micro_batch, accumulation=accumulation)
    if total is None and micro_batch and accumulation:
        reading.assumed.append("global batch: micro-batch x accumulation x replicas, as the file gives no train_batch_size")


def read_sharding(reading: Reading) -> None:
    """ZeRO stage, shard groups and offload."""
    reading.number("zero_optimization.stage", "zero", least=0)
    reading.fields.setdefault("zero", 0)
    group = reading.number("zero_optimization.mics_shard_size", "shard_group")
    if group is None:
        reading.fields.pop("shard_group", None)
    for what in ("optimizer", "param"):
        prefix = f"zero_optimization.offload_{what}"
        device = reading.value(f"{prefix}.device")
        if device not in (None, "none"):
            reading.cannot(f"{prefix}.device", device, f"{what} states on the {device} are not part of a strategy's short form")
        reading.ignore((prefix,), "settings of the offload")
    if reading.number("zero_optimization.zero_hpz_partition_size") not in (None, 1):
        reading.cannot("zero_optimization.zero_hpz_partition_size", True, "a second copy of parameters inside the node")
    reading.ignore(_BUCKETS, "buckets, overlap and prefetch: the planner has its own defaults")


def read_precision(reading: Reading) -> None:
    """Dtypes of weights and gradients."""
    bf16 = reading.value("bf16.enabled", "bfloat16 weights")
    fp16 = reading.value("fp16.enabled", "float16 weights")
    dtype: Any = reading.value("data_types.grad_accum_dtype", "dtype of the gradient buffer")
    if bf16 is True:
        reading.workload["precision"] = "bf16_mixed" if dtype in ("bf16", None) else "bf16_mixed_fp32_grad"
        if dtype is None:
            reading.assumed.append("gradients in bfloat16, float32 master weights: DeepSpeed's default with bf16")
    elif fp16 is True:
        reading.workload["precision"] = "fp16_mixed"
    elif bf16 is None and fp16 is None:
        reading.assumed.append("precision float32: neither bf16 nor fp16 is switched on")
        reading.workload["precision"] = "fp32"
