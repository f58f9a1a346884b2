"""Latent attention, state-space mixers, shared experts, adapters: published sizes, closed forms, numerics, placements."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from executor.support import plan_violations
from profiler.adapters import with_adapters
from profiler.capture import capture_config, capture_module, example_tokens
from profiler.decoder_graph import decoder_graph
from profiler.hf import DecoderConfig, adapt
from profiler.hf_layers import LatentAttention, StateSpace
from profiler.models import build_model, init_parameters
from profiler.models.latent_attention import MultiHeadLatentAttention
from profiler.models.mamba import Mamba2, ssd_scan
from profiler.models.mlp import MixtureOfExperts
from profiler.opset import OpClass, Tensor, op_class_of, op_cost
from profiler.placement import place_block
from specs.errors import InvalidInput
from specs.expr import Expr
from specs.graph import Block, ModelGraph
from specs.plan import Mesh, Pipeline, Plan, Stage
from specs.training import Adapters

BASE: dict[str, Any] = {
    "architecture": "any", "hidden": 96, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 24, "ffn": 64, "vocab": 320,
    "max_positions": 64,
}  # fmt: skip
DEEPSEEK = DecoderConfig(
    **BASE, latent=LatentAttention(q_rank=40, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16), experts=6, top_k=2, shared_ffn=64,
    dense_layers=1, dense_ffn=160, router="sigmoid",
)  # fmt: skip
HYBRID = DecoderConfig(
    **{**BASE, "layers": 6, "kv_heads": 2}, pattern="MEM*EE", mamba=StateSpace(heads=8, head_dim=12, groups=2, state=10, chunk=4),
    experts=6, top_k=2, shared_ffn=48, expert_input=24, gated_mlp=False, activation="relu2", position="none", router="sigmoid",
)  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return dict(json.loads(resources.files("traces").joinpath(f"models/{name}.json").read_text()))


def block_of(graph: ModelGraph, param: str) -> Block:
    return next(block for block in graph.blocks if any(item.name == param for item in block.params))


# --- sizes and FLOP -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3", 671.0), ("deepseek-v2-lite", 15.7), ("kimi-k2", 1026.4), ("nemotron-3-nano-30b", 31.6),
        ("nemotron-3-super-120b", 120.7),
    ],
)  # fmt: skip
def test_published_sizes(name: str, billions: float) -> None:
    assert round(capture_config(config_of(name), name).num_params() / 1e9, 1) == billions


def test_deepseek_v3_by_hand() -> None:
    h, heads = 7168, 128
    attention = h * 1536 + 1536 + 1536 * heads * 192 + h * 576 + 512 + 512 * heads * 256 + heads * 128 * h
    dense, sparse = 3 * h * 18432, 256 * h + 257 * 3 * h * 2048
    total = 61 * (attention + 2 * h) + 3 * dense + 58 * sparse + 2 * 129280 * h + h
    graph = capture_config(config_of("deepseek-v3"), "v3")
    assert graph.num_params() == total
    # forward of one sequence: 2 FLOP per active weight and token, head included, and the two products of attention
    seq, active = 1000, 61 * (attention - 1536 - 512) + 3 * dense + 58 * (256 * h + 9 * 3 * h * 2048) + 129280 * h
    by_hand = 2 * seq * active + 61 * heads * 2 * seq * seq * (192 + 128)
    assert graph.flop(batch=1, seq=seq, backward=False) == pytest.approx(by_hand, rel=1e-12)
    assert graph.flop(batch=1, seq=seq) == pytest.approx(3 * by_hand, rel=1e-12)


def test_flop_of_a_scan_is_the_closed_form() -> None:
    """arXiv 2405.21060 §6: per token Q N for each group (C B^T), Q P for each head (its use), N P twice (states, their use)."""
    heads, width, groups, state, chunk = 64, 64, 8, 128, 128
    batch, seq = Expr({(1, 0): 1.0}), Expr({(0, 1): 1.0})
    shared, x = Tensor((batch, seq, groups, state)), Tensor((batch, seq, heads, width))
    inputs = [x, Tensor((batch, seq, heads)), Tensor((heads,)), shared, shared]
    cost = op_cost("meshwright.ssd_scan.default", inputs, [x], [*({"ref": "t"} for _ in inputs), chunk], {})
    per_token = 2 * (chunk * state * groups + chunk * width * heads + 2 * state * width * heads)
    assert cost.known
    assert cost.forward_flop(2, 4096) == pytest.approx(2 * 4096 * per_token)
    assert cost.backward_flop(2, 4096) == pytest.approx(2 * 2 * 4096 * per_token)
    assert op_class_of("meshwright.ssd_scan.default") == OpClass.SCAN


def test_mamba_products_are_its_projections() -> None:
    graph = decoder_graph(HYBRID)
    block = block_of(graph, "mixer.dt.weight")
    products = sum(op.forward_flop(1, 1) for op in block.ops if op_class_of(op.target) == OpClass.GEMM)
    assert products == 2 * 96 * (2 * 96 + 2 * 20 + 8) + 2 * 96 * 96
    assert not graph.attributes.get("ops_without_rule")


# --- numerics -----------------------------------------------------------------------------------------------------------


def recurrence(x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    repeat = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(repeat, 2), c.repeat_interleave(repeat, 2)
    state, out = torch.zeros(*x.shape[0:1], *x.shape[2:], b.shape[-1], dtype=x.dtype), []
    for step in range(x.shape[1]):
        decay = (dt[:, step] * a).exp()[..., None, None]
        state = state * decay + torch.einsum("nhp,nhi,nh->nhpi", x[:, step], b[:, step], dt[:, step])
        out.append(torch.einsum("nhpi,nhi->nhp", state, c[:, step]))
    return torch.stack(out, 1)


def test_scan_by_chunks_is_the_recurrence() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 11, 4, 3), (2, 11, 4), (4,), (2, 11, 2, 5), (2, 11, 2, 5))
    x, dt, a, b, c = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    inputs = [item.requires_grad_() for item in (x, F.softplus(dt).detach(), -a.exp(), b, c)]
    inputs = [item.detach().requires_grad_() for item in inputs]
    by_chunks, plain = ssd_scan(*inputs, 4), recurrence(*inputs)
    assert torch.allclose(by_chunks, plain)
    weights = torch.randn(plain.shape, generator=generator, dtype=torch.float64)
    one = torch.autograd.grad((by_chunks * weights).sum(), inputs)
    two = torch.autograd.grad((plain * weights).sum(), inputs)
    assert all(torch.allclose(left, right) for left, right in zip(one, two, strict=True))


@pytest.mark.parametrize("module", [MultiHeadLatentAttention(DEEPSEEK), Mamba2(HYBRID)])
def test_mixers_look_back_only(module: torch.nn.Module) -> None:
    init_parameters(module, 1)
    hidden = torch.randn(2, 9, 96, generator=torch.Generator().manual_seed(1))
    changed = hidden.clone()
    changed[:, 6:] += 1.0
    before, after = module(hidden), module(changed)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-5)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-3)


@pytest.mark.parametrize("settings", [DEEPSEEK, HYBRID], ids=["deepseek", "hybrid"])
def test_a_step_reaches_every_trainable_parameter(settings: DecoderConfig) -> None:
    model = build_model(settings)
    init_parameters(model, 3)
    tokens = torch.randint(0, 320, (2, 10), generator=torch.Generator().manual_seed(3))
    loss = model(tokens, tokens)
    loss.backward()
    assert torch.isfinite(loss)
    trained = {name for name, item in model.named_parameters() if item.requires_grad}
    assert trained == {name for name, item in model.named_parameters() if item.grad is not None}
    assert len(trained) == len(list(model.parameters()))


def test_shared_and_narrowed_experts_by_hand() -> None:
    module = MixtureOfExperts(HYBRID)
    init_parameters(module, 2)
    hidden = torch.randn(1, 5, 96, generator=torch.Generator().manual_seed(2))
    tokens = hidden[0]
    scores, chosen = module.router(tokens).sigmoid().topk(2, dim=-1)
    narrow = module.narrow(tokens)  # type: ignore[misc]
    routed = torch.zeros_like(narrow)
    for row in range(5):
        for place in range(2):
            expert = int(chosen[row, place])
            inner = F.relu(narrow[row] @ module.experts.up[expert]).square() @ module.experts.down[expert]
            routed[row] += inner * scores[row, place] / scores[row].sum()
    assert module.shared is not None
    expected = module.widen(routed) + module.shared(tokens)  # type: ignore[misc]
    assert torch.allclose(module(hidden)[0], expected, atol=1e-5)


# --- graphs and placements ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [DEEPSEEK, HYBRID], ids=["deepseek", "hybrid"])
def test_a_chain_of_few_captured_layers_equals_a_trace(settings: DecoderConfig) -> None:
    with torch.device("meta"):
        traced = capture_module(build_model(settings), example_tokens(), name="decoder")
    made = decoder_graph(settings)
    assert made.segments == traced.segments
    assert made.num_params() == traced.num_params()
    assert [block.num_params() for block in made.blocks] == [block.num_params() for block in traced.blocks]
    for batch, seq in ((1, 8), (3, 40)):
        assert made.flop(batch=batch, seq=seq) == pytest.approx(traced.flop(batch=batch, seq=seq))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_latent_attention_is_split_over_heads(sequence_parallel: bool) -> None:
    block = block_of(decoder_graph(DEEPSEEK), "mlp.experts.up")
    placed = place_block(block, 2, sequence_parallel)
    found = {name: placed.placements[f"attention.{name}.weight"] for name in ("q_down", "q", "kv_down", "kv", "o")}
    assert found == {"q_down": None, "q": 0, "kv_down": None, "kv": 0, "o": 1}
    core = next(op for op in placed.ops if op.op_class == OpClass.ATTENTION)
    assert [tensor.shape[1](1, 1) for tensor in core.inputs] == [2, 2, 2]


def test_state_space_mixers_are_split_over_groups() -> None:
    block = block_of(decoder_graph(HYBRID), "mixer.dt.weight")
    placed = place_block(block, 2, True)
    names = ("x.weight", "b.weight", "dt.weight", "conv_x.weight", "conv_b.bias", "out.weight")
    assert [placed.placements[f"mixer.{name}"] for name in names] == [0, 0, 0, 0, 0, 1]
    scan = next(op for op in placed.ops if op.op_class == OpClass.SCAN)
    assert [tensor.shape[-2](1, 1) for tensor in scan.inputs if len(tensor.shape) == 4] == [4, 1, 1]
    assert scan.inputs[2].shape[0](1, 1) == 4
    assert not place_block(block, 8, False).sharded_any() or place_block(block, 8, False).placements["mixer.b.weight"] is None


def test_whole_experts_see_a_part_of_the_tokens() -> None:
    block = block_of(decoder_graph(HYBRID), "mixer.experts.up")
    split, whole = (place_block(block, 2, True, whole_experts=choice) for choice in (False, True))
    assert [split.placements[f"mixer.experts.{name}"] for name in ("up", "down")] == [2, 1]
    assert [whole.placements[f"mixer.experts.{name}"] for name in ("up", "down")] == [None, None]
    rows, found = 2 * 4 * 10, []  # top_k x batch x length
    for placed in (split, whole):
        grouped = [op for op in placed.ops if op.op_class == OpClass.GROUPED_GEMM]
        products = sum(op.inputs[0].shape[0](4, 10) * op.inputs[0].shape[1](1, 1) * op.outputs[0].shape[1](1, 1) for op in grouped)
        found.append(([op.inputs[0].shape[0](4, 10) for op in grouped], products, [len(op.before + op.after) for op in grouped]))
    assert found[0][0] == [rows, rows]
    assert found[1][0] == [rows / 2, rows / 2]
    assert found[0][1] == found[1][1]  # the same work per rank
    assert found[1][2] == [0, 0]  # and nothing sent over tp for it
    assert {"mixer.router.weight", "mixer.narrow.weight", "mixer.widen.weight"} <= set(whole.partial_grad_params)
    assert [tensor.placement for tensor in whole.outputs] == [1]


def test_split_state_spaces_and_latent_attention_are_not_executed() -> None:
    for settings in (DEEPSEEK, HYBRID):
        for tp, refused in ((1, False), (2, True)):
            stage = Stage(devices=tuple(range(tp)), first_unit=0, num_units=settings.layers + 2, mesh=Mesh(tp=tp))
            plan = Plan(global_batch=1, seq_len=8, pipelines=(Pipeline(stages=(stage,), micro_batch=1, num_micro_batches=1),))
            found = [item.loc for item in plan_violations(plan, decoder_graph(settings)) if item.code == "not_executable"]
            assert found == [("plan", "pipelines", 0, "stages", 0, "mesh", "tp")] * refused


def test_adapters_beside_attention_train_and_everything_else_is_frozen() -> None:
    graph = with_adapters(decoder_graph(DecoderConfig(**BASE)), Adapters(rank=4, beside="attention"))
    assert graph.num_params(trainable_only=True) == 3 * 4 * 2 * 4 * 96
    layer = next(block for block in graph.blocks if any(param.fqn.endswith("attention.q.lora_a.weight") for param in block.params))
    name = {param.fqn.split("attention.")[1]: param.name for param in layer.params if "attention.q." in param.fqn}
    base = next(op for op in layer.ops if name["q.weight"] in op.input_refs())
    assert base.backward_flop == base.forward_flop  # the gradient of the input alone
    narrow = next(op for op in layer.ops if name["q.lora_a.weight"] in op.input_refs())
    assert narrow.backward_flop(1, 1) == 2 * narrow.forward_flop(1, 1)
    placed = place_block(layer, 2, True)
    assert {part: placed.placements[name[f"q.{part}weight"]] for part in ("", "lora_a.", "lora_b.")} == {
        "": 0, "lora_a.": None, "lora_b.": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("settings", "expected"), [(DEEPSEEK, {"q", "kv", "kv_down", "o"}), (HYBRID, {"q", "k", "v", "o"})])
def test_adapters_beside_attention_are_told_by_where_they_stand(settings: DecoderConfig, expected: set[str]) -> None:
    """Latent attention's rotary keys come straight from ``kv_down``; layers of a hybrid occur once."""
    graph = with_adapters(decoder_graph(settings), Adapters(rank=4, beside="attention"))
    names = {param.fqn for block in graph.blocks for param in block.params if ".lora_a." in param.fqn}
    assert {name.split(".lora_a")[0].rpartition(".")[2] for name in names} == expected


