"""What the profiler runs, in which layout, and what it sees of memory. One process."""

from __future__ import annotations

import pytest
import torch

from profiler.measure.clock import timing
from profiler.measure.collectives import CollectiveSamples, spans_to_seconds
from profiler.measure.context import Worker
from profiler.measure.layouts import layout_at
from profiler.measure.operands import OperandMaker, integer_limit
from profiler.measure.operators import OperatorSamples, OperatorsJob, measure_operators
from profiler.measure.sizes import group_sizes, log_spaced
from profiler.measure.targets import resolve
from profiler.opset import Call, describe
from profiler.shapes import OpCall, op_calls
from specs.errors import InvalidInput
from specs.training import TrainingSpec
from tests.blocks import llama_graph

WORKLOAD = TrainingSpec(global_batch=4, seq_len=32, precision="fp32")  # type: ignore[arg-type]
GRAPH = llama_graph(layers=2, vocab=64, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128)
BLOCKS = {block.name: block for block in GRAPH.blocks}
BATCH, SEQ = 2, 32


@pytest.fixture(scope="module")
def calls() -> list[OpCall]:
    return op_calls(GRAPH, WORKLOAD, (1, 2), (BATCH,))


@pytest.fixture(scope="module")
def samples(calls: list[OpCall]) -> dict[str, OperatorSamples]:
    worker = Worker(0, 1, torch.device("cpu"), lambda done, total, message: None)
    found, _ = measure_operators(worker, OperatorsJob(tuple(calls), BLOCKS, "float32", 0.0, 1e9))
    return {call.key: item for call, item in zip(calls, found, strict=True)}


def test_every_op_of_the_graph_runs_forward_and_backward(calls: list[OpCall], samples: dict[str, OperatorSamples]) -> None:
    assert {key: item.error for key, item in samples.items() if item.error} == {}
    for call in calls:
        assert min(samples[call.key].forward_s) > 0
        assert bool(samples[call.key].backward_s) == call.needs_grad


@pytest.mark.parametrize("target", ["aten.linear.default", "aten.silu.default", "aten.mul.Tensor", "aten.add.Tensor"])
def test_what_autograd_keeps_is_what_the_op_table_says(
    target: str, calls: list[OpCall], samples: dict[str, OperatorSamples]
) -> None:
    found = [call for call in calls if call.target == target and all(tensor.requires_grad for tensor in call.inputs)]
    assert found
    for call in found:
        rule = describe(Call(call.target, call.inputs, call.outputs, call.args, call.kwargs))
        held = samples[call.key].footprint
        assert held is not None
        assert (held.saved_inputs, held.saved_outputs) == (rule.saved_inputs, rule.saved_outputs)
        assert held.saved_extra_bytes == rule.saved_extra_bytes
        assert held.forward_workspace_bytes == 0


def test_attention_keeps_its_operands_result_and_row_sums(calls: list[OpCall], samples: dict[str, OperatorSamples]) -> None:
    call = next(call for call in calls if "attention" in call.target and call.place.tp == 1)
    held = samples[call.key].footprint
    assert held is not None
    assert (held.saved_inputs, held.saved_outputs) == ((0, 1, 2), (0,))
    assert held.saved_extra_bytes == BATCH * 4 * SEQ * 4


def test_loss_keeps_log_probabilities(calls: list[OpCall], samples: dict[str, OperatorSamples]) -> None:
    call = next(call for call in calls if "cross_entropy" in call.target and call.place.tp == 1)
    held = samples[call.key].footprint
    assert held is not None
    assert held.saved_extra_bytes == pytest.approx(BATCH * SEQ * 64 * 4, abs=64)
    assert held.backward_workspace_bytes == pytest.approx(BATCH * SEQ * 64 * 4, abs=64)  # the gradient of the log-probabilities


def test_queries_reach_attention_transposed(calls: list[OpCall]) -> None:
    call = next(call for call in calls if "attention" in call.target and call.place.tp == 1)
    layout = layout_at(BLOCKS, call.place, "float32", "cpu")
    by_rows = (SEQ * 64, 16, 64, 1)  # (B, S, H, D) in memory, seen as (B, H, S, D)
    assert layout.inputs[0] == by_rows
    assert layout.output_grads[0] == by_rows
    operands = OperandMaker(torch.device("cpu")).make(call, layout)
    assert operands.tensors[0].stride() == by_rows
    assert operands.tensors[0].shape == (BATCH, 4, SEQ, 16)
    assert operands.output_grads[0].stride() == by_rows


def test_operands_are_random_and_indices_valid(calls: list[OpCall]) -> None:
    call = next(call for call in calls if "embedding" in call.target and call.place.tp == 2)
    layout = layout_at(BLOCKS, call.place, "float32", "cpu")
    operands = OperandMaker(torch.device("cpu")).make(call, layout)
    table, ids = operands.tensors
    assert table.shape == (32, 64)  # half of the vocabulary
    assert integer_limit(call, 1) == 32
    assert int(ids.max()) < 32
    assert float(table.detach().std()) == pytest.approx(1.0, abs=0.2)
    assert operands.wanted == [table]


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "aten.from_file.default", "aten.no_such_op.default", "prims.add.default", "aten.__class__.mro",
        "aten.add_.Tensor2", "aten.copy_.default",
    ],
)  # fmt: skip
def test_only_plain_aten_ops_are_resolved(target: str) -> None:
    with pytest.raises(InvalidInput, match="is not run"):
        resolve(target)


def test_an_op_that_fails_is_named_and_left_out(calls: list[OpCall]) -> None:
    good = next(call for call in calls if call.target == "aten.silu.default")
    wrong = OpCall("bad", "aten.mm.default", good.op_class, good.inputs, good.outputs, ({"ref": 0}, {"ref": 0}), {}, good.place)
    large = OpCall("large", good.target, good.op_class, good.inputs, good.outputs, good.args, good.kwargs, good.place)
    worker = Worker(0, 1, torch.device("cpu"), lambda done, total, message: None)
    (failed, ran), _ = measure_operators(worker, OperatorsJob((wrong, good), BLOCKS, "float32", 0.0, 1e9))
    assert failed.error is not None
    assert ran.error is None
    (skipped,), _ = measure_operators(worker, OperatorsJob((large,), BLOCKS, "float32", 0.0, 1000.0))
    assert skipped.error is not None
    assert "needs about" in skipped.error


def test_percentiles() -> None:
    summary = timing([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (summary.p10_s, summary.median_s, summary.p90_s, summary.samples) == (2.0, 6.0, 10.0, 11)


def test_a_collective_lasts_from_the_last_start_to_the_last_end() -> None:
    ranks = [
        CollectiveSamples("all_reduce", 2, 1024, ((0.0, 3.0), (10.0, 12.0)), 0),
        CollectiveSamples("all_reduce", 2, 1024, ((1.0, 2.5), (10.5, 12.5)), 0),
    ]
    assert spans_to_seconds(ranks) == [2.0, 2.0]
    other_group = [CollectiveSamples("all_reduce", 2, 1024, ((0.0, 5.0), (0.0, 1.0)), 1)] * 2
    assert spans_to_seconds([*ranks, *other_group]) == [5.0, 2.0]


def test_sizes() -> None:
    assert log_spaced(1024, 1024 * 64, 4, 256) == (1024, 4096, 16384, 65536)
    assert log_spaced(1024, 10, 4, 256) == (1024,)
    assert group_sizes(2) == (2,)
    assert group_sizes(4) == (2, 3, 4)
    assert group_sizes(8) == (2, 4, 8)
