"""Sharded data parallelism with ``fully_shard``, one unit at a time: ZeRO-1, 2 and 3 (arXiv 1910.02054), optionally HSDP.

This is the one file that touches FSDP2's internals (torch 2.13; a test checks that they are as expected).

* zero 1: parameters are gathered at a unit's first forward and kept for the step; full gradients accumulate; one reduce-scatter
  per unit in the last micro-batch's backward (under a pipeline: after the stage's last backward).
* zero 2: the same, but reduce-scattered in every micro-batch.
* zero 3: gathered before each forward and each backward and freed after (but the last unit's stay from forward to backward);
  reduce-scattered in every micro-batch. Gathers of the next units run ahead (``prefetch_units``).

On CPU a gather without prefetch and every reduce-scatter run on the calling thread, so all of it is exposed; a prefetched
gather runs on gloo's thread, and what is exposed is packing, the wait and unpacking.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from executor.data_parallel import DataParallel
from executor.timers import Timers


class CountedAllGather(DefaultAllGather):
    """The stock all-gather, counted."""

    def __init__(self, timers: Timers, kind: str) -> None:
        self._timers, self._kind = timers, kind

    def __call__(self, output_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        """Gather into ``output_tensor``."""
        self._timers.count(self._kind, output_tensor.nbytes)
        return super().__call__(output_tensor, *args, **kwargs)


class CountedReduceScatter(DefaultReduceScatter):
    """The stock reduce-scatter, counted."""

    def __init__(self, timers: Timers, kind: str) -> None:
        self._timers, self._kind = timers, kind

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce ``input_tensor``."""
        self._timers.count(self._kind, input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


@dataclass(frozen=True)
class UnitGroup:
    """Units that are gathered together (one, unless they share a parameter), and the modules in them that hold experts."""

    units: tuple[nn.Module, ...]
    experts: tuple[nn.Module, ...] = ()


class ShardedDataParallel(DataParallel):
    """A stage whose units are sharded over the data axis (or, HSDP, over groups of it), experts over the ranks with the same ones.

    HSDP: gradients are reduce-scattered within the group and all-reduced between groups in the last micro-batch (two hops, MiCS,
    arXiv 2205.00119 §3.4).
    """

    def __init__(
        self, module: nn.Module, unit_groups: Sequence[UnitGroup], mesh: DeviceMesh, expert_mesh: DeviceMesh | None, *,
        zero: int, prefetch_units: int, reduce_dtype: torch.dtype | None, under_pipeline: bool, timers: Timers,
    ) -> None:  # fmt: skip
        """Shard in place. ``expert_mesh``: ``None`` where no other rank holds the same experts."""
        super().__init__(module)
        self._zero, self._under_pipeline, self._timers = zero, under_pipeline, timers
        self._hybrid = any(item is not None and item.ndim > 1 for item in (mesh, expert_mesh))
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        experts_apart = expert_mesh is not None
        unsharded = (
            {p for group in unit_groups for part in group.experts for p in part.parameters()} if not experts_apart else set()
        )
        heads = []
        for group in unit_groups:
            # the last unit's backward follows its forward at once
            options = {"mp_policy": policy, "reshard_after_forward": zero == 3 and group is not unit_groups[-1]}
            experts = list(group.experts) if experts_apart else []
            for expert in experts:
                fully_shard(expert, mesh=expert_mesh, **options)
            units = list(group.units)
            fully_shard(units if len(units) > 1 else units[0], mesh=mesh, ignored_params=unsharded, **options)
            heads.append([_fsdp(part) for part in (units[0], *experts)])
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=unsharded)
        self._root = _fsdp(module)
        self._flags: tuple[bool, bool, bool, bool] | None = None
        # with kept parameters there is nothing to gather ahead, and torch's default would gather freed ones once more
        _prefetch(heads, prefetch_units if zero == 3 else 0, asynchronous=mesh.device_type == "cpu")
        for head, *parts in heads:
            self._instrument(head, "")
            for part in parts:
                self._instrument(part, "expert_")

    def _instrument(self, unit: FSDPModule, kind: str) -> None:
        """Sum gradients instead of averaging them; charge gathers, waits and reductions to ``dp_comm``."""
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_all_gather(CountedAllGather(self._timers, f"dp.{kind}all_gather"))
        unit.set_custom_reduce_scatter(CountedReduceScatter(self._timers, f"dp.{kind}reduce_scatter"))
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            if group._is_hsdp:
                group._all_reduce_hook = self._counted(f"dp.{kind}all_reduce")
            for name in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
                setattr(group, name, self._timed(getattr(group, name)))

    def _counted(self, kind: str) -> Callable[[Tensor], None]:
        """Called with each result of the second hop."""
        return lambda reduced: self._timers.count(kind, reduced.nbytes)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        phase = self._timers.phase("dp_comm")

        def run(*args: Any, **kwargs: Any) -> Any:
            with phase:
                return call(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _flagged(self, *, is_last: bool) -> Iterator[None]:
        if self._under_pipeline:
            self._set_flags(sync=self._zero == 2, between_groups=is_last, reshard=False, last=False)
        else:
            sync, reshard = is_last or self._zero >= 2, is_last or self._zero == 3
            self._set_flags(sync=sync, between_groups=is_last, reshard=reshard, last=is_last)
        yield

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Say what this micro-batch's backward does with gradients and gathered parameters."""
        return self._flagged(is_last=is_last)

    def _set_flags(self, *, sync: bool, between_groups: bool, reshard: bool, last: bool) -> None:
        """``between_groups``: HSDP's second hop, with what earlier micro-batches have scattered."""
        flags = (sync, between_groups, reshard, last)
        if self._flags == flags:
            return
        self._flags = flags
        self._root.set_requires_gradient_sync(sync)
        if self._hybrid and sync:
            self._root.set_requires_all_reduce(between_groups)
        self._root.set_reshard_after_backward(reshard)
        self._root.set_is_last_backward(last)

    def finish(self) -> None:
        """Under a pipeline: reduce what has accumulated and free the gathered parameters."""
        if self._under_pipeline:
            self._set_flags(sync=True, between_groups=True, reshard=True, last=True)
            self._root._get_fsdp_state()._root_post_backward_final_callback()


def _fsdp(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise RuntimeError("fully_shard has not taken the module")
    return module


def _prefetch(groups: Sequence[Sequence[FSDPModule]], count: int, *, asynchronous: bool) -> None:
    """Gather ``count`` groups of modules ahead, in forward and in backward. A module that prefetches itself prefetches nothing,
    which is how torch's default of one in backward is turned off."""
    for index, group in enumerate(groups):
        following = [part for other in groups[index + 1 : index + 1 + count] for part in other]
        preceding = [part for other in reversed(groups[max(0, index - count) : index]) for part in other]
        for number, part in enumerate(group):
            part.set_modules_to_forward_prefetch(following if number == 0 else [])
            part.set_modules_to_backward_prefetch((preceding if number == 0 else []) or [part])
            part._set_unshard_async_op(asynchronous and count > 0)
