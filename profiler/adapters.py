"""Low-rank adapters beside frozen weights: the graph of a model that trains only them (LoRA, arXiv 2106.09685 §4). No torch.

A product of a layer with a weight W gets two small ones beside it: y = W x + B (A x). All parameters of the model are
frozen, so no gradient of W is computed and its input is kept for A only; embedding and head stay whole. Any captured model can be
adapted: what matters is where products stand in the graph, not how modules are called.
"""

from __future__ import annotations

from profiler.opset import OpClass, base_name, op_class_of
from profiler.pricing import price_graph
from specs.expr import Expr
from specs.graph import Block, ModelGraph, Op, ParamSpec, TensorSpec
from specs.training import Adapters


def with_adapters(graph: ModelGraph, adapters: Adapters) -> ModelGraph:
    """The graph with ``adapters`` in its layers (all but the ends: embedding, head with loss), everything else frozen.

    A graph that has them already is returned as it is.
    """
    described = adapters.model_dump(mode="json")
    if graph.attributes.get("adapters") == described:
        return graph
    repeated = {segment.block for segment in graph.segments if segment.count > 1}
    layers = {block.name for block in graph.blocks if block.name in repeated or not _is_end(block)}
    blocks = tuple(_adapted(block, adapters) if block.name in layers else _frozen(block) for block in graph.blocks)
    return price_graph(graph.replace(blocks=blocks, attributes={**graph.attributes, "adapters": described}))


def _is_end(block: Block) -> bool:
    """Whether the block embeds tokens or computes the loss. A layer may occur once: hybrids have such."""
    return any(op_class_of(op.target) in (OpClass.EMBEDDING, OpClass.LOSS) for op in block.ops)


def _frozen(block: Block) -> Block:
    return block.replace(params=tuple(param.replace(trainable=False) for param in block.params))


def _adapted(block: Block, adapters: Adapters) -> Block:
    chosen = _weight_refs(block)
    if adapters.beside == "attention":
        chosen = {name: refs for name, refs in chosen.items() if name in _around_attention(block, set(chosen))}
    weights = {param.name: param for param in block.params}
    ops: list[Op] = []
    params = list(_frozen(block).params)
    for op in block.ops:
        if op.name not in chosen:
            ops.append(op)
            continue
        x, weight = chosen[op.name]
        added, own_ops = _adapter(op, x, weights[weight], adapters.rank)
        params += added
        ops += own_ops
    return block.replace(params=tuple(params), ops=tuple(ops))


def _weight_refs(block: Block) -> dict[str, tuple[str, str]]:
    """(input, weight) of every product with a matrix of parameters, by the op's name."""
    matrices = {param.name for param in block.params if not param.buffer and len(param.shape) == 2}
    found = {}
    for op in block.ops:
        refs = op.input_refs()
        first = 1 if base_name(op.target) == "addmm" else 0  # its bias comes first
        if op_class_of(op.target) == OpClass.GEMM and len(refs) > first + 1 and refs[first + 1] in matrices:
            found[op.name] = (refs[first], refs[first + 1])
    return found


def _around_attention(block: Block, products: set[str]) -> set[str]:
    """The ``products`` right before an attention op (queries, keys, values) and right after it (output)."""
    maker = {tensor.name: op for op in block.ops for tensor in op.outputs}
    readers: dict[str, list[Op]] = {}
    for op in block.ops:
        for name in op.input_refs():
            readers.setdefault(name, []).append(op)
    attention = [op for op in block.ops if op_class_of(op.target) == OpClass.ATTENTION]
    found: set[str] = set()
    for back in (True, False):
        pending, seen = list(attention), set()
        while pending:
            op = pending.pop()
            if back:
                near = [maker[name] for name in op.input_refs() if name in maker]
            else:
                near = [reader for tensor in op.outputs for reader in readers.get(tensor.name, [])]
            for other in near:
                if other.name in products:
                    found.add(other.name)
                elif other.name not in seen:
                    seen.add(other.name)
                    pending.append(other)
    return found


def _adapter(op: Op, x: str, weight: ParamSpec, rank: int) -> tuple[list[ParamSpec], list[Op]]:
    """Two parameters, and the ops that replace ``op``; the sum takes the name of its result."""
    out = op.outputs[0]
    n, k = weight.shape if base_name(op.target) == "linear" else reversed(weight.shape)
    down, up, base, low, high = (f"{op.name}_lora_{part}" for part in ("a", "b", "base", "low", "high"))
    stem = weight.fqn.removesuffix(".weight")
    params = [
        ParamSpec(name=down, fqn=f"{stem}.lora_a.weight", shape=(rank, k)),
        ParamSpec(name=up, fqn=f"{stem}.lora_b.weight", shape=(n, rank)),
    ]

    def linear(name: str, source: str, matrix: str, shape: tuple[Expr, ...]) -> Op:
        args = ({"ref": source}, {"ref": matrix})
        result = TensorSpec(name=name, shape=shape, dtype=out.dtype)
        return Op(name=f"{name}_op", target="aten.linear.default", args=args, outputs=(result,), module_path=op.module_path)

    whole = Op(
        name=f"{op.name}_lora_add", target="aten.add.Tensor", args=({"ref": base}, {"ref": high}), outputs=(out,),
        module_path=op.module_path,
    )  # fmt: skip
    first = op.replace(outputs=(out.replace(name=base),))
    narrow = (*out.shape[:-1], Expr.const(rank))
    return params, [first, linear(low, x, down, narrow), linear(high, low, up, tuple(out.shape)), whole]
