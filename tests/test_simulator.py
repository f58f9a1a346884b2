"""Graph-derived costs against closed forms, and the step simulation against schedules worked by hand."""

from __future__ import annotations

from functools import cache

import pytest

from simulator.cost_model import CostModel
from simulator.exchange import distinct_share
from simulator.kept import ACTIVATION_RESULTS, DISCARDED, NORM_RESULTS
from simulator.network import GroupShape, Network
from simulator.predict import fits, predict, simulate
from simulator.software import NATIVE, Software
from simulator.trace import chrome_trace
from simulator.unit_cost import RecomputeChoice, UnitCost
from specs.graph import ModelGraph, Segment
from specs.plan import RecomputeMode
from specs.training import PRECISIONS, Precision, TrainingSpec
from tests.blocks import gpt_layer, llama_graph
from tests.plans import gpu_cluster, make_plan

HIDDEN, HEADS, BATCH, SEQ = 1024, 16, 2, 512
SBH = SEQ * BATCH * HIDDEN
BF16 = PRECISIONS["bf16_mixed"]
FULL = RecomputeChoice(RecomputeMode.FULL)


@cache
def gpt_graph(layers: int = 2) -> ModelGraph:
    """GPT layers alone, with a residual stream in and out (no embedding, no head): the object of the published formulas."""
    layer = gpt_layer(HIDDEN, HEADS)
    segment = Segment(block="layer", count=layers, bind={"x": "x"}, carry={"x": layer.outputs[0]}, produces={layer.outputs[0]: "y"})
    return ModelGraph(name="gpt", inputs=layer.inputs, blocks=(layer,), segments=(segment,), loss="y")


def layer_cost(
    tp: int = 1, sequence_parallel: bool = False, recompute: RecomputeChoice = RecomputeChoice(),  # noqa: B008
    software: Software = NATIVE, precision: Precision = BF16,
) -> UnitCost:  # fmt: skip
    workload = TrainingSpec(global_batch=8, seq_len=SEQ, precision=precision)
    model = CostModel(gpt_graph(), gpu_cluster(8), workload, software=software)
    shape = model.network.shape(range(tp))
    return model.unit("layer", device="toy", tp_shape=shape, sequence_parallel=sequence_parallel, batch=BATCH, recompute=recompute)


# Korthikanti et al., arXiv 2205.05198, eq. 1-4, less the dropout masks (this layer has no dropout) and with flash attention
# (no s x s term): log-sum-exp 4 bytes per head and token, two statistics of 4 bytes per norm and token.
STATISTICS = 4 * BATCH * HEADS * SEQ
NORMS = 2 * 8 * BATCH * SEQ


def test_activation_bytes_without_parallelism() -> None:
    assert layer_cost().saved_bytes == 32 * SBH + STATISTICS + NORMS


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_activation_bytes_tensor_parallel(tp: int) -> None:
    assert layer_cost(tp).saved_bytes == pytest.approx(SBH * (8 + 24 / tp) + STATISTICS / tp + NORMS)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_activation_bytes_sequence_parallel_keeps_the_gathered_inputs(tp: int) -> None:
    # the two gathered inputs of the column-parallel products stay (4 sbh); the rest is split
    assert layer_cost(tp, True).saved_bytes == pytest.approx(SBH * (4 + 28 / tp) + STATISTICS / tp + NORMS / tp)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_activation_bytes_sequence_parallel_split_where_they_are_gathered_again(tp: int) -> None:
    # arXiv 2205.05198 eq. 4: everything is split; the price is two more gathers of sbh each in backward
    plain = layer_cost(tp, True)
    again = layer_cost(tp, True, software=Software(regathers_inputs=True))
    assert again.saved_bytes == pytest.approx(SBH * 32 / tp + STATISTICS / tp + NORMS / tp)
    assert again.tp_backward_calls == plain.tp_backward_calls + 2
    assert again.tp_bytes == pytest.approx(plain.tp_bytes + 2 * 2 * SBH)
    assert again.tp_backward_s > plain.tp_backward_s


def test_narrow_products_keep_their_inputs_narrow() -> None:
    # inputs of the four products: two norms' results and the activation's (2 + 2 + 8 sbh) halve; attention's result is kept twice
    precision = BF16.replace(matmul_dtype="float8")
    cost = layer_cost(software=Software(keeps_narrow_inputs=True), precision=precision)
    assert cost.saved_bytes == (32 - 6 + 1) * SBH + STATISTICS + NORMS
    assert layer_cost(precision=precision).saved_bytes == 32 * SBH + STATISTICS + NORMS


