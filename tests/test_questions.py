"""What changes between plans, why not another one, and how many devices a job needs (themes M and N of the user cases)."""

from __future__ import annotations

from functools import cache

import pytest

from planner.plan_diff import diff_plans
from planner.recommend import RecommendOptions, recommend
from planner.search import SearchOptions, search
from planner.strategy import plan_from_strategy
from planner.why_not import why_not
from profiler.catalogue import resolve_cluster
from profiler.sources import load_model
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.training import TrainingSpec
from tests.plans import gpu_cluster

CLUSTER = gpu_cluster(16, nodes=2)
WORKLOAD = TrainingSpec(global_batch=64, seq_len=2048)


@cache
def model() -> ModelGraph:
    return load_model("llama-demo")


@cache
def plan_of(strategy: str) -> Plan:
    return plan_from_strategy(strategy, model(), CLUSTER, WORKLOAD)


def test_no_change_moves_nothing() -> None:
    same = diff_plans(plan_of("dp=16 zero=3"), plan_of("dp=16 zero=3"), model(), WORKLOAD)
    assert same.changes == ()
    assert same.moved_bytes == pytest.approx(0, abs=1)
    assert same.checkpoint_bytes == model().num_params() * 14  # bf16 weights, float32 master weights and two moments


def test_dropping_tensor_parallel_moves_what_the_other_half_held() -> None:
    """U123: from tp 2 to tp 1 each device lacks half of every split weight."""
    before, after = plan_of("tp=2 dp=8"), plan_of("dp=16")
    found = diff_plans(before, after, model(), WORKLOAD)
    split = 0
    for segment in model().segments:
        for param in model().block(segment.block).params:
            placement = before.pipelines[0].stages[0].placements.get(param.fqn, "R")
            split += segment.count * param.num_elements if placement != "R" else 0
    assert found.most_moved_bytes == pytest.approx(split / 2 * 14, rel=1e-6)
    assert {change.what for change in found.changes} >= {"tp", "dp"}
    loads = {item.framework: item.loads for item in found.resharding}
    assert loads["torchtitan"]
    assert not loads["nanotron"]


def test_more_shards_need_nothing_from_others_on_the_same_rank_only_in_part() -> None:
    """From 8 to 16 shards: rank 0 keeps half of its shard, rank 15 had none of its own on one node of 8."""
    small = plan_from_strategy("dp=8 zero=3", model(), CLUSTER, WORKLOAD)
    found = diff_plans(small, plan_of("dp=16 zero=3"), model(), WORKLOAD, CLUSTER)
    shard = model().num_params() * 14 / 16
    by_rank = {rank: move for move in found.ranks for rank in move.ranks}
    assert by_rank[0].moves_bytes == pytest.approx(0, abs=1)
    assert by_rank[15].moves_bytes == pytest.approx(shard, rel=1e-6)
    assert found.moved_bytes == pytest.approx(sum(move.moves_bytes for move in by_rank.values()), rel=1e-9)
    assert found.move_time_s is not None
    assert found.move_time_s > 0


def test_a_pipeline_moves_whole_stages() -> None:
    found = diff_plans(plan_of("pp=2 dp=8 split=5,5"), plan_of("pp=2 dp=8 split=4,6"), model(), WORKLOAD)
    layer = next(model().block(s.block).num_params() for s in model().segments if s.count > 1)
    by_rank = {rank: move for move in found.ranks for rank in move.ranks}
    assert by_rank[0].moves_bytes == pytest.approx(0, abs=1)
    assert by_rank[8].moves_bytes == pytest.approx(layer * 14, rel=1e-6)


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="units"):
        diff_plans(plan_of("dp=16"), plan_of("dp=16"), load_model("llama-2-7b"), WORKLOAD)


def test_why_not_names_the_rule_the_memory_or_the_terms() -> None:
    answer = search(model(), CLUSTER, WORKLOAD, options=SearchOptions(time_limit_s=30))
    assert answer.plan is not None
    forbidden = why_not("tp=3 micro_batch=7", answer.plan, model(), CLUSTER, WORKLOAD)
    assert forbidden.verdict == "forbidden"
    assert len(forbidden.rules) >= 2
    assert any(rule.nearest is not None for rule in forbidden.rules)
    slower = why_not("tp=4 dp=4 micro_batch=1", answer.plan, model(), CLUSTER, WORKLOAD, proven=answer.status == "optimal")
    assert slower.verdict == "slower"
    assert slower.step_time is not None
    assert sum(item.delta for item in slower.terms) == pytest.approx(slower.step_time.delta, rel=1e-6)
    assert "tp_comm" in slower.reason
    assert why_not(answer.plan.strategy, answer.plan, model(), CLUSTER, WORKLOAD).verdict == "same"
    tight = gpu_cluster(16, nodes=2, memory_gib=3)
    full = why_not("dp=16 micro_batch=4 zero=0", plan_of("dp=16 zero=3 recompute=full"), model(), tight, WORKLOAD)
    assert full.verdict == "does_not_fit"
    assert full.missing_bytes is not None
    assert full.missing_bytes > 0


def test_fewest_devices_and_the_curve() -> None:
    """U125: the inverse question."""
    workload = TrainingSpec(global_batch=64, seq_len=2048)
    found = recommend(load_model("llama-2-7b"), "a100_sxm_80gb", workload, RecommendOptions(max_devices=16, time_limit_s=30))
    assert found.devices_per_node == 8
    by_size = {point.devices: point for point in found.curve}
    assert found.fewest_devices is not None
    assert not by_size[1].strategy  # 16 bytes a parameter: 108 GB on one device of 85
    assert by_size[1].limits
    for devices, point in by_size.items():
        assert bool(point.strategy) == (devices >= found.fewest_devices)
    assert by_size[16].step_time_s < by_size[8].step_time_s  # type: ignore[operator]
    assert max(point.efficiency or 0 for point in found.curve) == pytest.approx(1)


def test_sizes_come_in_multiples_of_the_given_degrees() -> None:
    """U125: tp 2 and pp 8 make multiples of 16."""
    found = recommend(model(), "h100_sxm", WORKLOAD, RecommendOptions(max_devices=64, strategy="tp=2 pp=8", time_limit_s=30))
    assert found.multiple_of == 16
    assert [point.devices for point in found.curve] == [16, 32, 64]
    with pytest.raises(InvalidInput, match="multiple of 16"):
        recommend(model(), "h100_sxm", WORKLOAD, RecommendOptions(max_devices=8, strategy="tp=2 pp=8"))


def test_unknown_device_and_preset() -> None:
    with pytest.raises(InvalidInput):
        recommend(model(), "h100_sx", WORKLOAD)
    with pytest.raises(InvalidInput) as caught:
        recommend(model(), "h100_sxm", WORKLOAD, RecommendOptions(preset="dgx_h10"))
    assert caught.value.violations[0].nearest == "dgx_h100"


def test_part_of_a_node_resolves() -> None:
    part = ClusterSpec.parse({"name": "part", "nodes": [{"preset": "dgx_h100", "count": 1, "devices_per_node": 2}]})
    assert resolve_cluster(part).num_devices == 2
