"""The op graph of a decoder by its settings, without tracing each size anew: one trace per structure, sizes put in afterwards.

Decoders that differ in sizes only have the same ops. One of each structure (norm, activation, biases, grouped heads, experts ...)
is captured with sizes that are all unlike, so that every number of its graph says which size it stands for; a decoder of other
sizes is that graph with the numbers exchanged and the ops priced again. ``tests/test_decoder_graph.py`` holds it equal to a trace.
"""

from __future__ import annotations

from typing import Any

from profiler.capture import captured_layers, decoder_attributes
from profiler.hf import DecoderConfig
from profiler.layer_chain import all_layers
from profiler.pricing import price_graph
from specs.errors import MeshwrightError
from specs.expr import Expr
from specs.graph import Block, ModelGraph, Op, ParamSpec, TensorSpec

# Primes and products of primes: no two sizes of a decoder, nor their halves and products, coincide.
_HEAD_DIM, _KV_HEADS, _GROUP = 302, 53, 59
_HIDDEN, _FFN, _VOCAB, _POSITIONS = 10007, 10009, 20011, 30011
_EXPERTS, _TOP_K = 101, 67
_PARTIAL_ROTARY = 142 / 302
_LEAST = 46  # smaller numbers in a graph are dims and flags, never sizes
_TO_THE_END = 2**63 - 1  # of a slice


def decoder_graph(settings: DecoderConfig, name: str = "decoder") -> ModelGraph:
    """The graph that capturing the decoder of ``settings`` gives. Latent attention and hybrids are captured at their own sizes."""
    if settings.latent is not None or settings.pattern:
        captured = captured_layers(settings)
    else:
        template = _template_settings(settings)
        captured = captured_layers(template)
        resize = _Resize(_sizes(template, settings))
        captured = captured.replace(blocks=tuple(resize.block(block) for block in captured.blocks))
    graph = all_layers(captured, settings)
    return price_graph(graph.replace(name=name, attributes=decoder_attributes(settings)))


def _template_settings(settings: DecoderConfig) -> DecoderConfig:
    """The settings of the structure that ``settings`` is one size of."""
    heads = _KV_HEADS * (_GROUP if settings.heads != settings.kv_heads else 1)
    moe = {"experts": _EXPERTS, "top_k": _TOP_K} if settings.experts else {"experts": 0, "top_k": 0}
    partial = settings.position == "rope" and settings.rotary_dim < settings.head_dim
    return settings.replace(
        architecture="template", hidden=_HIDDEN, layers=2, heads=heads, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM,
        ffn=_FFN, vocab=_VOCAB, max_positions=_POSITIONS, rotary_fraction=_PARTIAL_ROTARY if partial else 1.0,
        other={}, **moe,
    )  # fmt: skip


def _sizes(template: DecoderConfig, settings: DecoderConfig) -> dict[int, int]:
    """What each number of the template's graph becomes."""
    return {old: new for old, new in zip(_numbers(template), _numbers(settings), strict=True) if old >= _LEAST}


def _numbers(item: DecoderConfig) -> list[int]:
    return [
        item.hidden, item.heads, item.kv_heads, item.head_dim, item.heads * item.head_dim, item.kv_heads * item.head_dim,
        item.rotary_dim, item.rotary_dim // 2, item.head_dim - item.rotary_dim, item.ffn, item.vocab, item.max_positions,
        item.experts, item.top_k,
    ]  # fmt: skip


class _Resize:
    """Exchanges the sizes of a graph."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.sizes = sizes

    def block(self, block: Block) -> Block:
        return block.replace(
            inputs=tuple(self._tensor(tensor) for tensor in block.inputs),
            params=tuple(self._param(param) for param in block.params),
            ops=tuple(self._op(op) for op in block.ops),
        )

    def _op(self, op: Op) -> Op:
        return op.replace(
            args=tuple(self._value(value) for value in op.args),
            kwargs={key: self._value(value) for key, value in op.kwargs.items()},
            outputs=tuple(self._tensor(tensor) for tensor in op.outputs),
        )

    def _tensor(self, tensor: TensorSpec) -> TensorSpec:
        return tensor.replace(shape=tuple(self._expr(size) for size in tensor.shape))

    def _param(self, param: ParamSpec) -> ParamSpec:
        return param.replace(shape=tuple(self._number(size) for size in param.shape))

    def _expr(self, size: Expr) -> Expr:
        return Expr({powers: self._number(value) for powers, value in size.terms.items()})

    def _number(self, value: float) -> int:
        if value < _LEAST or value == _TO_THE_END:
            return int(value)
        if value not in self.sizes:
            raise MeshwrightError(f"size {value:g} of the captured decoder stands for no setting of it")
        return self.sizes[int(value)]

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {"expr": str(self._expr(Expr.parse(value["expr"])))} if set(value) == {"expr"} else value
        if isinstance(value, (list, tuple)):
            return [self._value(item) for item in value]
        if isinstance(value, int) and not isinstance(value, bool) and value >= _LEAST:
            return self._number(value)
        return value
