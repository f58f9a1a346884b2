"""Memory of a rehearsed step on fake tensors against the simulator's memory model."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from executor.dry_run import DryRunReport, dry_run
from executor.rehearsal import shortened
from profiler.capture import capture_config
from simulator.cost_model import CostModel
from simulator.rank_memory import plan_memory
from specs.graph import ModelGraph
from specs.plan import Plan, RecomputeMode
from specs.training import TrainingSpec
from tests.distributed_helpers import run_apart
from tests.plans import gpu_cluster, make_plan

pytestmark = [pytest.mark.timeout(120)]

SEQ_LEN = 256
TOLERANCE = 0.05
FULL = RecomputeMode.FULL
LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 7, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 2000, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 2000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


GPT3 = {
    "model_type": "gpt2", "n_embd": 12288, "n_layer": 48, "n_head": 96, "vocab_size": 51200, "n_positions": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip


@lru_cache(maxsize=4)
def captured(name: str) -> ModelGraph:
    return capture_config({"llama": LLAMA, "mixtral": MIXTRAL, "gpt3": GPT3}[name], name)


def rehearsed(plan: Plan, graph: ModelGraph, rank: int, precision: str) -> tuple[DryRunReport, float]:
    """The rank's dry run, and the peak that the memory model gives it."""
    workload = TrainingSpec.parse({"global_batch": plan.global_batch, "seq_len": plan.seq_len, "precision": precision})
    report = run_apart(_dry_run, plan, graph, rank, workload, timeout_s=100.0)
    size = max(8, plan.world_size)
    model = CostModel(graph, gpu_cluster(size, nodes=size // 8), workload)
    return report, plan_memory(model, plan)[report.pp].peak_bytes


def _dry_run(plan: Plan, graph: ModelGraph, rank: int, workload: TrainingSpec) -> DryRunReport:
    return dry_run(plan, graph, rank, workload, memory=True)


CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "one_rank": ("llama", "fp32", 0, {"num_micro_batches": 4}),
    "ddp_bf16": ("llama", "bf16_mixed", 0, {"dp": 2}),
    "zero1": ("llama", "fp32", 0, {"dp": 4, "zero": 1, "num_micro_batches": 2}),
    "zero2_uneven": ("llama", "fp32", 0, {"dp": 2, "zero": 2, "batch_share": (4, 1), "num_micro_batches": 2}),
    "zero3_recompute": ("llama", "bf16_mixed", 0, {"dp": 4, "zero": 3, "recompute": FULL}),
    "tp_sequence_parallel": ("llama", "fp32", 1, {"tp": 4, "sequence_parallel": True}),
    "pp_1f1b": ("llama", "fp32", 1, {"pp": 3, "micro_batch": 2, "num_micro_batches": 12}),
    "pp_zb_v": ("llama", "fp32", 0, {"pp": 2, "micro_batch": 2, "num_micro_batches": 8, "schedule": "zb_v", "chunks": 2}),
    "ring": ("llama", "fp32", 1, {"cp": 2}),
    "experts": ("mixtral", "fp32", 0, {"dp": 4, "ep": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rehearsed_step_fills_memory_as_modelled(name: str) -> None:
    model, precision, rank, choices = CASES[name]
    graph = captured(model)
    plan = make_plan(graph, seq_len=SEQ_LEN, **{"micro_batch": 4, **choices})
    report, modelled = rehearsed(plan, graph, rank, precision)
    assert report.memory is not None
    assert modelled == pytest.approx(report.memory.peak_bytes, rel=TOLERANCE)
    assert report.param_bytes < report.memory.resident_bytes < report.memory.peak_bytes


def test_a_rank_of_16384() -> None:
    graph = captured("gpt3")
    plan = make_plan(graph, seq_len=2048, pp=8, tp=8, dp=256, zero=1, sequence_parallel=True, recompute=FULL, num_micro_batches=64)
    report, modelled = rehearsed(plan, graph, 10_239, "bf16_mixed")
    assert (report.world_size, report.pp, report.dp, report.tp) == (16_384, 4, 255, 7)
    assert report.memory is not None
    assert modelled == pytest.approx(report.memory.peak_bytes, rel=TOLERANCE)


def test_micro_batches_beyond_a_full_pipeline_are_left_out() -> None:
    graph = captured("llama")
    plan = make_plan(graph, seq_len=SEQ_LEN, pp=2, dp=2, num_micro_batches=64, schedule="interleaved", chunks=3)
    short = shortened(plan)
    assert short.pipelines[0].num_micro_batches == 8
    assert short.global_batch == 16
    assert shortened(make_plan(graph, seq_len=SEQ_LEN, dp=2, num_micro_batches=2)).pipelines[0].num_micro_batches == 2
