"""Pipeline parallelism: the plan's action rows on torch's schedule runtime. The one file that knows its internals (torch 2.13).

torch inserts the sends and receives (each receive as early as its send is known) and keeps the stages' autograd state. What
each action does is ours, for three reasons: timing (waiting is ``pipeline``, computing is ``forward`` or ``backward``), data
parallelism (the stage's own, see ``executor.data_parallel``), and memory (torch's runtime keeps every receive buffer and every
sent tensor until the next step; here a buffer lives from its receive to its backward, and a sent gradient until two later).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineContext, _PipelineScheduleRuntime

from executor.data_parallel import DataParallel
from executor.timers import Timers
from specs.schedule import Rows, to_text

MAX_UNCONFIRMED_GRADIENT_SENDS = 2


@dataclass(frozen=True)
class BoundaryShape:
    """The hidden states that a stage receives (``None`` for the first) and sends (``None`` for the last)."""

    received: tuple[int, ...] | None
    sent: tuple[int, ...] | None
    dtype: torch.dtype


@dataclass(frozen=True)
class LocalStage:
    """A stage of this rank: its number, its module under data parallelism, and its boundary."""

    index: int
    data_parallel: DataParallel
    boundary: BoundaryShape


class _Body(nn.Module):
    """Hides what the module is wrapped in from torch's runtime, which would otherwise run FSDP and DDP its own way."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.module(*args, **kwargs)


