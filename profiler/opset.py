"""What an op is: its class, the kernels that its forward and backward run, what autograd keeps, how shapes decide cost.

One table for capture (FLOP and bytes of the graph), the profiler (what to measure), the simulator (what to price) and
the placement rules. No torch here. Sizes may be ints or :class:`specs.expr.Expr`; the arithmetic is the same.

Conventions: a multiply-add is 2 FLOP. ``model_flop`` counts what the mathematics needs (attention backward = 2x forward,
non-causal); ``flop`` counts what the kernel executes (flash attention backward recomputes the scores: 5 products against 2 of
forward, arXiv 2307.08691 §3.1). Bytes: each operand read once, each result written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from profiler import op_rules
from profiler.op_types import (
    DEFAULT_KERNELS,
    FUSED_LOSS_CHUNK,
    PRODUCTS,
    Call,
    Kernel,
    Kernels,
    OpClass,
    OpCost,
    OpRule,
    Tensor,
    base_name,
    product,
)
from specs.expr import Expr

__all__ = [
    "BUILDERS", "CLASSES", "DEFAULT_KERNELS", "ELEMENTWISE_SAVES", "FUSED_LOSS_CHUNK", "PRODUCTS", "VIEWS", "Call", "Kernel",
    "Kernels", "OpClass", "OpCost", "OpRule", "Tensor", "base_name", "describe", "op_class_of", "op_cost", "product",
]  # fmt: skip


def describe(call: Call) -> OpRule:
    """The rule of a call. An op without a rule is priced as memory-bound and says so (``known=False``)."""
    name = base_name(call.target)
    if name in VIEWS:
        return OpRule(OpClass.VIEW)
    builder = BUILDERS.get(name)
    if builder is not None:
        return builder(call)
    if name in ELEMENTWISE_SAVES:
        return op_rules.elementwise(call, ELEMENTWISE_SAVES[name])
    rule = op_rules.elementwise(call, "both")
    return OpRule(OpClass.OTHER, rule.forward, rule.backward, rule.saved_inputs, known=False)


def op_class_of(target: str) -> OpClass:
    """The class of an op without looking at its shapes."""
    name = base_name(target)
    if name in VIEWS:
        return OpClass.VIEW
    if name in CLASSES:
        return CLASSES[name]
    return OpClass.ELEMENTWISE if name in ELEMENTWISE_SAVES else OpClass.OTHER


def op_cost(
    target: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> OpCost:
    """Symbolic FLOP (model FLOP) and bytes of an op for the captured graph."""
    rule = describe(Call(target, tuple(inputs), tuple(outputs), tuple(args), dict(kwargs)))
    return OpCost(
        op_class=rule.op_class,
        forward_flop=_total(kernel.model_flop for kernel in rule.forward),
        backward_flop=_total(kernel.model_flop for kernel in rule.backward),
        forward_bytes=_total(kernel.bytes for kernel in rule.forward),
        backward_bytes=_total(kernel.bytes for kernel in rule.backward),
        known=rule.known,
    )


def _total(values: Any) -> Expr:
    total = Expr.const(0)
    for value in values:
        total = total + Expr.of(value)
    return total


VIEWS = frozenset(
    """view reshape transpose permute unsqueeze squeeze slice expand flatten split split_with_sizes chunk select detach alias t
    unflatten narrow view_as expand_as unbind sym_size sym_numel movedim swapaxes lift_fresh lift_fresh_copy""".split()
)

# What an element-wise op keeps for backward: none | input | output | both (each operand for the other's gradient).
ELEMENTWISE_SAVES: dict[str, str] = {
    **dict.fromkeys("add sub rsub neg to _to_copy type_as masked_fill zeros_like ones_like".split(), "none"),
    **dict.fromkeys("silu gelu pow relu6 leaky_relu softplus log abs sin cos clamp hardtanh mish elu".split(), "input"),
    **dict.fromkeys("sigmoid tanh exp rsqrt sqrt reciprocal relu dropout".split(), "output"),
    **dict.fromkeys("mul div where maximum minimum lerp".split(), "both"),
    **dict.fromkeys(
        "eq ne lt gt le ge arange full zeros ones floor_divide remainder logical_not bitwise_and tril triu".split(), "none"
    ),
}

BUILDERS: dict[str, Callable[[Call], OpRule]] = {
    "linear": op_rules.linear,
    "addmm": op_rules.addmm,
    "mm": op_rules.matmul,
    "bmm": op_rules.matmul,
    "matmul": op_rules.matmul,
    "_grouped_mm": op_rules.grouped_mm,
    "scaled_dot_product_attention": op_rules.attention,
    "ssd_scan": op_rules.ssd_scan,
    "conv1d": op_rules.conv1d,
    "rms_norm": op_rules.norm,
    "layer_norm": op_rules.norm,
    "softmax": op_rules.softmax,
    "log_softmax": op_rules.softmax,
    "embedding": op_rules.embedding,
    "cross_entropy_loss": op_rules.cross_entropy,
    "cat": op_rules.copying(OpClass.COPY),
    "stack": op_rules.copying(OpClass.COPY),
    "clone": op_rules.copying(OpClass.COPY),
    "contiguous": op_rules.copying(OpClass.COPY),
    "repeat": op_rules.copying(OpClass.COPY),
    "repeat_interleave": op_rules.copying(OpClass.COPY),
    "index_select": op_rules.indexing,
    "index": op_rules.indexing,
    "gather": op_rules.indexing,
    "index_add": op_rules.indexing,
    "scatter_add": op_rules.indexing,
    "sum": op_rules.reduction,
    "mean": op_rules.reduction,
    "cumsum": op_rules.reduction,
    "bincount": op_rules.reduction,
    "histc": op_rules.reduction,
    "topk": op_rules.sorting,
    "sort": op_rules.sorting,
    "argsort": op_rules.sorting,
}

CLASSES: dict[str, OpClass] = {
    **dict.fromkeys(("linear", "addmm", "mm", "bmm", "matmul"), OpClass.GEMM),
    "_grouped_mm": OpClass.GROUPED_GEMM,
    "scaled_dot_product_attention": OpClass.ATTENTION,
    "ssd_scan": OpClass.SCAN,
    **dict.fromkeys(("rms_norm", "layer_norm"), OpClass.NORM),
    **dict.fromkeys(("softmax", "log_softmax"), OpClass.SOFTMAX),
    "embedding": OpClass.EMBEDDING,
    "cross_entropy_loss": OpClass.LOSS,
    **dict.fromkeys(("cat", "stack", "clone", "contiguous", "repeat", "repeat_interleave"), OpClass.COPY),
    **dict.fromkeys(("index_select", "index", "gather", "index_add", "scatter_add", "topk", "sort", "argsort"), OpClass.INDEX),
    **dict.fromkeys(("sum", "mean", "cumsum", "bincount", "histc"), OpClass.REDUCTION),
}
