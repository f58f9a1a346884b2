"""Collectives of tensor parallelism as autograd functions, for hidden states ``(B, S, H)``.

=====================  =======================  =======================
function               forward                  backward
=====================  =======================  =======================
:func:`copy`           nothing                  all-reduce
:func:`reduce`         all-reduce               nothing
:func:`gather`         all-gather along S       reduce-scatter along S
:func:`scatter`        reduce-scatter along S   all-gather along S
=====================  =======================  =======================

``copy`` and ``reduce`` are f and g of Megatron (arXiv 1909.08053 §3), ``gather`` and ``scatter`` their sequence-parallel
counterparts (arXiv 2205.05198 §4.2.2). All run on the calling thread and wait for the result.

Results are written in place where the operand is ours to overwrite. Under selective recompute that would break the cache of
saved results, so there the ``meshwright::`` ops below are used: functional, and visible to the dispatcher that caches them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from executor.ops import context_of, define, name_of
from executor.timers import Timers

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class TpContext:
    """The tensor-parallel group as one rank sees it. ``functional``: keep operands untouched (selective recompute)."""

    group: ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool
    timers: Timers
    functional: bool = False


def all_reduce_(x: Tensor, tp: TpContext, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce ``x`` over the group in place."""
    with tp.timers.phase("tp_comm"):
        tp.timers.count("tp.all_reduce", x.nbytes)
        dist.all_reduce(x, op=op, group=tp.group)
    return x


def all_gather_sequence(x: Tensor, tp: TpContext) -> Tensor:
    """``(B, S / tp, H)`` of every rank to ``(B, S, H)``."""
    with tp.timers.phase("tp_comm"):
        batch, part, hidden = x.shape
        gathered = x.new_empty(tp.size, batch, part, hidden)
        tp.timers.count("tp.all_gather", gathered.nbytes)
        dist.all_gather_single(gathered.view(tp.size * batch, part, hidden), x.contiguous(), group=tp.group)
        return gathered.transpose(0, 1).reshape(batch, tp.size * part, hidden)


def reduce_scatter_sequence(x: Tensor, tp: TpContext) -> Tensor:
    """Sum of ``(B, S, H)`` over the ranks, of which each keeps its ``(B, S / tp, H)``."""
    with tp.timers.phase("tp_comm"):
        batch, sequence, hidden = x.shape
        part = sequence // tp.size
        tp.timers.count("tp.reduce_scatter", x.nbytes)
        packed = x.reshape(batch, tp.size, part, hidden).transpose(0, 1).contiguous()
        own = x.new_empty(batch, part, hidden)
        dist.reduce_scatter_single(own, packed.view(tp.size * batch, part, hidden), group=tp.group)
        return own


