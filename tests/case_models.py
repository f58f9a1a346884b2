"""Graphs of published models for the tests of reported cases: configs as their authors publish them, one graph a process each."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from profiler.catalogue import resolve_cluster
from profiler.decoder_graph import decoder_graph
from profiler.hf import adapt
from profiler.sources import preset_names, read_preset
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph

LLAMA: dict[str, Any] = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    # The text model of Llama-3.2-90B-Vision has 80 layers of self-attention and 20 of cross-attention, alike in size.
    "llama-3.2-90b-text": {
        **LLAMA, "vocab_size": 128264, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 100,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    "llama-1-7b": {
        **LLAMA, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3.1-70b": {
        **LLAMA, "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    # Gemma-2B's sizes on a gated decoder: 256,000 words, heads of 256, one key/value head, embedding tied to the head.
    "gemma-2b-sizes": {
        **LLAMA, "vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "qwen3-32b-sizes": {
        **LLAMA, "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    },
    "gpt-oss-20b-sizes": {
        "model_type": "mixtral", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
    },
    "qwen2.5-32b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "pythia-12b": {  # what Dolly v2 starts from
        "model_type": "gpt_neox", "vocab_size": 50688, "hidden_size": 5120, "intermediate_size": 20480, "num_hidden_layers": 36,
        "num_attention_heads": 40, "rotary_pct": 0.25, "tie_word_embeddings": False,
    },
}  # fmt: skip


@lru_cache(maxsize=64)
def case_graph(name: str) -> ModelGraph:
    """The graph of a config above or of a preset."""
    config = CONFIGS[name] if name in CONFIGS else read_preset(name)
    assert name in CONFIGS or name in preset_names()
    return decoder_graph(adapt(config), name)


def graph_file(name: str, folder: Path) -> str:
    """The graph as a file for the command line, which then captures nothing."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(case_graph(name).to_dict()))
    return str(path)


def cluster_of(device: str, per_node: int, nodes: int = 1, **group: Any) -> ClusterSpec:
    """Equal nodes of a device of the catalogue, resolved."""
    given = {"device": device, "devices_per_node": per_node, "count": nodes, **group}
    return resolve_cluster(ClusterSpec.parse({"name": f"{nodes} x {per_node} {device}", "nodes": [given]}))
