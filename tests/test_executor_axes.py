"""Data parallelism with unlike shares, context and expert parallelism and their compositions: parity with one process, and the
bytes that the ranks exchange against those that the simulator charges."""

from __future__ import annotations

from typing import Any

import pytest

from executor.layout import Layout
from simulator.cost_model import CostModel
from simulator.predict import predict
from simulator.stage_cost import stage_cost
from specs.errors import InvalidInput
from specs.plan import Plan, RecomputeMode, RecomputeRun
from tests.executor_models import graph_of
from tests.executor_parity import SEQ_LEN, compare_with_reference, workload_for
from tests.plans import gpu_cluster, make_plan

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

FULL = RecomputeMode.FULL
UNEVEN = {"batch_share": (3, 1), "num_micro_batches": 2}
TWICE = {"micro_batch": 2, "num_micro_batches": 2}

TWO_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven_ddp": ("llama", {"dp": 2, **UNEVEN}),
    "uneven_zero1": ("llama", {"dp": 2, "zero": 1, **UNEVEN}),
    "uneven_zero2": ("gpt2", {"dp": 2, "zero": 2, "batch_share": (5, 3)}),
    "uneven_zero3": ("llama", {"dp": 2, "zero": 3, "recompute": FULL, **UNEVEN}),
    "ring": ("llama", {"cp": 2, **TWICE}),
    "ring_zero3": ("gpt2", {"cp": 2, "zero": 3, **TWICE}),
    "ring_recompute": ("llama", {"cp": 2, "recompute": FULL, **TWICE}),
    "ulysses": ("llama", {"cp": 2, "context_parallel": "ulysses", **TWICE}),
    "ulysses_positions": ("gpt2", {"cp": 2, "context_parallel": "ulysses", "zero": 1, **TWICE}),
    "experts": ("mixtral", {"dp": 2, "ep": 2, **TWICE}),
    "experts_zero1": ("mixtral", {"dp": 2, "ep": 2, "zero": 1, **TWICE}),
    "experts_zero3_recompute": ("mixtral", {"dp": 2, "ep": 2, "zero": 3, "recompute": FULL, **TWICE}),
    "experts_uneven": ("mixtral", {"dp": 2, "ep": 2, **UNEVEN}),
    "experts_ring": ("mixtral", {"cp": 2, "ep": 2, **TWICE}),
    "experts_split_over_tp_sequence_parallel": ("mixtral", {"tp": 2, "sequence_parallel": True, **TWICE}),
    "experts_whole_over_tp": ("mixtral", {"tp": 2, "ep": 2, "whole_experts": True, "sequence_parallel": True, **TWICE}),
}
FOUR_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ring_of_4": ("llama", {"cp": 4, **TWICE}),
    "ulysses_of_4_with_2_key_heads": ("llama", {"cp": 4, "context_parallel": "ulysses", **TWICE}),
    "dp_ring_zero2_uneven": ("llama", {"dp": 2, "cp": 2, "zero": 2, **UNEVEN}),
    "ring_tp_sequence_parallel": ("gpt2", {"cp": 2, "tp": 2, "sequence_parallel": True, **TWICE}),
    "ulysses_tp": ("llama", {"cp": 2, "tp": 2, "context_parallel": "ulysses", **TWICE}),
    "pp_ring_tied": ("gpt2", {"pp": 2, "cp": 2, "zero": 1, **TWICE}),
    "pp_ring_split_backward": (
        "llama", {"pp": 2, "cp": 2, "zero": 2, "micro_batch": 1, "num_micro_batches": 4, "schedule": "zb_v", "chunks": 2},
    ),
    "pp_uneven": ("llama", {"pp": 2, "dp": 2, **UNEVEN}),
    "pp_uneven_zero1": ("llama", {"pp": 2, "dp": 2, "zero": 1, **UNEVEN}),
    "tp_uneven_zero3": ("llama", {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True, **UNEVEN}),
    "experts_replicated": ("mixtral", {"dp": 4, "ep": 2, **TWICE}),
    "experts_replicated_zero2": ("mixtral", {"dp": 4, "ep": 2, "zero": 2, **TWICE}),
    "experts_replicated_zero3": ("mixtral", {"dp": 4, "ep": 2, "zero": 3, **TWICE}),
    "experts_dp_ring": ("mixtral", {"dp": 2, "cp": 2, "ep": 4, **TWICE}),
    "experts_tp": ("mixtral", {"dp": 2, "tp": 2, "ep": 2, **TWICE}),
    "experts_tp_sequence_parallel": ("mixtral", {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True, "zero": 2, **TWICE}),
    "experts_whole_over_tp_and_dp": (
        "mixtral", {"dp": 2, "tp": 2, "ep": 2, "whole_experts": True, "sequence_parallel": True, "zero": 1, **TWICE},
    ),
    "experts_pp": ("mixtral", {"pp": 2, "dp": 2, "ep": 2, "zero": 1, **TWICE}),
    "shard_groups_zero1": ("llama", {"dp": 4, "shard_group": 2, "zero": 1, **TWICE}),
    "shard_groups_zero2": ("llama", {"dp": 4, "shard_group": 2, "zero": 2, **TWICE}),
    "shard_groups_of_experts": ("mixtral", {"dp": 4, "ep": 2, "shard_group": 1, "zero": 3, **TWICE}),
}  # fmt: skip
EIGHT_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp_cp_tp_zero3": ("llama", {"dp": 2, "cp": 2, "tp": 2, "zero": 3, "sequence_parallel": True, **TWICE}),
    "pp_dp_ep_tp": ("mixtral", {"pp": 2, "dp": 2, "tp": 2, "ep": 2, "zero": 1, **TWICE}),
    "pp_cp_tp": ("gpt2", {"pp": 2, "cp": 2, "tp": 2, "recompute": FULL, "sequence_parallel": True, **TWICE}),
    "pp_shard_groups": ("llama", {"pp": 2, "dp": 4, "shard_group": 2, "zero": 2, **TWICE}),
}


