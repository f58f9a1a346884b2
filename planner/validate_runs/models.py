"""From a row's architecture columns to the decoder that ran: :class:`DecoderConfig`, with what had to be assumed.

Ambiguities are settled by the model's published size where the row has one (``params_b``): tied or own head, size of a head.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass
from importlib import resources

from planner.validate_runs.runs import PublishedRun, SkippedRun
from profiler.hf import Activation, DecoderConfig, adapt

# Families whose layers are RMS norm, rotary positions, gated MLP without biases (arXiv 2302.13971 §2.2); the others are GPT-like.
LLAMA_LIKE = frozenset({"llama", "mistral", "mixtral", "qwen", "qwen2", "qwen3", "qwen-moe", "gpt-oss", "gemma", "deepseek", "phi"})
# Families with layer norm, rotary positions and a plain MLP.
ROTARY_GPT = frozenset({"gpt-neox", "nemotron", "pythia"})
ENCODERS = frozenset({"bert", "roberta", "encoder"})
UNKNOWN_LAYERS = {
    "deepseek": "latent attention whose sizes only its config tells",
    "nemotron-h": "a pattern of layers that only its config tells",
    "nemotron-h-moe": "a pattern of layers that only its config tells",
    "mamba": "state-space layers whose sizes only its config tells",
    "t5": "an encoder and a decoder of unlike layers",
    "vit": "images",
}
# Models whose name says more than a row's columns do: published configs (``traces/models``), first match wins.
CONFIGS: tuple[tuple[str, str], ...] = (
    (r"deepseek.?v3", "deepseek-v3"),
    (r"kimi.?k2", "kimi-k2"),
    (r"nemotron.*(nano|lightning)", "nemotron-3-nano-30b"),
    (r"nemotron.*super", "nemotron-3-super-120b"),
    (r"nemotron.*ultra", "nemotron-3-ultra-550b"),
    (r"^gpt3-23b$", "gpt3-23b"),
    (r"^gpt3-46b$", "gpt3-46b"),
    (r"^mingpt-175b$", "mingpt-175b"),
)
# Those of them whose source gives the length of the training sequences, as the config's longest.
TRAINED_AT_FULL_LENGTH = frozenset({"mingpt-175b"})
# LoRA beside the attention projections, as its paper has it (arXiv 2106.09685 §4.2), at a rank in its usual range.
ADAPTER_RANK = 16
VOCABULARIES = {"bert": 30522, "llama": 32000, "gpt": 50257}
HEAD_SIZES = (64, 80, 96, 128, 256)
# Deviation from the published size above which another reading of the columns is tried.
SIZE_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Model:
    """Settings of the decoder and the assumptions behind them."""

    settings: DecoderConfig
    assumed: tuple[str, ...]


def model_of(run: PublishedRun, *, vocab_multiple: int = 1) -> Model:
    """The decoder of a row; raises :class:`SkippedRun` where its layers cannot be expressed.

    ``vocab_multiple``: the framework pads the vocabulary to a multiple of it.
    """
    assumed: list[str] = []
    config = next((name for pattern, name in CONFIGS if re.search(pattern, run.model.lower())), None)
    if run.seq_len is None and config not in TRAINED_AT_FULL_LENGTH:
        raise SkippedRun("architecture_not_given", "the row does not give seq_len")
    settings = _published(config, vocab_multiple, assumed) if config else _from_columns(run, vocab_multiple, assumed)
    if run.seq_len is None:
        assumed.append(f"sequences of {settings.max_positions} tokens, the published length")
    if is_adapted(run):
        assumed.append(f"adapters of rank {ADAPTER_RANK} beside the attention projections, the rest frozen")
    settings = settings.replace(max_positions=run.seq_len or settings.max_positions)
    return Model(_with_shared_heads(run, settings, assumed), tuple(assumed))


def is_adapted(run: PublishedRun) -> bool:
    """Whether the run trains LoRA adapters beside a frozen base."""
    return "lora" in f"{run.model} {run.notes}".lower()


def _published(config: str, vocab_multiple: int, assumed: list[str]) -> DecoderConfig:
    data = json.loads(resources.files("traces").joinpath(f"models/{config}.json").read_text())
    settings = adapt(data, subject=f"model {config}")
    without = ", without multi-token prediction" if "multi-token" in data["_provenance"] else ""
    assumed.append(f"architecture of the published config '{config}'{without}")
    return settings.replace(vocab=vocab_multiple * math.ceil(settings.vocab / vocab_multiple), other={})


def _from_columns(run: PublishedRun, vocab_multiple: int, assumed: list[str]) -> DecoderConfig:
    family = run.family.lower()
    if family in UNKNOWN_LAYERS:
        raise SkippedRun(
            "layers_not_expressible", f"{run.model} ({run.family}) has {UNKNOWN_LAYERS[family]}, and none is known here"
        )
    missing = [name for name in ("layers", "hidden", "heads") if getattr(run, name) is None]
    if missing:
        raise SkippedRun("architecture_not_given", "the row does not give " + ", ".join(missing))
    return _nearest_size(run, _settings(run, family, vocab_multiple, assumed), assumed)


def _with_shared_heads(run: PublishedRun, settings: DecoderConfig, assumed: list[str]) -> DecoderConfig:
    """Frameworks repeat key-value heads where tensor-parallel ranks outnumber them, so that every rank has its own copy."""
    tp = run.tp or 1
    if tp <= settings.kv_heads or tp % settings.kv_heads or settings.heads % tp:
        return settings
    assumed.append(f"{settings.kv_heads} key-value heads repeated for {tp} tensor-parallel ranks")
    return settings.replace(kv_heads=tp)


def _settings(run: PublishedRun, family: str, vocab_multiple: int, assumed: list[str]) -> DecoderConfig:
    if run.hidden is None or run.heads is None or run.layers is None or run.seq_len is None:
        raise SkippedRun("architecture_not_given", "the row does not give hidden, heads, layers and seq_len")
    llama, experts = family in LLAMA_LIKE, run.moe_experts or 0
    gated = run.gated_mlp if run.gated_mlp is not None else llama or bool(experts)
    vocab = run.vocab
    if vocab is None:
        vocab = VOCABULARIES["bert" if family in ENCODERS else "llama" if llama else "gpt"]
        assumed.append(f"vocabulary of {vocab} tokens")
    ffn = run.ffn_hidden
    if ffn is None:
        ffn = 256 * math.ceil(8 * run.hidden / 3 / 256) if gated else 4 * run.hidden
        assumed.append(f"MLP width {ffn}")
    if experts and run.moe_topk is None:
        raise SkippedRun("architecture_not_given", "the row does not give moe_topk")
    biased = not llama and "mpt" not in run.model.lower()
    activation: Activation = "silu" if llama else "gelu"
    return DecoderConfig(
        architecture=family or "decoder", hidden=run.hidden, layers=run.layers, heads=run.heads,
        kv_heads=run.kv_heads or run.heads, head_dim=max(1, run.hidden // run.heads), ffn=ffn,
        vocab=vocab_multiple * math.ceil(vocab / vocab_multiple), max_positions=run.seq_len, norm="rms" if llama else "layer",
        activation=activation, gated_mlp=gated, qkv_bias=biased, o_bias=biased, mlp_bias=biased,
        position="rope" if llama or family in ROTARY_GPT else "learned", tied_embeddings=not llama, experts=experts,
        top_k=(run.moe_topk or 0) if experts else 0,
    )  # fmt: skip


def _nearest_size(run: PublishedRun, base: DecoderConfig, assumed: list[str]) -> DecoderConfig:
    """``base``, or the reading of its ambiguous columns whose size is nearest to the published one."""
    if not run.params_b or _deviation(run, base) <= SIZE_TOLERANCE:
        return base
    sizes = dict.fromkeys((base.head_dim, *HEAD_SIZES))
    readings = [
        base.replace(tied_embeddings=tied, head_dim=size)
        for tied, size in itertools.product((base.tied_embeddings, not base.tied_embeddings), sizes)
    ]
    best = min(readings, key=lambda item: _deviation(run, item))
    if _deviation(run, best) > 0.5 * _deviation(run, base):
        return base
    if best.head_dim != base.head_dim:
        assumed.append(f"heads of {best.head_dim}, from the published size")
    if best.tied_embeddings != base.tied_embeddings:
        assumed.append(f"{'tied' if best.tied_embeddings else 'own'} output head, from the published size")
    return best


def _deviation(run: PublishedRun, settings: DecoderConfig) -> float:
    return abs(num_params(settings) / ((run.params_b or 1.0) * 1e9) - 1)


def num_params(item: DecoderConfig) -> int:
    """Weights of the decoder, biases and norms left out: only to tell readings of a row apart."""
    attention = 2 * item.hidden * item.head_dim * (item.heads + item.kv_heads)
    matrices = 3 if item.gated_mlp else 2
    mlp = matrices * item.hidden * item.ffn * (item.experts or 1) + item.hidden * item.experts
    return item.layers * (attention + mlp) + item.vocab * item.hidden * (1 if item.tied_embeddings else 2)