class PipelineRunner:
    """Runs one step of the schedule on this rank."""

    def __init__(
        self, stages: Sequence[LocalStage], rows: Rows, *, num_stages: int, num_micro_batches: int, tokens_shape: tuple[int, int],
        share: float, group: ProcessGroup, device: torch.device, timers: Timers,
    ) -> None:  # fmt: skip
        """``tokens_shape``: (micro-batch, sequence) of the token ids. ``share``: what the mean loss of the rank's tokens counts."""
        self._data_parallel = {stage.index: stage.data_parallel for stage in stages}
        self._num_micro_batches, self._share, self._timers = num_micro_batches, share, timers
        self._stages = [_torch_stage(stage, num_stages, tokens_shape, group, device) for stage in stages]
        self._schedule = _PipelineScheduleRuntime(self._stages, num_micro_batches, loss_fn=_unused_loss, scale_grads=False)
        self._schedule._prepare_schedule_with_comms(torch_actions(rows))
        self._schedule._comp_type_to_function_map.update(self._handlers())
        self._by_index = {stage.stage_index: stage for stage in self._stages}
        self._backwards_left: dict[int, int] = {}
        self._losses: dict[int, Tensor] = {}
        self._forward_sends: dict[tuple[int, int], list[dist.Work]] = {}
        self._gradient_sends: deque[list[dist.Work]] = deque()

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor | None:
        """All micro-batches of ``tokens`` and ``labels`` (micro-batches x micro-batch, S). The mean loss on the last stage's
        ranks, elsewhere ``None``."""
        self._losses = {}
        self._backwards_left = dict.fromkeys(self._by_index, self._num_micro_batches)
        arguments = (tokens,) if any(stage.is_first for stage in self._stages) else ()
        with self._timers.phase("pipeline"):
            self._schedule.step(*arguments, labels=labels, return_outputs=False)
            for works in self._forward_sends.values():
                _wait(works)
            while self._gradient_sends:
                _wait(self._gradient_sends.popleft())
        self._forward_sends.clear()
        if not self._losses:
            return None
        return torch.stack([self._losses[index].detach() for index in range(self._num_micro_batches)]).mean()

    def take_shapes_as_given(self) -> None:
        """Leave out torch's vote on whether shapes are known: it reads a value, which fake tensors have not."""

        def warm_up(stages: Sequence[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
            for stage in stages:
                stage._inference_mode = InferenceMode.STATIC

        self._schedule._warmup_p2p = warm_up

    def lowered(self) -> list[str]:
        """The rows with sends and receives, as text."""
        rows = self._schedule.pipeline_order_with_comms
        return [",".join(str(action) for action in rows[rank]) for rank in sorted(rows)]

    def _handlers(self) -> dict[_ComputationType, Callable[[_Action, _PipelineContext], None]]:
        kind = _ComputationType
        return {
            kind.FORWARD: self._forward,
            kind.FULL_BACKWARD: self._full_backward,
            kind.BACKWARD_INPUT: self._input_backward,
            kind.BACKWARD_WEIGHT: self._weight_backward,
            kind.SEND_F: self._send_forward,
            kind.RECV_F: self._receive_forward,
            kind.SEND_B: self._send_gradient,
            kind.RECV_B: self._receive_gradient,
            kind.UNSHARD: _nothing,
            kind.RESHARD: _nothing,
            kind.REDUCE_GRAD: _nothing,
        }

    # --- computing ---------------------------------------------------------------------------------------------

    def _forward(self, action: _Action, context: _PipelineContext) -> None:
        stage, index = self._by_index[action.stage_index], _micro_batch(action)
        if not stage.is_first and stage.stage_index - 1 not in self._by_index:
            _wait(self._schedule.fwd_recv_ops.pop((stage.stage_index, index)))
        arguments = (context.arg_mbs or [])[index] if stage.is_first else ()
        keywords = (context.kwarg_mbs or [])[index] if stage.is_last else {}
        with self._timers.phase("forward"), self._data_parallel[stage.stage_index].micro_batch(is_last=False):
            output = stage.forward_one_chunk(index, arguments, keywords, save_forward_output=False)
            if stage.is_last:
                self._losses[index] = output
        if stage.stage_index + 1 in self._by_index:
            self._by_index[stage.stage_index + 1].set_local_fwd_input(output, index)

    def _full_backward(self, action: _Action, context: _PipelineContext) -> None:
        self._backward(action, full=True)
        self._weight_done(action)

    def _input_backward(self, action: _Action, context: _PipelineContext) -> None:
        self._backward(action, full=False)

    def _weight_backward(self, action: _Action, context: _PipelineContext) -> None:
        stage = self._by_index[action.stage_index]
        with self._timers.phase("backward"), self._data_parallel[stage.stage_index].micro_batch(is_last=self._is_last(action)):
            stage.backward_weight_one_chunk(_micro_batch(action))
        self._weight_done(action)

    def _backward(self, action: _Action, *, full: bool) -> None:
        stage, index = self._by_index[action.stage_index], _micro_batch(action)
        if not stage.is_last and stage.stage_index + 1 not in self._by_index:
            _wait(self._schedule.bwd_recv_ops.pop((stage.stage_index, index)))
        scale = self._share * self._data_parallel[stage.stage_index].loss_factor / self._num_micro_batches
        loss = self._losses[index] * scale if stage.is_last else None
        with (
            self._timers.phase("backward"),
            self._data_parallel[stage.stage_index].micro_batch(is_last=full and self._is_last(action)),
        ):
            stage.backward_one_chunk(index, loss=loss, full_backward=full)
        if stage.stage_index - 1 in self._by_index:
            self._by_index[stage.stage_index - 1].set_local_bwd_input(stage.get_local_bwd_output(index), index)
        _wait(self._forward_sends.pop((stage.stage_index, index), []))  # its gradient is here, so it has long arrived

    def _is_last(self, action: _Action) -> bool:
        return self._backwards_left[action.stage_index] == 1

    def _weight_done(self, action: _Action) -> None:
        self._backwards_left[action.stage_index] -= 1
        self._release(self._by_index[action.stage_index], _micro_batch(action))

    @staticmethod
    def _release(stage: PipelineStage, index: int) -> None:
        """Let the micro-batch's receive buffers go; new ones are made for the next receive."""
        for info in (*stage.args_recv_info[index], *stage.grad_recv_info.get(index, ())):
            info.buffer = None

    # --- sending and receiving ---------------------------------------------------------------------------------

    def _send_forward(self, action: _Action, context: _PipelineContext) -> None:
        stage, index = self._by_index[action.stage_index], _micro_batch(action)
        self._forward_sends[stage.stage_index, index] = self._post(stage.get_fwd_send_ops(index))

    def _send_gradient(self, action: _Action, context: _PipelineContext) -> None:
        stage = self._by_index[action.stage_index]
        self._gradient_sends.append(self._post(stage.get_bwd_send_ops(_micro_batch(action))))
        while len(self._gradient_sends) > MAX_UNCONFIRMED_GRADIENT_SENDS:
            _wait(self._gradient_sends.popleft())

    def _receive_forward(self, action: _Action, context: _PipelineContext) -> None:
        stage, index = self._by_index[action.stage_index], _micro_batch(action)
        self._fill_buffers(stage.args_recv_info[index], stage)
        self._schedule.fwd_recv_ops[stage.stage_index, index] = self._post(stage.get_fwd_recv_ops(index))

    def _receive_gradient(self, action: _Action, context: _PipelineContext) -> None:
        stage, index = self._by_index[action.stage_index], _micro_batch(action)
        self._fill_buffers(stage.grad_recv_info[index], stage)
        self._schedule.bwd_recv_ops[stage.stage_index, index] = self._post(stage.get_bwd_recv_ops(index))

    @staticmethod
    def _fill_buffers(infos: Sequence[Any], stage: PipelineStage) -> None:
        for info in infos:
            meta = info.tensor_meta
            info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=stage.device)

    def _post(self, ops: Sequence[dist.P2POp]) -> list[dist.Work]:
        works = []
        for op in ops:
            if op.op is dist.isend:
                self._timers.count("pp.p2p", op.tensor.nbytes)
                works.append(dist.isend(op.tensor, group=op.group, group_dst=op.group_peer))
            else:
                works.append(dist.irecv(op.tensor, group=op.group, group_src=op.group_peer))
        return [work for work in works if work is not None]


def torch_actions(rows: Rows) -> dict[int, list[_Action | None]]:
    """Our rows as torch's actions; the text form is the same in both."""
    return {rank: [_Action.from_str(cell) for cell in line.split(",") if cell] for rank, line in enumerate(to_text(rows))}


def _torch_stage(
    stage: LocalStage, num_stages: int, tokens_shape: tuple[int, int], group: ProcessGroup, device: torch.device
) -> PipelineStage:
    """torch's stage with its shapes given, so that it runs no trial forward to find them."""
    boundary = stage.boundary
    if boundary.received is None:
        inputs = torch.empty(tokens_shape, dtype=torch.int64, device="meta")
    else:
        inputs = torch.empty(boundary.received, dtype=boundary.dtype, device="meta", requires_grad=True)
    sent = () if boundary.sent is None else boundary.sent
    outputs = torch.empty(sent, dtype=boundary.dtype, device="meta", requires_grad=True)
    return PipelineStage(
        _Body(stage.data_parallel.module), stage.index, num_stages, device, input_args=inputs, output_args=outputs, group=group
    )


def _micro_batch(action: _Action) -> int:
    if action.microbatch_index is None:
        raise RuntimeError(f"action {action} names no micro-batch")
    return action.microbatch_index


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _nothing(action: _Action, context: _PipelineContext) -> None:
    """Gathers and reductions belong to the stage's data parallelism."""


def _unused_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last unit computes the loss; torch only needs to see that there is one."""
    return output
