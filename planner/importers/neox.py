"""GPT-NeoX YAML, whose 'model parallel' is tensor parallel."""

from __future__ import annotations

from planner.importers.deepspeed import read_batches, read_precision, read_sharding
from planner.importers.reading import Reading, flatten
from specs.base import parse_mapping
from specs.interchange import Imported

_MODEL = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size", "num_kv_heads": "num_key_value_heads",
    "max_position_embeddings": "max_position_embeddings",
    "padded_vocab_size": "vocab_size", "vocab_size": "vocab_size", "rotary_pct": "rotary_pct",
}  # fmt: skip
_IRRELEVANT = tuple(
    """
    lr_ min_lr warmup train_iters eval_ save load data_ vocab_file merge_file tokenizer log_ steps_per_print wall_clock
    tensorboard use_wandb wandb optimizer. gradient_clipping weight_decay init_method output_layer_init attention_dropout
    hidden_dropout checkpoint_factor extra_save keep_last split launcher deepspeed make_vocab_size pos_emb norm rms_norm
    layernorm scaled_ bias_ fp16. bf16. finetune no_weight_tying gpt_j_residual mlp_type activation distributed_backend
    test_data valid_data train_data checkpoint_num_layers synchronize_each_layer partition_activations attention_config
    rope_fusion use_bias rotary hostfile include profile s3_ iteration scheduler
    """.split()
)


def read(text: str) -> Imported:
    """Keys of the YAML, dashes and underscores alike."""
    keys = {name.replace("-", "_"): value for name, value in flatten(parse_mapping(text, ".yaml", subject="GPT-NeoX YAML")).items()}
    reading = Reading("neox", keys)
    reading.number("model_parallel_size", "tp", least=0)
    reading.number("pipe_parallel_size", "pp", least=0)
    for axis in ("tp", "pp"):
        reading.fields[axis] = max(reading.fields.get(axis, 1), 1)
    reading.num_devices = reading.number("global_num_gpus", "devices")
    if reading.fields["tp"] > 1:
        reading.fields["sequence_parallel"] = reading.flag("sequence_parallel", "sequence_parallel=true")
    if reading.fields["pp"] > 1:
        reading.fields["schedule"] = "1f1b"
    read_batches(reading)
    length = reading.number("seq_length", "sequence length")
    if length is not None:
        reading.workload["seq_len"] = length
    if reading.flag("checkpoint_activations", "recompute=full"):
        reading.fields["recompute"] = "full"
    read_sharding(reading)
    _precision(reading)
    for key, name in _MODEL.items():
        value = reading.value(key, f"model {name}")
        if value is not None:
            reading.model[name] = value
    if reading.model:
        reading.model["model_type"] = "gpt_neox"
        tying = reading.value("no_weight_tying", "whether embedding and head are separate")
        reading.model["tie_word_embeddings"] = tying is not True
    kind = reading.value("optimizer.type", "optimizer")
    if isinstance(kind, str) and kind.lower() == "sgd":
        reading.workload["optimizer"] = {"name": "momentum"}
    reading.ignore(_IRRELEVANT)
    return reading.imported()


def _precision(reading: Reading) -> None:
    name = reading.value("precision", "dtype of weights")
    if name is None:
        read_precision(reading)
        return
    reading.workload["precision"] = {"bfloat16": "bf16_mixed", "fp16": "fp16_mixed"}.get(str(name), "fp32")
