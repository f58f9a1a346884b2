"""The rule of each op: which kernels it runs forward and backward, and what autograd keeps. Torch-free.

FLOP: a multiply-add is 2. Bytes: each operand read once, each result written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from profiler.op_types import FUSED_LOSS_CHUNK, Call, Kernel, OpClass, OpRule, Size, Tensor, base_name, product
from specs.expr import Expr
from specs.graph import DTYPE_BYTES

# --- products -------------------------------------------------------------------------------------------------------


def gemm_kernel(
    m: Size, n: Size, k: Size, batch: Size, dtype_bytes: float, *, backward: bool = False, weight_grad: bool = False
) -> Kernel:
    """(m x k) times (k x n), ``batch`` times. FLOP 2mnk; bytes of both operands and the result."""
    flop = product((m, n, k, batch)) * 2
    moved = (product((m, k)) + product((k, n)) + product((m, n))) * batch * dtype_bytes
    return Kernel(OpClass.GEMM, flop, moved, flop, dims=(m, n, k, batch), backward=backward, weight_grad=weight_grad)


def linear(call: Call) -> OpRule:
    """x (..., k) times the transpose of the weight (n, k)."""
    x, weight = call.inputs[0], call.inputs[1]
    m, k, n = product(x.shape[:-1]), x.shape[-1], weight.shape[0]
    size = DTYPE_BYTES[x.dtype]
    backward = []
    if x.requires_grad:
        backward.append(gemm_kernel(m, k, n, 1, size, backward=True))
    if weight.requires_grad:
        backward.append(gemm_kernel(n, k, m, 1, size, backward=True, weight_grad=weight.is_param))
    return OpRule(OpClass.GEMM, (gemm_kernel(m, n, k, 1, size),), tuple(backward), product_saves(x, weight))


def product_saves(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    """x is kept for the weight's gradient, the weight for x's."""
    return tuple(index for index, other in ((0, weight), (1, x)) if other.requires_grad)


def addmm(call: Call) -> OpRule:
    """Bias plus x times weight (k, n)."""
    _, x, weight = call.inputs[:3]
    rule = matmul_of(x, weight)
    return OpRule(rule.op_class, rule.forward, rule.backward, tuple(index + 1 for index in rule.saved_inputs))


def matmul(call: Call) -> OpRule:
    """A product, batched when the second operand has more than two dims."""
    return matmul_of(call.inputs[0], call.inputs[1])


def matmul_of(x: Tensor, y: Tensor) -> OpRule:
    """The rule of x times y."""
    size = DTYPE_BYTES[x.dtype]
    batched = len(y.shape) > 2
    batch = product(x.shape[:-2]) if batched else 1
    m = x.shape[-2] if batched else product(x.shape[:-1])
    k, n = x.shape[-1], y.shape[-1]
    backward = []
    if x.requires_grad:
        backward.append(gemm_kernel(m, k, n, batch, size, backward=True))
    if y.requires_grad:
        backward.append(gemm_kernel(k, n, m, batch, size, backward=True, weight_grad=y.is_param))
    return OpRule(OpClass.GEMM, (gemm_kernel(m, n, k, batch, size),), tuple(backward), product_saves(x, y))


def grouped_mm(call: Call) -> OpRule:
    """Rows of x, sorted by expert, times that expert's matrix: x (tokens x k), w (experts x k x n)."""
    x, weight = call.inputs[0], call.inputs[1]
    m, k, n, experts = product(x.shape[:-1]), x.shape[-1], weight.shape[-1], weight.shape[0]
    flop = product((m, n, k)) * 2
    moved = (product((m, k)) + product((m, n)) + product((experts, k, n))) * DTYPE_BYTES[x.dtype]
    forward = Kernel(OpClass.GROUPED_GEMM, flop, moved, flop, dims=(m, n, k, experts))
    backward = tuple(
        Kernel(OpClass.GROUPED_GEMM, flop, moved, flop, dims=dims, backward=True, weight_grad=of.is_param)
        for dims, of in (((m, k, n, experts), x), ((n, k, m, experts), weight))
        if of.requires_grad
    )
    return OpRule(OpClass.GROUPED_GEMM, (forward,), backward, product_saves(x, weight))


# --- attention ------------------------------------------------------------------------------------------------------


