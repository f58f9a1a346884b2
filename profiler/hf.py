"""Hugging Face ``config.json`` to our decoder's settings. No torch.

Keys and defaults are those of the ``transformers`` configuration class of each ``model_type``. A key that an adapter does
not use is kept (``DecoderConfig.other``); an architecture without an adapter is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from profiler.hf_layers import MAX_LAYERS, MIXERS, LatentAttention, StateSpace, deepseek, nemotron_h
from profiler.hf_reader import ConfigReader
from specs.base import Spec
from specs.errors import InvalidInput, nearest_name

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class DecoderConfig(Spec):
    """A causal decoder: what :func:`profiler.models.build_model` needs, in elements and counts.

    ``ffn`` is the hidden width of one MLP (of one expert in a mixture). ``experts`` is 0 for a dense model.
    ``rotary_fraction`` is the leading part of each head that RoPE turns. ``sliding_window`` is kept as a setting; attention
    is computed in full. ``other`` holds the source's keys that no field here stands for.

    ``latent`` replaces plain attention. The first ``dense_layers`` of a mixture have an MLP of width ``dense_ffn`` instead of
    experts. ``shared_ffn``: width of the expert that every token takes. ``expert_input``: width that tokens are projected to
    before the routed experts and back after (0 = the hidden size). ``pattern``: one letter of ``hf_layers.MIXERS`` for each
    layer where a layer is a single mixer.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    position: Literal["rope", "learned", "none"] = "rope"
    rope_theta: float = 10000.0
    rotary_fraction: float = 1.0
    parallel_residual: bool = False
    tied_embeddings: bool = False
    experts: int = 0
    top_k: int = 0
    sliding_window: int | None = None
    latent: LatentAttention | None = None
    mamba: StateSpace | None = None
    pattern: str = ""
    dense_layers: int = 0
    dense_ffn: int = 0
    shared_ffn: int = 0
    expert_input: int = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    other: dict[str, Any] = {}

    @property
    def rotary_dim(self) -> int:
        """Leading dims of a head that RoPE turns; 0 with learned positions or none."""
        return int(self.head_dim * self.rotary_fraction) if self.position == "rope" else 0

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each layer: ``layer``, ``dense`` (a leading dense one of a mixture), or a mixer's name."""
        if self.pattern:
            return tuple(MIXERS[letter] for letter in self.pattern)
        dense = min(self.dense_layers, self.layers) if self.experts else 0
        return ("dense",) * dense + ("layer",) * (self.layers - dense)


def adapt(config: Mapping[str, Any], *, subject: str = "model config") -> DecoderConfig:
    """Our settings for a Hugging Face config; raise :class:`InvalidInput` with every violation at once."""
    adapter = ADAPTERS[_model_type(config, subject)]
    reader = ConfigReader(config)
    values = adapter(reader)
    _check_ratios(reader, values)
    reader.raise_if_invalid(subject)
    return DecoderConfig(**values, other=reader.unused())


def _model_type(config: Mapping[str, Any], subject: str) -> str:
    known = sorted(ADAPTERS)
    name = config.get("model_type")
    if name is None:
        name = _from_architectures(config.get("architectures"))
    if name in ADAPTERS:
        return str(name)
    capture = "for any other architecture capture the module itself: meshwright capture package.module:factory"
    problem = "the config names no 'model_type'" if name is None else f"no adapter for architecture {name!r}"
    nearest = nearest_name(str(name), known) if name is not None else None
    raise InvalidInput.single(
        "unknown_architecture",
        f"{problem}; {capture}",
        subject=subject,
        loc=("model_type",),
        actual=name,
        allowed=known,
        nearest=nearest,
    )


def _from_architectures(names: Any) -> str | None:
    """``["LlamaForCausalLM"]`` -> ``llama`` for configs that lack ``model_type``."""
    if not isinstance(names, (list, tuple)) or not names:
        return None
    by_class = {"".join(part.capitalize() for part in name.split("_")).lower(): name for name in ADAPTERS}
    by_class["gptneox"] = "gpt_neox"
    stem = str(names[0]).split("For")[0].removesuffix("Model").removesuffix("LMHead").lower()
    return by_class.get(stem, str(names[0]))