def plan_of(model: str, **choices: Any) -> Plan:
    return make_plan(graph_of(model), seq_len=SEQ_LEN, **choices)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str) -> None:
    model, choices = TWO_RANKS[name]
    compare_with_reference(model, plan_of(model, **choices))


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(name: str) -> None:
    model, choices = FOUR_RANKS[name]
    compare_with_reference(model, plan_of(model, **choices))


@pytest.mark.parametrize("name", EIGHT_RANKS)
def test_eight_ranks(name: str) -> None:
    model, choices = EIGHT_RANKS[name]
    compare_with_reference(model, plan_of(model, **choices))


@pytest.mark.parametrize("name", ["ring", "ulysses", "experts", "uneven_zero1"])
def test_bfloat16(name: str) -> None:
    model, choices = TWO_RANKS[name]
    compare_with_reference(model, plan_of(model, **choices), "bf16_mixed")


@pytest.mark.parametrize(("name", "classes", "repeats"), [
    ("ring", ("attention", "norm"), True), ("ring", ("norm", "elementwise"), False),
    ("ulysses", ("attention", "norm"), False), ("experts", ("norm", "elementwise", "index"), False),
])  # fmt: skip
def test_selective_recompute_repeats_only_a_recomputed_ring(name: str, classes: tuple[str, ...], repeats: bool) -> None:
    model, choices = TWO_RANKS[name]
    plan = plan_of(model, **choices)
    before = compare_with_reference(model, plan)["record"].traffic
    run = RecomputeRun(first_unit=0, num_units=graph_of(model).num_units(), mode=RecomputeMode.SELECTIVE, op_classes=classes)
    stage = plan.pipelines[0].stages[0].replace(recompute=(run,))
    recomputing = plan.replace(pipelines=(plan.pipelines[0].replace(stages=(stage,)),))
    traffic = compare_with_reference(model, recomputing)["record"].traffic
    assert (traffic != before) == repeats


# --- bytes against the simulator --------------------------------------------------------------------------------------

# What a rank sends of a collective's full tensor.
_SENT = {
    "all_gather": lambda n: (n - 1) / n, "reduce_scatter": lambda n: (n - 1) / n, "all_reduce": lambda n: 2 * (n - 1) / n,
}  # fmt: skip


def sent_bytes(plan: Plan, records: list[Any]) -> dict[str, float]:
    """Bytes that a rank sends in a step by axis, mean over ranks, from what they counted. tp, cp and ep: bytes of the tensors."""
    layout = Layout(plan)
    sizes = {"dp.": layout.data, "dp.expert_": layout.expert_replicas}
    total: dict[str, float] = {}
    for record in records:
        for kind, traffic in record.traffic.items():
            axis, op = kind.split(".")
            size, op = (sizes["dp.expert_"], op[7:]) if op.startswith("expert_") else (sizes.get(f"{axis}."), op)
            sent = traffic.num_bytes * (_SENT[op](size) if size is not None else 1.0)
            total[axis] = total.get(axis, 0.0) + sent / len(records)
    return total


