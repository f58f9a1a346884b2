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


def _squared_relu(x: Tensor) -> Tensor:
    positive = F.relu(x)
    return positive * positive


ACTIVATION_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _squared_relu,
}


class MLP(nn.Module):
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` when gated. ``(B, S, H) -> (B, S, H)``."""

    def __init__(self, config: DecoderConfig, width: int = 0) -> None:
        """``width``: of the MLP, where it is not the config's ``ffn``."""
        super().__init__()
        width = width or config.ffn
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.gate = nn.Linear(config.hidden, width, bias=config.mlp_bias) if config.gated_mlp else None
        self.up = nn.Linear(config.hidden, width, bias=config.mlp_bias)
        self.down = nn.Linear(width, config.hidden, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the MLP to every token."""
        if self.gate is None:
            return self.down(self.activation(self.up(hidden)))
        return self.down(self.activation(self.gate(hidden)) * self.up(hidden))


class Experts(nn.Module):
    """The MLPs of all experts as stacked weights ``(experts, in, out)``, multiplied group by group."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.expert_input or config.hidden
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.gate = nn.Parameter(torch.empty(config.experts, width, config.ffn)) if config.gated_mlp else None
        self.up = nn.Parameter(torch.empty(config.experts, width, config.ffn))
        self.down = nn.Parameter(torch.empty(config.experts, config.ffn, width))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """``rows`` (N, in) sorted by expert; ``ends`` (experts,) int32: one past the last row of each. Returns (N, in)."""
        if self.gate is None:
            return grouped_mm(self.activation(grouped_mm(rows, self.up, ends)), self.down, ends)
        gated = self.activation(grouped_mm(rows, self.gate, ends)) * grouped_mm(rows, self.up, ends)
        return grouped_mm(gated, self.down, ends)


class MixtureOfExperts(nn.Module):
    """Top-k routed experts without dropping: softmax over the chosen logits weighs their outputs (arXiv 2401.04088 §2.1), or
    sigmoids of them divided by their sum (arXiv 2412.19437 §2.1.2; the bias that only balances the choice is left out).

    Each token is copied ``top_k`` times and the copies are sorted by expert, so every shape is static and the work is
    proportional to ``top_k``, whatever the router decides. A shared expert sees every token. Where ``expert_input`` is set, tokens
    are projected to that width before the routed experts and back after their sum.
    """

    expert_ids: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.sigmoid = config.top_k, config.experts, config.router == "sigmoid"
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        narrow = config.expert_input
        self.narrow = nn.Linear(config.hidden, narrow, bias=False) if narrow else None
        self.experts = Experts(config)
        self.widen = nn.Linear(narrow, config.hidden, bias=False) if narrow else None
        self.shared = MLP(config, config.shared_ffn) if config.shared_ffn else None
        self.register_buffer("expert_ids", torch.empty(config.experts, 1, dtype=torch.int64), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Number the experts, where the buffer now lives."""
        self.expert_ids = torch.arange(self.num_experts, device=self.expert_ids.device).view(-1, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Route every token through its experts. ``(B, S, H) -> (B, S, H)``."""
        tokens = hidden.flatten(0, 1)
        weights, chosen = self._chosen(tokens)
        sorted_experts, order = torch.sort(chosen.flatten(), stable=True)
        source = order // self.top_k
        ends = (sorted_experts <= self.expert_ids).sum(dim=1, dtype=torch.int32)
        narrowed = tokens if self.narrow is None else self.narrow(tokens)
        rows = self.experts(narrowed.index_select(0, source), ends)
        weighted = rows * weights.flatten().index_select(0, order).unsqueeze(-1)
        routed = torch.zeros_like(narrowed).index_add(0, source, weighted)
        routed = routed if self.widen is None else self.widen(routed)
        mixed = routed.view(*hidden.shape[:2], -1)
        return mixed if self.shared is None else mixed + self.shared(hidden)

    def _chosen(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (N, top_k) and numbers of each token's experts."""
        logits, chosen = torch.topk(self.router(tokens), self.top_k, dim=-1)
        if not self.sigmoid:
            return F.softmax(logits, dim=-1, dtype=torch.float32).to(tokens.dtype), chosen
        scores = logits.float().sigmoid()
        return (scores / scores.sum(dim=-1, keepdim=True)).to(tokens.dtype), chosen
