"""Attention that also returns, and in backward takes, the log-sum-exp of its scores: torch's flash kernels (2.13).

Shapes: queries ``(B, h, Sq, D)``, keys and values ``(B, hk, Sk, D)`` with ``hk`` dividing ``h``, log-sum-exp ``(B, h, Sq)`` in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ATEN: Any = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output ``(B, h, Sq, D)`` and log-sum-exp."""
    if q.device.type == "cuda":
        k, v = _repeated(k, q), _repeated(v, q)
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``. With the ``out`` and ``lse`` of attention over more keys than ``k`` these are the parts
    that go through ``k``: the probabilities come from ``lse``, and the row sums of ``grad * out`` are those of the whole."""
    if q.device.type != "cuda":
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    wide_k, wide_v = _repeated(k, q), _repeated(v, q)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of the dropout that there is not
    grad_q, grad_k, grad_v = _ATEN._scaled_dot_product_flash_attention_backward(
        grad, q, wide_k, wide_v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
    )
    return grad_q, _folded(grad_k, k), _folded(grad_v, v)


def _repeated(tensor: Tensor, q: Tensor) -> Tensor:
    """A key-value head for each query head."""
    return tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def _folded(grad: Tensor, like: Tensor) -> Tensor:
    batch, heads, seq, dim = like.shape
    return grad.view(batch, heads, -1, seq, dim).sum(dim=2)
