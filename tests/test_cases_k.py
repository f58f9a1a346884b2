"""Reported cases about long context, logits and recomputation (U106 to U112): what fills the memory is named with its bytes."""

from __future__ import annotations

import pytest

from planner.search import SearchOptions, search
from planner.strategy import plan_from_strategy
from simulator.cost_model import CostModel
from simulator.memory_report import memory_report
from simulator.predict import predict
from specs.memory import MemoryReport
from specs.plan import RecomputeMode
from specs.training import Adapters, Precision, TrainingSpec
from tests.case_models import case_graph, cluster_of


def report_of(name: str, strategy: str, workload: TrainingSpec, *cluster: object) -> MemoryReport:
    model = CostModel(case_graph(name), cluster_of(*cluster), workload)  # type: ignore[arg-type]
    return memory_report(model, plan_from_strategy(strategy, model.graph, model.cluster, workload, cost_model=model))


# --- U106, U108: logits ---------------------------------------------------------------------------------------------------


def test_u106_logits_of_a_256k_vocabulary_dominate() -> None:
    """4 x 4,096 x 256,000: 8.4 GB in bf16, 16.8 GB in float32 and as much again for its gradient; 1.0 and 2.1 GB at 32 k words."""
    workload = TrainingSpec(global_batch=16, seq_len=4096, adapters=Adapters(rank=8))
    strategy = "micro_batch=4 recompute=full"
    small = report_of("gemma-2b-sizes", strategy, workload, "a100_sxm_80gb", 4)
    large = report_of("llama-2-7b", strategy, workload, "a100_sxm_80gb", 4)
    assert small.loss is not None
    assert large.loss is not None
    assert case_graph("gemma-2b-sizes").num_params() == pytest.approx(2.506e9, rel=0.02)
    assert small.loss.logits_bytes == pytest.approx(8.4e9, rel=0.02)
    assert small.loss.log_probabilities_bytes == pytest.approx(16.8e9, rel=0.02)
    assert small.loss.gradient_bytes == pytest.approx(16.8e9, rel=0.02)
    assert large.loss.logits_bytes == pytest.approx(1.0e9, rel=0.05)  # 1.05 written as 1.0
    assert large.loss.log_probabilities_bytes == pytest.approx(2.1e9, rel=0.02)
    # the surprise: the model a third as large needs more
    (gemma,), (llama,) = small.ranks, large.ranks
    assert gemma.peak_bytes > 1.5 * llama.peak_bytes
    assert small.loss.total_bytes > 0.8 * gemma.peak_bytes
    assert any("logits" in note and "256000" in note for note in small.notes)
    assert gemma.saved_by_class["loss"] > 0.9 * sum(gemma.saved_by_class.values())


@pytest.mark.parametrize("vocab_graph", ["llama-2-7b", "llama-3.1-70b"])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_u108_bytes_of_a_full_loss(vocab_graph: str, micro_batch: int) -> None:
    """B x S x V x (2 + 4 + 4)."""
    workload = TrainingSpec(global_batch=8, seq_len=4096)
    graph = case_graph(vocab_graph)
    loss = memory_report(CostModel(graph, cluster_of("h100_sxm", 8), workload), micro_batch=micro_batch).loss
    assert loss is not None
    assert loss.total_bytes == micro_batch * 4096 * graph.attributes["vocab"] * (2 + 4 + 4)


def test_u108_the_loss_implementation_is_part_of_the_strategy() -> None:
    """'loss=fused' in a strategy makes the plan, its prediction and the search use it; what is not said is the workload's."""
    graph, cluster, workload = case_graph("llama-2-7b"), cluster_of("h100_sxm", 8), TrainingSpec(global_batch=64, seq_len=4096)
    full, fused = (
        predict(
            graph, cluster, workload, plan_from_strategy(f"zero=3 micro_batch=8 recompute=full{loss}", graph, cluster, workload)
        )
        for loss in ("", " loss=fused")
    )
    assert full.memory.saved_by_class["loss"] >= 8 * 4096 * 32000 * 4  # the full loss sets the peak, the fused one does not
    assert "loss" not in fused.memory.saved_by_class
    assert fused.memory.peak_bytes < full.memory.peak_bytes
    answer = search(graph, cluster, workload, options=SearchOptions(strategy="loss=fused zero=3 tp=1 pp=1 recompute=full", top=0))
    assert answer.plan is not None
    assert answer.plan.loss_kernel == "fused"
    assert "loss=fused" in answer.plan.strategy
    again = predict(graph, cluster, workload, answer.plan)
    assert again.memory == answer.prediction.memory  # type: ignore[union-attr]


def test_a_loss_in_place_keeps_the_logits_once() -> None:
    """2 x 4,096 x 32,000 logits in bf16 and a sum per row, against float32 copies of them and of their gradient."""
    workload, graph, cluster = TrainingSpec(global_batch=16, seq_len=4096), case_graph("llama-2-7b"), cluster_of("h100_sxm", 8)
    kept = {}
    for kernel in ("full", "in_place", "fused"):
        text = f"micro_batch=2 zero=3 recompute=full loss={kernel}"
        model = CostModel(graph, cluster, workload)
        plan = plan_from_strategy(text, graph, cluster, workload, cost_model=model)
        kept[kernel] = predict(graph, cluster, workload, plan)
    rows = 2 * 4096
    saved = {name: item.memory.saved_by_class.get("loss", 0.0) for name, item in kept.items()}
    assert saved["in_place"] - saved["fused"] <= rows * (32000 * 2 + 4)
    peaks = [kept[name].memory.peak_bytes for name in ("fused", "in_place", "full")]
    assert peaks == sorted(peaks)
    assert peaks[1] < peaks[2]


