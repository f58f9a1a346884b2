"""Which ops are measured, and under which key."""

from __future__ import annotations

import subprocess
import sys

import pytest

from profiler.opset import OpClass
from profiler.placement import place_block
from profiler.shapes import (
    call_arguments,
    default_micro_batches,
    default_tps,
    degrees_of,
    grad_add_key,
    op_calls,
    record_key,
)
from specs.plan import Mesh, Pipeline, Plan, Stage
from specs.training import TrainingSpec
from tests.blocks import llama_graph

WORKLOAD = TrainingSpec(global_batch=16, seq_len=64, precision="fp32")  # type: ignore[arg-type]
GRAPH = llama_graph(layers=2, vocab=256, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_op_that_computes_is_measured(tp: int, sequence_parallel: bool) -> None:
    known = {call.key for call in op_calls(GRAPH, WORKLOAD, (1, 2), (1, 4))}
    for block in GRAPH.blocks:
        for op in place_block(block, tp, sequence_parallel).ops:
            for batch in (1, 4):
                key = record_key(op, batch, 64, "float32")
                assert (key in known) == (op.op_class != OpClass.VIEW), key


def test_like_ops_are_measured_once() -> None:
    calls = op_calls(GRAPH, WORKLOAD, (1,), (2,))
    keys = [call.key for call in calls]
    assert len(keys) == len(set(keys))
    linears = [call for call in calls if call.op_class == OpClass.GEMM]
    # q and o, k and v, gate and up share their shapes; down and the head stand alone
    assert sorted(call.inputs[1].shape for call in linears) == [(32, 64), (64, 64), (64, 128), (128, 64), (256, 64)]


def test_keys_are_stable() -> None:
    (key,) = [call.key for call in op_calls(GRAPH, WORKLOAD, (1,), (2,)) if call.target == "aten.silu.default"]
    assert key == 'aten.silu.default|float32[2,64,128]|[["%"],[]]'
    assert grad_add_key(10, "float32") == 'aten.add_.Tensor|float32[10];float32[10]|[["%","%"],[]]'


def test_compute_dtype_and_gradients_are_in_the_call() -> None:
    bf16 = TrainingSpec(global_batch=4, seq_len=64)
    calls = {call.target: call for call in op_calls(GRAPH, bf16, (1,), (1,))}
    embedding = calls["aten.embedding.default"]
    assert [tensor.dtype for tensor in embedding.inputs] == ["bfloat16", "int64"]
    assert [tensor.requires_grad for tensor in embedding.inputs] == [True, False]
    assert embedding.needs_grad


def test_arguments_name_tensors_by_position() -> None:
    op = place_block(GRAPH.block("layer")).ops[0]
    assert call_arguments(op, 2, 64) == (({"ref": 0}, [64], {"ref": 1}), {})


def test_sequence_parallel_needs_a_divisible_sequence() -> None:
    odd = TrainingSpec(global_batch=4, seq_len=63, precision="fp32")  # type: ignore[arg-type]
    norms = {call.inputs[0].shape for call in op_calls(GRAPH, odd, (2,), (1,)) if call.op_class == OpClass.NORM}
    assert norms == {(1, 63, 64)}


def test_default_degrees() -> None:
    assert default_micro_batches(WORKLOAD) == (1, 2, 4, 8)
    assert default_micro_batches(WORKLOAD.replace(global_batch=12)) == (1, 2, 4)
    assert default_micro_batches(WORKLOAD.replace(micro_batches=(3,))) == (3,)
    assert default_tps(GRAPH, 4) == (1, 2, 4)


def test_degrees_of_plans() -> None:
    stage = Stage(devices=(0, 1), first_unit=0, num_units=4, mesh=Mesh(tp=2), sequence_parallel=True)
    plan = Plan(global_batch=16, seq_len=64, pipelines=(Pipeline(stages=(stage,), micro_batch=4, num_micro_batches=4),))
    assert degrees_of([plan]) == ((2,), (4,), (False, True))


@pytest.mark.parametrize("module", ["profiler.shapes", "profiler.store", "profiler.interpolate", "profiler.fingerprint"])
def test_what_the_simulator_uses_is_free_of_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