def attention(call: Call) -> OpRule:
    """Scaled dot product attention on (batch, heads, length, head_dim); fused (flash) kernel: no s x s tensor is kept."""
    query, key, value = call.inputs[:3]
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    if call.kernels.attention == "math":
        return math_attention(call)
    score = product((batch, heads, q_len, kv_len, head_dim)) * 2
    apply = product((batch, heads, q_len, kv_len, value.shape[3])) * 2  # values may be narrower than keys (latent attention)
    causal = bool(call.kwargs.get("is_causal", call.args[5] if len(call.args) > 5 else False))
    forward_bytes = query.bytes + key.bytes + value.bytes + call.outputs[0].bytes
    dims = (product((batch, heads)), q_len, kv_len, head_dim)
    forward = Kernel(OpClass.ATTENTION, score + apply, forward_bytes, score + apply, dims, causal)
    if not call.needs_grad:
        return OpRule(OpClass.ATTENTION, (forward,))
    executed, needed = score * 3 + apply * 2, score * 2 + apply * 2  # the scores once more, and two products of each kind
    backward = Kernel(OpClass.ATTENTION, executed, forward_bytes * 2, needed, dims, causal, backward=True)
    log_sum_exp_bytes = product((batch, heads, q_len)) * 4
    return OpRule(OpClass.ATTENTION, (forward,), (backward,), (0, 1, 2), (0,), log_sum_exp_bytes)


def math_attention(call: Call) -> OpRule:
    """Two batched products and a softmax: the probabilities (s x s per head) are kept, with dropout its mask and result too
    (arXiv 2205.05198, the 5as^2b term)."""
    query, key, value = call.inputs[:3]
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    size, pairs = DTYPE_BYTES[query.dtype], product((batch, heads))
    scores_bytes = product((batch, heads, q_len, kv_len)) * size
    score = gemm_kernel(q_len, kv_len, head_dim, pairs, size)
    apply = gemm_kernel(q_len, value.shape[3], kv_len, pairs, size)
    passes = call.kernels.softmax_passes
    forward = (score, memory_kernel(OpClass.SOFTMAX, scores_bytes * passes), apply)
    if not call.needs_grad:
        return OpRule(OpClass.ATTENTION, forward)
    products = tuple(replace(kernel, backward=True) for kernel in (score, score, apply, apply))
    backward = (*products, memory_kernel(OpClass.SOFTMAX, scores_bytes * (passes + 1), backward=True))
    kept = scores_bytes + (product((batch, heads, q_len, kv_len)) + scores_bytes if call.kernels.dropout else 0)
    return OpRule(OpClass.ATTENTION, forward, backward, (0, 1, 2), (), kept, backward_workspace_bytes=scores_bytes * 2)


# --- state-space scan -----------------------------------------------------------------------------------------------


def ssd_scan(call: Call) -> OpRule:
    """Mamba-2's scan by chunks of Q tokens (arXiv 2405.21060 §6): x (batch, length, heads, P), b and c (batch, length, groups, N).

    Products of a pass: C B^T once per group (2QN per token), its use on x (2QP per head), chunk states and their use (2NP each per
    head). Between chunks the states pass through memory in float32. Backward has two products for each and computes the states
    and scores again first; only the inputs are kept.
    """
    x, groups_state, chunk = call.inputs[0], call.inputs[3].shape, float(call.args[5])
    batch, length, heads, width = x.shape
    groups, state = groups_state[2], groups_state[3]
    size, chunks = DTYPE_BYTES[x.dtype], length * (1 / chunk)
    per_group, per_head = product((batch, groups)) * chunks, product((batch, heads)) * chunks
    states = product((per_head, width, state))
    scores = gemm_kernel(chunk, chunk, state, per_group, size)
    scores_bytes = per_group * (chunk * chunk * size)
    made = gemm_kernel(width, state, chunk, per_head, size)
    passing = memory_kernel(OpClass.SCAN, states * 8)
    inside = replace(gemm_kernel(chunk, width, chunk, per_head, size), bytes=x.bytes * 2 + scores_bytes)  # decay stays on the chip
    across = gemm_kernel(chunk, width, state, per_head, size)
    forward = (scores, made, passing, inside, across)
    if not call.needs_grad:
        return OpRule(OpClass.SCAN, forward)
    again = tuple(replace(kernel, model_flop=0, backward=True) for kernel in (scores, made, passing))
    gradients = tuple(replace(kernel, backward=True) for kernel in (scores, made, inside, across) for _ in range(2))
    return OpRule(OpClass.SCAN, forward, (*again, *gradients, replace(passing, backward=True)), (0, 1, 2, 3, 4),
                  backward_workspace_bytes=states * 8 + scores_bytes)  # fmt: skip


