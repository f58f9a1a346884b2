"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1): keys and values of all heads come from one narrow vector
per token, and one rotary key part is shared by all heads.

Shapes: B batch, S sequence, H hidden. Heads are viewed as ``(B, S, -1, dim)``; queries and keys are ``nope + rope`` wide, values
``value_dim``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiler.hf import DecoderConfig
from profiler.models.attention import rotary_frequencies, rotate, rotation


class MultiHeadLatentAttention(nn.Module):
    """``(B, S, H) -> (B, S, H)``."""

    inv_freq: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        latent = config.latent
        if latent is None:
            raise ValueError("the config has no latent attention")
        self.latent, self.rope_theta = latent, config.rope_theta
        query_width = config.heads * (latent.nope_dim + latent.rope_dim)
        self.q_down = nn.Linear(config.hidden, latent.q_rank, bias=False) if latent.q_rank else None
        self.q_norm = nn.RMSNorm(latent.q_rank, eps=config.norm_eps) if latent.q_rank else None
        self.q = nn.Linear(latent.q_rank or config.hidden, query_width, bias=False)
        self.kv_down = nn.Linear(config.hidden, latent.kv_rank + latent.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=config.norm_eps)
        self.kv = nn.Linear(latent.kv_rank, config.heads * (latent.nope_dim + latent.value_dim), bias=False)
        self.o = nn.Linear(config.heads * latent.value_dim, config.hidden, bias=False)
        self.register_buffer("inv_freq", torch.empty(latent.rope_dim // 2), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the rotary frequencies where the buffer now lives."""
        self.inv_freq = rotary_frequencies(self.latent.rope_dim, self.rope_theta, self.inv_freq.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend causally over the sequence."""
        latent, (batch, seq, _) = self.latent, hidden.shape
        compressed = hidden if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(hidden))
        q = self.q(compressed).view(batch, seq, -1, latent.nope_dim + latent.rope_dim)
        down = self.kv_down(hidden)
        kv = self.kv(self.kv_norm(down[..., : latent.kv_rank])).view(batch, seq, -1, latent.nope_dim + latent.value_dim)
        cos, sin = rotation(seq, self.inv_freq, q.dtype)
        shared = rotate(down[..., latent.kv_rank :].unsqueeze(2), cos, sin).expand(-1, -1, q.shape[2], -1)
        q = torch.cat([q[..., : latent.nope_dim], rotate(q[..., latent.nope_dim :], cos, sin)], dim=-1)
        k = torch.cat([kv[..., : latent.nope_dim], shared], dim=-1)
        v = kv[..., latent.nope_dim :]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, seq, -1))
