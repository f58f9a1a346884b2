"""Data parallelism without sharding: none, ``DistributedDataParallel``, or flattened all-reduces after the last micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from executor.timers import Timers


class DataParallel:
    """One stage on one rank of the data axis. This base class is a stage that is on no such axis.

    Every rank's loss is its share of the step's mean, so gradients are summed over the axis, whatever the shares.

    Life of a step: for each micro-batch :meth:`micro_batch` around forward and backward, with :meth:`watch` on the loss and
    :meth:`backward_done`; then :meth:`finish`. After that every parameter's ``grad`` is the sum over the axis.
    ``loss_factor``: multiply the loss by it, where the sum that is at hand is a mean.
    """

    loss_factor = 1.0

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch; ``is_last`` of the step."""
        return contextlib.nullcontext()

    def watch(self, loss: Tensor, *, is_last: bool) -> None:
        """Called with the loss before its backward runs."""

    def backward_done(self) -> None:
        """Called right after a micro-batch's backward, still under its timer."""

    def finish(self) -> None:
        """Called after the last micro-batch of a step."""


class DdpDataParallel(DataParallel):
    """Buckets that are all-reduced while backward still runs (arXiv 2006.15704), in the last micro-batch only.

    Gradients live in the buckets. The exposed part is the wait after the last gradient; packing happens inside backward.
    """

    def __init__(
        self, module: nn.Module, group: ProcessGroup, bucket_bytes: float, timers: Timers, *,
        experts: ExpertGradients | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module)
        self.loss_factor = float(dist.get_world_size(group))  # the buckets' mean over the axis becomes the sum
        self._experts = experts
        device = next(module.parameters()).device
        ids = experts.ids if experts is not None else set()
        ignored = [name for name, parameter in module.named_parameters() if id(parameter) in ids]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        self.module = self._ddp = DistributedDataParallel(
            module,
            process_group=group,
            bucket_cap_mb=bucket_bytes / 2**20,  # type: ignore[arg-type]  # torch multiplies by 2^20; fractions are fine
            gradient_as_bucket_view=True,
            forward_sync_buffers=False,
            init_sync=False,  # every rank draws the same initial values
            device_ids=[device.index] if device.type == "cuda" else None,
        )
        self._timers = timers
        self._computed_at: float | None = None
        self._grad_bytes = sum(
            parameter.nbytes for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in ids
        )

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged in the last micro-batch only."""
        return contextlib.nullcontext() if is_last else self._ddp.no_sync()

    def watch(self, loss: Tensor, *, is_last: bool) -> None:
        """Note the moment when the last gradient is computed: final callbacks run in the order in which they are queued, and
        DDP queues its wait only when its last bucket is full."""
        if is_last:
            loss.register_hook(lambda _: Variable._execution_engine.queue_callback(self._mark))

    def _mark(self) -> None:
        self._computed_at = self._timers.now()

    def backward_done(self) -> None:
        """Charge the wait to ``dp_comm``."""
        if self._computed_at is not None:
            self._timers.move("backward", "dp_comm", self._timers.now() - self._computed_at)
            self._computed_at = None
            for size in self._bucket_sizes():
                self._timers.count("dp.all_reduce", size)

    def finish(self) -> None:
        """Reduce the experts, which no bucket holds."""
        if self._experts is not None:
            self._experts.reduce(scale=1 / self.loss_factor)

    def _bucket_sizes(self) -> list[int]:
        logged = self._ddp._get_ddp_logging_data()
        text = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or str(self._grad_bytes)
        return [int(part) for part in str(text).split(",")]


class RehearsedBuckets(DataParallel):
    """Stands for ``DistributedDataParallel``, whose buckets want real tensors: they are there from the start, and gradients move
    into them as they come in the last micro-batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._is_last = False
        self._buckets: list[Tensor] = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                bucket = torch.empty_like(parameter)
                self._buckets.append(bucket)
                parameter.register_post_accumulate_grad_hook(self._mover(bucket))

    def _mover(self, bucket: Tensor) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            if self._is_last:
                parameter.grad = bucket

        return move

    def watch(self, loss: Tensor, *, is_last: bool) -> None:
        """Gradients move in the last micro-batch only."""
        self._is_last = is_last


class FlatDataParallel(DataParallel):
    """One all-reduce of each unit's flattened gradients after the last micro-batch; nothing overlaps."""

    def __init__(
        self, module: nn.Module, units: Sequence[nn.Module], group: ProcessGroup | None, timers: Timers, *,
        experts: ExpertGradients | None = None, elsewhere: Set[int] = frozenset(),
    ) -> None:  # fmt: skip
        super().__init__(module)
        self._units, self._group, self._timers, self._experts = list(units), group, timers, experts
        self._elsewhere = elsewhere

    def finish(self) -> None:
        """Reduce unit by unit; a shared parameter with the first unit that holds it (``elsewhere``: identities of those that
        another stage of the rank reduces), experts between those that hold them."""
        if self._group is not None:
            experts = self._experts.ids if self._experts is not None else set()
            _reduce_units(self._units, self._group, "dp.all_reduce", self._timers, done={*experts, *self._elsewhere})
        if self._experts is not None:
            self._experts.reduce()


class ExpertGradients:
    """Gradients of a stage's experts, summed over the ranks that hold the same ones: one all-reduce per unit."""

    def __init__(self, experts: Sequence[nn.Module], group: ProcessGroup | None, timers: Timers) -> None:
        self._experts, self._group, self._timers = list(experts), group, timers

    @property
    def ids(self) -> set[int]:
        """Identities of the parameters."""
        return {id(parameter) for part in self._experts for parameter in part.parameters()}

    def reduce(self, scale: float = 1.0) -> None:
        """Sum, and multiply by ``scale``."""
        if self._group is not None:
            _reduce_units(self._experts, self._group, "dp.expert_all_reduce", self._timers, done=set())
        if scale != 1.0:
            for part in self._experts:
                for parameter in part.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)


def _reduce_units(units: Sequence[nn.Module], group: ProcessGroup, kind: str, timers: Timers, *, done: set[int]) -> None:
    for unit in units:
        own = [parameter for parameter in unit.parameters() if parameter.grad is not None and id(parameter) not in done]
        done |= {id(parameter) for parameter in own}
        if own:
            with timers.phase("dp_comm"):
                all_reduce_gradients(own, group, kind, timers)


def all_reduce_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup, kind: str, timers: Timers) -> None:
    """Sum the gradients of ``parameters`` as one flat tensor. The gradients become views of it (no copy back).

    DTensor parameters contribute their local shard.
    """
    grads = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    timers.count(kind, flat.nbytes)
    dist.all_reduce(flat, group=group)
    for parameter, grad, part in zip(parameters, grads, flat.split([grad.numel() for grad in grads]), strict=True):
        if grad is parameter.grad:
            parameter.grad = part.view_as(grad)
        else:
            grad.copy_(part.view_as(grad))


def local_tensor(tensor: Tensor | None) -> Tensor:
    """The local part of a DTensor, or the tensor itself."""
    if tensor is None:
        raise RuntimeError("a parameter has no gradient")
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local
