"""Context parallelism: each rank holds a part of every sequence; only attention and positions look beyond it.

A unit needs no change: while its forward runs, ``scaled_dot_product_attention`` becomes attention over the whole sequence (a
ring, or Ulysses' exchange of the sequence for heads, arXiv 2309.14509), and ``arange(length of the local part)``, by which a unit
numbers the positions of its sequence, counts the positions that are here (an ``arange`` with a start is let be).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from executor.ops import context_of, define, name_of
from executor.ring_attention import CpContext, ring_attention


class ContextParallelUnit(nn.Module):
    """A unit whose forward runs on a part of the sequence."""

    def __init__(self, unit: nn.Module, cp: CpContext) -> None:
        super().__init__()
        self.unit, self._cp = unit, cp

    def forward(self, *args: Tensor) -> Tensor:
        """The unit's forward, its attention and positions replaced."""
        with _WholeSequence(self._cp):
            return self.unit(*args)


class _WholeSequence(TorchFunctionMode):
    def __init__(self, cp: CpContext) -> None:
        super().__init__()
        self._cp = cp

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return context_parallel_attention(*args, cp=self._cp, **options)
        if func is torch.arange and len(args) == 1 and args[0] == self._cp.local_seq:
            return self._cp.positions.to(device=options.get("device"), dtype=options.get("dtype"))
        return func(*args, **options)


def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, cp: CpContext,
) -> Tensor:  # fmt: skip
    """``scaled_dot_product_attention`` of local queries ``(B, h, S / n, D)`` over the whole sequence.

    Raises :class:`RuntimeError` for what it does not do: masks, dropout, and a ring without causality or with unlike head sizes.
    """
    if attn_mask is not None or dropout_p:
        raise RuntimeError("context-parallel attention takes no mask and no dropout")
    if not cp.ring:
        return ulysses_attention(q, k, v, cp, is_causal=is_causal, scale=scale)
    if not is_causal or q.shape[-1] != v.shape[-1]:
        raise RuntimeError("ring attention is causal, with values as wide as queries; use context_parallel 'ulysses'")
    return ring_attention(q, k, v, cp, scale)


# --- Ulysses --------------------------------------------------------------------------------------------------------


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, cp: CpContext, *, is_causal: bool, scale: float | None) -> Tensor:
    """Attention of 1/n of the heads over the whole sequence, between two all-to-alls."""
    if q.shape[1] % cp.size:
        raise RuntimeError(f"{q.shape[1]} heads are no multiple of the {cp.size} context-parallel ranks")
    if k.shape[1] % cp.size:  # fewer key-value heads than ranks: each query head brings its own
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    q, k, v = (_Exchange.apply(tensor, cp, True) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return _Exchange.apply(out, cp, False)


def _exchange(x: Tensor, cp: CpContext, to_heads: bool) -> Tensor:
    """``(B, h, S / n, D)`` to ``(B, h / n, S, D)``, or back."""
    batch, heads, seq, dim = x.shape
    n = cp.size
    with cp.timers.phase("cp_comm"):
        cp.timers.count("cp.all_to_all", x.nbytes)
        if to_heads:
            packed = x.reshape(batch, n, heads // n, seq, dim).transpose(0, 1).contiguous()
        else:
            packed = x.reshape(batch, heads, n, seq // n, dim).movedim(2, 0).contiguous()
        received = torch.empty_like(packed)
        dist.all_to_all_single(received.flatten(0, 1), packed.flatten(0, 1), group=cp.group)
        if to_heads:
            return received.movedim(0, 2).reshape(batch, heads // n, n * seq, dim)
        return received.transpose(0, 1).reshape(batch, n * heads, seq // n, dim)


def _op_exchange(x: Tensor, to_heads: bool, context: str) -> Tensor:
    return _exchange(x, context_of(context), to_heads)


def _fake_exchange(x: Tensor, to_heads: bool, context: str) -> Tensor:
    batch, heads, seq, dim = x.shape
    n = context_of(context).size
    return x.new_empty((batch, heads // n, seq * n, dim) if to_heads else (batch, heads * n, seq // n, dim))


define("exchange_heads(Tensor x, bool to_heads, str context) -> Tensor", _op_exchange, _fake_exchange)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: CpContext, to_heads: bool) -> Tensor:
        ctx.cp, ctx.to_heads = cp, to_heads
        return torch.ops.meshwright.exchange_heads(x, to_heads, name_of("cp", cp))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(grad, ctx.cp, not ctx.to_heads), None, None
