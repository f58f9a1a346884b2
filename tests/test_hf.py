"""Hugging Face configs to decoder settings: defaults of each architecture, and every violation at once."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from profiler.hf import ADAPTERS, adapt
from profiler.sources import preset_names, read_preset
from specs.errors import InvalidInput

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def codes(config: dict[str, Any]) -> dict[str, str]:
    """Violations of a config: key -> code."""
    with pytest.raises(InvalidInput) as caught:
        adapt(config)
    return {str(violation.loc[0]): violation.code for violation in caught.value.violations}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_adapts(name: str) -> None:
    settings = adapt(read_preset(name))
    assert settings.heads % settings.kv_heads == 0
    assert "_provenance" in settings.other


def test_llama_defaults() -> None:
    settings = adapt(LLAMA)
    assert (settings.kv_heads, settings.head_dim, settings.norm, settings.gated_mlp) == (8, 8, "rms", True)
    assert (settings.qkv_bias, settings.o_bias, settings.mlp_bias, settings.tied_embeddings) == (False,) * 4
    assert settings.max_positions == 2048
    assert settings.rotary_dim == 8


def test_llama_biases_and_own_head_dim() -> None:
    settings = adapt({**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True})
    assert settings.qkv_bias
    assert settings.o_bias
    assert settings.mlp_bias
    assert settings.tied_embeddings
    assert settings.head_dim == 16  # 8 heads of 16 is wider than the hidden size, which is allowed


def test_newer_configs_nest_rope_parameters() -> None:
    settings = adapt({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert settings.rope_theta == 5e5
    assert "rope_parameters" in settings.other


def test_mistral_keeps_its_window_and_null_means_none() -> None:
    mistral = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}
    assert adapt({**mistral, "sliding_window": 1024}).sliding_window == 1024
    assert adapt({**mistral, "sliding_window": None}).sliding_window is None
    assert adapt(mistral).sliding_window == 4096  # the class default


def test_qwen2_has_qkv_bias_only() -> None:
    settings = adapt({**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 7, "use_sliding_window": False})
    assert settings.qkv_bias
    assert not settings.o_bias
    assert settings.sliding_window is None


def test_mixtral_experts() -> None:
    settings = adapt({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3})
    assert (settings.experts, settings.top_k, settings.kv_heads) == (4, 3, 8)
    assert codes({**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}) == {
        "num_experts_per_tok": "top_k_at_most_experts"
    }


def test_gpt2_names_and_default_ffn() -> None:
    settings = adapt({"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 3, "vocab_size": 10})
    assert (settings.hidden, settings.ffn, settings.max_positions) == (48, 192, 1024)
    assert (settings.position, settings.norm, settings.activation) == ("learned", "layer", "gelu_tanh")
    assert settings.tied_embeddings
    same = adapt({"model_type": "gpt2", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 10})
    assert same == settings


def test_gpt_neox_is_parallel_with_a_quarter_rotary() -> None:
    settings = adapt({**LLAMA, "model_type": "gpt_neox", "hidden_size": 128})
    assert settings.parallel_residual
    assert settings.rotary_dim == 4
    assert settings.mlp_bias


def test_unknown_keys_are_kept() -> None:
    assert adapt({**LLAMA, "rope_scaling": {"factor": 8}, "pretraining_tp": 1}).other == {
        "rope_scaling": {"factor": 8},
        "pretraining_tp": 1,
    }


def test_architectures_stand_in_for_the_model_type() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert adapt({**config, "architectures": ["LlamaForCausalLM"]}).hidden == 64
    assert adapt({**config, "architectures": ["GPTNeoXForCausalLM"]}).parallel_residual


@pytest.mark.parametrize(("name", "nearest"), [("lama", "llama"), ("mixtrall", "mixtral"), ("bert", None)])
def test_unknown_architecture_names_the_nearest_and_the_way_out(name: str, nearest: str | None) -> None:
    with pytest.raises(InvalidInput) as caught:
        adapt({**LLAMA, "model_type": name})
    violation = caught.value.violations[0]
    assert violation.code == "unknown_architecture"
    assert violation.allowed == sorted(ADAPTERS)
    assert violation.nearest == nearest
    assert "meshwright capture package.module:factory" in str(caught.value)


def test_all_violations_at_once() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 100,
        "num_attention_heads": 8,
        "num_hidden_layers": "two",
        "vocab_size": -1,
        "hidden_act": "sillu",
        "rms_norm_eps": None,
        "tie_word_embeddings": "no",
        "intermidiate_size": 5,
    }
    assert codes(config) == {
        "num_attention_heads": "hidden_divisible_by_heads",
        "num_hidden_layers": "wrong_type",
        "vocab_size": "out_of_range",
        "hidden_act": "unsupported_value",
        "tie_word_embeddings": "wrong_type",
        "intermediate_size": "missing_key",
    }
    with pytest.raises(InvalidInput) as caught:
        adapt(config)
    by_key = {violation.loc[0]: violation for violation in caught.value.violations}
    assert by_key["intermediate_size"].nearest == "intermidiate_size"
    assert by_key["hidden_act"].nearest == "silu"
    assert by_key["num_attention_heads"].nearest == 10


def test_grouped_heads_must_divide() -> None:
    assert codes({**LLAMA, "num_key_value_heads": 3}) == {"num_key_value_heads": "heads_divisible_by_kv_heads"}


def test_odd_rotary_dims_are_refused() -> None:
    assert codes({**LLAMA, "head_dim": 7}) == {"head_dim": "rotary_dim_even"}


def test_absurd_sizes_are_refused() -> None:
    assert codes({**LLAMA, "num_hidden_layers": 10**12}) == {"num_hidden_layers": "out_of_range"}


def test_reading_configs_needs_no_torch() -> None:
    code = "import sys, profiler.hf, profiler.sources, profiler.fold, profiler.pricing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
