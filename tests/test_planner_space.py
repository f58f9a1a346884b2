"""Device choices, enumeration against plain loops, and memory arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from planner import rules
from planner.layout import pools, whole_cluster
from planner.prices import Prices, layer_range
from planner.sites import Degrees, sites
from planner.space import enumerate_space
from planner.stage_memory import in_flight
from simulator.cost_model import CostModel
from specs.schedule import SCHEDULES
from specs.training import Limits, TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster
from tests.test_planner_bounds import unlike_cluster


def test_divisors() -> None:
    assert rules.divisors(12) == [1, 2, 3, 4, 6, 12]
    assert rules.divisors(1) == [1]
    assert rules.divisors(49) == [1, 7, 49]


def test_pools_of_one_group() -> None:
    found = pools(gpu_cluster(8, nodes=2))
    assert [pool.size for pool in found] == [8, 4, 3, 2, 1]
    assert all(pool.uniform for pool in found)


def test_pools_of_unlike_groups_come_in_both_orders_and_alone() -> None:
    labels = [pool.label for pool in pools(unlike_cluster(nodes=(1, 1)))]
    assert "1 x 4 fast then 1 x 4 slow" in labels
    assert "1 x 4 slow then 1 x 4 fast" in labels
    assert "1 x 4 fast" in labels
    assert "1 x 4 slow" in labels


def test_pools_without_slow_devices_and_within_the_limit() -> None:
    cluster = unlike_cluster(nodes=(2, 0), slow=True)
    healthy = [pool for pool in pools(cluster) if 1 not in pool.devices]
    assert {7, 4} <= {pool.size for pool in healthy}
    assert max(pool.size for pool in pools(cluster, 3)) == 3


def test_big_groups_try_powers_of_two() -> None:
    sizes = [pool.size // 8 for pool in pools(gpu_cluster(8 * 20, nodes=20))]
    assert sizes == [20, 16, 8, 4, 2, 1]


def test_enumeration_agrees_with_plain_loops() -> None:
    graph, workload = llama_graph(layers=4), TrainingSpec(global_batch=12, seq_len=128)
    cluster = gpu_cluster(4)
    space = enumerate_space(graph, workload, [whole_cluster(cluster)])
    expected = 0
    for tp in (1, 2, 4):  # heads 8, kv heads 4, ffn 1408
        for pp in (1, 2, 4):
            if 4 % (tp * pp):
                continue
            dp = 4 // (tp * pp)
            for micro_batch in range(1, 13):
                if 12 % (dp * micro_batch):
                    continue
                passes = 12 // (dp * micro_batch)
                # one interleaved schedule where four layers are two or more a rank; it has a chunk for each unit at most
                schedules = [(rule, rule.stages_per_rank or 2) for rule in SCHEDULES.values()] if pp > 1 else [(None, 1)]
                allowed = [
                    rule is None or (rule.allows(passes, pp) and chunks * pp <= 6 and bool(rule.stages_per_rank or pp == 2))
                    for rule, chunks in schedules
                ]
                zeros = (4 if pp == 1 else 3) if dp > 1 else 1
                expected += sum(allowed) * zeros * (2 if tp > 1 else 1) * 2
    assert len(space.rows) == expected
    assert (
        space.rows["num_micro_batches"] * space.rows["micro_batch"] * [space.layout(row).dp for row in range(expected)] == 12
    ).all()
    assert len({space.strategy(row).text() for row in range(expected)}) == expected


def test_workload_and_model_restrict_the_space() -> None:
    graph = llama_graph(hidden=448, heads=28, kv_heads=4, head_dim=16, ffn=1344, layers=3)
    workload = TrainingSpec(global_batch=16, seq_len=128, micro_batches=(2, 4), limits=Limits(max_devices=8))
    space = enumerate_space(graph, workload, [whole_cluster(gpu_cluster(8))])
    assert {layout.tp for layout in space.layouts} == {1, 2, 4}
    assert set(np.unique(space.rows["micro_batch"])) == {2, 4}
    assert space.rejected["heads_divisible_by_tp"] == 4  # 3, 5, 6, 8
    assert space.examples["heads_divisible_by_tp"].nearest == 2
    assert space.dimensions()["tp"] == [1, 2, 4]


def test_shard_groups_inside_nodes_only_where_stages_span_them() -> None:
    graph, workload = llama_graph(layers=4), TrainingSpec(global_batch=16, seq_len=128)
    space = enumerate_space(graph, workload, [whole_cluster(gpu_cluster(8, nodes=2))])
    sharded = [space.layout(row) for row in np.flatnonzero(space.rows["shard_group"]).tolist()]
    assert sharded
    assert all(layout.dp * layout.tp > 4 for layout in sharded)


def test_tp_groups_lie_inside_nodes_and_stages_are_consecutive() -> None:
    cluster = gpu_cluster(16, nodes=4)
    model = CostModel(llama_graph(layers=4), cluster, TrainingSpec(global_batch=16, seq_len=128))
    found = sites(model, whole_cluster(cluster), Degrees(tp=4), pp=2)
    assert [(site.first_device, site.last_device) for site in found] == [(0, 7), (8, 15)]
    assert all(site.tp_shape.num_nodes == 1 and site.dp_shape.num_nodes == 2 for site in found)


def test_recompute_covers_the_repeated_layers() -> None:
    assert layer_range(llama_graph(layers=5)) == range(1, 6)
    prices = Prices(CostModel(llama_graph(layers=5), gpu_cluster(2), TrainingSpec(global_batch=2, seq_len=64)))
    assert prices.kinds == [("embedding", False), ("layer", True), ("tail", False)]
    assert prices.counts.tolist() == [1, 5, 1]


@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches", "expected"),
    [("1f1b", 4, 8, [4, 3, 2, 1]), ("1f1b", 4, 4, [4, 3, 2, 1]), ("gpipe", 2, 6, [6, 6]), ("1f1b", 1, 9, [1])],
)
def test_micro_batches_in_flight(schedule: str, pp: int, micro_batches: int, expected: list[int]) -> None:
    assert in_flight(schedule, pp=pp, num_micro_batches=np.array(micro_batches)).tolist() == expected