def cross_entropy_parts(logits: Tensor, labels: Tensor, first: int, tp: TpContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean cross entropy of logits split over the vocabulary, and what its backward needs: local probabilities (N, V / tp), the
    label's local column (N,), and whether it lies outside (N,).

    A maximum per token goes over the group, then two sums per token in one call.
    """
    highest = all_reduce_(logits.amax(dim=-1), tp, dist.ReduceOp.MAX)
    shifted = logits - highest.unsqueeze(-1)
    index = labels - first
    outside = (index < 0) | (index >= logits.shape[-1])
    index.masked_fill_(outside, 0)
    target = shifted.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill_(outside, 0.0)
    exponentials = shifted.exp_()
    sums = all_reduce_(torch.stack((exponentials.sum(dim=-1), target)), tp)
    return (sums[0].log() - sums[1]).mean(), exponentials.div_(sums[0].unsqueeze(-1)), index, outside


# --- dispatcher-visible, functional forms ---------------------------------------------------------------------------


def _op_all_reduce(x: Tensor, context: str) -> Tensor:
    return all_reduce_(x.clone(), context_of(context))


def _op_all_gather(x: Tensor, context: str) -> Tensor:
    return all_gather_sequence(x, context_of(context))


def _op_reduce_scatter(x: Tensor, context: str) -> Tensor:
    return reduce_scatter_sequence(x, context_of(context))


def _op_cross_entropy(logits: Tensor, labels: Tensor, first: int, context: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return cross_entropy_parts(logits, labels, first, context_of(context))


def _fake_all_gather(x: Tensor, context: str) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * context_of(context).size, x.shape[2])


def _fake_reduce_scatter(x: Tensor, context: str) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // context_of(context).size, x.shape[2])


def _fake_cross_entropy(logits: Tensor, labels: Tensor, first: int, context: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return logits.new_empty(()), torch.empty_like(logits), torch.empty_like(labels), torch.empty_like(labels, dtype=torch.bool)


define("all_reduce(Tensor x, str context) -> Tensor", _op_all_reduce, lambda x, context: torch.empty_like(x))
define("all_gather_sequence(Tensor x, str context) -> Tensor", _op_all_gather, _fake_all_gather)
define("reduce_scatter_sequence(Tensor x, str context) -> Tensor", _op_reduce_scatter, _fake_reduce_scatter)
define(
    "vocab_cross_entropy(Tensor logits, Tensor labels, int first, str context) -> (Tensor, Tensor, Tensor, Tensor)",
    _op_cross_entropy, _fake_cross_entropy, kept=False,
)  # fmt: skip


def _key(tp: TpContext) -> str:
    return name_of("tp", tp)


# --- autograd -------------------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TpContext) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # the consumers are products, whose input gradients are fresh tensors: safe to overwrite
        return all_reduce_(grad.contiguous(), ctx.tp), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TpContext) -> Tensor:
        if tp.functional:
            return torch.ops.meshwright.all_reduce(x, _key(tp))
        ctx.mark_dirty(x)
        return all_reduce_(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TpContext) -> Tensor:
        ctx.tp = tp
        return torch.ops.meshwright.all_gather_sequence(x, _key(tp)) if tp.functional else all_gather_sequence(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_sequence(grad, ctx.tp), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TpContext) -> Tensor:
        ctx.tp = tp
        return torch.ops.meshwright.reduce_scatter_sequence(x, _key(tp)) if tp.functional else reduce_scatter_sequence(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_sequence(grad, ctx.tp), None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, tp: TpContext) -> Tensor:
        if tp.functional:
            loss, *saved = torch.ops.meshwright.vocab_cross_entropy(logits, labels, first, _key(tp))
        else:
            loss, *saved = cross_entropy_parts(logits, labels, first, tp)
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, outside = ctx.saved_tensors
        hit = (~outside).to(probabilities.dtype).neg_().unsqueeze(1)
        grad_logits = probabilities.scatter_add_(1, index.unsqueeze(1), hit)  # saved for this call only: overwritten
        return grad_logits.mul_(grad / probabilities.shape[0]), None, None, None


def copy(x: Tensor, tp: TpContext) -> Tensor:
    """Enter a column-parallel product with a replicated input."""
    return _Copy.apply(x, tp)


def reduce(x: Tensor, tp: TpContext) -> Tensor:
    """Leave a row-parallel product: sum the partial results. ``x`` is overwritten unless ``tp.functional``."""
    return _Reduce.apply(x, tp)


def gather(x: Tensor, tp: TpContext) -> Tensor:
    """Enter a column-parallel product with an input split along the sequence."""
    return _Gather.apply(x, tp)


def scatter(x: Tensor, tp: TpContext) -> Tensor:
    """Leave a row-parallel product, keeping this rank's part of the sequence."""
    return _Scatter.apply(x, tp)


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, first: int, tp: TpContext) -> Tensor:
    """Mean cross entropy of ``logits`` (N, V / tp), whose first column is vocabulary entry ``first``, and ``labels`` (N,)."""
    return _VocabParallelCrossEntropy.apply(logits, labels, first, tp)
