"""Causal self-attention with grouped key-value heads and rotary positions.

Shapes: B batch, S sequence, H hidden, D head dim. Heads are viewed as ``(B, S, -1, D)``, so a module that holds only some of
the heads (a tensor-parallel shard) runs unchanged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiler.hf import DecoderConfig


class Attention(nn.Module):
    """``(B, S, H) -> (B, S, H)``."""

    inv_freq: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.rotary_dim, self.rope_theta = config.rotary_dim, config.rope_theta
        self.grouped = config.kv_heads != config.heads
        self.q = nn.Linear(config.hidden, width, bias=config.qkv_bias)
        self.k = nn.Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.v = nn.Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.o = nn.Linear(width, config.hidden, bias=config.o_bias)
        if self.rotary_dim:
            self.register_buffer("inv_freq", torch.empty(self.rotary_dim // 2), persistent=False)
            self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the rotary frequencies where the buffer now lives."""
        if self.rotary_dim:
            self.inv_freq = rotary_frequencies(self.rotary_dim, self.rope_theta, self.inv_freq.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend causally over the sequence."""
        batch, seq, _ = hidden.shape
        q = self.q(hidden).view(batch, seq, -1, self.head_dim)
        k = self.k(hidden).view(batch, seq, -1, self.head_dim)
        v = self.v(hidden).view(batch, seq, -1, self.head_dim)
        if self.rotary_dim:
            cos, sin = rotation(seq, self.inv_freq, q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=self.grouped
        )
        return self.o(out.transpose(1, 2).reshape(batch, seq, -1))


def rotary_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """``theta^(-2i/dim)`` (arXiv 2104.09864 §3.2.2), ``(dim / 2,)`` in float32."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return theta**-exponent


def rotation(seq: int, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, ``(S, 1, rotary_dim / 2)``, computed in float32."""
    positions = torch.arange(seq, dtype=torch.float32, device=inv_freq.device)
    angles = positions.view(-1, 1, 1) * inv_freq
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the leading ``2 * cos.shape[-1]`` dims of each head, first half paired with second; the rest passes through."""
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < heads.shape[-1]:
        turned.append(heads[..., 2 * half :])
    return torch.cat(turned, dim=-1)
