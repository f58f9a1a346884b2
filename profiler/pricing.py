"""Filling in the FLOP and bytes of every op of a graph from the op table, with the gradients that are really needed. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from profiler.opset import Tensor, base_name, op_cost
from specs.graph import Block, ModelGraph, Op, ParamSpec, TensorSpec

NO_GRADIENT = frozenset("detach detach_ zeros_like ones_like empty_like full_like rand_like randn_like sign floor round".split())


def price_graph(graph: ModelGraph) -> ModelGraph:
    """The graph with every op's cost computed from its shapes.

    A repeated block is priced as its last instance: the first one may need no gradient of its input, the others do. Ops that
    the table does not know are listed in ``attributes["ops_without_rule"]``.
    """
    needs = _block_needs(graph)
    unknown: set[str] = set()
    blocks = tuple(_priced(block, needs[block.name], unknown) for block in graph.blocks)
    attributes = {key: value for key, value in graph.attributes.items() if key != "ops_without_rule"}
    if unknown:
        attributes["ops_without_rule"] = sorted(unknown)
    return graph.replace(blocks=blocks, attributes=attributes)


def _block_needs(graph: ModelGraph) -> dict[str, set[str]]:
    """By block, the names of its tensors that need a gradient in any instance."""
    values: dict[str, bool] = {}
    needs: dict[str, set[str]] = {block.name: set() for block in graph.blocks}
    for segment in graph.segments:
        block = graph.block(segment.block)
        inputs = {name: values.get(value, False) for name, value in segment.bind.items()}
        grads = _flow(block, inputs)
        for _ in range(len(segment.carry) if segment.count > 1 else 0):
            carried = {name: inputs[name] or source in grads for name, source in segment.carry.items()}
            inputs = {**inputs, **carried}
            grads = _flow(block, inputs)
        needs[block.name] |= grads
        values.update({value: name in grads for name, value in segment.produces.items()})
    return needs


def _flow(block: Block, inputs: Mapping[str, bool]) -> set[str]:
    grads = {name for name, needed in inputs.items() if needed}
    grads |= {param.name for param in block.params if param.trainable and not param.buffer}
    for op in block.ops:
        if base_name(op.target) not in NO_GRADIENT and any(ref in grads for ref in op.input_refs()):
            grads |= {tensor.name for tensor in op.outputs if _is_float(tensor.dtype)}
    return grads


def _priced(block: Block, grads: set[str], unknown: set[str]) -> Block:
    table = block.tensors()
    ops = []
    for op in block.ops:
        inputs = [_as_input(table[ref], ref in grads) for ref in op.input_refs()]
        outputs = [Tensor(tensor.shape, tensor.dtype, tensor.name in grads) for tensor in op.outputs]
        ops.append(_with_cost(op, inputs, outputs, unknown))
    return block.replace(ops=tuple(ops))


def _with_cost(op: Op, inputs: list[Tensor], outputs: list[Tensor], unknown: set[str]) -> Op:
    if not outputs:
        return op
    cost = op_cost(op.target, inputs, outputs, op.args, op.kwargs)
    if not cost.known:
        unknown.add(op.target)
    return op.replace(
        forward_flop=cost.forward_flop,
        backward_flop=cost.backward_flop,
        forward_bytes=cost.forward_bytes,
        backward_bytes=cost.backward_bytes,
    )


def _as_input(tensor: TensorSpec | ParamSpec, requires_grad: bool) -> Tensor:
    return Tensor(tuple(tensor.shape), tensor.dtype, requires_grad, isinstance(tensor, ParamSpec))


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "tf32"))
