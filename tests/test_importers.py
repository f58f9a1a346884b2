"""Configs as people write them: what is understood, what is not, and values that nobody takes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.importers import read_config
from planner.importers.megatron import parse_layout
from planner.strategy import parse_strategy
from specs.errors import InvalidInput
from specs.interchange import FRAMEWORKS

MEGATRON = """
#!/bin/bash
TP=8
PP=${PP:-4}
export CUDA_DEVICE_MAX_CONNECTIONS=1
MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --ffn-hidden-size 28672 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights
    --position-embedding-type rope
)
torchrun --nproc-per-node 8 --nnodes 16 pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP --sequence-parallel \\
    --micro-batch-size 1 --global-batch-size 512 --seq-length 8192 --bf16 \\
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \\
    --recompute-granularity selective --lr 3e-4 --train-iters 1000 --frobnicate 3
"""
NANOTRON = """
general: {project: x, run: y}
model:
  dtype: bfloat16
  model_config: {hidden_size: 2048, num_hidden_layers: 24, num_attention_heads: 32, num_key_value_heads: 8, intermediate_size: 8192,
    vocab_size: 49152, is_llama_config: true}
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true, optimizer_factory: {name: adamW}}
parallelism: {dp: 4, pp: 2, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, recompute_layer: true, expert_parallel_size: 1}
tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 8, sequence_length: 4096, train_steps: 10}
"""
NEOX = """
{
  "pipe-parallel-size": 4, "model-parallel-size": 2, "num-layers": 44, "hidden-size": 6144, "num-attention-heads": 64,
  "seq-length": 2048, "max-position-embeddings": 2048, "pos-emb": "rotary", "no-weight-tying": true,
  "zero_optimization": {"stage": 1, "allgather_partitions": True, "reduce_bucket_size": 1260000000},
  "train_batch_size": 1536, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
  "checkpoint-activations": true, "checkpoint-num-layers": 1, "partition-activations": false,
  "fp16": {"fp16": true, "enabled": true, "loss_scale": 0}, "train-iters": 150000,
  "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
}
"""
TITAN = """
[job]
dump_folder = "./outputs"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
DEEPSPEED = """
{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4, "bf16": {"enabled": true},
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_max_live_parameters": 1e9},
 "sparse_attention": {"mode": "fixed"}}
"""
FSDP_1 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_offload_params: true}
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


def test_megatron_launch_script() -> None:
    read = read_config(MEGATRON, "megatron")
    strategy = parse_strategy(read.strategy)
    assert (strategy.tp, strategy.pp, strategy.dp, strategy.zero, strategy.micro_batch) == (8, 4, 4, 1, 1)
    assert strategy.sequence_parallel
    assert strategy.op_classes == ("attention",)
    assert strategy.split == (21, 20, 20, 21)
    assert read.num_devices == 128
    assert read.workload == {"global_batch": 512, "seq_len": 8192, "precision": "bf16_mixed_fp32_grad"}
    assert read.model["model_type"] == "llama"
    assert read.model["num_key_value_heads"] == 8
    assert [key.key for key in read.not_understood] == ["--frobnicate"]
    assert {"--lr", "--train-iters"} <= {key.key for key in read.ignored}


def test_nanotron() -> None:
    read = read_config(NANOTRON, "nanotron")
    strategy = parse_strategy(read.strategy)
    assert (strategy.dp, strategy.pp, strategy.tp, strategy.zero, strategy.micro_batch) == (4, 2, 2, 1, 2)
    assert strategy.sequence_parallel
    assert strategy.recompute == "full"
    assert read.workload == {"global_batch": 64, "seq_len": 4096, "precision": "bf16_mixed_fp32_grad"}
    assert read.model["hidden_size"] == 2048


