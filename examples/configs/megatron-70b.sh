#!/bin/bash
# Llama 3 70B on 64 DGX H100 as a Megatron-LM launch script: meshwright import examples/configs/megatron-70b.sh --from megatron ...
TP=8
PP=8
torchrun --nproc-per-node 8 --nnodes 64 pretrain_gpt.py \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} --sequence-parallel \
    --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope \
    --untie-embeddings-and-output-weights --vocab-size 128256 \
    --micro-batch-size 1 --global-batch-size 1024 --seq-length 8192 --bf16 \
    --recompute-granularity selective --lr 1.5e-4 --train-iters 100000
