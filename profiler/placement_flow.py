"""What placing a block asks about its dataflow: gradients, shared storage, narrow products. Torch-free."""

from __future__ import annotations

from profiler.opset import OpClass, base_name, op_class_of
from profiler.placed import Placement
from specs.graph import Block, Op


def is_bottleneck(block: Block, op: Op, out_width: int, in_width: int) -> bool:
    """A product to a narrower tensor that only products with a weight read (a low-rank adapter): split over ranks, it would cost a
    sum of their wide results."""
    if out_width >= in_width:
        return False
    params = {param.name for param in block.params}
    names, found = {op.outputs[0].name}, False
    for later in block.ops:
        refs = later.input_refs()
        if not names & set(refs):
            continue
        kind = op_class_of(later.target)
        if kind == OpClass.GEMM and refs[1] in params:
            found = True
        elif kind in (OpClass.VIEW, OpClass.ELEMENTWISE) and len(refs) == 1:
            names |= {tensor.name for tensor in later.outputs}
        else:
            return False
    return found


def before_expand(block: Block, name: str) -> str:
    """The tensor that ``name`` was expanded from; itself where it was not."""
    maker = next((op for op in block.ops if op.outputs[0].name == name), None)
    return maker.input_refs()[0] if maker is not None and base_name(maker.target) == "expand" else name


def from_right(placement: Placement, rank: int, out_rank: int) -> Placement:
    """The dim of a broadcast result that a dim of an operand becomes."""
    return None if placement is None else placement + out_rank - rank


def grad_flow(block: Block) -> dict[str, bool]:
    """Which tensors need a gradient: float inputs, trainable parameters and what is computed from them."""
    flow = {tensor.name: tensor.dtype.startswith(("float", "bfloat")) for tensor in block.inputs}
    flow.update({param.name: param.trainable and not param.buffer for param in block.params})
    for op in block.ops:
        needs = any(flow[ref] for ref in op.input_refs())
        flow.update({t.name: needs and t.dtype.startswith(("float", "bfloat")) for t in op.outputs})
    return flow


def storage_roots(block: Block) -> dict[str, str]:
    """The tensor whose storage each tensor shares: views that of what they look at, all others their own."""
    roots = {name: name for name in (*(t.name for t in block.inputs), *(p.name for p in block.params))}
    for op in block.ops:
        aliases = op_class_of(op.target) == OpClass.VIEW and op.input_refs()
        for tensor in op.outputs:
            roots[tensor.name] = roots[op.input_refs()[0]] if aliases else tensor.name
    return roots