def _check_ratios(reader: ConfigReader, values: Mapping[str, Any]) -> None:
    """Rules between keys; skipped where a number is already known to be bad."""
    heads, kv_heads, head_dim = values.get("heads"), values.get("kv_heads"), values.get("head_dim")
    if heads and kv_heads and heads % kv_heads:
        reader.violation(
            "heads_divisible_by_kv_heads", f"{heads} attention heads are no multiple of {kv_heads} key-value heads",
            key=reader.key_of("kv_heads"), actual=kv_heads, allowed=[n for n in range(1, heads + 1) if heads % n == 0],
        )  # fmt: skip
    if head_dim and values.get("position") == "rope":
        rotary = int(head_dim * values["rotary_fraction"])
        if rotary % 2 or rotary == 0:
            reader.violation(
                "rotary_dim_even", f"RoPE turns {rotary} of {head_dim} dims per head; it needs an even number of at least 2",
                key=reader.key_of("head_dim"), actual=rotary,
            )  # fmt: skip
    experts, top_k = values.get("experts"), values.get("top_k")
    if experts and top_k and top_k > experts:
        reader.violation(
            "top_k_at_most_experts", f"{top_k} experts per token of only {experts}",
            key=reader.key_of("top_k"), actual=top_k, allowed=f"1 to {experts}",
        )  # fmt: skip


def _llama_like(
    reader: ConfigReader, *, max_positions: int, norm_eps: float, kv_heads: int | None, theta: float = 10000.0
) -> dict[str, Any]:
    """The keys that llama, mistral, mixtral and qwen2 share; arguments are the class defaults of each."""
    heads = reader.integer("heads", "num_attention_heads")
    hidden = reader.integer("hidden", "hidden_size")
    return {
        "architecture": reader.architecture,
        "hidden": hidden,
        "layers": reader.integer("layers", "num_hidden_layers", maximum=MAX_LAYERS),
        "heads": heads,
        "kv_heads": reader.integer("kv_heads", "num_key_value_heads", default=heads if kv_heads is None else kv_heads),
        "head_dim": reader.head_dim(hidden, heads),
        "ffn": reader.integer("ffn", "intermediate_size"),
        "vocab": reader.integer("vocab", "vocab_size"),
        "max_positions": reader.integer("max_positions", "max_position_embeddings", default=max_positions),
        "norm": "rms",
        "norm_eps": reader.number("norm_eps", "rms_norm_eps", default=norm_eps),
        "activation": reader.choice("activation", "hidden_act", ACTIVATIONS, default="silu"),
        "rope_theta": reader.rope_number("rope_theta", "rope_theta", "rope_theta", default=theta),
        "rotary_fraction": reader.rope_number("rotary_fraction", "partial_rotary_factor", "partial_rotary_factor", default=1.0),
        "position": "rope",
        "tied_embeddings": reader.boolean("tied_embeddings", "tie_word_embeddings", default=False),
    }


def _llama(reader: ConfigReader) -> dict[str, Any]:
    values = _llama_like(reader, max_positions=2048, norm_eps=1e-6, kv_heads=None)
    attention_bias = reader.boolean("attention_bias", "attention_bias", default=False)
    mlp_bias = reader.boolean("mlp_bias", "mlp_bias", default=False)
    return {**values, "qkv_bias": attention_bias, "o_bias": attention_bias, "mlp_bias": mlp_bias}


def _mistral(reader: ConfigReader) -> dict[str, Any]:
    values = _llama_like(reader, max_positions=131072, norm_eps=1e-6, kv_heads=8)
    return {**values, "sliding_window": reader.optional_integer("sliding_window", "sliding_window", default=4096)}


