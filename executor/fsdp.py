"""Sharded data parallelism with ``fully_shard``, one unit at a time: ZeRO-1, 2 and 3 (arXiv 1910.02054), optionally HSDP.

This is the one file that touches FSDP2's internals (torch 2.13; a test checks that they are as expected).

* zero 1: parameters are gathered at a unit's first forward and kept for the step; full gradients accumulate; one reduce-scatter
  per unit in the last micro-batch's backward (under a pipeline: after the stage's last backward).
* zero 2: the same, but reduce-scattered in every micro-batch.
* zero 3: gathered before each forward and each backward and freed after; reduce-scattered in every micro-batch. Gathers of the
  next units run ahead (``prefetch_units``).

On CPU a gather without prefetch and every reduce-scatter run on the calling thread, so all of it is exposed; a prefetched
gather runs on gloo's thread, and what is exposed is packing, the wait and unpacking.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
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

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def __call__(self, output_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        """Gather into ``output_tensor``."""
        self._timers.count("dp.all_gather", output_tensor.nbytes)
        return super().__call__(output_tensor, *args, **kwargs)


class CountedReduceScatter(DefaultReduceScatter):
    """The stock reduce-scatter, counted."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce ``input_tensor``."""
        self._timers.count("dp.reduce_scatter", input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class ShardedDataParallel(DataParallel):
    """A stage whose units are sharded over the dp axis (or, HSDP, over groups of it)."""

    def __init__(
        self, module: nn.Module, unit_groups: Sequence[Sequence[nn.Module]], mesh: DeviceMesh, *, zero: int, prefetch_units: int,
        reduce_dtype: torch.dtype | None, under_pipeline: bool, timers: Timers,
    ) -> None:  # fmt: skip
        """Shard in place. ``unit_groups``: units that are gathered together (one each, unless they share a parameter)."""
        super().__init__(module)
        self._zero, self._under_pipeline, self._timers = zero, under_pipeline, timers
        self._hybrid = mesh.ndim > 1
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        heads = []
        for group in unit_groups:
            fully_shard(list(group) if len(group) > 1 else group[0], mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
            heads.append(_fsdp(group[0]))
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        self._root = _fsdp(module)
        self._flags: tuple[bool, bool, bool] | None = None
        # with kept parameters there is nothing to gather ahead, and torch's default would gather freed ones once more
        _prefetch(heads, prefetch_units if zero == 3 else 0, asynchronous=mesh.device_type == "cpu")
        for head in heads:
            self._instrument(head)

    def _instrument(self, unit: FSDPModule) -> None:
        """Charge gathers, waits and reductions to ``dp_comm``."""
        unit.set_custom_all_gather(CountedAllGather(self._timers))
        unit.set_custom_reduce_scatter(CountedReduceScatter(self._timers))
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for name in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
                setattr(group, name, self._timed(getattr(group, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        phase = self._timers.phase("dp_comm")

        def run(*args: Any, **kwargs: Any) -> Any:
            with phase:
                return call(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _flagged(self, *, is_last: bool) -> Iterator[None]:
        if self._under_pipeline:
            self._set_flags(sync=self._zero == 2, reshard=False, last=False)
        else:
            self._set_flags(sync=is_last or self._zero >= 2, reshard=is_last or self._zero == 3, last=is_last)
        yield

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Say what this micro-batch's backward does with gradients and gathered parameters."""
        return self._flagged(is_last=is_last)

    def _set_flags(self, *, sync: bool, reshard: bool, last: bool) -> None:
        if self._flags == (sync, reshard, last):
            return
        self._flags = (sync, reshard, last)
        self._root.set_requires_gradient_sync(sync)
        if self._hybrid and sync:
            self._root.set_requires_all_reduce(last)
        self._root.set_reshard_after_backward(reshard)
        self._root.set_is_last_backward(last)

    def finish(self) -> None:
        """Under a pipeline: reduce what has accumulated and free the gathered parameters."""
        if self._under_pipeline:
            self._set_flags(sync=True, reshard=True, last=True)
            self._root._get_fsdp_state()._root_post_backward_final_callback()


def _fsdp(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise RuntimeError("fully_shard has not taken the module")
    return module


def _prefetch(units: Sequence[FSDPModule], count: int, *, asynchronous: bool) -> None:
    """Gather ``count`` units ahead, in forward and in backward. A unit that prefetches itself prefetches nothing, which is how
    torch's default of one in backward is turned off."""
    for index, unit in enumerate(units):
        following, preceding = units[index + 1 : index + 1 + count], units[max(0, index - count) : index]
        unit.set_modules_to_forward_prefetch(list(following))
        unit.set_modules_to_backward_prefetch(list(reversed(preceding)) or [unit])
        unit._set_unshard_async_op(asynchronous and count > 0)
