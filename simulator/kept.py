"""How many bytes of a tensor wait for backward, and which results are made again instead of being kept.

A product's input may wait in another form than it was read in: split over tensor-parallel ranks where it was gathered just for
the product (arXiv 2205.05198 section 4.2.2), or in the narrow dtype of the product.
"""

from __future__ import annotations

from collections.abc import Sequence

from profiler.opset import PRODUCTS, OpClass
from profiler.placed import LocalOp, LocalTensor, PlacedBlock, numeric_tensor
from simulator.software import Software
from specs.graph import DTYPE_BYTES

# Words of selective recompute for results that are dropped right after use and made again before the backward of their readers
# (Megatron Core's output-discarding recompute of layer norms, activations and MLA's up-projections).
NORM_RESULTS, ACTIVATION_RESULTS, WIDENED_RESULTS = "norm results", "activation results", "widened results"
DISCARDED = (NORM_RESULTS, ACTIVATION_RESULTS, WIDENED_RESULTS)
_LIGHT = (OpClass.ELEMENTWISE, OpClass.VIEW, OpClass.COPY)


def kept_sizes(
    placed: PlacedBlock, sizes: dict[str, float], saved: Sequence[set[str]], software: Software, matmul_dtype: str | None,
    *, batch: int, seq: int, dtype: str,
) -> dict[str, float]:  # fmt: skip
    """Bytes by storage that wait for backward if it is kept. ``saved``: the storages that each op keeps."""
    kept = dict(sizes)
    by_product: set[str] = set()
    by_other: set[str] = set()
    for op, roots in zip(placed.ops, saved, strict=True):
        (by_product if op.op_class in PRODUCTS else by_other).update(roots)
    if software.regathers_inputs:
        made = {tensor.name: float(numeric_tensor(tensor, batch, seq, dtype).bytes) for tensor in _made(placed)}
        for root, name in _gathered_for_products(placed):
            if root in by_product and root not in by_other and name in made:
                kept[root] = made[name]
    if software.keeps_narrow_inputs and matmul_dtype is not None and DTYPE_BYTES[matmul_dtype] < DTYPE_BYTES[dtype]:
        share = DTYPE_BYTES[matmul_dtype] / DTYPE_BYTES[dtype]
        for root in by_product:
            kept[root] = kept[root] * share if root not in by_other else kept[root] * (1 + share)
    return kept


def _made(placed: PlacedBlock) -> list[LocalTensor]:
    return [*placed.inputs, *(tensor for op in placed.ops for tensor in op.outputs)]


def _gathered_for_products(placed: PlacedBlock) -> list[tuple[str, str]]:
    """(storage, tensor) of what is gathered over tensor-parallel ranks before a product."""
    found = []
    for op in placed.ops:
        names = {item.tensor for item in op.before if item.forward == "all_gather"}
        if op.op_class in PRODUCTS:
            found += [(tensor.root, tensor.name) for tensor in op.inputs if tensor.name in names]
    return found


def made_again(placed: PlacedBlock, words: Sequence[str]) -> frozenset[int]:
    """Positions of the ops whose results are dropped after use and made again, for words of :data:`DISCARDED`."""
    found: set[int] = set()
    if NORM_RESULTS in words:
        found |= {index for index, op in enumerate(placed.ops) if op.op_class == OpClass.NORM}
    if ACTIVATION_RESULTS in words:
        found |= _upstream(placed, PRODUCTS, _LIGHT, widening=False)
    if WIDENED_RESULTS in words:
        widened = _upstream(placed, (OpClass.ATTENTION,), _LIGHT, widening=True)
        if any(placed.ops[index].op_class == OpClass.GEMM for index in widened):
            found |= widened
    return frozenset(index for index in found if placed.ops[index].op_class != OpClass.VIEW)  # a view's storage is another's


def _upstream(placed: PlacedBlock, readers: Sequence[OpClass], through: Sequence[OpClass], *, widening: bool) -> set[int]:
    """Ops of the classes ``through`` that lead to an input of a reader without another reader, and the products that widen their
    input on the way if so asked. What also leads elsewhere stays: dropping it would save nothing."""
    users: dict[str, set[int]] = {}
    for index, op in enumerate(placed.ops):
        for tensor in op.inputs:
            users.setdefault(tensor.name, set()).add(index)
    outputs = {tensor.name for tensor in placed.outputs}
    found: set[int] = set()
    for index in reversed(range(len(placed.ops))):
        op = placed.ops[index]
        names = {tensor.name for tensor in op.outputs}
        passes = op.op_class in through or (widening and op.op_class == OpClass.GEMM and _widens(op))
        reading = set().union(*(users.get(name, set()) for name in names))
        if not passes or names & outputs or not reading:
            continue
        if all(user in found or placed.ops[user].op_class in readers for user in reading):
            found.add(index)
    return found


def _widens(op: LocalOp) -> bool:
    activation = next((tensor for tensor in op.inputs if tensor.kind not in ("param", "buffer")), None)
    return activation is not None and op.outputs[0].shape[-1](1, 1) > activation.shape[-1](1, 1)
