"""Small hand-written blocks and graphs for tests that must not depend on capture."""

from __future__ import annotations

from typing import Any

from profiler.opset import Tensor, op_cost
from specs.expr import Expr
from specs.graph import Block, ModelGraph, Op, ParamSpec, Segment, TensorSpec


class BlockBuilder:
    """Writes ops one after another; shapes are lists of ints and 'B'/'S' texts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inputs: list[TensorSpec] = []
        self.params: list[ParamSpec] = []
        self.ops: list[Op] = []

    def input(self, name: str, *shape: Any, dtype: str = "float32") -> str:
        self.inputs.append(TensorSpec(name=name, shape=tuple(Expr.of(size) for size in shape), dtype=dtype))
        return name

    def param(self, name: str, *shape: int, fqn: str = "", buffer: bool = False) -> str:
        self.params.append(
            ParamSpec(name=name, fqn=fqn or f"layers.{{i}}.{name}", shape=shape, buffer=buffer, trainable=not buffer)
        )
        return name

    def op(self, target: str, refs: list[str], shape: list[Any], *args: Any, dtype: str = "float32", **kwargs: Any) -> str:
        name = f"t{len(self.ops)}"
        out = TensorSpec(name=name, shape=tuple(Expr.of(size) for size in shape), dtype=dtype)
        table = {tensor.name: tensor for tensor in self.inputs} | {param.name: param for param in self.params}
        table |= {tensor.name: tensor for op in self.ops for tensor in op.outputs}
        all_args = (*({"ref": ref} for ref in refs), *args)
        if target in ("aten.rms_norm.default", "aten.layer_norm.default"):  # schema order: input, normalized shape, weight, bias
            all_args = (all_args[0], [shape[-1]], *all_args[1 : len(refs)])
        tensors = [Tensor(tuple(table[ref].shape), table[ref].dtype, table[ref].dtype == "float32") for ref in refs]
        cost = op_cost(target, tensors, [Tensor(out.shape, dtype)], all_args, kwargs)
        self.ops.append(
            Op(
                name=f"op{len(self.ops)}", target=target, args=all_args, kwargs=kwargs, outputs=(out,),
                forward_flop=cost.forward_flop, backward_flop=cost.backward_flop,
                forward_bytes=cost.forward_bytes, backward_bytes=cost.backward_bytes,
            )
        )  # fmt: skip
        return name

    def build(self, *outputs: str) -> Block:
        return Block(name=self.name, inputs=tuple(self.inputs), params=tuple(self.params), ops=tuple(self.ops), outputs=outputs)


def llama_layer(hidden: int = 512, heads: int = 8, kv_heads: int = 4, head_dim: int = 64, ffn: int = 1408) -> Block:
    b = BlockBuilder("layer")
    x = b.input("x", "B", "S", hidden)
    b.param("norm1", hidden), b.param("q", heads * head_dim, hidden), b.param("k", kv_heads * head_dim, hidden)
    b.param("v", kv_heads * head_dim, hidden), b.param("o", hidden, heads * head_dim), b.param("norm2", hidden)
    b.param("gate", ffn, hidden), b.param("up", ffn, hidden), b.param("down", hidden, ffn)
    b.param("cos", 4096, head_dim, buffer=True)
    n = b.op("aten.rms_norm.default", [x, "norm1"], ["B", "S", hidden], [hidden])
    parts = {}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        y = b.op("aten.linear.default", [n, name], ["B", "S", count * head_dim])
        y = b.op("aten.view.default", [y], ["B", "S", count, head_dim], [{"expr": "B"}, {"expr": "S"}, -1, head_dim])
        if name != "v":
            c = b.op("aten.slice.Tensor", ["cos"], ["S", head_dim], 0, None, {"expr": "S"})
            c = b.op("aten.unsqueeze.default", [c], [1, "S", head_dim], 0)
            c = b.op("aten.unsqueeze.default", [c], [1, "S", 1, head_dim], 2)
            y = b.op("aten.mul.Tensor", [y, c], ["B", "S", count, head_dim])
        parts[name] = b.op("aten.transpose.int", [y], ["B", count, "S", head_dim], 1, 2)
    a = b.op(
        "aten.scaled_dot_product_attention.default", [parts["q"], parts["k"], parts["v"]], ["B", heads, "S", head_dim],
        None, 0.0, True,
        enable_gqa=True,
    )  # fmt: skip
    a = b.op("aten.transpose.int", [a], ["B", "S", heads, head_dim], 1, 2)
    a = b.op("aten.reshape.default", [a], ["B", "S", heads * head_dim], [{"expr": "B"}, {"expr": "S"}, -1])
    o = b.op("aten.linear.default", [a, "o"], ["B", "S", hidden])
    h = b.op("aten.add.Tensor", [x, o], ["B", "S", hidden])
    n2 = b.op("aten.rms_norm.default", [h, "norm2"], ["B", "S", hidden], [hidden])
    g = b.op("aten.silu.default", [b.op("aten.linear.default", [n2, "gate"], ["B", "S", ffn])], ["B", "S", ffn])
    u = b.op("aten.linear.default", [n2, "up"], ["B", "S", ffn])
    m = b.op("aten.mul.Tensor", [g, u], ["B", "S", ffn])
    d = b.op("aten.linear.default", [m, "down"], ["B", "S", hidden])
    return b.build(b.op("aten.add.Tensor", [h, d], ["B", "S", hidden]))


def gpt_layer(hidden: int, heads: int) -> Block:
    """GPT layer with biases, layer norms, GELU, dropout left out."""
    b = BlockBuilder("layer")
    head_dim = hidden // heads
    x = b.input("x", "B", "S", hidden)
    for name, shape in (("q", (hidden, hidden)), ("k", (hidden, hidden)), ("v", (hidden, hidden)), ("o", (hidden, hidden)),
                        ("up", (4 * hidden, hidden)), ("down", (hidden, 4 * hidden))):  # fmt: skip
        b.param(name, *shape), b.param(name + "_bias", shape[0])
    for name in ("norm1", "norm1_bias", "norm2", "norm2_bias"):
        b.param(name, hidden)
    n = b.op("aten.layer_norm.default", [x, "norm1", "norm1_bias"], ["B", "S", hidden])
    parts = []
    for name in "qkv":
        y = b.op("aten.linear.default", [n, name, name + "_bias"], ["B", "S", hidden])
        y = b.op("aten.view.default", [y], ["B", "S", heads, head_dim])
        parts.append(b.op("aten.transpose.int", [y], ["B", heads, "S", head_dim], 1, 2))
    a = b.op("aten.scaled_dot_product_attention.default", parts, ["B", heads, "S", head_dim], None, 0.0, True)
    a = b.op("aten.transpose.int", [a], ["B", "S", heads, head_dim], 1, 2)
    a = b.op("aten.reshape.default", [a], ["B", "S", hidden])
    h = b.op("aten.add.Tensor", [x, b.op("aten.linear.default", [a, "o", "o_bias"], ["B", "S", hidden])], ["B", "S", hidden])
    n2 = b.op("aten.layer_norm.default", [h, "norm2", "norm2_bias"], ["B", "S", hidden])
    u = b.op(
        "aten.gelu.default", [b.op("aten.linear.default", [n2, "up", "up_bias"], ["B", "S", 4 * hidden])], ["B", "S", 4 * hidden]
    )
    d = b.op("aten.linear.default", [u, "down", "down_bias"], ["B", "S", hidden])
    return b.build(b.op("aten.add.Tensor", [h, d], ["B", "S", hidden]))


def embedding_block(vocab: int, hidden: int) -> Block:
    b = BlockBuilder("embedding")
    tokens = b.input("tokens", "B", "S", dtype="int64")
    b.param("table", vocab, hidden, fqn="embed.weight")
    return b.build(b.op("aten.embedding.default", ["table", tokens], ["B", "S", hidden]))


def tail_block(vocab: int, hidden: int) -> Block:
    b = BlockBuilder("tail")
    x, labels = b.input("x", "B", "S", hidden), b.input("labels", "B", "S", dtype="int64")
    b.param("norm", hidden, fqn="tail.norm.weight"), b.param("head", vocab, hidden, fqn="tail.head.weight")
    n = b.op("aten.rms_norm.default", [x, "norm"], ["B", "S", hidden], [hidden])
    logits = b.op("aten.linear.default", [n, "head"], ["B", "S", vocab])
    flat = b.op("aten.flatten.using_ints", [logits], ["B*S", vocab], 0, 1)
    flat_labels = b.op("aten.flatten.using_ints", [labels], ["B*S"], dtype="int64")
    return b.build(b.op("aten.cross_entropy_loss.default", [flat, flat_labels], []))


def llama_graph(layers: int = 4, vocab: int = 1024, **sizes: int) -> ModelGraph:
    layer = llama_layer(**sizes)
    hidden = sizes.get("hidden", 512)
    embedding, tail = embedding_block(vocab, hidden), tail_block(vocab, hidden)
    inputs = (*embedding.inputs, tail.inputs[1])
    return ModelGraph(
        name="tiny-llama", inputs=inputs, blocks=(embedding, layer, tail), loss="loss",
        segments=(
            Segment(block="embedding", bind={"tokens": "tokens"}, produces={embedding.outputs[0]: "hidden0"}),
            Segment(block="layer", count=layers, bind={"x": "hidden0"},
                    carry={"x": layer.outputs[0]}, produces={layer.outputs[0]: "hidden"}),
            Segment(block="tail", bind={"x": "hidden", "labels": "labels"}, produces={tail.outputs[0]: "loss"}),
        ),
        attributes={"heads": sizes.get("heads", 8), "kv_heads": sizes.get("kv_heads", 4), "hidden": hidden, "layers": layers,
                    "ffn": sizes.get("ffn", 1408), "vocab": vocab, "head_dim": sizes.get("head_dim", 64)},
    )  # fmt: skip
