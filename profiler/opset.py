"""What an op is: its class, the kernels that its forward and backward run, what autograd keeps, how shapes decide cost.

One table for capture (FLOP and bytes of the graph), the profiler (what to measure), the simulator (what to price) and
the placement rules. No torch here. Sizes may be ints or :class:`specs.expr.Expr`; the arithmetic is the same.

Conventions: a multiply-add is 2 FLOP. ``model_flop`` counts what the mathematics needs (attention backward = 2x forward,
non-causal); ``flop`` counts what the kernel executes (flash attention backward recomputes the scores: 5 products against 2 of
forward, arXiv 2307.08691 §3.1). Bytes: each operand read once, each result written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
    """One device kernel: what its time depends on. ``m n k batch`` for products; ``heads q_len kv_len head_dim`` for attention."""

    op_class: OpClass
    flop: Size
    bytes: Size
    model_flop: Size
    dims: tuple[Size, ...] = ()
    causal: bool = False
    backward: bool = False


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
    """Which kernels the workload runs: attention ``flash`` | ``math``, loss ``full`` | ``fused``."""

    attention: str = "flash"
    loss: str = "full"


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


def describe(call: Call) -> OpRule:
    """The rule of a call. An op without a rule is priced as memory-bound and says so (``known=False``)."""
    name = base_name(call.target)
    if name in VIEWS:
        return OpRule(OpClass.VIEW)
    builder = BUILDERS.get(name)
    if builder is not None:
        return builder(call)
    if name in ELEMENTWISE_SAVES:
        return _elementwise(call, ELEMENTWISE_SAVES[name])
    rule = _elementwise(call, "both")
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


# --- products -------------------------------------------------------------------------------------------------------


def gemm_kernel(m: Size, n: Size, k: Size, batch: Size, dtype_bytes: float, *, backward: bool = False) -> Kernel:
    """(m x k) times (k x n), ``batch`` times. FLOP 2mnk; bytes of both operands and the result."""
    flop = product((m, n, k, batch)) * 2
    moved = (product((m, k)) + product((k, n)) + product((m, n))) * batch * dtype_bytes
    return Kernel(OpClass.GEMM, flop, moved, flop, dims=(m, n, k, batch), backward=backward)


def _linear(call: Call) -> OpRule:
    x, weight = call.inputs[0], call.inputs[1]
    m, k, n = product(x.shape[:-1]), x.shape[-1], weight.shape[0]
    size = DTYPE_BYTES[x.dtype]
    backward = []
    if x.requires_grad:
        backward.append(gemm_kernel(m, k, n, 1, size, backward=True))
    if weight.requires_grad:
        backward.append(gemm_kernel(n, k, m, 1, size, backward=True))
    return OpRule(OpClass.GEMM, (gemm_kernel(m, n, k, 1, size),), tuple(backward), _product_saves(x, weight))


def _product_saves(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    """x is kept for the weight's gradient, the weight for x's."""
    return tuple(index for index, other in ((0, weight), (1, x)) if other.requires_grad)


def _addmm(call: Call) -> OpRule:
    _, x, weight = call.inputs[:3]
    rule = _matmul_of(x, weight)
    return OpRule(rule.op_class, rule.forward, rule.backward, tuple(index + 1 for index in rule.saved_inputs))


def _matmul(call: Call) -> OpRule:
    return _matmul_of(call.inputs[0], call.inputs[1])


def _matmul_of(x: Tensor, y: Tensor) -> OpRule:
    size = DTYPE_BYTES[x.dtype]
    batched = len(y.shape) > 2
    batch = product(x.shape[:-2]) if batched else 1
    m = x.shape[-2] if batched else product(x.shape[:-1])
    k, n = x.shape[-1], y.shape[-1]
    backward = []
    if x.requires_grad:
        backward.append(gemm_kernel(m, k, n, batch, size, backward=True))
    if y.requires_grad:
        backward.append(gemm_kernel(k, n, m, batch, size, backward=True))
    return OpRule(OpClass.GEMM, (gemm_kernel(m, n, k, batch, size),), tuple(backward), _product_saves(x, y))


def _grouped_mm(call: Call) -> OpRule:
    """Rows of x, sorted by expert, times that expert's matrix: x (tokens x k), w (experts x k x n)."""
    x, weight = call.inputs[0], call.inputs[1]
    m, k, n, experts = product(x.shape[:-1]), x.shape[-1], weight.shape[-1], weight.shape[0]
    flop = product((m, n, k)) * 2
    moved = (product((m, k)) + product((m, n)) + product((experts, k, n))) * DTYPE_BYTES[x.dtype]
    forward = Kernel(OpClass.GROUPED_GEMM, flop, moved, flop, dims=(m, n, k, experts))
    backward = tuple(
        Kernel(OpClass.GROUPED_GEMM, flop, moved, flop, dims=dims, backward=True)
        for dims, needed in (((m, k, n, experts), x.requires_grad), ((n, k, m, experts), weight.requires_grad))
        if needed
    )
    return OpRule(OpClass.GROUPED_GEMM, (forward,), backward, _product_saves(x, weight))


