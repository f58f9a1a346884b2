"""Op sharding finds the known patterns by itself, and is exact."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from planner.op_sharding.mesh import PARTIAL, PARTIAL_GRAD, WHOLE, Redistributor, device_mesh, split
from planner.op_sharding.problem import Builder, Problem
from planner.op_sharding.shard import ShardOptions, shard_ops
from planner.op_sharding.solve import Choice, Program, ends_agree, evaluate, memory_bytes
from profiler.catalogue import resolve_cluster
from profiler.decoder_graph import decoder_graph
from profiler.hf import adapt
from profiler.placed import placement_text
from profiler.placement import place_block
from profiler.sources import read_preset
from simulator.cost_model import CostModel
from simulator.unit_cost import RecomputeChoice, unit_cost
from specs.cluster import ClusterSpec
from specs.graph import Block
from specs.op_sharding import OpSharding
from specs.training import TrainingSpec
from tests.blocks import BlockBuilder, embedding_block, gpt_layer, llama_graph, llama_layer, tail_block

LARGE = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336}
GIB = 2**30


def cost_model(seq: int = 4096) -> CostModel:
    cluster = resolve_cluster(ClusterSpec.parse({"name": "node", "nodes": [{"preset": "dgx_h100", "count": 1}]}))
    return CostModel(llama_graph(), cluster, TrainingSpec(global_batch=8, seq_len=seq))


def shard(block: Block, sizes: tuple[int, ...], batch: int, seq: int = 4096, **options: Any) -> OpSharding:
    model = cost_model(seq)
    return shard_ops(block, device_mesh(model.network, sizes), model, batch=batch, options=ShardOptions(**options))


def kinds(found: OpSharding) -> list[str]:
    return sorted(item.rsplit(" over ", 1)[0] for change in found.redistributions for item in change.collectives)


def test_llama_block_gets_columns_rows_and_sequence_parallel() -> None:
    block = llama_layer(**LARGE)
    found = shard(block, (8,), batch=1)
    assert found.status == "optimal"
    assert found.params() == {
        **dict.fromkeys(("q", "k", "v", "gate", "up"), "S(0)"), "o": "S(1)", "down": "S(1)", "norm1": "R", "norm2": "R",
    }  # fmt: skip
    assert found.inputs == {"x": "S(1)"}
    assert set(found.outputs.values()) == {"S(1)"}
    assert kinds(found) == sorted(f"{way} {op}" for way in ("forward", "backward") for op in ["all_gather", "reduce_scatter"] * 2)


def test_gpt_block_gets_the_same_pattern_with_its_biases() -> None:
    found = shard(gpt_layer(4096, 32), (8,), batch=1).params()
    assert [found[name] for name in ("q", "q_bias", "o", "o_bias", "up", "up_bias", "down", "down_bias")] == [
        "S(0)", "S(0)", "S(1)", "R", "S(0)", "S(0)", "S(1)", "R",
    ]  # fmt: skip


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_equal_those_of_the_placement_walk(sequence_parallel: bool) -> None:
    """Count, bytes and seconds of the found plan by the walk and the unit's cost are those of the program."""
    block, model = llama_layer(**LARGE), cost_model()
    mesh = device_mesh(model.network, (8,))
    found = shard(block, (8,), batch=1, ends={"x": "S(1)" if sequence_parallel else "R", block.outputs[0]: "x"})
    placed = place_block(block, 8, sequence_parallel)
    assert found.params() == {name: placement_text(placed.placements[name]) for name in found.params()}
    walked = [(f"{way} {op}", 2 * item.num_elements(1, 4096)) for local in placed.ops for item in (*local.before, *local.after)
              for way, op in (("forward", item.forward), ("backward", item.backward)) if op]  # fmt: skip
    ours = [(name.rsplit(" over ", 1)[0], size) for change in found.redistributions
            for name, size in zip(change.collectives, change.sizes_bytes, strict=True)]  # fmt: skip
    assert sorted(ours) == sorted(walked)
    cost = unit_cost(placed, model.pricer(model.network.places[0].device), model.network, mesh.axes[0].shape, batch=1, seq=4096,
                     recompute=RecomputeChoice())  # fmt: skip
    assert sum(size for _, size in ours) == cost.tp_bytes
    assert len(ours) == cost.tp_forward_calls + cost.tp_backward_calls
    seconds = sum(change.seconds for change in found.redistributions)
    assert seconds == pytest.approx(cost.tp_forward_s + cost.tp_backward_s, rel=1e-4)