def test_results_made_again_are_not_kept() -> None:
    norms = layer_cost(recompute=RecomputeChoice(RecomputeMode.SELECTIVE, (NORM_RESULTS,)))
    assert norms.saved_bytes == (32 - 4) * SBH + STATISTICS  # their statistics are made again too
    activation = layer_cost(recompute=RecomputeChoice(RecomputeMode.SELECTIVE, (ACTIVATION_RESULTS,)))
    assert activation.saved_bytes == (32 - 8) * SBH + STATISTICS + NORMS
    both = layer_cost(recompute=RecomputeChoice(RecomputeMode.SELECTIVE, DISCARDED))  # no product here widens what attention reads
    assert both.saved_bytes == (32 - 12) * SBH + STATISTICS
    assert both.recompute_s == pytest.approx(norms.recompute_s + activation.recompute_s)
    assert 0 < both.recompute_s < layer_cost().forward_s / 2


def test_activation_bytes_full_recompute() -> None:
    assert layer_cost(recompute=FULL).saved_bytes == 2 * SBH
    assert layer_cost(recompute=FULL).backward_peak_bytes > 32 * SBH - 2 * SBH


def test_full_recompute_is_one_forward_or_ends_before_the_last_product() -> None:
    plain, full = layer_cost(), layer_cost(recompute=FULL)
    whole = layer_cost(recompute=FULL, software=Software(recompute_stops_early=False))
    assert full.backward_s == plain.backward_s
    assert whole.recompute_s == plain.forward_s
    # the last product has 4 of the 12 h^2 weights; the addition after it is left out as well
    assert plain.forward_s / 2 < full.recompute_s < 0.8 * plain.forward_s


def test_selective_recompute_of_attention_keeps_less_than_none_and_more_than_full() -> None:
    selective = layer_cost(recompute=RecomputeChoice(RecomputeMode.SELECTIVE, ("elementwise", "norm")))
    assert 2 * SBH < selective.saved_bytes < layer_cost().saved_bytes
    assert 0 < selective.recompute_s < layer_cost().forward_s / 3


def test_tensor_parallel_volume() -> None:
    # two all-reduces of the residual stream forward and two backward: 4 x 2 bytes x bsh
    assert layer_cost(2).tp_bytes == 4 * 2 * SBH
    assert (
        layer_cost(2, True).tp_bytes == 8 * 2 * SBH
    )  # an all-gather and a reduce-scatter each: twice as many calls, half the traffic each


def test_layer_flop() -> None:
    expected = 24 * BATCH * SEQ * HIDDEN**2 + 4 * BATCH * SEQ**2 * HIDDEN
    assert gpt_graph(1).flop(batch=BATCH, seq=SEQ, backward=False) == expected
    assert gpt_graph(1).flop(batch=BATCH, seq=SEQ) == 3 * expected


# --- a whole step ---------------------------------------------------------------------------------------------------


@cache
def model_of(num_devices: int = 8, nodes: int = 1, layers: int = 6, global_batch: int = 8) -> CostModel:
    return CostModel(
        llama_graph(layers), gpu_cluster(num_devices, nodes=nodes), TrainingSpec(global_batch=global_batch, seq_len=128)
    )


@pytest.mark.parametrize("keywords", [
    {}, {"dp": 4}, {"dp": 4, "zero": 1}, {"dp": 4, "zero": 2, "num_micro_batches": 2}, {"dp": 4, "zero": 3}, {"tp": 2},
    {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 1}, {"pp": 4, "num_micro_batches": 8},
    {"pp": 2, "dp": 2, "tp": 2, "num_micro_batches": 4, "zero": 1, "recompute": RecomputeMode.FULL},
    {"pp": 2, "num_micro_batches": 4, "schedule": "gpipe"},
])  # fmt: skip
def test_terms_of_every_rank_sum_to_the_step(keywords: dict[str, object]) -> None:
    model = model_of()
    prediction = predict(model.graph, model.cluster, model.workload, make_plan(model.graph, **keywords), cost_model=model)  # type: ignore[arg-type]
    assert sum(prediction.waterfall.values()) == pytest.approx(prediction.step_time_s)
    for rank in prediction.ranks:
        assert sum(rank.terms.values()) == pytest.approx(prediction.step_time_s)
        assert sum(rank.memory.terms.values()) == pytest.approx(rank.memory.peak_bytes)
    assert prediction.step_time_low_s < prediction.step_time_s < prediction.step_time_high_s
    assert fits(prediction)


