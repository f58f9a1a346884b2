"""User cases of theme D: combinations that frameworks refuse only at run time, here refused before, all rules at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from planner.exporters import export_plan
from planner.importers import read_config
from planner.plan_diff import diff_plans
from planner.strategy import plan_from_strategy
from profiler.sources import load_model, model_from_document
from specs.errors import InvalidInput, Violation
from specs.graph import ModelGraph
from specs.training import TrainingSpec
from tests.plans import gpu_cluster

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 448, "intermediate_size": 896, "num_hidden_layers": 4,
    "num_attention_heads": 28, "num_key_value_heads": 28, "tie_word_embeddings": False,
}  # fmt: skip


@cache
def model(**changes: Any) -> ModelGraph:
    return model_from_document({**LLAMA, **changes}, name="case")


def violations(strategy: str, graph: ModelGraph, *, devices: int = 8, nodes: int = 1, batch: int = 64) -> dict[str, Violation]:
    workload = TrainingSpec(global_batch=batch, seq_len=128)
    with pytest.raises(InvalidInput) as caught:
        plan_from_strategy(strategy, graph, gpu_cluster(devices, nodes=nodes), workload)
    return {violation.code: violation for violation in caught.value.violations}


def test_u037_heads_that_tp_does_not_divide() -> None:
    found = violations("tp=8", model())
    assert found["heads_divisible_by_tp"].allowed == [1, 2, 4, 7, 14, 28]
    grouped = violations("tp=7", model(num_key_value_heads=4), devices=7)
    assert grouped["kv_heads_divisible_by_tp"].allowed == [1, 2, 4]
    assert grouped["kv_heads_divisible_by_tp"].nearest == 4


def test_u042_u044_every_layer_has_a_place() -> None:
    """30 layers on 4 stages and 40 on 16: uneven stages, and what Megatron-LM needs to be told of them."""
    for layers, pp, devices in ((30, 4, 4), (40, 16, 16)):
        graph = model(num_hidden_layers=layers)
        workload = TrainingSpec(global_batch=64, seq_len=128)
        plan = plan_from_strategy(f"pp={pp}", graph, gpu_cluster(devices, nodes=max(1, devices // 8)), workload)
        counts = [stage.num_units for stage in plan.pipelines[0].stages]
        assert sum(counts) == layers + 2
        assert min(counts) >= 1
        text = export_plan(plan, "megatron", graph=graph, workload=workload).files["megatron.args"]
        read = read_config(text, "megatron")
        assert f"split={','.join(map(str, counts))}" in read.strategy
        bare = f"--num-layers {layers} --pipeline-model-parallel-size {pp} --micro-batch-size 1"
        with pytest.raises(InvalidInput, match=r"layers on .* stages"):
            read_config(bare, "megatron")


def test_u047_fewer_micro_batches_than_stages() -> None:
    found = violations("pp=8 micro_batch=16", model(num_hidden_layers=8))
    assert "micro_batches_below_stages" in found
    assert "micro_batch 8 gives 8" in found["micro_batches_below_stages"].message


def test_u049_interleaving_names_what_would_work() -> None:
    found = violations("pp=6 schedule=interleaved chunks=2", model(num_hidden_layers=12), devices=6, batch=3)
    message = found["micro_batches_below_stages"].message
    assert "3 < 6" in message
    assert "a global batch of 6 would do" in message


def test_u051_all_rules_at_once() -> None:
    found = violations("tp=3 micro_batch=5 zero=3 pp=2", model(), devices=6)
    assert {"heads_divisible_by_tp", "zero_3_with_pipeline", "batch_divisible_by_micro_batch"} <= set(found)


def test_u053_deepspeed_has_no_pipeline_in_its_json() -> None:
    workload = TrainingSpec(global_batch=64, seq_len=128)
    plan = plan_from_strategy("pp=2 dp=4 zero=2", model(), gpu_cluster(8), workload)
    with pytest.raises(InvalidInput, match="zero <= 1: gradients stay for all micro-batches"):
        export_plan(plan, "deepspeed", graph=model(), workload=workload)


def test_u054_padded_vocabulary() -> None:
    graph = model(vocab_size=151_669)
    workload = TrainingSpec(global_batch=64, seq_len=128)
    plan = plan_from_strategy("tp=4 dp=2", graph, gpu_cluster(8), workload)
    notes = " ".join(export_plan(plan, "megatron", graph=graph, workload=workload).notes)
    assert "151,669 to 152,064" in notes
    assert f"{(152_064 - 151_669) * 448 * 2 / 1e6:.1f} M more parameters" in notes


def test_u057_the_global_batch_is_asked_for_and_never_changed() -> None:
    with pytest.raises(InvalidInput) as caught:
        TrainingSpec.parse({"seq_len": 128})
    assert caught.value.violations[0].loc == ("global_batch",)
    for strategy in ("dp=8", "tp=2 dp=4", "pp=2 dp=4"):
        plan = plan_from_strategy(strategy, model(), gpu_cluster(8), TrainingSpec(global_batch=64, seq_len=128))
        assert plan.global_batch == 64
        assert plan.pipelines[0].sequences() == 64


def test_u121_size_of_a_checkpoint() -> None:
    """Llama 3 8B in float32 with two moments: 96.4 GB."""
    graph = load_model("llama-3-8b")
    workload = TrainingSpec.parse({"global_batch": 8, "seq_len": 128, "precision": "fp32"})
    plan = plan_from_strategy("dp=8 zero=3", graph, gpu_cluster(8), workload)
    found = diff_plans(plan, plan, graph, workload)
    assert found.checkpoint_bytes == pytest.approx(96.4e9, rel=0.02)
