"""Small models with their graphs for executor tests."""

from __future__ import annotations

from functools import lru_cache

from profiler.capture import capture_config
from profiler.sources import model_from_graph
from specs.graph import ModelGraph

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 61, "n_positions": 32, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@lru_cache(maxsize=8)
def graph_of(name: str) -> ModelGraph:
    """The captured graph of a small model: llama, gpt2 (biases, learned positions, tied head) or mixtral."""
    return capture_config({"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL}[name], name)


def model_of(name: str) -> object:
    """The module on ``meta``."""
    return model_from_graph(graph_of(name))