def test_neox_reads_dashes_and_model_parallel() -> None:
    read = read_config(NEOX.replace("True", "true"), "neox")
    strategy = parse_strategy(read.strategy)
    assert (strategy.tp, strategy.pp, strategy.dp, strategy.zero, strategy.micro_batch) == (2, 4, 12, 1, 4)
    assert strategy.recompute == "full"
    assert read.workload["precision"] == "fp16_mixed"
    assert read.model == {
        "model_type": "gpt_neox", "num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip


def test_torchtitan_leaves_dp_to_the_rest() -> None:
    read = read_config(TITAN, "torchtitan")
    assert "dp=" not in read.strategy
    assert parse_strategy(read.strategy).zero == 3
    assert parse_strategy(read.strategy).sequence_parallel
    assert [key.key for key in read.not_understood] == ["activation_checkpoint.mode"]


def test_torchtitan_command_line() -> None:
    text = """torchrun -m torchtitan.train --module llama3 --config llama3_8b --parallelism.tensor_parallel_degree 2 \\
      --parallelism.pipeline-parallel-degree=2 --training.local_batch_size=8 --parallelism.pipeline_parallel_schedule GPipe"""
    strategy = parse_strategy(read_config(text, "torchtitan").strategy)
    assert (strategy.tp, strategy.pp, strategy.schedule, strategy.micro_batch) == (2, 2, "gpipe", 1)


def test_deepspeed_says_what_it_assumed_and_missed() -> None:
    read = read_config(DEEPSPEED, "deepspeed")
    assert parse_strategy(read.strategy).zero == 3
    assert {key.key for key in read.not_understood} == {"zero_optimization.offload_optimizer.device", "sparse_attention.mode"}
    assert any("'auto'" in line for line in read.assumed)


def test_accelerate_fsdp_1() -> None:
    read = read_config(FSDP_1, "accelerate")
    strategy = parse_strategy(read.strategy)
    assert (strategy.zero, strategy.dp) == (2, 8)
    assert [key.key for key in read.not_understood] == ["fsdp_config.fsdp_offload_params"]


def test_layers_that_megatron_would_drop() -> None:
    """U042: 30 layers on 4 stages."""
    with pytest.raises(InvalidInput) as caught:
        read_config("--num-layers 30 --pipeline-model-parallel-size 4 --tensor-model-parallel-size x", "megatron")
    assert {violation.loc for violation in caught.value.violations} == {("--num-layers",), ("--tensor-model-parallel-size",)}


def test_batches_that_do_not_divide() -> None:
    text = '{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}'
    with pytest.raises(InvalidInput, match="global batch 100"):
        read_config(text, "deepspeed")


def test_layout_strings() -> None:
    assert parse_layout("Et*3|(tt|)*29,m|L") == [3, *[2] * 29, 0, 0]
    assert parse_layout("'E,t*7|t*8|t,t,L'") == [7, 8, 2]
    for bad in ("E|x|L", "Et*3|q", "(((t*99)*99)*99)*99"):
        with pytest.raises(ValueError, match=r"stage|often"):
            parse_layout(bad)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=300))
def test_any_text_is_read_or_refused(framework: str, text: str) -> None:
    with contextlib.suppress(InvalidInput):  # anything else is a defect
        read_config(text, framework)


def test_text_that_unfolds_without_end_is_refused() -> None:
    bomb = "\n".join(["a0: &a0 [x, x]", *[f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 30)]])
    assert read_config(bomb, "neox").not_understood  # lists stay values, shown in short
    nested = "\n".join(["a0: &a0 {x: 1, y: 2}", *[f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}" for i in range(1, 30)]])
    with pytest.raises(InvalidInput, match="keys"):
        read_config(nested, "neox")
    with pytest.raises(InvalidInput, match="characters"):
        read_config("x" * 1_000_001, "megatron")


def test_unknown_framework() -> None:
    with pytest.raises(InvalidInput) as caught:
        read_config("", "megatron-lm")
    assert caught.value.violations[0].nearest == "megatron"