def test_memory_asks_for_sequence_parallel() -> None:
    """Whole streams at the block's edges: splitting norms costs a gather more, and is done where what they keep does not fit."""
    block = llama_layer(**LARGE)
    ends = {"x": "R", block.outputs[0]: "R"}
    free = shard(block, (8,), batch=1, ends=ends)
    tight = shard(block, (8,), batch=1, ends=ends, memory_limit_bytes=(free.memory_bytes or 0.0) - 2**20)
    assert tight.status == "optimal"
    assert (tight.memory_bytes or 0.0) < (free.memory_bytes or 0.0)
    assert (tight.seconds or 0.0) >= (free.seconds or 0.0)
    norms = [text for choice in tight.choices for text in choice.outputs.values() if {"norm1", "norm2"} & set(choice.params)]
    assert "S(1)" in norms


def mixtral() -> Block:
    return decoder_graph(adapt(read_preset("mixtral-8x7b")), "mixtral").block("layers")


def test_experts_are_spread_with_an_exchange_each_way() -> None:
    found = shard(mixtral(), (8,), batch=8)
    params = found.params()
    assert [params[f"mlp.experts.{name}"] for name in ("gate", "up", "down")] == ["S(0)"] * 3
    assert params["attention.q.weight"] == "R"
    assert kinds(found) == ["backward all_to_all"] * 2 + ["forward all_to_all"] * 2
    assert found.inputs == {"input_0": "S(0)"}
    grouped = next(choice for choice in found.choices if "mlp.experts.gate" in choice.params)
    assert grouped.inputs["index_select"] == "S(experts)"


def test_batch_is_split_where_products_are_small_beside_activations() -> None:
    block = llama_layer(hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1408)
    found = shard(block, (4,), batch=64, micro_batches=8)
    assert set(found.params().values()) == {"R"}
    assert found.inputs == {"x": "S(0)"}
    assert not found.redistributions


def test_a_large_table_is_split_over_its_rows_or_columns() -> None:
    """Summing the gradients of a whole table costs more than sending what was looked up."""
    block = embedding_block(4_000_000, 128)
    found = shard(block, (8,), batch=64, seq=64)
    assert found.params()["table"] in ("S(0)", "S(1)")
    assert found.redistributions or found.outputs != {"t0": "R"}
    tail = shard(tail_block(128256, 4096), (8,), batch=1, ends={"x": "S(1)"})
    assert tail.params()["head"] == "S(0)"


def test_memory_splits_parameters_further_and_infeasible_says_the_least() -> None:
    block = llama_layer(**LARGE)
    options = {"ends": {"x": "S(0)", block.outputs[0]: "S(0)"}, "micro_batches": 64}
    free = shard(block, (8,), batch=8, **options)
    assert set(free.params().values()) == {"R"}
    tight = shard(block, (8,), batch=8, memory_limit_bytes=1.5 * GIB, **options)
    assert tight.status == "optimal"
    assert tight.memory_bytes is not None
    assert tight.memory_bytes <= 1.5 * GIB
    assert any(choice.gathered for choice in tight.choices) or set(tight.params().values()) != {"R"}
    none = shard(block, (8,), batch=8, memory_limit_bytes=1e6, **options)
    assert none.status == "infeasible"
    assert none.least_memory_bytes is not None
    assert none.least_memory_bytes > 1e6


# --- brute force ----------------------------------------------------------------------------------------------------


def tiny_mlp() -> Block:
    b = BlockBuilder("mlp")
    x = b.input("x", "B", "S", 512)
    b.param("norm", 512), b.param("up", 1024, 512), b.param("down", 512, 1024)
    n = b.op("aten.rms_norm.default", [x, "norm"], ["B", "S", 512], [512])
    u = b.op("aten.gelu.default", [b.op("aten.linear.default", [n, "up"], ["B", "S", 1024])], ["B", "S", 1024])
    d = b.op("aten.linear.default", [u, "down"], ["B", "S", 512])
    return b.build(b.op("aten.add.Tensor", [x, d], ["B", "S", 512]))