def _qwen2(reader: ConfigReader) -> dict[str, Any]:
    values = _llama_like(reader, max_positions=32768, norm_eps=1e-6, kv_heads=32)
    window = reader.optional_integer("sliding_window", "sliding_window", default=4096)
    windowed = reader.boolean("use_sliding_window", "use_sliding_window", default=False)
    return {**values, "qkv_bias": True, "sliding_window": window if windowed else None}


def _mixtral(reader: ConfigReader) -> dict[str, Any]:
    values = _llama_like(reader, max_positions=131072, norm_eps=1e-5, kv_heads=8, theta=1e6)
    return {
        **values,
        "experts": reader.integer("experts", "num_local_experts", default=8),
        "top_k": reader.integer("top_k", "num_experts_per_tok", default=2),
        "sliding_window": reader.optional_integer("sliding_window", "sliding_window", default=None),
    }


def _gpt2(reader: ConfigReader) -> dict[str, Any]:
    hidden = reader.integer("hidden", "n_embd", "hidden_size")
    heads = reader.integer("heads", "n_head", "num_attention_heads")
    ffn = reader.optional_integer("ffn", "n_inner", default=None)
    reader.refuse_true("add_cross_attention", "cross-attention layers are not part of a causal decoder")
    return {
        "architecture": reader.architecture,
        "hidden": hidden,
        "layers": reader.integer("layers", "n_layer", "num_hidden_layers", maximum=MAX_LAYERS),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": reader.head_dim(hidden, heads, own_key=False),
        "ffn": ffn or (4 * hidden if hidden else None),
        "vocab": reader.integer("vocab", "vocab_size"),
        "max_positions": reader.integer("max_positions", "n_positions", "n_ctx", "max_position_embeddings", default=1024),
        "norm": "layer",
        "norm_eps": reader.number("norm_eps", "layer_norm_epsilon", default=1e-5),
        "activation": reader.choice("activation", "activation_function", ACTIVATIONS, default="gelu_new"),
        "gated_mlp": False,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "position": "learned",
        "tied_embeddings": reader.boolean("tied_embeddings", "tie_word_embeddings", default=True),
    }


def _gpt_neox(reader: ConfigReader) -> dict[str, Any]:
    hidden = reader.integer("hidden", "hidden_size")
    heads = reader.integer("heads", "num_attention_heads")
    attention_bias = reader.boolean("attention_bias", "attention_bias", default=True)
    return {
        "architecture": reader.architecture,
        "hidden": hidden,
        "layers": reader.integer("layers", "num_hidden_layers", maximum=MAX_LAYERS),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": reader.head_dim(hidden, heads, own_key=False),
        "ffn": reader.integer("ffn", "intermediate_size"),
        "vocab": reader.integer("vocab", "vocab_size"),
        "max_positions": reader.integer("max_positions", "max_position_embeddings", default=2048),
        "norm": "layer",
        "norm_eps": reader.number("norm_eps", "layer_norm_eps", default=1e-5),
        "activation": reader.choice("activation", "hidden_act", ACTIVATIONS, default="gelu"),
        "gated_mlp": False,
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": True,
        "position": "rope",
        "rope_theta": reader.rope_number("rope_theta", "rotary_emb_base", "rope_theta", default=10000.0),
        "rotary_fraction": reader.rope_number("rotary_fraction", "rotary_pct", "partial_rotary_factor", default=0.25),
        "parallel_residual": reader.boolean("parallel_residual", "use_parallel_residual", default=True),
        "tied_embeddings": reader.boolean("tied_embeddings", "tie_word_embeddings", default=False),
    }


ADAPTERS: dict[str, Callable[[ConfigReader], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
    "deepseek_v2": partial(deepseek, activations=ACTIVATIONS),
    "deepseek_v3": partial(deepseek, activations=ACTIVATIONS),
    "kimi_k2": partial(deepseek, activations=ACTIVATIONS),
    "nemotron_h": partial(nemotron_h, activations=ACTIVATIONS),
}
