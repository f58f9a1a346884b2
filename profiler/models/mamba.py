"""Mamba-2 mixer (arXiv 2405.21060 §7): projections, a causal convolution per channel, and the chunked state-space scan.

Shapes: B batch, S sequence, H hidden, N state size. The scan is one op, as its published kernel is one call: in training it keeps
its inputs and computes the chunk states again in backward, so nothing of size S x chunk per head stays in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiler.hf import DecoderConfig


class Mamba2(nn.Module):
    """``(B, S, H) -> (B, S, H)``. One projection per part of the published fused one, so that each can be split over heads or
    groups; the convolution over x, B and C likewise."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        mamba = config.mamba
        if mamba is None:
            raise ValueError("the config has no state-space mixer")
        inner, shared = mamba.heads * mamba.head_dim, mamba.groups * mamba.state
        self.mamba, self.eps = mamba, config.norm_eps
        self.z = nn.Linear(config.hidden, inner, bias=False)
        self.x = nn.Linear(config.hidden, inner, bias=False)
        self.b = nn.Linear(config.hidden, shared, bias=False)
        self.c = nn.Linear(config.hidden, shared, bias=False)
        self.dt = nn.Linear(config.hidden, mamba.heads, bias=False)
        self.conv_x, self.conv_b, self.conv_c = (CausalConv(width, mamba.conv) for width in (inner, shared, shared))
        self.dt_bias = nn.Parameter(torch.empty(mamba.heads))
        self.decay = nn.Parameter(torch.empty(mamba.heads))
        self.skip = nn.Parameter(torch.empty(mamba.heads))
        self.norm_weight = nn.Parameter(torch.empty(inner))
        self.out = nn.Linear(inner, config.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the scan over the sequence, then gate and norm its result by groups."""
        mamba, (batch, seq, _) = self.mamba, hidden.shape
        x = self.conv_x(self.x(hidden)).view(batch, seq, -1, mamba.head_dim)
        b = self.conv_b(self.b(hidden)).view(batch, seq, -1, mamba.state)
        c = self.conv_c(self.c(hidden)).view(batch, seq, -1, mamba.state)
        dt = F.softplus(self.dt(hidden) + self.dt_bias)
        y = ssd_scan(x, dt, -self.decay.exp(), b, c, mamba.chunk) + x * self.skip.view(-1, 1)
        gated = y.reshape(batch, seq, -1) * F.silu(self.z(hidden))
        width = mamba.heads * mamba.head_dim // mamba.groups
        normed = F.rms_norm(gated.view(batch, seq, -1, width), (width,), eps=self.eps)
        return self.out(normed.reshape(batch, seq, -1) * self.norm_weight)


class CausalConv(nn.Module):
    """A convolution of each channel by itself over the sequence, looking back only, and SiLU. ``(B, S, C) -> (B, S, C)``."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Convolve and activate."""
        seq, channels = x.shape[1], self.weight.shape[0]
        out = F.conv1d(x.transpose(1, 2), self.weight, self.bias, padding=self.width - 1, groups=channels)
        return F.silu(out[..., :seq].transpose(1, 2))


@torch.library.custom_op("meshwright::ssd_scan", mutates_args=())
def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """``y_t = sum_{s<=t} (c_t . b_s) exp(sum_{r in (s, t]} dt_r a) dt_s x_s`` by chunks (arXiv 2405.21060 §6).

    ``x`` (B, S, heads, P), ``dt`` (B, S, heads) > 0, ``a`` (heads,) < 0, ``b`` and ``c`` (B, S, groups, N); returns x's shape.
    """
    return chunked_scan(x, dt, a, b, c, chunk).contiguous()


@ssd_scan.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    return torch.empty_like(x)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.chunk = inputs[5]


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        x, dt, a, b, c = inputs
        y = chunked_scan(x, dt, a, b, c, ctx.chunk)
    return (*torch.autograd.grad(y, inputs, grad), None)


ssd_scan.register_autograd(_scan_backward, setup_context=_keep_inputs)


def chunked_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """The scan in plain torch: products within chunks, a state per chunk, a recurrence over chunks. Shapes as :func:`ssd_scan`."""
    seq, heads = x.shape[1:3]
    pad = -seq % chunk
    x, dt, b, c = (F.pad(item, (0, 0) * (item.dim() - 2) + (0, pad)) for item in (x, dt, b, c))
    repeat = heads // b.shape[2]
    x, dt, b, c = (item.unflatten(1, (-1, chunk)) for item in (x * dt.unsqueeze(-1), dt, b, c))
    b, c = b.repeat_interleave(repeat, dim=3), c.repeat_interleave(repeat, dim=3)
    total = (dt * a).cumsum(dim=2)  # log decay from the chunk's start to each token: (B, chunks, chunk, heads)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril().unsqueeze(-1)
    within = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(~causal, float("-inf")).exp()
    y = torch.einsum("nclhi,ncshi,nclsh,ncshp->nclhp", c, b, within, x)
    states = torch.einsum("ncshi,ncsh,ncshp->nchip", b, (total[:, :, -1:] - total).exp(), x)
    carried, before = torch.zeros_like(states[:, 0]), []
    for index in range(states.shape[1]):
        before.append(carried)
        carried = carried * total[:, index, -1].exp()[..., None, None] + states[:, index]
    y = y + torch.einsum("nclhi,nclh,nchip->nclhp", c, total.exp(), torch.stack(before, dim=1))
    return y.flatten(1, 2)[:, :seq]
