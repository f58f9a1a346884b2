"""Reported cases about fitting (U001 to U014): verdicts with their numbers, what would help, and how full is too full."""

from __future__ import annotations

import math

import pytest

from planner.search import SearchOptions, search
from planner.strategy import parse_strategy, plan_from_strategy
from simulator.cost_model import CostModel
from simulator.memory_report import memory_report
from simulator.predict import predict
from simulator.rank_memory import fill, plan_memory
from specs.answer import BrokenLimit, PlanAnswer
from specs.prediction import MemoryPrediction
from specs.training import Adapters, LengthBin, Optimizer, Precision, TrainingSpec
from tests.case_models import case_graph, cluster_of

FP32_GRADS = "bf16_mixed_fp32_grad"  # 18 bytes per parameter
# What the driver leaves of the label, as the table of cases has it.
USABLE_80G, USABLE_24G = 85.0e9, 25.4e9


def memory_limit(answer: PlanAnswer) -> BrokenLimit:
    assert answer.status == "infeasible"
    assert answer.plan is None
    (limit,) = answer.limits
    assert limit.limit == "memory"
    return limit


def peak(graph_name: str, strategy: str, workload: TrainingSpec, *cluster: object) -> MemoryPrediction:
    """The fullest rank of a strategy."""
    model = CostModel(case_graph(graph_name), cluster_of(*cluster), workload)  # type: ignore[arg-type]
    plan = plan_from_strategy(strategy, model.graph, model.cluster, workload, cost_model=model)
    return max(plan_memory(model, plan), key=fill)


def test_u001_full_fine_tune_of_90b_on_8_a100() -> None:
    """Infeasible: 177 GB of states a device against 80; 18 devices for states alone; 1.06 TB of host memory to offload Adam.

    The graph is the text part of Llama-3.2-90B-Vision (87.7 of 88.6 G parameters)."""
    graph = case_graph("llama-3.2-90b-text")
    assert graph.num_params() == pytest.approx(88.6e9, rel=0.02)
    answer = search(graph, cluster_of("a100_sxm_80gb", 8), TrainingSpec(global_batch=8, seq_len=2048))
    limit = memory_limit(answer)
    assert limit.state_bytes == pytest.approx(177e9, rel=0.02)
    assert limit.devices_for_states is not None
    assert limit.devices_for_states == 18
    assert limit.offload_host_bytes == pytest.approx(1.06e12, rel=0.02)
    assert limit.available is not None
    assert limit.available < USABLE_80G < limit.state_bytes
    text = next(item for item in limit.relaxations if "devices of this kind" in item)
    assert int(text.split()[2]) >= limit.devices_for_states
    assert "host memory" in limit.relaxations[-1]  # offload is the last resort
    assert "175." in limit.message  # GB a device, in words