def test_pipeline_bubble_of_equal_stages() -> None:
    """1F1B and GPipe: (m + p - 1)(F + B) when stages are equal and links free (PipeDream-flush, arXiv 2006.09503)."""
    graph = gpt_graph(4)
    cluster = gpu_cluster(4)
    free = cluster.nodes[0].replace(intra={"bandwidth_bytes_per_s": 1e30, "latency_s": 0.0})
    model = CostModel(graph, cluster.replace(nodes=(free,)), TrainingSpec(global_batch=8, seq_len=SEQ))
    unit = model.unit("layer", device="toy", tp_shape=model.network.shape((0,)), sequence_parallel=False, batch=1)
    for schedule in ("1f1b", "gpipe"):
        plan = make_plan(graph, pp=4, num_micro_batches=8, schedule=schedule, seq_len=SEQ)
        result = simulate(model, plan)
        compute = (8 + 3) * (unit.forward_s + unit.backward_s)
        ends = [
            max(task.end_s for task in result.engine.tasks if task.stream == rank.compute and "B" in task.label)
            for rank in result.ranks
        ]
        adds = (8 + 3) * model.grad_add_s("toy", model.params("layer", 1).trainable)  # of later micro-batches
        assert compute <= max(ends) <= compute + adds


def test_1f1b_holds_fewer_activations_than_gpipe() -> None:
    model = model_of()
    peaks = {}
    for schedule in ("1f1b", "gpipe"):
        plan = make_plan(model.graph, pp=4, num_micro_batches=8, schedule=schedule)
        peaks[schedule] = predict(model.graph, model.cluster, model.workload, plan, cost_model=model).memory.terms["activations"]
    assert peaks["1f1b"] < peaks["gpipe"]


def test_zero_state_bytes() -> None:
    """bf16 with fp32 master weights and Adam: 16 bytes per parameter, sharded by stage (arXiv 1910.02054, figure 1)."""
    model = model_of()
    count = model.graph.num_params()
    states = {}
    for zero in range(4):
        plan = make_plan(model.graph, dp=8, zero=zero)
        terms = predict(model.graph, model.cluster, model.workload, plan, cost_model=model).memory.terms
        states[zero] = terms
    assert states[0]["params"] == 2 * count
    assert states[0]["optimizer"] == 12 * count
    assert states[1]["optimizer"] == pytest.approx(12 * count / 8)
    assert states[1]["gathered"] == 2 * count
    assert states[3]["params"] == pytest.approx(2 * count / 8)
    assert states[3]["optimizer"] == pytest.approx(12 * count / 8)
    assert states[3].get("gathered", 0.0) < count


def test_ddp_reductions_hide_behind_backward_but_not_all() -> None:
    model = model_of()
    alone = predict(model.graph, model.cluster, model.workload, make_plan(model.graph), cost_model=model)
    data_parallel = predict(model.graph, model.cluster, model.workload, make_plan(model.graph, dp=8), cost_model=model)
    assert data_parallel.step_time_s > alone.step_time_s
    assert data_parallel.link_bytes["dp"] == pytest.approx(2 * 7 / 8 * 2 * model.graph.num_params())


def test_a_slow_device_stretches_the_step() -> None:
    model = model_of()
    slow = model.cluster.replace(nodes=(model.cluster.nodes[0].replace(slowdown={3: 2.0}),))
    plan = make_plan(model.graph, dp=8)
    before = predict(model.graph, model.cluster, model.workload, plan)
    after = predict(model.graph, slow, model.workload, plan)
    assert 1.5 < after.step_time_s / before.step_time_s <= 2.0


def test_crossing_nodes_is_slower() -> None:
    inside, across = model_of(8, 1), model_of(8, 2)
    plan = make_plan(inside.graph, dp=8, zero=3)
    assert predict(across.graph, across.cluster, across.workload, plan).step_time_s > predict(
        inside.graph, inside.cluster, inside.workload, plan
    ).step_time_s  # fmt: skip


def test_does_not_fit_is_flagged() -> None:
    model = CostModel(llama_graph(6), gpu_cluster(1, memory_gib=0.3), TrainingSpec(global_batch=8, seq_len=128))
    prediction = predict(model.graph, model.cluster, model.workload, make_plan(model.graph, num_micro_batches=8), cost_model=model)
    assert prediction.flags == ("does_not_fit",)
    assert not fits(prediction)