# --- memory-bound ops -----------------------------------------------------------------------------------------------


def memory_kernel(op_class: OpClass, moved: Size, *, backward: bool = False) -> Kernel:
    """A kernel whose time is its traffic."""
    return Kernel(op_class, 0, moved, 0, backward=backward)


def total_moved(call: Call) -> Size:
    """Bytes of all inputs and outputs, symbolic or not."""
    return (
        sum((tensor.bytes for tensor in (*call.inputs, *call.outputs)), start=Expr.const(0))
        if symbolic(call)
        else moved_as_number(call)
    )


def symbolic(call: Call) -> bool:
    """Whether any size is an expression."""
    return any(isinstance(size, Expr) for tensor in (*call.inputs, *call.outputs) for size in tensor.shape)


def moved_as_number(call: Call) -> float:
    """The same where all sizes are numbers."""
    return float(sum(tensor.bytes for tensor in (*call.inputs, *call.outputs)))


def elementwise(call: Call, saves: str) -> OpRule:
    """One pass over inputs and outputs; ``saves`` as in ``ELEMENTWISE_SAVES``."""
    forward = (memory_kernel(OpClass.ELEMENTWISE, total_moved(call)),)
    if not call.needs_grad:
        return OpRule(OpClass.ELEMENTWISE, forward)
    grads = [tensor for tensor in call.inputs if tensor.requires_grad]
    saved_inputs, saved_outputs = elementwise_saved(call, saves)
    read: Size = call.outputs[0].bytes  # the incoming gradient, once per result
    moved: Size = 0
    for tensor in grads:
        moved = tensor.bytes + read + moved
    for index in saved_inputs:
        moved = call.inputs[index].bytes + moved
    passes_through = saves == "none" and all(tensor.shape == call.outputs[0].shape for tensor in grads)
    backward = () if passes_through else (memory_kernel(OpClass.ELEMENTWISE, moved, backward=True),)
    return OpRule(OpClass.ELEMENTWISE, forward, backward, saved_inputs, saved_outputs)