def test_u001_the_count_that_is_named_is_enough() -> None:
    graph, workload = case_graph("llama-3.2-90b-text"), TrainingSpec(global_batch=24, seq_len=2048)
    text = next(
        item for item in memory_limit(search(graph, cluster_of("a100_sxm_80gb", 8), workload)).relaxations if "devices of" in item
    )
    devices = int(text.split()[2])
    enough = search(graph, cluster_of("a100_sxm_80gb", 8, devices // 8), workload, options=SearchOptions(top=0, time_limit_s=20))
    assert enough.plan is not None


@pytest.mark.parametrize(
    ("frozen", "weights_gb", "feasible"), [(None, 34.5, False), ("int4", 8.6, True)], ids=["bf16 base", "4-bit base"]
)
def test_u003_lora_of_70b_on_four_3090(frozen: str | None, weights_gb: float, feasible: bool) -> None:
    """Frozen bf16 weights alone are 34.5 GB a device: infeasible; a 4-bit base is 8.6 GB: QLoRA with FSDP fits."""
    workload = TrainingSpec(global_batch=4, seq_len=2048, adapters=Adapters(rank=16), precision=Precision(frozen_dtype=frozen))
    graph, cluster = case_graph("llama-2-70b"), cluster_of("rtx_3090", 4)
    assert cluster.device_type("rtx_3090").memory_bytes == pytest.approx(USABLE_24G, rel=0.01)
    states = memory_report(CostModel(graph, cluster, workload)).states[3]
    held = next(term for term in states.terms if term.what == "frozen weights")
    assert held.device_bytes == pytest.approx(weights_gb * 1e9, rel=0.02)
    answer = search(graph, cluster, workload, options=SearchOptions(top=2))
    if feasible:
        assert answer.prediction is not None
        sharded = search(graph, cluster, workload, options=SearchOptions(strategy="zero=3 tp=1 pp=1", top=0))
        assert sharded.prediction is not None  # QLoRA with FSDP
        assert answer.prediction.step_time_s <= sharded.prediction.step_time_s
    else:
        assert any("4 bits" in text for text in memory_limit(answer).relaxations)


def test_u003_only_adapters_have_gradients_and_optimizer_states() -> None:
    workload = TrainingSpec(global_batch=4, seq_len=2048, adapters=Adapters(rank=16))
    model = CostModel(case_graph("llama-2-70b"), cluster_of("rtx_3090", 4), workload)
    report = memory_report(model)
    # rank x (in + out) of q, k, v, o, gate, up, down of 80 layers
    sizes = ((8192, 8192), (8192, 1024), (8192, 1024), (8192, 8192), (8192, 28672), (8192, 28672), (28672, 8192))
    assert report.num_trainable == 80 * 16 * sum(a + b for a, b in sizes)
    base = case_graph("llama-2-70b").num_params()
    assert report.num_params == base + report.num_trainable
    frozen = next(term for term in report.states[0].terms if term.what == "frozen weights")
    assert frozen.device_bytes == 2 * base
    whole = report.states[0].device_bytes
    assert whole == pytest.approx(2 * base + 16 * report.num_trainable)


def test_u005_neox_20b_on_8_a100_by_zero_stage() -> None:
    """ZeRO-2 holds 82.2 of about 85 GB before activations: no. ZeRO-3 46.2 GB: yes. Tensor x pipeline with ZeRO-1 is listed too."""
    graph, cluster = case_graph("gpt-neox-20b"), cluster_of("a100_sxm_80gb", 8)
    workload = TrainingSpec(global_batch=16, seq_len=2048, precision=FP32_GRADS)
    states = {item.zero: item.device_bytes for item in memory_report(CostModel(graph, cluster, workload)).states}
    assert states[2] == pytest.approx(82.2e9, rel=0.02)
    assert states[3] == pytest.approx(46.2e9, rel=0.02)
    two = search(graph, cluster, workload, options=SearchOptions(strategy="zero=2 tp=1 pp=1", top=0))
    limit = memory_limit(two)
    assert "host memory" in limit.relaxations[-1]
    assert "leave 'zero' to the search" in limit.relaxations
    three = search(graph, cluster, workload, options=SearchOptions(strategy="zero=3 tp=1 pp=1 recompute=full", top=0))
    assert three.prediction is not None
    assert three.prediction.flags == ()
    free = search(graph, cluster, workload, options=SearchOptions(top=8))
    assert free.plan is not None
    listed = [parse_strategy(item.strategy) for item in free.alternatives]
    assert any(item.zero == 1 and (item.tp > 1 or item.pp > 1) for item in [parse_strategy(free.plan.strategy), *listed])


def test_u007_neox_20b_on_24_a100_40g() -> None:
    """PP 6 x TP 4 or better is found; states 15.4 GB a device; 44 layers lie on 6 stages as 7s and 8s, none dropped."""
    graph, cluster = case_graph("gpt-neox-20b"), cluster_of("a100_sxm_40gb", 8, 3)
    workload = TrainingSpec(global_batch=96, seq_len=2048, precision=FP32_GRADS)
    states = memory_report(CostModel(graph, cluster, workload)).states[3].device_bytes
    assert states == pytest.approx(15.4e9, rel=0.02)
    forced = search(graph, cluster, workload, options=SearchOptions(strategy="pp=6 tp=4 cp=1 schedule=1f1b", top=0))
    assert forced.plan is not None
    assert forced.prediction is not None
    units = [stage.num_units for stage in forced.plan.pipelines[0].stages]
    layers = [units[0] - 1, *units[1:-1], units[-1] - 1]  # embedding and head are units of the ends
    assert sum(layers) == 44
    assert "performance_risk" not in forced.prediction.flags
    given = "pp=6 tp=4 micro_batch=1 sequence_parallel=true split=9,8,7,7,7,8"
    even = predict(graph, cluster, workload, plan_from_strategy(given, graph, cluster, workload))
    assert "does_not_fit" not in even.flags  # 8/8/7/7/7/7 layers run as well
    assert forced.prediction.step_time_s <= even.step_time_s
    free = search(graph, cluster, workload, options=SearchOptions(top=0, time_limit_s=30))
    assert free.prediction is not None
    assert free.prediction.step_time_s <= forced.prediction.step_time_s


def test_u011_allocated_and_reserved_are_told_apart() -> None:
    """Llama-2-70B, FSDP, pure bf16, 16 A100-80G: 42 GB allocated (±10 %); the margin behind the reserved figure is in the answer.

    The report gives no batch: one sequence of 4,096 tokens a device with activation checkpointing, its recipe's default."""
    workload = TrainingSpec(global_batch=16, seq_len=4096, precision="bf16_pure", optimizer=Optimizer(state_dtype="bfloat16"))
    graph, cluster = case_graph("llama-2-70b"), cluster_of("a100_sxm_80gb", 8, 2)
    model = CostModel(graph, cluster, workload)
    plan = plan_from_strategy("zero=3 micro_batch=1 recompute=full", graph, cluster, workload, cost_model=model)
    report = memory_report(model, plan)
    (memory,) = report.ranks
    assert memory.peak_bytes == pytest.approx(42e9, rel=0.10)
    assert memory.margin_fraction == workload.limits.memory_margin_fraction > 0
    assert memory.reserved_bytes == pytest.approx(memory.peak_bytes * (1 + memory.margin_fraction) + memory.baseline_bytes)
    assert any("allocated" in note and "reserved" in note and "6%" in note for note in report.notes)
    assert any("expandable_segments:True" in note for note in report.notes)
    assert predict(graph, cluster, workload, plan, cost_model=model).memory == memory


@pytest.mark.parametrize(("filled", "risky"), [(0.97, True), (0.93, False)])
def test_u012_above_95_percent_is_a_performance_risk(filled: float, risky: bool) -> None:
    """A mixture of experts that fits with 3 % to spare is flagged: the allocator would free and retry in every step."""
    graph, workload = case_graph("mixtral-8x7b"), TrainingSpec(global_batch=64, seq_len=4096)
    strategy = "pp=1 tp=8 cp=1 ep=1 dp=8 zero=1 micro_batch=1 sequence_parallel=true recompute=full"
    memory = peak("mixtral-8x7b", strategy, workload, "h100_sxm", 8, 8)
    assert memory.reserved_bytes is not None
    tight = cluster_of("h100_sxm", 8, 8, free_memory_bytes=memory.reserved_bytes / filled)
    answer = search(graph, tight, workload, options=SearchOptions(strategy=strategy, top=0))
    assert answer.prediction is not None
    assert ("performance_risk" in answer.prediction.flags) is risky
    assert any(line.startswith("performance risk") for line in answer.explanation) is risky
    full = cluster_of("h100_sxm", 8, 8, free_memory_bytes=memory.reserved_bytes / 1.01)
    assert search(graph, full, workload, options=SearchOptions(strategy=strategy, top=0)).status == "infeasible"


def test_u014_memory_is_that_of_the_longest_sequence() -> None:
    """Lengths vary: the peak is that of the longest, not of the mean, and the answer says so."""
    bins = (LengthBin(length=256, weight=0.9), LengthBin(length=2048, weight=0.1))
    graph, cluster = case_graph("pythia-12b"), cluster_of("a100_sxm_40gb", 4)
    strategy = "zero=3 micro_batch=8 recompute=full"

    def of(**lengths: object) -> tuple[float, list[str]]:
        workload = TrainingSpec(global_batch=32, **lengths)  # type: ignore[arg-type]
        found = predict(graph, cluster, workload, plan_from_strategy(strategy, graph, cluster, workload))
        return found.memory.peak_bytes, [item.what for item in found.assumptions]

    mixed, said = of(seq_len_histogram=bins)
    assert mixed == of(seq_len=2048)[0]
    mean = math.ceil(0.9 * 256 + 0.1 * 2048)
    assert mixed > 1.02 * of(seq_len=mean)[0]
    assert any("longest sequence" in what for what in said)


def test_u014_states_double_from_8_to_4_devices() -> None:
    workload = TrainingSpec(global_batch=8, seq_len=2048)

    def states(devices: int) -> float:
        model = CostModel(case_graph("pythia-12b"), cluster_of("a100_sxm_40gb", devices), workload)
        return memory_report(model).states[3].device_bytes

    assert states(4) == pytest.approx(2 * states(8))
    options = SearchOptions(strategy="zero=3 tp=1 pp=1", top=0)
    answer = search(case_graph("pythia-12b"), cluster_of("a100_sxm_40gb", 4), workload, options=options)
    assert memory_limit(answer).state_bytes == pytest.approx(states(4))