# --- adapters of configs ------------------------------------------------------------------------------------------------


def test_configs_that_cannot_be_expressed_say_why() -> None:
    with pytest.raises(InvalidInput) as error:
        adapt({**config_of("deepseek-v3"), "moe_layer_freq": 2, "num_experts_per_tok": 300})
    assert {violation.code for violation in error.value.violations} == {"unsupported_value", "top_k_at_most_experts"}
    with pytest.raises(InvalidInput) as error:
        adapt({**config_of("nemotron-3-nano-30b"), "hybrid_override_pattern": "MEX", "n_groups": 7})
    assert {violation.code for violation in error.value.violations} >= {"wrong_pattern", "heads_divisible_by_groups"}
    with pytest.raises(InvalidInput) as error:
        adapt({**config_of("nemotron-3-nano-30b"), "num_hidden_layers": 50})
    assert [violation.code for violation in error.value.violations] == ["pattern_length"]


def test_both_spellings_of_a_pattern_are_one_model() -> None:
    config = config_of("nemotron-3-nano-30b")
    words = {"M": "mamba", "E": "moe", "*": "attention"}
    spelled = {key: value for key, value in config.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    spelled["layers_block_type"] = [words[letter] for letter in config["hybrid_override_pattern"]]
    assert adapt(spelled).replace(other={}) == adapt(config).replace(other={})
