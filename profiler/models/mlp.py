"""Feed-forward layers: plain, gated, and a dropless mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiler.hf import Activation, DecoderConfig
from profiler.models.grouped import grouped_mm


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATION_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}


class MLP(nn.Module):
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` when gated. ``(B, S, H) -> (B, S, H)``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.gate = nn.Linear(config.hidden, config.ffn, bias=config.mlp_bias) if config.gated_mlp else None
        self.up = nn.Linear(config.hidden, config.ffn, bias=config.mlp_bias)
        self.down = nn.Linear(config.ffn, config.hidden, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the MLP to every token."""
        if self.gate is None:
            return self.down(self.activation(self.up(hidden)))
        return self.down(self.activation(self.gate(hidden)) * self.up(hidden))


class Experts(nn.Module):
    """The gated MLPs of all experts as three stacked weights ``(experts, in, out)``, multiplied group by group."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.gate = nn.Parameter(torch.empty(config.experts, config.hidden, config.ffn))
        self.up = nn.Parameter(torch.empty(config.experts, config.hidden, config.ffn))
        self.down = nn.Parameter(torch.empty(config.experts, config.ffn, config.hidden))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """``rows`` (N, H) sorted by expert; ``ends`` (experts,) int32: one past the last row of each. Returns (N, H)."""
        gated = self.activation(grouped_mm(rows, self.gate, ends)) * grouped_mm(rows, self.up, ends)
        return grouped_mm(gated, self.down, ends)


class MixtureOfExperts(nn.Module):
    """Top-k routed experts without dropping (arXiv 2401.04088 §2.1): softmax over the chosen logits weighs their outputs.

    Each token is copied ``top_k`` times and the copies are sorted by expert, so every shape is static and the work is
    proportional to ``top_k``, whatever the router decides.
    """

    expert_ids: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.top_k, self.num_experts = config.top_k, config.experts
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = Experts(config)
        self.register_buffer("expert_ids", torch.empty(config.experts, 1, dtype=torch.int64), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Number the experts, where the buffer now lives."""
        self.expert_ids = torch.arange(self.num_experts, device=self.expert_ids.device).view(-1, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Route every token through its experts. ``(B, S, H) -> (B, S, H)``."""
        tokens = hidden.flatten(0, 1)
        logits, chosen = torch.topk(self.router(tokens), self.top_k, dim=-1)
        weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(tokens.dtype)
        sorted_experts, order = torch.sort(chosen.flatten(), stable=True)
        source = order // self.top_k
        ends = (sorted_experts <= self.expert_ids).sum(dim=1, dtype=torch.int32)
        rows = self.experts(tokens.index_select(0, source), ends)
        weighted = rows * weights.flatten().index_select(0, order).unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, source, weighted).view(*hidden.shape[:2], -1)
