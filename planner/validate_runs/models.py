"""From a row's architecture columns to the decoder that ran: :class:`DecoderConfig`, with what had to be assumed.

Ambiguities are settled by the model's published size where the row has one (``params_b``): tied or own head, size of a head.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from planner.validate_runs.runs import PublishedRun, SkippedRun
from profiler.hf import Activation, DecoderConfig

# Families whose layers are RMS norm, rotary positions, gated MLP without biases (arXiv 2302.13971 §2.2); the others are GPT-like.
LLAMA_LIKE = frozenset({"llama", "mistral", "mixtral", "qwen", "qwen2", "qwen3", "qwen-moe", "gpt-oss", "gemma", "deepseek", "phi"})
# Families with layer norm, rotary positions and a plain MLP.
ROTARY_GPT = frozenset({"gpt-neox", "nemotron", "pythia"})
ENCODERS = frozenset({"bert", "roberta", "encoder"})
UNKNOWN_LAYERS = {
    "deepseek": "multi-head latent attention",
    "nemotron-h": "state-space layers",
    "nemotron-h-moe": "state-space layers",
    "mamba": "state-space layers",
    "t5": "an encoder and a decoder of unlike layers",
    "vit": "images",
}
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
    family = run.family.lower()
    if family in UNKNOWN_LAYERS:
        raise SkippedRun("layers_not_expressible", f"{run.family} has {UNKNOWN_LAYERS[family]}, which no captured model here has")
    missing = [name for name in ("layers", "hidden", "heads", "seq_len") if getattr(run, name) is None]
    if missing:
        raise SkippedRun("architecture_not_given", "the row does not give " + ", ".join(missing))
    assumed: list[str] = []
    settings = _nearest_size(run, _settings(run, family, vocab_multiple, assumed), assumed)
    return Model(_with_shared_heads(run, settings, assumed), tuple(assumed))


def _with_shared_heads(run: PublishedRun, settings: DecoderConfig, assumed: list[str]) -> DecoderConfig:
    """Frameworks repeat key-value heads where tensor-parallel ranks outnumber them, so that every rank has its own copy."""
    tp = run.tp or 1
    if tp <= settings.kv_heads or tp % settings.kv_heads or settings.heads % tp:
        return settings
    assumed.append(f"{settings.kv_heads} key-value heads repeated for {tp} tensor-parallel ranks")
    return settings.replace(kv_heads=tp)


def _settings(run: PublishedRun, family: str, vocab_multiple: int, assumed: list[str]) -> DecoderConfig:
    if run.hidden is None or run.heads is None or run.layers is None or run.seq_len is None:
        raise ValueError("an expressible run has hidden, heads, layers and seq_len")
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
    if experts and not gated:
        raise SkippedRun("layers_not_expressible", "experts without a gate, which no captured model here has")
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