def elementwise_saved(call: Call, saves: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of (inputs, outputs) kept for backward."""
    if saves == "output":
        return (), (0,)
    if saves == "input":
        return (0,), ()
    if saves == "both" and len(call.inputs) > 1:
        first, second = call.inputs[0], call.inputs[1]
        return tuple(index for index, other in ((0, second), (1, first)) if other.requires_grad), ()
    return ((0,), ()) if saves == "both" and len(call.inputs) == 1 else ((), ())


def conv1d(call: Call) -> OpRule:
    """A convolution of each channel by itself (as many groups as channels): a few multiply-adds per element, so its traffic
    decides. Any other is priced alike and says so."""
    rule = elementwise(call, "input")
    return replace(rule, known=call.args[6] == call.inputs[1].shape[0] if len(call.args) > 6 else False)


def norm(call: Call) -> OpRule:
    """RMS or layer norm: x is kept, with one or two statistics per row. Backward reads x and the gradient, writes one."""
    x = call.inputs[0]
    rows = product(x.shape[:-1])
    if call.kernels.composed_norms and base_name(call.target) == "rms_norm" and DTYPE_BYTES[x.dtype] == 2:
        return _composed_norm(x, needs_grad=call.needs_grad)
    forward = (memory_kernel(OpClass.NORM, total_moved(call)),)
    if not call.needs_grad:
        return OpRule(OpClass.NORM, forward)
    backward = (memory_kernel(OpClass.NORM, x.bytes * 3, backward=True),)
    statistics = 1 if base_name(call.target) == "rms_norm" else 2
    return OpRule(OpClass.NORM, forward, backward, (0,), (), rows * 4 * statistics)


# Bytes per element that an RMS norm's single ops read and write; x and the result have 2 bytes, all between has 4. Forward:
# widen, square, mean, scale by the root, narrow, weight. Backward: those of weight (for x, then for itself, and its sum over rows),
# narrow, scale (for x, for the root, and its sum), mean with square (two), the sum of both ways to x, widen.
COMPOSED_FORWARD = (6, 8, 4, 8, 6, 4)
COMPOSED_BACKWARD = (4, 6, 2, 6, 8, 12, 4, 8, 8, 12, 6)
COMPOSED_KEPT = 6  # the float32 copy of x for square and scale, the narrowed product for the weight's gradient


def _composed_norm(x: Tensor, *, needs_grad: bool) -> OpRule:
    forward = tuple(memory_kernel(OpClass.ELEMENTWISE, x.numel * moved) for moved in COMPOSED_FORWARD)
    if not needs_grad:
        return OpRule(OpClass.NORM, forward)
    backward = tuple(memory_kernel(OpClass.ELEMENTWISE, x.numel * moved, backward=True) for moved in COMPOSED_BACKWARD)
    return OpRule(OpClass.NORM, forward, backward, (), (), x.numel * COMPOSED_KEPT + product(x.shape[:-1]) * 4)


def softmax(call: Call) -> OpRule:
    """The result is kept."""
    x = call.inputs[0]
    forward = (memory_kernel(OpClass.SOFTMAX, total_moved(call)),)
    backward = (memory_kernel(OpClass.SOFTMAX, x.bytes * 3, backward=True),) if call.needs_grad else ()
    return OpRule(OpClass.SOFTMAX, forward, backward, (), (0,) if call.needs_grad else ())


def embedding(call: Call) -> OpRule:
    """Rows of a table. Backward fills a dense gradient of the table's size and adds the rows into it."""
    weight, out = call.inputs[0], call.outputs[0]
    forward = (memory_kernel(OpClass.EMBEDDING, out.bytes * 2),)
    if not weight.requires_grad:
        return OpRule(OpClass.EMBEDDING, forward)
    filled = memory_kernel(OpClass.EMBEDDING, weight.bytes + out.bytes * 3, backward=True)
    return OpRule(OpClass.EMBEDDING, forward, (replace(filled, weight_grad=weight.is_param),), (1,))


def cross_entropy(call: Call) -> OpRule:
    """Log-softmax and negative log-likelihood: the log-probabilities are kept in float32; backward writes two such tensors.

    ``in_place``: one kernel that keeps the logits as they are and a sum per row, and writes the gradient over them.
    """
    logits = call.inputs[0]
    if call.kernels.loss == "in_place":
        once = (memory_kernel(OpClass.LOSS, logits.bytes),)
        twice = (memory_kernel(OpClass.LOSS, logits.bytes * 2, backward=True),) if logits.requires_grad else ()
        return OpRule(OpClass.LOSS, once, twice, (0, 1), (), product(logits.shape[:-1]) * 4)
    kept = logits.numel * 4
    forward = (memory_kernel(OpClass.LOSS, logits.bytes * 2 + kept),)
    backward = (memory_kernel(OpClass.LOSS, kept * 3 + logits.bytes, backward=True),) if logits.requires_grad else ()
    if call.kernels.loss == "fused":
        return OpRule(OpClass.LOSS, forward, backward, (1,), (), 0, backward_workspace_bytes=kept * FUSED_LOSS_CHUNK)
    return OpRule(OpClass.LOSS, forward, backward, (1,), (), kept, backward_workspace_bytes=kept)


def copying(op_class: OpClass) -> Callable[[Call], OpRule]:
    """The rule of ops that copy their result together."""

    def build(call: Call) -> OpRule:
        moved = call.outputs[0].bytes * 2
        backward = (memory_kernel(op_class, moved, backward=True),) if call.needs_grad else ()
        return OpRule(op_class, (memory_kernel(op_class, moved),), backward)

    return build


def indexing(call: Call) -> OpRule:
    """Rows picked or added by index. Backward moves the same rows, into a zeroed tensor of the source's size when it gathers."""
    out = call.outputs[0]
    forward = (memory_kernel(OpClass.INDEX, out.bytes * 2),)
    if not call.needs_grad:
        return OpRule(OpClass.INDEX, forward)
    filled = call.inputs[0].bytes if call.inputs[0].requires_grad else 0
    backward = (memory_kernel(OpClass.INDEX, out.bytes * 2 + filled, backward=True),)
    saved = tuple(index for index, tensor in enumerate(call.inputs) if tensor.dtype.startswith("int"))
    return OpRule(OpClass.INDEX, forward, backward, saved)


def reduction(call: Call) -> OpRule:
    """Reads its input once."""
    x = call.inputs[0]
    backward = (memory_kernel(OpClass.REDUCTION, x.bytes, backward=True),) if call.needs_grad else ()
    return OpRule(OpClass.REDUCTION, (memory_kernel(OpClass.REDUCTION, x.bytes),), backward)


def sorting(call: Call) -> OpRule:
    """Several passes over the input; indices are kept."""
    moved = call.inputs[0].bytes * 4
    return OpRule(
        OpClass.INDEX, (memory_kernel(OpClass.INDEX, moved),), (), (), (1,) if call.needs_grad and len(call.outputs) > 1 else ()
    )
