"""Low-rank adapters beside frozen weights: the graph of a model that trains only them (LoRA, arXiv 2106.09685 §4). No torch.

Every product of a repeated block with a weight W gets two small ones beside it: y = W x + B (A x). All parameters of the model are
frozen, so no gradient of W is computed and its input is kept for A only; embedding and head stay whole.
"""

from __future__ import annotations

from profiler.opset import OpClass, op_class_of
from profiler.placement import ADAPTER_DOWN
from profiler.pricing import price_graph
from specs.graph import Block, ModelGraph, Op, ParamSpec, TensorSpec


def with_adapters(graph: ModelGraph, rank: int) -> ModelGraph:
    """The graph with adapters of ``rank`` on every linear layer of its repeated blocks, everything else frozen.

    A graph that has them already is returned as it is.
    """
    if graph.attributes.get("adapter_rank") == rank:
        return graph
    repeated = {segment.block for segment in graph.segments if segment.count > 1}
    blocks = tuple(_adapted(block, rank) if block.name in repeated else _frozen(block) for block in graph.blocks)
    return price_graph(graph.replace(blocks=blocks, attributes={**graph.attributes, "adapter_rank": rank}))


def _frozen(block: Block) -> Block:
    return block.replace(params=tuple(param.replace(trainable=False) for param in block.params))


def _adapted(block: Block, rank: int) -> Block:
    weights = {param.name: param for param in block.params if not param.buffer}
    ops: list[Op] = []
    params = list(_frozen(block).params)
    for op in block.ops:
        refs = op.input_refs()
        if op_class_of(op.target) != OpClass.GEMM or len(refs) < 2 or refs[1] not in weights:
            ops.append(op)
            continue
        added, own_ops = _adapter(op, refs[0], weights[refs[1]], rank)
        params += added
        ops += own_ops
    return block.replace(params=tuple(params), ops=tuple(ops))


def _adapter(op: Op, x: str, weight: ParamSpec, rank: int) -> tuple[list[ParamSpec], list[Op]]:
    """Two parameters, and the ops that replace ``op``; the sum takes the name of its result."""
    out = op.outputs[0]
    n, k = weight.shape
    down, up, base, low, high = (f"{op.name}_lora_{part}" for part in ("a", "b", "base", "low", "high"))
    stem = weight.fqn.removesuffix(".weight")
    params = [
        ParamSpec(name=down, fqn=f"{stem}{ADAPTER_DOWN}weight", shape=(rank, k)),
        ParamSpec(name=up, fqn=f"{stem}.lora_b.weight", shape=(n, rank)),
    ]

    def linear(name: str, source: str, matrix: str, shape: tuple[object, ...]) -> Op:
        args = ({"ref": source}, {"ref": matrix})
        result = TensorSpec(name=name, shape=shape, dtype=out.dtype)  # type: ignore[arg-type]
        return Op(name=f"{name}_op", target="aten.linear.default", args=args, outputs=(result,), module_path=op.module_path)

    whole = Op(
        name=f"{op.name}_lora_add", target="aten.add.Tensor", args=({"ref": base}, {"ref": high}), outputs=(out,),
        module_path=op.module_path,
    )  # fmt: skip
    first = op.replace(outputs=(out.replace(name=base),))
    return params, [first, linear(low, x, down, (*out.shape[:-1], rank)), linear(high, low, up, tuple(out.shape)), whole]
