"""What-if: changes in words, the cluster they make, and the step that the simulator finds for it."""

from __future__ import annotations

import pytest

from simulator.cost_model import CostModel
from simulator.predict import simulate
from simulator.stragglers.relayout import layouts_for
from simulator.stragglers.what_if import apply, parse_changes, slower, what_if
from specs.cluster import ClusterSpec, CollectiveCurve, CurvePoint, Link
from specs.errors import InvalidInput
from specs.plan import Plan
from specs.straggler import WhatIf
from specs.training import TrainingSpec
from tests.blocks import llama_graph
from tests.plans import gpu_cluster, make_plan

GRAPH = llama_graph()
CLUSTER = gpu_cluster(16, nodes=4)


def ask(plan: Plan, *texts: str, cluster: ClusterSpec = CLUSTER) -> list[WhatIf]:
    model = CostModel(GRAPH, cluster, TrainingSpec(global_batch=plan.global_batch, seq_len=plan.seq_len))
    return what_if(model, plan, parse_changes(list(texts), cluster))


@pytest.mark.parametrize(
    ("text", "speed"),
    [("device 3 x0.8", 0.8), ("device 3 at 0.8x", 0.8), ("rank 3: 80%", 0.8), ("gpu 3 at half speed", 0.5),
     ("link 3 at half rate", 0.5), ("link 1-2 x0.25", 0.25), ("Node 3 at a quarter of its speed", 0.25), ("fabric 3 x.5", 0.5)],
)  # fmt: skip
def test_words(text: str, speed: float) -> None:
    change = parse_changes([text], CLUSTER)[0]
    assert change.speed == speed
    assert change.first in (1, 3)


def test_all_that_is_wrong_is_said() -> None:
    with pytest.raises(InvalidInput) as error:
        parse_changes(["device 99 x0.8", "link 1 x0", "gpu seven slow", "link 2-2 x0.5", "device 1 x1.2", "device 1 x.."], CLUSTER)
    codes = [violation.code for violation in error.value.violations]
    assert codes == [
        "no_such_index", "speed_out_of_bounds", "unreadable_change", "not_a_pair", "speed_out_of_bounds", "unreadable_change",
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match="carries nothing"):
        parse_changes(["link 0 x0.5"], gpu_cluster(8))


def test_a_link_of_one_node_keeps_the_numbers_of_all_devices() -> None:
    group = CLUSTER.nodes[0].replace(slowdown={1: 1.1, 9: 1.5, 15: 2.0})
    before = CLUSTER.replace(nodes=(group,))
    after = apply(parse_changes(["link 2 x0.5"], before)[0], before)
    assert [item.count for item in after.nodes] == [2, 1, 1]
    assert [(p.rank, p.node, p.local, p.slowdown) for p in after.device_table()] == [
        (p.rank, p.node, p.local, p.slowdown) for p in before.device_table()
    ]
    rates = [item.inter.bandwidth_bytes_per_s for item in after.nodes if item.inter]
    assert rates == [100e9, 50e9, 100e9]


def test_a_slow_device_of_data_parallel_ranks_slows_them_all() -> None:
    """Compute takes 1.25 x as long, the rest what it took."""
    plan = make_plan(GRAPH, dp=16, zero=1)
    one, node = ask(plan, "device 5 x0.8", "node 2 x0.8")[:2]
    assert one.step_time_s == pytest.approx(node.step_time_s)
    assert 1 < one.ratio < 1.25
    assert one.meaning == "device 5 takes 1.25 x as long to compute"


@pytest.mark.parametrize("node", range(4))
def test_a_slow_uplink_counts_on_whichever_node(node: int) -> None:
    plan = make_plan(GRAPH, dp=16, zero=1)
    link, twice = ask(plan, f"link {node} x0.5", f"link {node} x0.25")[:2]
    assert 1 < link.ratio < 2
    assert link.ratio < twice.ratio
    assert link.waterfall["dp_comm"] > 0


@pytest.mark.parametrize("node", range(4))
def test_slow_links_inside_a_node_slow_its_tensor_parallel_ranks(node: int) -> None:
    plan = make_plan(GRAPH, dp=4, tp=4, zero=1)
    fabric = ask(plan, f"fabric {node} x0.1")[0]
    assert fabric.ratio > 1.05
    assert fabric.step_time_s == pytest.approx(ask(plan, "fabric 0 x0.1")[0].step_time_s, rel=1e-6)


def test_a_slow_link_between_two_pipeline_ranks() -> None:
    """A pipeline over four nodes: the link that it crosses counts, one that it does not cross costs nothing."""
    plan = make_plan(GRAPH, pp=4, dp=4, num_micro_batches=4, seq_len=2048)
    crossed, beside = ask(plan, "link 1-2 x0.01", "link 0-3 x0.01")[:2]
    assert crossed.ratio > 1.02
    assert beside.ratio == pytest.approx(1)


def test_several_changes_are_also_answered_together() -> None:
    plan = make_plan(GRAPH, dp=16, zero=1)
    first, second, both = ask(plan, "device 5 x0.8", "link 3 x0.5")
    assert both.change == "all of them"
    assert both.step_time_s >= max(first.step_time_s, second.step_time_s)


def test_another_order_of_replicas_is_the_same_plan() -> None:
    plan = make_plan(GRAPH, dp=4, cp=2, tp=2, zero=1, shard_group=2)
    model = CostModel(GRAPH, CLUSTER, TrainingSpec(global_batch=plan.global_batch, seq_len=plan.seq_len))
    step = simulate(model, plan).step_time_s
    found = list(layouts_for(model, plan, 2))
    assert len(found) == 3
    assert model.network.places[found[1].pipelines[0].stages[0].devices[0]].node == 2
    assert model.network.places[found[2].pipelines[0].stages[0].devices[-1]].node == 2
    for layout in found:
        stage = layout.pipelines[0].stages[0]
        assert sorted(stage.devices) == list(range(16))
        assert {frozenset(stage.devices[i : i + 8]) for i in (0, 8)} == {frozenset(range(8)), frozenset(range(8, 16))}
        assert simulate(model, layout).step_time_s == pytest.approx(step)


def test_measured_times_of_a_link_grow_by_all_but_latency() -> None:
    points = (CurvePoint(size_bytes=8, time_s=1e-5), CurvePoint(size_bytes=1e9, time_s=1e-2 + 1e-5))
    link = Link(
        bandwidth_bytes_per_s=1e11, latency_s=1e-5, allreduce_bus_bandwidth_bytes_per_s=8e10,
        curves=(CollectiveCurve(op="all_reduce", group_size=8, points=points),),
    )  # fmt: skip
    found = slower(link, 0.5)
    assert [point.time_s for point in found.curves[0].points] == pytest.approx([1e-5, 2e-2 + 1e-5])
    assert (found.bandwidth_bytes_per_s, found.allreduce_bus_bandwidth_bytes_per_s) == (5e10, 4e10)
