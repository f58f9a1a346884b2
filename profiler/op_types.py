"""The vocabulary of ops: classes, tensors as the rules see them, kernels, and what is known of a call. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specs.expr import Expr
from specs.graph import DTYPE_BYTES

Size = Any  # int | float | Expr


class OpClass(StrEnum):
    """Classes of ops that share a cost model."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    SCAN = "scan"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    SOFTMAX = "softmax"
    EMBEDDING = "embedding"
    LOSS = "loss"
    COPY = "copy"
    INDEX = "index"
    REDUCTION = "reduction"
    VIEW = "view"
    OTHER = "other"


# Matrix products, single and grouped.
PRODUCTS = (OpClass.GEMM, OpClass.GROUPED_GEMM)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor argument as the rules see it."""

    shape: tuple[Size, ...]
    dtype: str = "float32"
    requires_grad: bool = True
    is_param: bool = False

    @property
    def numel(self) -> Size:
        """Product of the shape."""
        return product(self.shape)

    @property
    def bytes(self) -> Size:
        """Size in bytes."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One device kernel: what its time depends on. ``m n k batch`` for products; ``heads q_len kv_len head_dim`` for attention.

    ``weight_grad``: a kernel of backward that makes a parameter's gradient and nothing else, so that it may run later.
    """

    op_class: OpClass
    flop: Size
    bytes: Size
    model_flop: Size
    dims: tuple[Size, ...] = ()
    causal: bool = False
    backward: bool = False
    weight_grad: bool = False


@dataclass(frozen=True, slots=True)
class OpRule:
    """Everything known of one op at some shapes.

    ``saved_inputs`` / ``saved_outputs``: argument and result positions that autograd keeps. ``saved_extra_bytes``: kept
    tensors that are neither. ``workspace``: temporaries of backward besides the results, in bytes.
    """

    op_class: OpClass
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    saved_extra_bytes: Size = 0
    backward_workspace_bytes: Size = 0
    known: bool = True


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels the workload runs: attention ``flash`` | ``math``, loss ``full`` | ``fused``.

    ``softmax_passes``: reads and writes of the scores between the two products of math attention: 4 for one kernel of scale,
    mask and softmax and one of dropout, 8 when each is its own. ``dropout``: its mask and result are kept as well.
    ``composed_norms``: an RMS norm of 16-bit tensors is written out in single ops that work in float32.
    """

    attention: str = "flash"
    loss: str = "full"
    softmax_passes: int = 4
    dropout: bool = False
    composed_norms: bool = False


DEFAULT_KERNELS = Kernels()
# A fused head and loss holds the logits of one chunk of tokens at a time; share of the whole [assumed].
FUSED_LOSS_CHUNK = 1 / 16


@dataclass(frozen=True, slots=True)
class OpCost:
    """Symbolic totals of one op, as stored in the graph."""

    op_class: OpClass
    forward_flop: Expr
    backward_flop: Expr
    forward_bytes: Expr
    backward_bytes: Expr
    known: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """An op call: tensor inputs in argument order, results, and the static arguments."""

    target: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    kernels: Kernels = DEFAULT_KERNELS

    @property
    def needs_grad(self) -> bool:
        """Whether any input needs a gradient."""
        return any(tensor.requires_grad for tensor in self.inputs)


def product(sizes: Sequence[Size]) -> Size:
    """Product of sizes, ints or Expr."""
    total: Size = 1
    for size in sizes:
        total = size * total if isinstance(size, Expr) else total * size
    return total


def base_name(target: str) -> str:
    """``aten.linear.default`` -> ``linear``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target