# --- attention ------------------------------------------------------------------------------------------------------


def _attention(call: Call) -> OpRule:
    """Scaled dot product attention on (batch, heads, length, head_dim); fused (flash) kernel: no s x s tensor is kept."""
    query, key, value = call.inputs[:3]
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    if call.kernels.attention == "math":
        return _math_attention(call)
    one = product((batch, heads, q_len, kv_len, head_dim)) * 2
    causal = bool(call.kwargs.get("is_causal", call.args[5] if len(call.args) > 5 else False))
    forward_bytes = query.bytes + key.bytes + value.bytes + call.outputs[0].bytes
    dims = (product((batch, heads)), q_len, kv_len, head_dim)
    forward = Kernel(OpClass.ATTENTION, one * 2, forward_bytes, one * 2, dims, causal)
    if not call.needs_grad:
        return OpRule(OpClass.ATTENTION, (forward,))
    backward = Kernel(OpClass.ATTENTION, one * 5, forward_bytes * 2, one * 4, dims, causal, backward=True)
    log_sum_exp_bytes = product((batch, heads, q_len)) * 4
    return OpRule(OpClass.ATTENTION, (forward,), (backward,), (0, 1, 2), (0,), log_sum_exp_bytes)


def _math_attention(call: Call) -> OpRule:
    """Two batched products and a softmax: the probabilities (s x s per head) are kept (arXiv 2205.05198, the 5as^2b term)."""
    query, key = call.inputs[:2]
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    size, pairs = DTYPE_BYTES[query.dtype], product((batch, heads))
    scores_bytes = product((batch, heads, q_len, kv_len)) * size
    score = gemm_kernel(q_len, kv_len, head_dim, pairs, size)
    apply = gemm_kernel(q_len, head_dim, kv_len, pairs, size)
    forward = (score, memory_kernel(OpClass.SOFTMAX, scores_bytes * 4), apply)
    if not call.needs_grad:
        return OpRule(OpClass.ATTENTION, forward)
    products = tuple(replace(kernel, backward=True) for kernel in (score, score, apply, apply))
    backward = (*products, memory_kernel(OpClass.SOFTMAX, scores_bytes * 5, backward=True))
    return OpRule(OpClass.ATTENTION, forward, backward, (0, 1, 2), (), scores_bytes, backward_workspace_bytes=scores_bytes * 2)


# --- memory-bound ops -----------------------------------------------------------------------------------------------


def memory_kernel(op_class: OpClass, moved: Size, *, backward: bool = False) -> Kernel:
    """A kernel whose time is its traffic."""
    return Kernel(op_class, 0, moved, 0, backward=backward)


def _moved(call: Call) -> Size:
    return (
        sum((tensor.bytes for tensor in (*call.inputs, *call.outputs)), start=Expr.const(0))
        if _symbolic(call)
        else _moved_number(call)
    )


