"""The tensor-parallel pattern is found from the ops, not written down."""

from __future__ import annotations

import pytest

from profiler.placed import placement_text
from profiler.placement import place_block
from tests.blocks import embedding_block, gpt_layer, llama_layer, tail_block

MEGATRON = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 0, "up": 0, "down": 1, "norm1": None, "norm2": None}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_llama_layer_gets_the_megatron_pattern(sequence_parallel: bool) -> None:
    placed = place_block(llama_layer(), 2, sequence_parallel)
    assert {name: placed.placements[name] for name in MEGATRON} == MEGATRON


def test_layer_without_sequence_parallel_has_two_all_reduces_each_way() -> None:
    placed = place_block(llama_layer(), 2)
    collectives = [item for op in placed.ops for item in (*op.before, *op.after)]
    assert [item.forward for item in collectives if item.forward] == ["all_reduce"] * 2
    assert [item.backward for item in collectives if item.backward] == ["all_reduce"] * 2
    assert all(item.num_elements(2, 16) == 2 * 16 * 512 for item in collectives)
    assert placed.partial_grad_params == ()


def test_layer_with_sequence_parallel_gathers_and_scatters_along_the_sequence() -> None:
    placed = place_block(llama_layer(), 2, sequence_parallel=True)
    collectives = [item for op in placed.ops for item in (*op.before, *op.after)]
    assert sorted(item.forward for item in collectives if item.forward) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert sorted(item.backward for item in collectives if item.backward) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert placed.partial_grad_params == ("norm1", "norm2")
    assert placed.inputs[0].placement == 1
    assert placed.outputs[0].placement == 1
    norm = placed.ops[0]
    assert norm.inputs[0].shape[1](2, 16) == 8


def test_local_shapes_of_products() -> None:
    placed = place_block(llama_layer(), 4)
    linears = [op for op in placed.ops if op.op.target == "aten.linear.default"]
    shapes = [[tuple(int(size(2, 16)) for size in tensor.shape) for tensor in op.inputs] for op in linears]
    assert shapes[0] == [(2, 16, 512), (128, 512)]  # q: 8 heads of 64 over 4
    assert shapes[1] == [(2, 16, 512), (64, 512)]  # k: 4 heads over 4
    assert shapes[3] == [(2, 16, 128), (512, 128)]  # o: rows
    assert shapes[6] == [(2, 16, 352), (512, 352)]  # down


def test_heads_that_do_not_divide_stay_whole() -> None:
    placed = place_block(llama_layer(kv_heads=2), 4)
    assert placed.placements["k"] is None
    assert placed.placements["down"] == 1


def test_biases_follow_their_product() -> None:
    placed = place_block(gpt_layer(256, 8), 2, sequence_parallel=True)
    assert placed.placements["q_bias"] == 0
    assert placed.placements["up_bias"] == 0
    assert placed.placements["o_bias"] is None
    assert set(placed.partial_grad_params) == {"norm1", "norm1_bias", "norm2", "norm2_bias", "o_bias", "down_bias"}


def test_embedding_is_split_over_the_vocabulary_and_reduced() -> None:
    placed = place_block(embedding_block(1000, 64), 2)
    assert placed.placements["table"] == 0
    assert [item.forward for item in placed.ops[0].after] == ["all_reduce"]
    scattered = place_block(embedding_block(1000, 64), 2, sequence_parallel=True)
    assert [item.forward for item in scattered.ops[0].after] == ["reduce_scatter"]


def test_head_and_loss_are_vocabulary_parallel_also_when_uneven() -> None:
    placed = place_block(tail_block(1001, 64), 2)
    assert placed.placements["head"] == 0
    loss = placed.ops[-1]
    assert loss.inputs[0].placement == 1
    assert loss.inputs[0].shape[1](1, 1) == 501
    (reduction,) = loss.before
    assert (reduction.forward, reduction.count, reduction.num_elements(2, 8)) == ("all_reduce", 3, 16)


def test_degree_one_has_no_collectives() -> None:
    placed = place_block(llama_layer(), 1, sequence_parallel=True)
    assert not any((*op.before, *op.after) for op in placed.ops)
    assert not placed.sharded_any()


def test_plan_placements_use_fqns() -> None:
    texts = place_block(llama_layer(), 2).plan_placements()
    assert texts["layers.{i}.q"] == placement_text(0)
    assert texts["layers.{i}.down"] == "S(1)"
    assert "layers.{i}.norm1" not in texts