def tiny_lookup() -> Block:
    b = BlockBuilder("lookup")
    tokens = b.input("tokens", "B", "S", dtype="int64")
    b.param("table", 4096, 256), b.param("w", 64, 256)
    return b.build(
        b.op("aten.linear.default", [b.op("aten.embedding.default", ["table", tokens], ["B", "S", 256]), "w"], ["B", "S", 64])
    )


def best_by_force(problem: Problem) -> float:
    block, best = problem.folded.block, float("inf")
    forms = {tensor.name: tensor.forms for tensor in problem.tensors if tensor.source is None}
    ends = {
        tensor.name: tuple({target for _, target in tensor.changes}) for tensor in problem.tensors if tensor.name in block.outputs
    }
    for strategies in product(*(range(len(options)) for options in problem.strategies)):
        for chosen in product(*forms.values()):
            for left in product(*ends.values()):
                choice = Choice(strategies, dict(zip(forms, chosen, strict=True)), dict(zip(ends, left, strict=True)))
                if not ends_agree(problem, choice):
                    continue
                cost = evaluate(problem, choice)
                limit = problem.memory_limit_bytes
                if cost is not None and (limit is None or memory_bytes(problem, cost) <= limit):
                    best = min(best, cost.seconds)
    return best


@pytest.mark.parametrize(
    ("block", "sizes", "batch", "limit"),
    [
        (tiny_mlp(), (2,), 1, None), (tiny_mlp(), (4,), 4, None), (tiny_mlp(), (4,), 4, 19e6), (tiny_mlp(), (8,), 8, 24e6),
        (tiny_lookup(), (2, 2), 4, None), (tiny_lookup(), (4,), 2, 6e6),
    ],
)  # fmt: skip
def test_optimum_equals_brute_force(block: Block, sizes: tuple[int, ...], batch: int, limit: float | None) -> None:
    model = cost_model(512)
    mesh = device_mesh(model.network, sizes)
    ends: dict[str, Any] = {block.outputs[0]: "x"} if block.inputs[0].name == "x" else {}
    problem = Builder(
        block, mesh, model, batch=batch, micro_batches=2, memory_limit_bytes=limit, passes_in_flight=1, ends=ends
    ).build()
    found, forced = Program(problem).run(), best_by_force(problem)
    assert found.seconds == pytest.approx(forced, rel=1e-6) or (found.status == "infeasible" and forced == float("inf"))
    if found.choice is not None:
        assert found.bound_s == pytest.approx(forced, rel=1e-4)


# --- parts ----------------------------------------------------------------------------------------------------------


def test_changes_of_state_send_what_they_must() -> None:
    model = cost_model()
    redistribute = Redistributor(device_mesh(model.network, (4, 2)), model.network)

    def sent(source: Any, target: Any) -> list[tuple[str, int, bool, float]]:
        found = redistribute.change(800.0, source, target, needs_grad=True)
        return [] if found is None else [tuple(item) for item in found[1]]

    assert sent((PARTIAL, WHOLE), (WHOLE, WHOLE)) == [("all_reduce", 0, False, 800.0)]
    assert sent((WHOLE, WHOLE), (PARTIAL_GRAD, WHOLE)) == [("all_reduce", 0, True, 800.0)]
    assert sent((split(0), split(1)), (split(0), PARTIAL_GRAD)) == [
        ("all_gather", 1, False, 200.0), ("reduce_scatter", 1, True, 200.0),
    ]  # fmt: skip
    assert sent((split(0), WHOLE), (split(1), WHOLE)) == [("all_to_all", 0, False, 200.0), ("all_to_all", 0, True, 200.0)]
    assert redistribute.change(800.0, (WHOLE, WHOLE), (PARTIAL, WHOLE), needs_grad=True) is None


def test_same_seed_same_placement_and_reasons_are_given() -> None:
    block = llama_layer()
    first, second = (shard(block, (2, 2), batch=2, seed=3).replace(wall_s=0.0) for _ in range(2))
    assert first == second
    assert all(choice.alternative_extra_s >= -1e-12 for choice in first.choices if choice.alternative_extra_s is not None)
    assert any(choice.alternative for choice in first.choices)
