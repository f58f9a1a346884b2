"""Layers beyond attention and MLP of one kind: latent attention, state-space mixers, mixtures with shared experts. No torch.

What they are made of, and how the Hugging Face configs of DeepSeek-V2/V3 (Kimi K2 alike) and Nemotron-H write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.hf_reader import ConfigReader
from specs.base import Spec

MAX_LAYERS = 10_000
# One letter per layer of a hybrid (NVIDIA's ``hybrid_override_pattern``), and the words of newer configs.
MIXERS = {"M": "mamba", "*": "attention", "E": "experts", "-": "mlp"}
LETTERS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}


class LatentAttention(Spec):
    """Multi-head latent attention (arXiv 2405.04434 §2.1). Dims are per head, ranks those of the compressed queries and of the
    compressed keys and values; ``q_rank`` None: queries come from the hidden states directly."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


class StateSpace(Spec):
    """A Mamba-2 mixer (arXiv 2405.21060 §7): ``heads`` of ``head_dim``, ``groups`` that share B and C, ``state`` size, width of
    the causal convolution, tokens of a chunk of the scan."""

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int = 4
    chunk: int = 128


def deepseek(reader: ConfigReader, activations: Mapping[str, Any]) -> dict[str, Any]:
    """``deepseek_v2`` and ``deepseek_v3``: latent attention, leading dense layers, shared and routed experts."""
    version_3 = reader.architecture != "deepseek_v2"
    heads = reader.integer("heads", "num_attention_heads")
    nope, rope = reader.integer("nope", "qk_nope_head_dim", default=128), reader.integer("rope", "qk_rope_head_dim", default=64)
    expert_ffn = reader.integer("ffn", "moe_intermediate_size")
    shared = reader.optional_integer("shared", "n_shared_experts", default=None)
    latent = {
        "q_rank": reader.optional_integer("q_rank", "q_lora_rank", default=1536),
        "kv_rank": reader.integer("kv_rank", "kv_lora_rank", default=512),
        "nope_dim": nope, "rope_dim": rope, "value_dim": reader.integer("value_dim", "v_head_dim", default=128),
    }  # fmt: skip
    values = {
        "architecture": reader.architecture, "hidden": reader.integer("hidden", "hidden_size"),
        "layers": reader.integer("layers", "num_hidden_layers", maximum=MAX_LAYERS), "heads": heads, "kv_heads": heads,
        "head_dim": nope + rope if nope and rope else None, "ffn": expert_ffn, "vocab": reader.integer("vocab", "vocab_size"),
        "max_positions": reader.integer("max_positions", "max_position_embeddings", default=2048),
        "norm": "rms", "norm_eps": reader.number("norm_eps", "rms_norm_eps", default=1e-6),
        "activation": reader.choice("activation", "hidden_act", activations, default="silu"), "position": "rope",
        "rope_theta": reader.rope_number("rope_theta", "rope_theta", "rope_theta", default=10000.0), "rotary_fraction": 1.0,
        "tied_embeddings": reader.boolean("tied_embeddings", "tie_word_embeddings", default=False),
        "latent": latent if None not in (nope, rope, latent["kv_rank"], latent["value_dim"]) else None,
        "experts": reader.integer("experts", "n_routed_experts"), "top_k": reader.integer("top_k", "num_experts_per_tok"),
        "dense_layers": reader.config.get("first_k_dense_replace", 0),
        "dense_ffn": reader.integer("dense_ffn", "intermediate_size"), "shared_ffn": (shared or 0) * (expert_ffn or 0),
        "router": "sigmoid" if version_3 else "softmax",
    }  # fmt: skip
    reader.mark_used("first_k_dense_replace")
    if reader.config.get("moe_layer_freq", 1) != 1:
        reader.violation("unsupported_value", "experts in every layer after the leading dense ones only", key="moe_layer_freq",
                         actual=reader.config["moe_layer_freq"], allowed=[1])  # fmt: skip
    reader.mark_used("moe_layer_freq")
    return values


