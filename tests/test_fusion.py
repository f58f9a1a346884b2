"""Fused kernels, NCCL's model and other software: figures worked by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from profiler.opset import OpClass
from profiler.placement import place_block
from simulator.cost_model import CostModel
from simulator.fusion import COMPILED, POINTWISE, groups_of
from simulator.nccl import RING, ring_s
from simulator.software import NATIVE, Software, attention_slowdown
from simulator.unit_cost import UnitCost
from specs.graph import ModelGraph, Segment
from specs.training import TrainingSpec
from tests.blocks import gpt_layer, llama_layer
from tests.plans import gpu_cluster


def cost(software: Software, layer: str = "llama") -> UnitCost:
    block = llama_layer() if layer == "llama" else gpt_layer(512, 8)
    segment = Segment(block="layer", count=2, bind={"x": "x"}, carry={"x": block.outputs[0]}, produces={block.outputs[0]: "y"})
    graph = ModelGraph(name="layers", inputs=block.inputs, blocks=(block,), segments=(segment,), loss="y")
    model = CostModel(graph, gpu_cluster(8), TrainingSpec(global_batch=8, seq_len=512), software=software)
    shape = model.network.shape(range(1))
    return model.unit("layer", device="toy", tp_shape=shape, sequence_parallel=False, batch=4)


def test_gate_and_activation_are_one_group_and_products_never_are() -> None:
    placed = place_block(llama_layer())
    for classes in (POINTWISE, COMPILED):
        groups = groups_of(placed, classes)
        assert groups
        for group in groups:
            assert all(placed.ops[index].op_class in classes for index in group.ops)
    gated = [group for group in groups_of(placed, POINTWISE) if len(group.reads) == 2 and len(group.writes) == 1]
    names = {placed.ops[index].op.target for group in gated for index in group.ops}
    assert "aten.silu.default" in names


def test_a_group_never_spans_an_op_that_needs_its_result() -> None:
    placed = place_block(llama_layer())
    producer = {tensor.root: index for index, op in enumerate(placed.ops) for tensor in op.outputs if op.op_class != OpClass.VIEW}
    for group in groups_of(placed, COMPILED):
        inside = set(group.ops)
        tainted: set[int] = set()
        for index, op in enumerate(placed.ops):
            sources = {producer[tensor.root] for tensor in op.inputs if tensor.root in producer}
            if index in inside:
                assert not sources & tainted
            elif sources & (inside | tainted):
                tainted.add(index)


def test_fusion_saves_time_and_a_compiler_saves_memory() -> None:
    plain, pointwise, compiler = (cost(replace(NATIVE, fusion=name)) for name in ("none", "pointwise", "compiler"))
    assert compiler.forward_s <= pointwise.forward_s < plain.forward_s
    assert compiler.backward_s < plain.backward_s
    assert compiler.saved_bytes < plain.saved_bytes


def test_dropout_keeps_masks_of_unfused_attention() -> None:
    block = gpt_layer(512, 8)
    segment = Segment(block="layer", count=1, bind={"x": "x"}, produces={block.outputs[0]: "y"})
    graph = ModelGraph(name="layers", inputs=block.inputs, blocks=(block,), segments=(segment,), loss="y")
    saved = []
    for dropout in (False, True):
        workload = TrainingSpec(global_batch=8, seq_len=512, attention_kernel="math")
        model = CostModel(graph, gpu_cluster(8), workload, software=replace(NATIVE, dropout=dropout))
        unit = model.unit("layer", device="toy", tp_shape=model.network.shape(range(1)), sequence_parallel=False, batch=4)
        saved.append(unit.saved_bytes)
    # arXiv 2205.05198: 5 a s^2 b bytes with dropout (probabilities, mask, result), 2 without
    assert saved[1] - saved[0] == 3 * 8 * 512**2 * 4


def test_host_time_binds_small_kernels_only() -> None:
    slow = cost(replace(NATIVE, launch_s=1e-3))
    assert slow.forward_s > 5 * cost(replace(NATIVE, launch_s=0.0)).forward_s
    assert cost(replace(NATIVE, launch_s=1e-9)).forward_s == cost(replace(NATIVE, launch_s=0.0)).forward_s


def test_ring_over_nodes_by_hand() -> None:
    simple = RING[2]
    large, ranks, nodes = 1e12, 16, 2
    expected = 15 / 16 * large / 100e9  # bandwidth rules
    hops = simple.base_s + 14 * simple.intra_hop_s + 1 * simple.inter_hop_s
    assert ring_s("all_gather", large, 1.0, ranks, nodes, 200e9, 100e9, 0.0) == pytest.approx(expected + hops)
    small = [ring_s("all_gather", 1e3, 1.0, 8 * count, count, 200e9, 100e9, 0.0) for count in (2, 4, 8, 16)]
    assert all(low < high for low, high in pairwise(small))


def test_attention_generations() -> None:
    assert attention_slowdown("latest", "Hopper", backward=False) == 1.0
    assert attention_slowdown("flash1", "Hopper", backward=False) > attention_slowdown("flash2", "Hopper", backward=False) > 1
    assert attention_slowdown("flash2", "Ampere", backward=True) == 1.0
    assert attention_slowdown("flash1", "Volta", backward=True) == 1.0
