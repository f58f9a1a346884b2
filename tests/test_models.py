"""Our decoder against plain mathematics written down again here, term by term, without its modules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from profiler.hf import DecoderConfig, adapt
from profiler.models import CausalLM, build_model, init_parameters, init_tensor, reset_buffers
from profiler.models.attention import Attention, rotate
from profiler.models.mlp import MixtureOfExperts

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "llama-biased": {**BASE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": {**BASE, "model_type": "qwen2"},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64},
    "gpt_neox": {**BASE, "model_type": "gpt_neox", "rotary_pct": 0.5},
    "gpt_neox-serial": {**BASE, "model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 1.0},
    "mixtral": {**BASE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


def make(config: dict[str, Any], seed: int = 3) -> CausalLM:
    model = build_model(adapt(config))
    init_parameters(model, seed)
    with torch.no_grad():  # biases and norms away from their initial values, so that leaving one out shows
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(init_tensor(f"{name}.noise", parameter.shape, seed, std=0.3))
            else:
                parameter.mul_(8)
    return model


def batch(config: DecoderConfig, size: int = 3, seq: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, config.vocab, (size, seq), generator=generator) for _ in range(2))  # type: ignore[return-value]


# --- the same mathematics, written independently --------------------------------------------------------------------


def reference_loss(model: CausalLM, tokens: Tensor, labels: Tensor) -> Tensor:
    config, state = model.config, dict(model.named_parameters(remove_duplicate=False))
    hidden = state["embed.weight"][tokens]
    if config.position == "learned":
        hidden = hidden + state["embed.positions.weight"][: tokens.shape[1]]
    for index in range(config.layers):
        part = {
            name.removeprefix(f"layers.{index}."): value for name, value in state.items() if name.startswith(f"layers.{index}.")
        }
        attention = reference_attention(config, part, norm(config, part, "attention_norm", hidden))
        if config.parallel_residual:
            hidden = hidden + attention + reference_mlp(config, part, norm(config, part, "mlp_norm", hidden))
        else:
            hidden = hidden + attention
            hidden = hidden + reference_mlp(config, part, norm(config, part, "mlp_norm", hidden))
    logits = norm(config, state, "tail.norm", hidden) @ state["tail.head.weight"].T
    chosen = torch.gather(torch.log_softmax(logits, -1), -1, labels.unsqueeze(-1))
    return -chosen.mean()


def norm(config: DecoderConfig, state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.norm == "rms":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * state[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + config.norm_eps)
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def affine(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)


def reference_attention(config: DecoderConfig, state: dict[str, Tensor], x: Tensor) -> Tensor:
    group = config.heads // config.kv_heads
    q, k, v = (affine(state, f"attention.{name}", x) for name in "qkv")
    outputs = []
    for head in range(config.heads):
        own, shared = slice_of(head, config.head_dim), slice_of(head // group, config.head_dim)
        query, key = turned(config, q[..., own]), turned(config, k[..., shared])
        scores = query @ key.transpose(1, 2) / math.sqrt(config.head_dim)
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        outputs.append(torch.softmax(scores.masked_fill(future, -math.inf), -1) @ v[..., shared])
    return affine(state, "attention.o", torch.cat(outputs, -1))


def slice_of(head: int, width: int) -> slice:
    return slice(head * width, (head + 1) * width)


def turned(config: DecoderConfig, head: Tensor) -> Tensor:
    """RoPE as a rotation in the plane of dims i and i + half, position by position."""
    half = config.rotary_dim // 2
    result = head.clone()
    for position in range(head.shape[1]):
        for i in range(half):
            angle = position * config.rope_theta ** (-2 * i / config.rotary_dim)
            cos, sin = math.cos(angle), math.sin(angle)
            a, b = head[:, position, i], head[:, position, i + half]
            result[:, position, i] = a * cos - b * sin
            result[:, position, i + half] = b * cos + a * sin
    return result


def activation(config: DecoderConfig, x: Tensor) -> Tensor:
    if config.activation == "silu":
        return x / (1 + torch.exp(-x))
    if config.activation == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference_mlp(config: DecoderConfig, state: dict[str, Tensor], x: Tensor) -> Tensor:
    if config.experts:
        return reference_experts(config, state, x)
    if config.gated_mlp:
        inner = activation(config, affine(state, "mlp.gate", x)) * affine(state, "mlp.up", x)
    else:
        inner = activation(config, affine(state, "mlp.up", x))
    return affine(state, "mlp.down", inner)


def reference_experts(config: DecoderConfig, state: dict[str, Tensor], x: Tensor) -> Tensor:
    """Every expert on every token, weighed by softmax over all experts, renormalised over the chosen ones (as published)."""
    weights = torch.softmax(x @ state["mlp.router.weight"].T, -1)
    top, chosen = weights.topk(config.top_k, -1)
    top = top / top.sum(-1, keepdim=True)
    total = torch.zeros_like(x)
    for expert in range(config.experts):
        gate, up, down = (state[f"mlp.experts.{name}"][expert] for name in ("gate", "up", "down"))
        share = (top * (chosen == expert)).sum(-1, keepdim=True)
        total = total + share * ((activation(config, x @ gate) * (x @ up)) @ down)
    return total


# --- the checks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_every_gradient_equal_plain_mathematics(name: str) -> None:
    model = make(CONFIGS[name])
    tokens, labels = batch(model.config)
    loss = model(tokens, labels)
    loss.backward()
    got = {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    expected = reference_loss(model, tokens, labels)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-5, atol=2e-6)
    assert set(got) == {key for key, _ in model.named_parameters()}
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(got[key], parameter.grad, rtol=2e-3, atol=2e-5 * float(got[key].abs().max() + 1), msg=key)


@pytest.mark.parametrize("name", CONFIGS)
def test_units_in_a_chain_are_the_model(name: str) -> None:
    model = make(CONFIGS[name])
    tokens, labels = batch(model.config)
    first, *middle, last = model.unit_modules()
    hidden = first(tokens)
    for unit in middle:
        assert hidden.shape == (3, 10, 32)
        hidden = unit(hidden)
    assert torch.equal(last(hidden, labels), model(tokens, labels))
    assert model.unit_names() == ["embed", "layers.0", "layers.1", "tail"]


def test_training_on_the_cpu_learns_with_experts() -> None:
    model = build_model(adapt(CONFIGS["mixtral"]))
    init_parameters(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    tokens, labels = batch(model.config)
    losses = []
    for _ in range(25):
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(61), rel=0.02)
    assert losses[-1] < 0.5 * losses[0]


def test_experts_without_any_token_are_harmless() -> None:
    config = adapt({**CONFIGS["mixtral"], "num_local_experts": 8, "num_experts_per_tok": 1})
    moe = MixtureOfExperts(config)
    init_parameters(moe, 0)
    x = torch.ones(1, 5, 32, requires_grad=True)  # equal tokens: all go to one expert
    moe(x).square().sum().backward()
    busy = moe.experts.gate.grad.flatten(1).abs().sum(1) > 0  # type: ignore[union-attr]
    assert int(busy.sum()) == 1


def test_sharded_heads_run_unchanged() -> None:
    """Half of the heads with half of the weights, twice: the outputs sum to the whole (row-parallel output)."""
    config = adapt(BASE)
    whole = Attention(config)
    init_parameters(whole, 5)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    parts = []
    for rank in range(2):
        half = Attention(config)
        for name in ("q", "k", "v"):
            getattr(half, name).weight = torch.nn.Parameter(getattr(whole, name).weight.chunk(2)[rank])
        half.o.weight = torch.nn.Parameter(whole.o.weight.chunk(2, dim=1)[rank])
        parts.append(half(x))
    torch.testing.assert_close(parts[0] + parts[1], whole(x), rtol=1e-5, atol=1e-6)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    angles = torch.arange(8.0).view(-1, 1, 1) * torch.tensor([1.0, 0.1])
    head = torch.randn(1, 1, 1, 4, generator=torch.Generator().manual_seed(0)).expand(1, 8, 1, 4)
    out = rotate(head, angles.cos(), angles.sin())
    torch.testing.assert_close(out.norm(dim=-1), head.norm(dim=-1))
    products = (out[0, :, 0] @ out[0, :, 0].T).diagonal(offset=3)
    torch.testing.assert_close(products, products[:1].expand_as(products))


# --- initial values, buffers, tying ---------------------------------------------------------------------------------


def test_initial_values_depend_on_name_and_seed_only() -> None:
    a = init_tensor("layers.3.attention.q.weight", (64, 32), 7)
    assert torch.equal(a, init_tensor("layers.3.attention.q.weight", (64, 32), 7))
    assert not torch.equal(a, init_tensor("layers.4.attention.q.weight", (64, 32), 7))
    assert not torch.equal(a, init_tensor("layers.3.attention.q.weight", (64, 32), 8))
    assert float(a.std()) == pytest.approx(0.02, rel=0.05)
    assert torch.equal(init_tensor("layers.3.mlp_norm.weight", (5,), 7), torch.ones(5))
    assert torch.equal(init_tensor("tail.norm.weight", (5,), 7), torch.ones(5))
    assert torch.equal(init_tensor("layers.3.attention.q.bias", (5,), 7), torch.zeros(5))


def test_a_part_is_initialised_like_the_whole() -> None:
    config = adapt(BASE)
    whole, part = build_model(config), build_model(config).layers["1"]
    init_parameters(whole, 11)
    init_parameters(part, 11, prefix="layers.1.")
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(f"layers.1.{name}"))


@pytest.mark.parametrize("name", ["llama", "mixtral", "llama-biased", "gpt2"])
def test_meta_to_empty_and_back_is_the_same_model(name: str) -> None:
    config = adapt(CONFIGS[name])
    direct = build_model(config)
    init_parameters(direct, 2)
    with torch.device("meta"):
        model = build_model(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.tie_parameters()
    model.reset_buffers()
    init_parameters(model, 2)
    tokens, labels = batch(config)
    assert torch.equal(model(tokens, labels), direct(tokens, labels))
    assert (model.tail.head.weight is model.embed.weight) == config.tied_embeddings


def test_reset_buffers_of_one_unit() -> None:
    layer = build_model(adapt(CONFIGS["mixtral"])).layers["0"]
    expected = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    layer.to_empty(device="cpu")
    for buffer in layer.buffers():
        buffer.zero_()
    reset_buffers(layer)
    assert set(expected) == {"attention.inv_freq", "mlp.expert_ids"}
    assert all(torch.equal(buffer, expected[name]) for name, buffer in layer.named_buffers())


def test_dropping_layers_keeps_the_names_of_the_others() -> None:
    with torch.device("meta"):
        model = build_model(adapt({**BASE, "num_hidden_layers": 4}))
    del model.layers["0"], model.layers["1"]
    assert model.unit_names() == ["embed", "layers.2", "layers.3", "tail"]


def test_bfloat16_runs_and_keeps_rotary_frequencies_in_float32() -> None:
    model = make(BASE).to(torch.bfloat16)
    model.reset_buffers()
    attention = model.layers["0"].attention
    assert attention.inv_freq.dtype == torch.float32  # type: ignore[union-attr]
    tokens, labels = batch(model.config)
    assert model(tokens, labels).dtype == torch.float32
