"""Recompute: a unit under ``torch.utils.checkpoint`` (arXiv 1604.06174), in full or for chosen op classes only.

``full`` keeps the unit's inputs. ``selective`` runs the listed op classes again and keeps the results of all other ops. The
forward that runs again inside backward is timed as ``recompute``; its collectives stay with their own term. Recomputation stops
as soon as the last tensor that backward needs is there (torch's early stop), so the unit's last product does not run again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from executor.ops import COLLECTIVES
from executor.timers import Timers
from profiler.opset import OpClass, op_class_of
from specs.plan import RecomputeMode, RecomputeRun

# A composite function's class holds for all that it is made of: rms_norm runs as pow, mean, rsqrt and mul.
_COMPOSITES = {
    "rms_norm": OpClass.NORM,
    "layer_norm": OpClass.NORM,
    "scaled_dot_product_attention": OpClass.ATTENTION,
    "linear": OpClass.GEMM,
    "cross_entropy": OpClass.LOSS,
    "softmax": OpClass.SOFTMAX,
}
# Classes of ops that only the dispatcher sees; the rest are in the op table under their own name.
_DISPATCHED = {
    "native_layer_norm": OpClass.NORM,
    "_fused_rms_norm": OpClass.NORM,
    "_softmax": OpClass.SOFTMAX,
    "_log_softmax": OpClass.SOFTMAX,
    "nll_loss_forward": OpClass.LOSS,
    "vocab_cross_entropy": OpClass.LOSS,
    "ring_attention": OpClass.ATTENTION,
    "_unsafe_view": OpClass.VIEW,
}


def in_backward() -> bool:
    """Whether autograd is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class RecomputedUnit(nn.Module):
    """A unit whose activations are dropped after forward and computed again in backward."""

    def __init__(self, unit: nn.Module, run: RecomputeRun, timers: Timers) -> None:
        super().__init__()
        self.unit = unit
        self._timers = timers
        self._contexts = None if run.mode is RecomputeMode.FULL else selective_contexts(frozenset(run.op_classes))

    def forward(self, *args: Tensor) -> Tensor:
        """The unit's forward, checkpointed."""
        options: dict[str, Any] = {} if self._contexts is None else {"context_fn": self._contexts}
        return checkpoint(self._run, *args, use_reentrant=False, preserve_rng_state=False, **options)

    def _run(self, *args: Tensor) -> Tensor:
        if in_backward():
            with self._timers.phase("recompute"):
                return self.unit(*args)
        return self.unit(*args)


def recompute_unit(unit: nn.Module, run: RecomputeRun | None, timers: Timers) -> nn.Module:
    """``unit`` under the recompute of its run, if any."""
    if run is None or run.mode is RecomputeMode.NONE:
        return unit
    return RecomputedUnit(unit, run, timers)


def selective_contexts(recomputed: frozenset[str]) -> Callable[[], tuple[Any, Any]]:
    """A ``context_fn`` for ``checkpoint`` that keeps the results of every op outside the ``recomputed`` classes."""

    def build() -> tuple[Any, Any]:
        composite = _CompositeClass()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return _policy(op, composite.current, recomputed)

        saving, reusing = create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)
        return _Both(composite, saving), _Both(composite, reusing)

    return build


def _policy(op: Any, composite: OpClass | None, recomputed: frozenset[str]) -> CheckpointPolicy:
    if op in COLLECTIVES:
        return CheckpointPolicy.MUST_SAVE
    name = op.__name__.split(".")[0]
    op_class = composite or _DISPATCHED.get(name) or op_class_of(f"aten.{name}")
    if composite is None and op._schema.is_mutable:
        # its operand is a cached result: running one again and not the other would apply it twice, or never
        raise RuntimeError(f"selective recompute cannot hold '{op}', which changes its operand in place; use full recompute")
    if op_class == OpClass.VIEW or str(op_class) in recomputed:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


class _CompositeClass(TorchFunctionMode):
    """Remembers which composite function is running, for the policy to see."""

    def __init__(self) -> None:
        super().__init__()
        self.current: OpClass | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op_class = _COMPOSITES.get(getattr(func, "__name__", ""))
        if op_class is None or self.current is not None:
            return func(*args, **(kwargs or {}))
        with self._inside(op_class):
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def _inside(self, op_class: OpClass) -> Iterator[None]:
        self.current = op_class
        try:
            yield
        finally:
            self.current = None


class _Both:
    """Two context managers as one, entered in order."""

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second = first, second

    def __enter__(self) -> None:
        self._first.__enter__()
        self._second.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._second.__exit__(kind, error, trace)
        self._first.__exit__(kind, error, trace)
