"""A causal language model as a chain of units: embedding, layers, tail. The only tensor between units is ``hidden`` (B, S, H).

Parameter names: ``embed.weight``, ``embed.positions.weight``, ``layers.{i}.<...>``, ``tail.norm.*``, ``tail.head.weight``. They
stay the same when a pipeline stage keeps only some of the units.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiler.hf import DecoderConfig
from profiler.models.attention import Attention
from profiler.models.init import reset_buffers
from profiler.models.latent_attention import MultiHeadLatentAttention
from profiler.models.mamba import Mamba2
from profiler.models.mlp import MLP, MixtureOfExperts


def build_model(config: DecoderConfig) -> CausalLM:
    """The decoder of ``config`` on the current default device; under ``torch.device("meta")`` it costs no memory."""
    return CausalLM(config)


def make_norm(config: DecoderConfig) -> nn.Module:
    """RMS norm (arXiv 1910.07467) or layer norm over the hidden dim."""
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden, eps=config.norm_eps)


class Embedding(nn.Module):
    """Unit 0: token ids (B, S) to hidden states (B, S, H), plus learned positions where the model has them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab, config.hidden))
        self.positions = nn.Embedding(config.max_positions, config.hidden) if config.position == "learned" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Look the tokens up."""
        hidden = F.embedding(tokens, self.weight)
        if self.positions is None:
            return hidden
        return hidden + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream; in parallel where the architecture says so."""

    def __init__(self, config: DecoderConfig, kind: str = "layer") -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.attention_norm = make_norm(config)
        self.attention = make_mixer(config, "attention")
        self.mlp_norm = make_norm(config)
        self.mlp = make_mixer(config, "experts" if config.experts and kind == "layer" else "mlp")

    def forward(self, hidden: Tensor) -> Tensor:
        """``(B, S, H) -> (B, S, H)``."""
        attended = hidden + self.attention(self.attention_norm(hidden))
        return attended + self.mlp(self.mlp_norm(hidden if self.parallel_residual else attended))


class MixerLayer(nn.Module):
    """One mixer after a norm, added to the residual stream: a layer of a hybrid (arXiv 2504.03624 §2.1)."""

    def __init__(self, config: DecoderConfig, kind: str) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.mixer = make_mixer(config, kind)

    def forward(self, hidden: Tensor) -> Tensor:
        """``(B, S, H) -> (B, S, H)``."""
        return hidden + self.mixer(self.norm(hidden))


def make_mixer(config: DecoderConfig, kind: str) -> nn.Module:
    """``attention``, ``mamba``, ``experts`` or ``mlp`` of the config, ``(B, S, H) -> (B, S, H)``."""
    if kind == "attention":
        return MultiHeadLatentAttention(config) if config.latent is not None else Attention(config)
    if kind == "mamba":
        return Mamba2(config)
    return MixtureOfExperts(config) if kind == "experts" else MLP(config, config.dense_ffn)


def make_layer(config: DecoderConfig, kind: str) -> nn.Module:
    """A layer of one of ``config.layer_kinds``."""
    return DecoderLayer(config, kind) if kind in ("layer", "dense") else MixerLayer(config, kind)


class Tail(nn.Module):
    """The last unit: final norm, head, and the mean cross entropy over all tokens, computed in float32."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """``(B, S, H) -> (B, S, V)``."""
        return self.head(self.norm(hidden))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Hidden states (B, S, H) and labels (B, S) to a scalar."""
        logits = self.logits(hidden)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class CausalLM(nn.Module):
    """``forward(tokens, labels)``, both (B, S) int64, returns the mean loss."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        # a dict, so that a stage that drops layers keeps the names of the others
        self.layers = nn.ModuleDict({str(index): make_layer(config, kind) for index, kind in enumerate(config.layer_kinds)})
        self.tail = Tail(config)
        self.tie_parameters()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of next-token prediction; ``labels`` are already shifted."""
        hidden = self.embed(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.tail(hidden, labels)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits (B, S, V) of the tokens."""
        hidden = self.embed(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.tail.logits(hidden)

    def unit_names(self) -> list[str]:
        """Name of each unit in order, the prefix of its parameters: ``embed``, ``layers.0``, ..., ``tail``."""
        return ["embed", *(f"layers.{name}" for name in self.layers), "tail"]

    def unit_modules(self) -> list[nn.Module]:
        """The units in order: embedding, one per layer, tail."""
        return [self.get_submodule(name) for name in self.unit_names()]

    def tie_parameters(self) -> None:
        """Share the embedding with the head where the architecture ties them; call again after ``to_empty``."""
        if self.config.tied_embeddings:
            self.tail.head.weight = self.embed.weight

    def reset_buffers(self) -> None:
        """Recompute every non-persistent buffer; call after ``to_empty``."""
        for child in self.children():
            reset_buffers(child)