def test_chrome_trace_has_every_task_and_memory() -> None:
    model = model_of()
    plan = make_plan(model.graph, pp=2, num_micro_batches=4)
    result = simulate(model, plan)
    trace = chrome_trace(model, plan, result)
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(result.engine.tasks)
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(result.step_time_s * 1e6)
    assert any(event["ph"] == "C" for event in trace["traceEvents"])


def test_same_input_same_prediction() -> None:
    model = model_of()
    plan = make_plan(model.graph, dp=2, pp=2, num_micro_batches=4, zero=1)
    first = predict(model.graph, model.cluster, model.workload, plan)
    assert first.to_json() == predict(model.graph, model.cluster, model.workload, plan).to_json()


def test_a_slow_pair_of_nodes_limits_groups_that_cross_it() -> None:
    cluster = gpu_cluster(8, nodes=4)
    slow = cluster.replace(pair_links=({"node_a": 0, "node_b": 2, "bandwidth_bytes_per_s": 1e9},))
    fast_network, slow_network = Network(cluster), Network(slow)
    size = 1e9
    for ranks, slower in (((0, 1), False), ((0, 2), False), ((0, 4), True), ((2, 4), False)):
        before = fast_network.p2p(size, *ranks).seconds
        after = slow_network.p2p(size, *ranks).seconds
        assert (after > before * 10) == slower, ranks


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"])
def test_collectives_are_monotone_and_free_alone(op: str) -> None:
    network = Network(gpu_cluster(16, nodes=2))
    shape = network.shape((0, 1) if op == "p2p" else range(8))
    times = [network.collective(op, size, shape).seconds for size in (1e3, 1e5, 1e7, 1e9)]
    assert times == sorted(times)
    assert network.collective(op, 1e9, network.shape((0,))).seconds == 0.0
    across = network.collective(op, 1e8, network.shape((7, 8) if op == "p2p" else range(16))).seconds
    assert across > network.collective(op, 1e8, shape).seconds


def test_large_ring_all_reduce_is_bandwidth_bound() -> None:
    """2 (n-1)/n S / B with B at 80 % of the link where no bus bandwidth was measured."""
    network = Network(gpu_cluster(8))
    assert network.collective("all_reduce", 1e10, network.shape(range(8))).seconds == pytest.approx(
        2 * 7 / 8 * 1e10 / (0.8 * 300e9), rel=0.01
    )


def test_math_attention_keeps_the_probabilities() -> None:
    """The s x s term of arXiv 2205.05198 (2as^2b without dropout), which flash attention does not have."""
    workload = TrainingSpec(global_batch=8, seq_len=SEQ, attention_kernel="math")
    model = CostModel(gpt_graph(), gpu_cluster(8), workload)
    math = model.unit("layer", device="toy", tp_shape=model.network.shape((0,)), sequence_parallel=False, batch=BATCH)
    assert math.saved_bytes == 32 * SBH + NORMS + 2 * BATCH * HEADS * SEQ**2
    assert math.forward_s > layer_cost().forward_s


def test_fused_loss_does_not_hold_the_logits() -> None:
    graph = llama_graph(2, vocab=32768)
    saved = {}
    for kernel in ("full", "fused"):
        model = CostModel(graph, gpu_cluster(1), TrainingSpec(global_batch=8, seq_len=128, loss_kernel=kernel))
        unit = model.unit("tail", device="toy", tp_shape=model.network.shape((0,)), sequence_parallel=False, batch=8)
        saved[kernel] = unit.saved_bytes + unit.backward_peak_bytes
    logits = 8 * 128 * 32768
    assert saved["full"] >= logits * (2 + 4 + 4)
    assert saved["fused"] < logits


def test_tokens_sent_once_by_hand() -> None:
    """Eight experts of a token over eight ranks lie on 8 (1 - (7/8)^8) = 5.25 of them; over four nodes on 4 (1 - (3/4)^8) = 3.6."""
    ranks = GroupShape(size=8, per_node=8, num_nodes=1, group=0, devices_per_node=8)
    nodes = GroupShape(size=32, per_node=8, num_nodes=4, group=0, devices_per_node=8)
    assert distinct_share(8, ranks) == pytest.approx(5.2511 / 8, rel=1e-4)
    assert distinct_share(8, nodes) == pytest.approx(3.5995 / 8, rel=1e-4)
    assert distinct_share(1, ranks) == 1.0