def nemotron_h(reader: ConfigReader, activations: Mapping[str, Any]) -> dict[str, Any]:
    """``nemotron_h``: one mixer per layer, by a pattern: Mamba-2, attention without positions, MLP or experts, none gated."""
    hidden, heads = reader.integer("hidden", "hidden_size"), reader.integer("heads", "num_attention_heads")
    pattern = _pattern(reader)
    mamba = {
        "heads": reader.integer("mamba_heads", "mamba_num_heads"), "head_dim": reader.integer("mamba_dim", "mamba_head_dim"),
        "groups": reader.integer("groups", "n_groups", default=8), "state": reader.integer("state", "ssm_state_size", default=128),
        "conv": reader.integer("conv", "conv_kernel", default=4), "chunk": reader.integer("chunk", "chunk_size", default=128),
    }  # fmt: skip
    values: dict[str, Any] = {
        "architecture": reader.architecture, "hidden": hidden, "layers": len(pattern), "heads": heads,
        "kv_heads": reader.integer("kv_heads", "num_key_value_heads"), "head_dim": reader.head_dim(hidden, heads),
        "vocab": reader.integer("vocab", "vocab_size"),
        "max_positions": reader.integer("max_positions", "max_position_embeddings", default=4096),
        "norm": "rms", "norm_eps": reader.number("norm_eps", "layer_norm_epsilon", default=1e-5),
        "activation": reader.choice("activation", "mlp_hidden_act", activations, default="relu2"), "gated_mlp": False,
        "position": "none", "pattern": pattern, "mamba": mamba if None not in mamba.values() else None,
        "tied_embeddings": reader.boolean("tied_embeddings", "tie_word_embeddings", default=False),
    }  # fmt: skip
    if mamba["heads"] and mamba["groups"] and mamba["heads"] % mamba["groups"]:
        reader.violation("heads_divisible_by_groups", f"{mamba['heads']} heads are no multiple of {mamba['groups']} groups",
                         key="n_groups", actual=mamba["groups"])  # fmt: skip
    if "E" not in pattern:
        return {**values, "ffn": reader.integer("ffn", "intermediate_size")}
    shared = reader.optional_integer("shared", "n_shared_experts", default=None)
    return {
        **values, "ffn": reader.integer("ffn", "moe_intermediate_size"),
        "dense_ffn": reader.integer("dense_ffn", "intermediate_size") if "-" in pattern else 0,
        "experts": reader.integer("experts", "n_routed_experts"), "top_k": reader.integer("top_k", "num_experts_per_tok"),
        "shared_ffn": (reader.integer("shared_ffn", "moe_shared_expert_intermediate_size") or 0) if shared else 0,
        "expert_input": reader.optional_integer("expert_input", "moe_latent_size", default=None) or 0, "router": "sigmoid",
    }  # fmt: skip


def _pattern(reader: ConfigReader) -> str:
    """The letters of the layers, from either spelling."""
    reader.mark_used("hybrid_override_pattern", "layers_block_type", "num_hidden_layers")
    words = reader.config.get("layers_block_type")
    pattern = reader.config.get("hybrid_override_pattern")
    if isinstance(words, (list, tuple)):
        pattern = "".join(LETTERS.get(str(word), "?") for word in words)
    key = "layers_block_type" if words else "hybrid_override_pattern"
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(MIXERS) or len(pattern) > MAX_LAYERS:
        reader.violation("wrong_pattern", "needs one letter (or word) for each layer", key=key, actual=str(pattern)[:200],
                         allowed=[*MIXERS, *LETTERS])  # fmt: skip
        return ""
    layers = reader.config.get("num_hidden_layers")
    if layers is not None and layers != len(pattern):
        reader.violation("pattern_length", f"the pattern has {len(pattern)} layers, num_hidden_layers says {layers}",
                         key="num_hidden_layers", actual=layers, nearest=len(pattern))  # fmt: skip
    return pattern
