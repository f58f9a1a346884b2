"""nanotron YAML."""

from __future__ import annotations

from planner.importers.reading import Reading, flatten
from specs.base import parse_mapping
from specs.interchange import Imported

_MODEL = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "tie_word_embeddings", "rope_theta", "rms_norm_eps",
)  # fmt: skip
_IRRELEVANT = tuple(
    """
    checkpoints. data_stages general. logging. profiler tokenizer. lighteval metrics_logging s3_upload optimizer.
    model.init_method model.model_config model.ddp_bucket tokens.limit tokens.val tokens.train_steps
    parallelism.tp_linear_async parallelism.tp_recompute parallelism.moe_layer_recompute model.make_vocab
    """.split()
)


def read(text: str) -> Imported:
    """Keys of the YAML."""
    reading = Reading("nanotron", flatten(parse_mapping(text, ".yaml", subject="nanotron YAML")))
    for key, field in {"dp": "dp", "tp": "tp", "pp": "pp", "expert_parallel_size": "ep", "context_parallel_size": "cp"}.items():
        reading.number(f"parallelism.{key}", field)
    mode = str(reading.value("parallelism.tp_mode", "how tensor parallel exchanges") or "ALL_REDUCE").upper()
    if reading.fields.get("tp", 1) > 1:
        reading.fields["sequence_parallel"] = mode.endswith("REDUCE_SCATTER")
    engine = str(reading.value("parallelism.pp_engine", "schedule") or "1f1b").lower()
    reading.fields["schedule"] = "gpipe" if "afab" in engine or "allforward" in engine else "1f1b"
    if reading.flag("parallelism.recompute_layer", "recompute=full"):
        reading.fields["recompute"] = "full"
    reading.number("optimizer.zero_stage", "zero", least=0)
    reading.fields.setdefault("zero", 0)
    _batch(reading)
    wide = reading.flag("optimizer.accumulate_grad_in_fp32", "gradients in float32")
    dtype = str(reading.value("model.dtype", "dtype of weights") or "float32")
    presets = {"bfloat16": "bf16_mixed_fp32_grad" if wide else "bf16_mixed", "float16": "fp16_mixed"}
    reading.workload["precision"] = presets.get(dtype, "fp32")
    _model(reading)
    reading.ignore(_IRRELEVANT)
    return reading.imported()


def _batch(reading: Reading) -> None:
    micro_batch = reading.number("tokens.micro_batch_size", "micro_batch")
    accumulation = reading.number("tokens.batch_accumulation_per_replica", "accumulation") or 1
    length = reading.number("tokens.sequence_length", "sequence length")
    if length is not None:
        reading.workload["seq_len"] = length
    if micro_batch is not None and "dp" in reading.fields:
        reading.workload["global_batch"] = micro_batch * accumulation * reading.fields["dp"]
        reading.say("batch", reading.workload["global_batch"], "global batch = micro-batch x accumulation x dp")


def _model(reading: Reading) -> None:
    for name in _MODEL:
        value = reading.value(f"model.model_config.{name}", f"model {name}")
        if value is not None:
            reading.model[name] = value
    if reading.model:
        reading.model["model_type"] = "qwen2" if reading.flag("model.model_config.is_qwen2_config", "Qwen2") else "llama"
