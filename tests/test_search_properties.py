"""What must not change an answer, what must not make it worse, and rules of thumb that must never beat it."""

from __future__ import annotations

from itertools import product

import pytest

from planner.search import SearchOptions, search
from planner.strategy import plan_from_strategy
from simulator.predict import fits, predict
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.training import TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster
from tests.test_planner_bounds import BIG, unlike_cluster

QUIET = SearchOptions(top=0, explain=False)
WORKLOAD = TrainingSpec(global_batch=16, seq_len=1024)


def best_s(graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec = WORKLOAD) -> float:
    answer = search(graph, cluster, workload, options=QUIET)
    assert answer.status == "optimal"
    assert answer.prediction is not None
    return answer.prediction.step_time_s


def scaled(cluster: ClusterSpec, *, speed: float = 1.0, links: float = 1.0, memory: float = 1.0) -> ClusterSpec:
    """Devices ``speed`` times as fast (arithmetic and memory), links ``links`` times, memory ``memory`` times as large."""
    devices = tuple(
        item.replace(
            peak_flop_per_s={name: speed * value for name, value in item.peak_flop_per_s.items()},
            memory_bandwidth_bytes_per_s=speed * item.memory_bandwidth_bytes_per_s, memory_bytes=memory * item.memory_bytes,
        )
        for item in cluster.device_types
    )  # fmt: skip
    groups = []
    for group in cluster.nodes:
        changed = {
            name: link.replace(bandwidth_bytes_per_s=links * link.bandwidth_bytes_per_s)
            for name, link in (("intra", group.intra), ("inter", group.inter))
            if link is not None
        }
        groups.append(group.replace(**changed))
    return cluster.replace(device_types=devices, nodes=tuple(groups))


def test_order_of_node_groups_and_their_names_change_nothing() -> None:
    graph, cluster = llama_graph(**{**BIG, "layers": 4}), unlike_cluster(nodes=(1, 1), inter=1)
    renamed = tuple(group.replace(name=f"rack {index}") for index, group in enumerate(cluster.nodes))
    assert best_s(graph, cluster) == pytest.approx(best_s(graph, cluster.replace(nodes=cluster.nodes[::-1])), rel=1e-9)
    assert best_s(graph, cluster) == best_s(graph, cluster.replace(nodes=renamed))


def test_identical_devices_written_as_one_group_or_two_are_the_same() -> None:
    graph, one = llama_graph(**BIG), gpu_cluster(8, nodes=2)
    group = one.nodes[0].replace(count=1)
    two = one.replace(nodes=(group, group))
    assert best_s(graph, two) == pytest.approx(best_s(graph, one), rel=1e-9)


def test_more_memory_and_faster_links_never_make_it_worse() -> None:
    graph, cluster = llama_graph(**{**BIG, "layers": 10}), gpu_cluster(8, nodes=2, memory_gib=8.0)
    times = [best_s(graph, scaled(cluster, memory=factor)) for factor in (1.0, 1.5, 4.0)]
    assert times[0] >= times[1] >= times[2]
    times = [best_s(graph, scaled(cluster, links=factor)) for factor in (0.25, 1.0, 4.0)]
    assert times[0] >= times[1] >= times[2]


def test_faster_devices_never_make_it_worse() -> None:
    graph, cluster = llama_graph(**BIG), gpu_cluster(8)
    assert best_s(graph, scaled(cluster, speed=2.0)) <= best_s(graph, cluster)


RULES = {
    "fsdp": [f"dp=8 zero=3 micro_batch={size} recompute={again}" for size, again in product((1, 2), ("none", "full"))],
    "ddp": [f"dp=8 zero=0 micro_batch={size} recompute={again}" for size, again in product((1, 2), ("none", "full"))],
    "megatron": [
        f"tp={tp} pp={pp} zero=1 sequence_parallel=true micro_batch={size} recompute={again}"
        for tp, pp, size, again in product((2, 4), (1, 2), (1, 2, 4), ("none", "full"))
    ],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("memory_gib", [9.0, 80.0])
def test_no_rule_of_thumb_beats_the_planner(rule: str, memory_gib: float) -> None:
    """Each tuned over micro-batch and recompute, written out and simulated without the search."""
    graph, cluster = llama_graph(**{**BIG, "layers": 10}), gpu_cluster(8, nodes=2, memory_gib=memory_gib)
    planned = best_s(graph, cluster)
    tried = 0
    for text in RULES[rule]:
        try:
            predicted = predict(graph, cluster, WORKLOAD, plan_from_strategy(text, graph, cluster, WORKLOAD))
        except InvalidInput:
            continue
        tried += 1
        assert not fits(predicted) or predicted.step_time_s >= planned * (1 - 1e-9), text
    assert tried
