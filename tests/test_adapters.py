"""Low-rank adapters beside frozen weights: what is trained, what is computed, what is sent."""

from __future__ import annotations

import pytest

from executor.support import workload_violations
from planner.strategy import plan_from_strategy
from profiler.adapters import with_adapters
from profiler.opset import OpClass
from profiler.placement import place_block
from simulator.cost_model import CostModel
from specs.training import Adapters, TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster

RANK = 8
ADAPTERS = Adapters(rank=RANK)


def test_only_adapters_are_trained_and_again_changes_nothing() -> None:
    plain = llama_graph()
    adapted = with_adapters(plain, ADAPTERS)
    assert adapted.num_params(trainable_only=True) == adapted.num_params() - plain.num_params() > 0
    names = {param.fqn for block in adapted.blocks for param in block.params if param.trainable and not param.buffer}
    assert names
    assert all(".lora_" in name for name in names)
    assert with_adapters(adapted, ADAPTERS) is adapted
    assert plain.num_params() == plain.num_params(trainable_only=True)


def test_backward_computes_no_gradient_of_frozen_weights() -> None:
    """Backward of a layer is once its forward instead of twice: input gradients alone (adapters and attention aside)."""
    plain, adapted = llama_graph(layers=16), with_adapters(llama_graph(layers=16), ADAPTERS)

    def products(graph, *, backward: bool) -> float:
        ops = [op for op in graph.block("layer").ops if "linear" in op.target and "lora" not in op.name]
        return sum((op.backward_flop if backward else op.forward_flop)(1, 128) for op in ops)

    assert products(adapted, backward=False) == products(plain, backward=False)
    assert products(plain, backward=True) == 2 * products(plain, backward=False)
    assert products(adapted, backward=True) == products(adapted, backward=False)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_sends_what_it_sent_and_sums_of_the_rank(sequence_parallel: bool) -> None:
    def collectives(graph):
        placed = place_block(graph.block("layer"), 4, sequence_parallel)
        return [item for op in placed.ops for item in (*op.before, *op.after)]

    wide = sorted(str(item.num_elements(1, 128)) for item in collectives(llama_graph()))
    found = [item.num_elements(1, 128) for item in collectives(with_adapters(llama_graph(), ADAPTERS))]
    narrow = [size for size in found if size == RANK * 128]
    assert sorted(str(size) for size in found if size != RANK * 128) == wide
    assert len(narrow) == 7  # one for each linear layer
    attention = place_block(with_adapters(llama_graph(), ADAPTERS).block("layer"), 4, sequence_parallel).ops
    assert all(not op.before for op in attention if op.op_class == OpClass.ATTENTION)


def test_runs_refuse_adapters_until_there_is_an_executor_for_them() -> None:
    graph, cluster = llama_graph(), gpu_cluster(2)
    workload = TrainingSpec(global_batch=4, seq_len=128, adapters=ADAPTERS, precision="fp32")
    plan = plan_from_strategy("dp=2", graph, cluster, workload)
    assert ("workload", "adapters") in [item.loc for item in workload_violations(plan, workload)]
    model = CostModel(graph, cluster, workload)
    assert model.params("layer", 1).trainable < model.params("layer", 1).frozen