def charged_bytes(plan: Plan, model: str) -> dict[str, float]:
    """The same from the simulator."""
    graph, workload, cluster = graph_of(model), workload_for(plan.global_batch), gpu_cluster(8)
    charged = dict(predict(graph, cluster, workload, plan).link_bytes)
    cost_model = CostModel(graph, cluster, workload)
    (pipeline,) = plan.pipelines
    costs = [stage_cost(cost_model, plan, pipeline, stage) for stage in pipeline.stages]
    charged["exchange"] = (
        sum(unit.exchange_bytes for cost in costs for unit in cost.units) * pipeline.num_micro_batches / len(costs)
    )
    return charged


# FSDP pads each parameter to a multiple of the shards.
PADDING = 0.01


@pytest.mark.parametrize("choices", [
    {"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}, {"dp": 4, "zero": 3},
    {"pp": 2, "dp": 2, "zero": 2}, {"pp": 2, "dp": 2}, {"cp": 2, "dp": 2}, {"cp": 2, "zero": 3},
])  # fmt: skip
def test_gradients_and_parameters_travel_as_charged(choices: dict[str, Any]) -> None:
    plan = plan_of("llama", **choices, **TWICE)
    got = compare_with_reference("llama", plan)
    sent, charged = sent_bytes(plan, got["records"]), charged_bytes(plan, "llama")
    assert charged["dp"] <= sent["dp"] <= (1 + PADDING) * charged["dp"]
    assert sent.get("pp", 0.0) == charged.get("pp", 0.0)


@pytest.mark.parametrize(("zero", "choices"), [(0, {}), (2, {}), (3, {})])
def test_experts_travel_as_charged(zero: int, choices: dict[str, Any]) -> None:
    """The router's real choices differ from rank to rank; their mean is what balanced routing sends. Dispatch and combine move it
    in forward, and again in backward; a few bytes more say how many rows follow."""
    plan = plan_of("mixtral", dp=4, ep=2, zero=zero, **choices, **TWICE)
    got = compare_with_reference("mixtral", plan)
    sent, charged = sent_bytes(plan, got["records"]), charged_bytes(plan, "mixtral")
    assert charged["dp"] <= sent["dp"] <= (1 + PADDING) * charged["dp"]
    counts = sum(record.traffic["ep.counts"].num_bytes for record in got["records"]) / 4
    assert sent["ep"] - counts == pytest.approx(2 * charged["exchange"])


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_tensor_parallel_reduces_what_is_charged(model: str) -> None:
    plan = plan_of(model, tp=2, **TWICE)
    got = compare_with_reference(model, plan)
    assert sent_bytes(plan, got["records"])["tp"] == charged_bytes(plan, model)["tp"]


@pytest.mark.parametrize(("recompute", "passes"), [(RecomputeMode.NONE, 3), (FULL, 4)])
def test_keys_and_values_travel_as_charged(recompute: RecomputeMode, passes: int) -> None:
    """In forward once, in backward once, their gradients once; once more where the forward runs again."""
    plan = plan_of("llama", cp=2, recompute=recompute, **TWICE)
    got = compare_with_reference("llama", plan)
    assert sent_bytes(plan, got["records"])["cp"] == passes * charged_bytes(plan, "llama")["exchange"]


def test_shards_by_groups_sync_in_two_hops() -> None:
    """Every micro-batch scatters inside a group; between groups only the sum of all micro-batches is exchanged, one shard each."""
    plan = plan_of("llama", dp=4, shard_group=2, zero=2, **TWICE)
    traffic = compare_with_reference("llama", plan)["record"].traffic
    units = graph_of("llama").num_units()
    assert traffic["dp.reduce_scatter"].calls == 2 * units
    assert traffic["dp.all_reduce"].calls == units
    assert traffic["dp.all_reduce"].num_bytes * 2 * 2 == traffic["dp.reduce_scatter"].num_bytes


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "choices", "code"), [
    ("llama", {"dp": 2, "batch_share": (4, 0)}, "batch_share"),
    ("llama", {"dp": 2, "batch_share": (4, 2, 2)}, "batch_share"),
    ("llama", {"cp": 3}, "sequence_divisible_by_cp"),
    ("llama", {"cp": 8, "context_parallel": "ulysses"}, "heads_divisible_by_cp"),
    ("mixtral", {"dp": 4, "ep": 3}, "ep_divides_ranks"),
    ("mixtral", {"dp": 2, "tp": 2, "ep": 4, "whole_experts": True}, "whole_experts"),
])  # fmt: skip
def test_plans_that_cannot_run_are_refused_with_numbers(model: str, choices: dict[str, Any], code: str) -> None:
    from executor.support import require_supported

    plan = plan_of(model, **choices)
    with pytest.raises(InvalidInput) as caught:
        require_supported(plan, graph_of(model), workload_for(plan.global_batch))
    assert code in [violation.code for violation in caught.value.violations]
