"""A resized template equals a trace of the same decoder."""

import pytest
import torch

from profiler.capture import capture_module, decoder_attributes, example_tokens
from profiler.decoder_graph import decoder_graph
from profiler.hf import DecoderConfig
from profiler.models import build_model

BASE = {
    "architecture": "any", "hidden": 96, "layers": 2, "heads": 6, "kv_heads": 6, "head_dim": 16, "ffn": 224, "vocab": 640,
    "max_positions": 128,
}  # fmt: skip
CASES = {
    "gpt": {
        "norm": "layer", "activation": "gelu", "gated_mlp": False, "position": "learned", "qkv_bias": True, "o_bias": True,
        "mlp_bias": True, "tied_embeddings": True,
    },
    "llama": {},
    "grouped heads": {"kv_heads": 2},
    "own head size": {"heads": 4, "kv_heads": 2, "head_dim": 32},
    "partial rotary": {"rotary_fraction": 0.25, "parallel_residual": True, "norm": "layer", "gated_mlp": False},
    "experts": {"experts": 8, "top_k": 2, "kv_heads": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_a_trace(name: str) -> None:
    settings = DecoderConfig(**{**BASE, **CASES[name]})
    with torch.device("meta"):
        traced = capture_module(build_model(settings), example_tokens(), name="decoder")
    made = decoder_graph(settings)
    assert made.blocks == traced.blocks
    assert made.segments == traced.segments
    assert made.tied == traced.tied
    assert made.attributes == decoder_attributes(settings)


def test_layers_are_counted() -> None:
    settings = DecoderConfig(**{**BASE, "layers": 80})
    graph = decoder_graph(settings)
    assert graph.num_units() == 82
    assert graph.num_params() == 2 * 640 * 96 + 96 + 80 * (4 * 96 * 96 + 3 * 96 * 224 + 2 * 96)