def test_u108_a_fused_loss_is_named_where_it_is_what_would_fit() -> None:
    """Where the logits alone break the limit, the answer names the loss that does not."""
    workload = TrainingSpec(global_batch=16, seq_len=4096, adapters=Adapters(rank=8), micro_batches=(4,))
    answer = search(
        case_graph("gemma-2b-sizes"), cluster_of("rtx_4090", 4), workload, options=SearchOptions(strategy="tp=1 pp=1 cp=1")
    )
    (limit,) = answer.limits
    assert any("loss_kernel fused" in text for text in limit.relaxations)
    assert any("logits" in line for line in answer.explanation)


# --- U109: recompute with flash attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "saves"), [("flash", False), ("math", True)])
def test_u109_selective_recompute_saves_scores_that_flash_attention_never_keeps(kernel: str, saves: bool) -> None:
    """The 5 a s^2 b term is 0 with flash attention: selective recompute is no saver there and is flagged; without it is one."""
    workload = TrainingSpec(global_batch=8, seq_len=4096, attention_kernel=kernel)
    strategy = "tp=8 sequence_parallel=true micro_batch=1 recompute={}"
    kept, dropped = (
        report_of("llama-2-7b", strategy.format(mode), workload, "a100_sxm_80gb", 8) for mode in ("none", "selective:attention")
    )
    (before,), (after,) = kept.ranks, dropped.ranks
    drop = 1 - after.terms["activations"] / before.terms["activations"]
    scores = 32 / 8 * 4096 * 4096 * 2 * 32  # heads of a rank x s^2 x bf16 x layers
    if saves:
        assert before.terms["activations"] - after.terms["activations"] >= scores
        assert drop > 0.4
        assert "selective_recompute_saves_nothing" not in dropped.flags
    else:
        linear = 4 * 4096 * 4096 / 8 * 2 + 32 / 8 * 4096 * 4  # query, key, value, result; one statistic a row
        assert before.saved_by_class["attention"] == pytest.approx(32 * linear)  # no term in s^2
        assert drop < 0.05
        assert "selective_recompute_saves_nothing" in dropped.flags


@pytest.mark.parametrize(("kernel", "offered"), [("flash", False), ("math", True)])
def test_u109_the_planner_offers_it_only_where_it_saves(kernel: str, offered: bool) -> None:
    workload = TrainingSpec(global_batch=16, seq_len=8192, attention_kernel=kernel)
    options = SearchOptions(top=2, strategy="tp=1 pp=1 cp=1")
    answer = search(case_graph("llama-2-7b"), cluster_of("a100_sxm_80gb", 8), workload, options=options)
    tried = answer.search.space["recompute"]
    assert ("selective:attention" in tried) is offered
    assert {"none", "full"} <= set(tried)
    if offered:  # scores of 8,192 tokens do not fit beside a 7B model; dropping them alone costs least
        assert answer.plan is not None
        modes = {run.mode for stage in answer.plan.pipelines[0].stages for run in stage.recompute}
        assert modes == {RecomputeMode.SELECTIVE}


# --- U112: why the smaller model does not fit ---------------------------------------------------------------------------------


def test_u112_the_smaller_model_runs_out_and_the_answer_says_why() -> None:
    """20B mixture with unfused attention against a dense 32B with flash attention at 16 k: kernel and experts, not parameters."""
    workload = TrainingSpec(global_batch=8, seq_len=16384)
    strategy = "pp=2 micro_batch=1 zero=1"
    mixture, dense = case_graph("gpt-oss-20b-sizes"), case_graph("qwen3-32b-sizes")
    assert mixture.num_params() < 0.7 * dense.num_params()
    unfused = workload.replace(attention_kernel="math")
    small = report_of("gpt-oss-20b-sizes", strategy, unfused, "b200_sxm", 8)
    fused = report_of("gpt-oss-20b-sizes", strategy, workload, "b200_sxm", 8)
    large = report_of("qwen3-32b-sizes", strategy + " recompute=full", workload, "b200_sxm", 8)
    assert small.fits is False
    assert large.fits is True
    fullest = max(small.ranks, key=lambda rank: rank.peak_bytes)
    scores = 64 * 16384.0**2 * 2 * 12  # heads x s^2 x bf16 x layers of a stage, for one micro-batch
    assert fullest.saved_by_class["attention"] >= scores
    assert max(fullest.saved_by_class, key=lambda name: fullest.saved_by_class[name]) == "attention"
    assert any("not fused keeps its scores" in note for note in small.notes)
    assert any("activations are kept by attention" in note for note in small.notes)
    # with the same kernel, the mixture's grouped products come next in line
    rest = max(fused.ranks, key=lambda rank: rank.peak_bytes).saved_by_class
    assert rest["grouped_gemm"] > 2 * rest["attention"]
    answer = search(mixture, cluster_of("b200_sxm", 8), unfused, options=SearchOptions(strategy=strategy + " recompute=none tp=1"))
    (limit,) = answer.limits
    assert any("attention_kernel flash" in text for text in limit.relaxations)
    assert any("kept by attention" in line for line in answer.explanation)


def test_4_bit_base_is_said_to_be_counted_without_scales() -> None:
    workload = TrainingSpec(global_batch=4, seq_len=1024, adapters=Adapters(rank=8), precision=Precision(frozen_dtype="int4"))
    graph, cluster = case_graph("llama-2-7b"), cluster_of("rtx_3090", 2)
    found = predict(graph, cluster, workload, plan_from_strategy("zero=3", graph, cluster, workload))
    assert any("4-bit" in item.what for item in found.assumptions)
