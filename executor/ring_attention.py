"""Causal attention over a sequence that is split over a ring of ranks (arXiv 2310.01889), the work balanced (arXiv 2311.09431).

Of 2n equal parts of the sequence rank r of n holds parts r and 2n - 1 - r. Its queries then see of the keys of rank j, with which
they meet after (r - j) mod n hops:

* j = r: its own, causally (the early part lies before the late one);
* j < r: the early half, by all queries; the late half lies behind every query;
* j > r: both halves, by the late half of the queries; the early queries lie before both.

So every meeting but the first is half of a full block without a mask. Keys and values travel r -> r + 1 while the ones that are
here are used. In backward they travel once more, and each block's gradients follow one hop behind, gathering every rank's part,
until they reach the owner: n - 1 hops for either, the bytes of an all-gather and of a reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from executor.attention_kernels import attend, attend_backward
from executor.ops import context_of, define, name_of
from executor.timers import Timers


@dataclass(frozen=True)
class CpContext:
    """The context-parallel group as one rank sees it. ``local_seq``: tokens of a sequence that it holds, at ``positions``."""

    group: ProcessGroup
    rank: int
    size: int
    local_seq: int
    positions: Tensor
    ring: bool
    timers: Timers

    def to_next(self, tensor: Tensor) -> _Hop:
        """Begin to send ``tensor`` to the next rank and to receive its like from the one before."""
        received = torch.empty_like(tensor)
        ops = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank + 1) % self.size),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.size),
        ]
        return _Hop(dist.batch_isend_irecv(ops), tensor, received, self.timers)


@dataclass(frozen=True)
class _Hop:
    """One exchange that is under way; the sent tensor lives until it has gone."""

    works: list[dist.Work]
    sent: Tensor
    received: Tensor
    timers: Timers

    def wait(self) -> Tensor:
        with self.timers.phase("cp_comm"):
            for work in self.works:
                work.wait()
        return self.received


def _forward(q: Tensor, k: Tensor, v: Tensor, cp: CpContext, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the whole sequence."""
    half = q.shape[2] // 2
    cp.timers.count("cp.ring", cp.size * (k.nbytes + v.nbytes))
    travelling = torch.stack((k, v))
    hop = cp.to_next(travelling)
    first, lse = attend(q, k, v, causal=True, scale=scale)
    out = first.float()
    for step in range(1, cp.size):
        travelling = hop.wait()
        if step + 1 < cp.size:
            hop = cp.to_next(travelling)
        keys, values = travelling
        if step <= cp.rank:
            part, part_lse = attend(q, keys[:, :, :half], values[:, :, :half], causal=False, scale=scale)
            _merge(out, lse, part, part_lse)
        else:
            part, part_lse = attend(q[:, :, half:], keys, values, causal=False, scale=scale)
            _merge(out[:, :, half:], lse[:, :, half:], part, part_lse)
    return out.to(q.dtype), lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add attention over further keys to ``out`` and ``lse``, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(part.float() * (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cp: CpContext, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    half = q.shape[2] // 2
    cp.timers.count("cp.ring", cp.size * (k.nbytes + v.nbytes))
    cp.timers.count("cp.ring", cp.size * (k.nbytes + v.nbytes))
    hop = cp.to_next(torch.stack((k, v)))
    grad_q, own_k, own_v = attend_backward(grad, q, k, v, out, lse, causal=True, scale=scale)
    grad_q = grad_q.float()
    late = [tensor[:, :, half:].contiguous() for tensor in (grad, q, out, lse)]
    following: _Hop | None = None
    for step in range(1, cp.size):
        travelling = hop.wait()
        if step + 1 < cp.size:
            hop = cp.to_next(travelling)
        block = torch.zeros(travelling.shape, dtype=torch.float32, device=q.device)
        if step <= cp.rank:
            early_k, early_v = (tensor[:, :, :half].contiguous() for tensor in travelling)
            part, block_k, block_v = attend_backward(grad, q, early_k, early_v, out, lse, causal=False, scale=scale)
            grad_q += part
            block[0, :, :, :half], block[1, :, :, :half] = block_k, block_v
        else:
            late_grad, late_q, late_out, late_lse = late
            part, block_k, block_v = attend_backward(
                late_grad, late_q, travelling[0], travelling[1], late_out, late_lse, causal=False, scale=scale
            )
            grad_q[:, :, half:] += part
            block[0], block[1] = block_k, block_v
        if following is not None:
            block += following.wait()
        following = cp.to_next(block.to(k.dtype))
    if following is not None:
        arrived = following.wait()
        own_k, own_v = own_k + arrived[0], own_v + arrived[1]
    return grad_q.to(q.dtype), own_k, own_v


def _op_forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, context: str) -> tuple[Tensor, Tensor]:
    return _forward(q, k.contiguous(), v.contiguous(), context_of(context), scale)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, context: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


define(
    "ring_attention(Tensor q, Tensor k, Tensor v, float? scale, str context) -> (Tensor, Tensor)",
    _op_forward, _fake_forward, kept=False,
)  # fmt: skip


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, cp: CpContext) -> Tensor:
        out, lse = torch.ops.meshwright.ring_attention(q, k, v, scale, name_of("cp", cp))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.cp = scale, cp
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = _backward(grad.contiguous(), q, k.contiguous(), v.contiguous(), out, lse, ctx.cp, ctx.scale)
        return (*gradients, None, None)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, cp: CpContext, scale: float | None = None) -> Tensor:
    """Causal attention of local queries ``(B, h, S / n, D)`` over the keys and values of all ranks."""
    return _RingAttention.apply(q, k, v, scale, cp)
