"""Expert parallelism: each rank holds some of the experts, and tokens travel to the ranks of theirs and back (arXiv 2006.16668).

A module that multiplies rows sorted by expert with stacked weights, ``forward(rows, ends)``, keeps its code: it gets the rows of
all ranks for the experts that are here. Dropless: as many rows travel as the router says; ranks first tell each other how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

from executor.ops import context_of, define, name_of
from executor.params import MetaParameters, ParamPlace, shard_bounds
from executor.timers import Timers
from specs.errors import InvalidInput, Violation


@dataclass(frozen=True)
class EpContext:
    """The expert-parallel group as one rank sees it."""

    group: ProcessGroup
    rank: int
    size: int
    timers: Timers


class ParallelExperts(nn.Module):
    """Stands for a module of stacked experts, of which it holds ``num_experts / ep``."""

    def __init__(self, experts: nn.Module, num_experts: int, ep: EpContext) -> None:
        super().__init__()
        self.experts, self._ep = experts, ep
        self._local = [shard_bounds(num_experts, rank, ep.size) for rank in range(ep.size)]

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """``rows`` (N, in) sorted by expert; ``ends`` (experts,) int32: one past the last row of each. Returns (N, out)."""
        ep = self._ep
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int64)
        received_counts = torch.ops.meshwright.exchange_counts(counts, [stop - first for first, stop in self._local], _key(ep))
        sent, received = _splits(counts, received_counts, self._local, rows.shape[0])
        order = _by_expert(received_counts, sum(received))
        arrived = _Exchange.apply(rows, sent, received, ep)
        local_ends = received_counts.sum(dim=0).cumsum(0).to(torch.int32)
        produced = self.experts(arrived.index_select(0, order), local_ends)
        back = torch.argsort(order)
        return _Exchange.apply(produced.index_select(0, back), received, sent, ep)


def _splits(
    counts: Tensor, received_counts: Tensor, local: Sequence[tuple[int, int]], num_rows: int
) -> tuple[list[int], list[int]]:
    """Rows for and from each rank. Fake tensors have no counts: then as if the router were balanced."""
    if isinstance(counts, FakeTensor):
        even = [num_rows * stop // counts.shape[0] - num_rows * first // counts.shape[0] for first, stop in local]
        return even, even
    per_expert = counts.tolist()
    return [sum(per_expert[first:stop]) for first, stop in local], received_counts.sum(dim=1).tolist()


def _by_expert(received_counts: Tensor, num_rows: int) -> Tensor:
    """What comes rank by rank, and there expert by expert, in the order of the experts."""
    ranks, experts = received_counts.shape
    expert = torch.arange(0, experts, device=received_counts.device).repeat(ranks)  # two bounds: no positions of a sequence
    return torch.argsort(expert.repeat_interleave(received_counts.flatten(), output_size=num_rows), stable=True)


# --- exchanges ------------------------------------------------------------------------------------------------------


def _exchange_counts(counts: Tensor, experts_of: Sequence[int], context: str) -> Tensor:
    """Rows for each expert (experts,) to rows from each rank for each expert that is here (ep, local experts)."""
    ep: EpContext = context_of(context)
    own = experts_of[ep.rank]
    received = counts.new_empty(ep.size * own)
    with ep.timers.phase("ep_comm"):
        ep.timers.count("ep.counts", counts.nbytes)
        dist.all_to_all_single(received, counts.contiguous(), [own] * ep.size, list(experts_of), group=ep.group)
    return received.view(ep.size, own)


def _exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], context: str) -> Tensor:
    """Rows to each rank, and from each rank."""
    ep: EpContext = context_of(context)
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    with ep.timers.phase("ep_comm"):
        ep.timers.count("ep.all_to_all", rows.nbytes)
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=ep.group)
    return arrived


def _fake_counts(counts: Tensor, experts_of: Sequence[int], context: str) -> Tensor:
    ep: EpContext = context_of(context)
    return counts.new_empty(ep.size, experts_of[ep.rank])


def _fake_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], context: str) -> Tensor:
    return rows.new_empty(sum(received), *rows.shape[1:])


define("exchange_counts(Tensor counts, int[] experts_of, str context) -> Tensor", _exchange_counts, _fake_counts)
define("exchange_rows(Tensor rows, SymInt[] sent, SymInt[] received, str context) -> Tensor", _exchange_rows, _fake_rows)


def _key(ep: EpContext) -> str:
    return name_of("ep", ep)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], ep: EpContext) -> Tensor:
        ctx.sent, ctx.received, ctx.ep = sent, received, ep
        return torch.ops.meshwright.exchange_rows(rows, sent, received, _key(ep))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ops.meshwright.exchange_rows(grad, ctx.received, ctx.sent, _key(ctx.ep)), None, None, None


# --- conversion -----------------------------------------------------------------------------------------------------


def apply_expert_parallel(
    units: dict[int, nn.Module], places: list[ParamPlace], expert_params: set[str], ep: EpContext, meta: MetaParameters
) -> dict[int, list[nn.Module]]:
    """Shrink the stacked weights named in ``expert_params`` (on ``meta``) and wrap their modules. Returns the wrappers by unit.

    Raises :class:`InvalidInput` where a rank would hold no expert.
    """
    wrapped: dict[int, list[nn.Module]] = {}
    for number, unit in units.items():
        own = [place for place in places if place.unit == number and place.fqn in expert_params]
        for module in {id(place.module): place.module for place in own}.values():
            mine = [place for place in own if place.module is module]
            count = mine[0].full_shape[0]
            _check(mine[0], count, ep)
            first, stop = shard_bounds(count, ep.rank, ep.size)
            for place in mine:
                place.expert = True
                shape = (stop - first, *place.parameter.shape[1:])
                place.module._parameters[place.name] = meta.replace(place.parameter, shape)
            wrapper = ParallelExperts(module, count, ep)
            wrapper.train(module.training)
            units[number] = _replaced(unit, module, wrapper)
            wrapped.setdefault(number, []).append(wrapper)
    return wrapped


def _check(place: ParamPlace, count: int, ep: EpContext) -> None:
    if shard_bounds(count, ep.size - 1, ep.size)[0] >= count:
        message = f"{place.fqn}: {count} experts leave a rank of ep {ep.size} without one"
        raise InvalidInput([Violation(code="experts_of_rank", message=message, actual=ep.size)], subject="expert parallel")


def _replaced(unit: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """``unit`` with ``new`` in the place of ``old``."""
    if unit is old:
        return new
    for parent in list(unit.modules()):
        if parent is not new:
            for name, child in list(parent._modules.items()):
                if child is old:
                    parent._modules[name] = new
    return unit