def _symbolic(call: Call) -> bool:
    return any(isinstance(size, Expr) for tensor in (*call.inputs, *call.outputs) for size in tensor.shape)


def _moved_number(call: Call) -> float:
    return float(sum(tensor.bytes for tensor in (*call.inputs, *call.outputs)))


def _elementwise(call: Call, saves: str) -> OpRule:
    forward = (memory_kernel(OpClass.ELEMENTWISE, _moved(call)),)
    if not call.needs_grad:
        return OpRule(OpClass.ELEMENTWISE, forward)
    grads = [tensor for tensor in call.inputs if tensor.requires_grad]
    saved_inputs, saved_outputs = _elementwise_saved(call, saves)
    read: Size = call.outputs[0].bytes  # the incoming gradient, once per result
    moved: Size = 0
    for tensor in grads:
        moved = tensor.bytes + read + moved
    for index in saved_inputs:
        moved = call.inputs[index].bytes + moved
    passes_through = saves == "none" and all(tensor.shape == call.outputs[0].shape for tensor in grads)
    backward = () if passes_through else (memory_kernel(OpClass.ELEMENTWISE, moved, backward=True),)
    return OpRule(OpClass.ELEMENTWISE, forward, backward, saved_inputs, saved_outputs)


def _elementwise_saved(call: Call, saves: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if saves == "output":
        return (), (0,)
    if saves == "input":
        return (0,), ()
    if saves == "both" and len(call.inputs) > 1:
        first, second = call.inputs[0], call.inputs[1]
        return tuple(index for index, other in ((0, second), (1, first)) if other.requires_grad), ()
    return ((0,), ()) if saves == "both" and len(call.inputs) == 1 else ((), ())


def _norm(call: Call) -> OpRule:
    """RMS or layer norm: x is kept, with one or two statistics per row. Backward reads x and the gradient, writes one."""
    x = call.inputs[0]
    rows = product(x.shape[:-1])
    forward = (memory_kernel(OpClass.NORM, _moved(call)),)
    if not call.needs_grad:
        return OpRule(OpClass.NORM, forward)
    backward = (memory_kernel(OpClass.NORM, x.bytes * 3, backward=True),)
    statistics = 1 if base_name(call.target) == "rms_norm" else 2
    return OpRule(OpClass.NORM, forward, backward, (0,), (), rows * 4 * statistics)


def _softmax(call: Call) -> OpRule:
    x = call.inputs[0]
    forward = (memory_kernel(OpClass.SOFTMAX, _moved(call)),)
    backward = (memory_kernel(OpClass.SOFTMAX, x.bytes * 3, backward=True),) if call.needs_grad else ()
    return OpRule(OpClass.SOFTMAX, forward, backward, (), (0,) if call.needs_grad else ())


def _embedding(call: Call) -> OpRule:
    """Rows of a table. Backward fills a dense gradient of the table's size and adds the rows into it."""
    weight, out = call.inputs[0], call.outputs[0]
    forward = (memory_kernel(OpClass.EMBEDDING, out.bytes * 2),)
    if not weight.requires_grad:
        return OpRule(OpClass.EMBEDDING, forward)
    backward = (memory_kernel(OpClass.EMBEDDING, weight.bytes + out.bytes * 3, backward=True),)
    return OpRule(OpClass.EMBEDDING, forward, backward, (1,))


def _cross_entropy(call: Call) -> OpRule:
    """Log-softmax and negative log-likelihood: the log-probabilities are kept in float32; backward writes two such tensors."""
    logits = call.inputs[0]
    kept = logits.numel * 4
    forward = (memory_kernel(OpClass.LOSS, logits.bytes * 2 + kept),)
    backward = (memory_kernel(OpClass.LOSS, kept * 3 + logits.bytes, backward=True),) if logits.requires_grad else ()
    if call.kernels.loss == "fused":
        return OpRule(OpClass.LOSS, forward, backward, (1,), (), 0, backward_workspace_bytes=kept * FUSED_LOSS_CHUNK)
    return OpRule(OpClass.LOSS, forward, backward, (1,), (), kept, backward_workspace_bytes=kept)


def _copying(op_class: OpClass) -> Callable[[Call], OpRule]:
    def build(call: Call) -> OpRule:
        moved = call.outputs[0].bytes * 2
        backward = (memory_kernel(op_class, moved, backward=True),) if call.needs_grad else ()
        return OpRule(op_class, (memory_kernel(op_class, moved),), backward)

    return build


def _indexing(call: Call) -> OpRule:
    """Rows picked or added by index. Backward moves the same rows, into a zeroed tensor of the source's size when it gathers."""
    out = call.outputs[0]
    forward = (memory_kernel(OpClass.INDEX, out.bytes * 2),)
    if not call.needs_grad:
        return OpRule(OpClass.INDEX, forward)
    filled = call.inputs[0].bytes if call.inputs[0].requires_grad else 0
    backward = (memory_kernel(OpClass.INDEX, out.bytes * 2 + filled, backward=True),)
    saved = tuple(index for index, tensor in enumerate(call.inputs) if tensor.dtype.startswith("int"))
    return OpRule(OpClass.INDEX, forward, backward, saved)


def _reduction(call: Call) -> OpRule:
    x = call.inputs[0]
    backward = (memory_kernel(OpClass.REDUCTION, x.bytes, backward=True),) if call.needs_grad else ()
    return OpRule(OpClass.REDUCTION, (memory_kernel(OpClass.REDUCTION, x.bytes),), backward)


def _sorting(call: Call) -> OpRule:
    moved = call.inputs[0].bytes * 4
    return OpRule(
        OpClass.INDEX, (memory_kernel(OpClass.INDEX, moved),), (), (), (1,) if call.needs_grad and len(call.outputs) > 1 else ()
    )


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
    "linear": _linear,
    "addmm": _addmm,
    "mm": _matmul,
    "bmm": _matmul,
    "matmul": _matmul,
    "_grouped_mm": _grouped_mm,
    "scaled_dot_product_attention": _attention,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    "cat": _copying(OpClass.COPY),
    "stack": _copying(OpClass.COPY),
    "clone": _copying(OpClass.COPY),
    "contiguous": _copying(OpClass.COPY),
    "repeat": _copying(OpClass.COPY),
    "repeat_interleave": _copying(OpClass.COPY),
    "index_select": _indexing,
    "index": _indexing,
    "gather": _indexing,
    "index_add": _indexing,
    "scatter_add": _indexing,
    "sum": _reduction,
    "mean": _reduction,
    "cumsum": _reduction,
    "bincount": _reduction,
    "histc": _reduction,
    "topk": _sorting,
    "sort": _sorting,
    "argsort": _sorting,
}

CLASSES: dict[str, OpClass] = {
    **dict.fromkeys(("linear", "addmm", "mm", "bmm", "matmul"), OpClass.GEMM),
    "_grouped_mm": OpClass.GROUPED_GEMM,
    "scaled_dot_product_attention": OpClass.ATTENTION,
    **dict.fromkeys(("rms_norm", "layer_norm"), OpClass.NORM),
    **dict.fromkeys(("softmax", "log_softmax"), OpClass.SOFTMAX),
    "embedding": OpClass.EMBEDDING,
    "cross_entropy_loss": OpClass.LOSS,
    **dict.fromkeys(("cat", "stack", "clone", "contiguous", "repeat", "repeat_interleave"), OpClass.COPY),
    **dict.fromkeys(("index_select", "index", "gather", "index_add", "scatter_add", "topk", "sort", "argsort"), OpClass.INDEX),
    **dict.fromkeys(("sum", "mean", "cumsum", "bincount", "histc"), OpClass.REDUCTION),
}
