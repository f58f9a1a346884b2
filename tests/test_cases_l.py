"""Reported cases about MFU and FLOP accounting (U113 to U118): one number, its formula, its peak, and no mixed comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from api.engine import Engine
from simulator.utilization import flop_per_token
from specs.accounting import AttentionFlop, FlopConvention
from specs.errors import InvalidInput
from tests.case_models import case_graph, graph_file


def mfu(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["mfu", *args, "--json"])
    assert result.exit_code == code, (result.stdout, result.stderr)
    return json.loads(result.stdout)


def test_u113_7b_on_h100(tmp_path: Path) -> None:
    """9,600 tokens/s on an H100: 45.5 % of 989 dense with attention, 39.2 % by 6N alone; the peak and the formula are stated."""
    given = ["--model", graph_file("llama-2-7b", tmp_path), "--device", "h100_sxm", "--tokens-per-s", "9600", "--seq-len", "4096"]
    whole, bare = mfu(*given), mfu(*given, "--attention", "none")
    assert whole["mfu"] == pytest.approx(0.455, rel=0.005)
    assert bare["mfu"] == pytest.approx(0.392, rel=0.005)
    assert whole["peak_flop_per_s"] == pytest.approx(989e12, rel=0.001)
    assert "dense" in whole["peak_source"]
    assert "non-causal" in whole["formula"]
    assert "no attention" in bare["formula"]
    without_table = mfu(*given, "--no-embedding-table")
    lost = 6 * 32000 * 4096 * 9600 / whole["peak_flop_per_s"]
    assert whole["mfu"] - without_table["mfu"] == pytest.approx(lost, rel=1e-6)


def test_u113_formula_is_the_published_one() -> None:
    """6 N + 12 L a d s of the whole model, from the ops of its graph."""
    graph = case_graph("llama-2-7b")
    norms = 4096 * (2 * 32 + 1)  # multiply nothing
    expected = 6 * (graph.num_params() - norms) + 12 * 32 * 4096 * 4096
    assert flop_per_token(graph, 4096) == pytest.approx(expected, rel=1e-9)


def test_u114_more_than_the_peak_is_an_error(tmp_path: Path) -> None:
    """What is 104 % of an A100's peak is an error there and 32.8 % of an H100's."""
    given = ["--model", graph_file("gpt2", tmp_path), "--seq-len", "1024"]
    slow = mfu(*given, "--device", "a100_sxm_40gb", "--tokens-per-s", "1000")
    rate = ["--tokens-per-s", str(1000 * 1.04 / slow["mfu"])]
    assert mfu(*given, "--device", "h100_sxm", *rate)["mfu"] == pytest.approx(0.328, rel=0.005)
    refused = mfu(*given, "--device", "a100_sxm_40gb", *rate, code=2)
    (error,) = refused["error"]["errors"]
    assert error["code"] == "utilization_above_peak"
    assert error["actual"] == pytest.approx(1.04)
    assert "312.0 TFLOP/s" in error["msg"]


def test_u117_of_the_dense_peak_not_of_the_sparse_one() -> None:
    found = mfu("--device", "h200_sxm", "--tflops", "420")
    assert found["mfu"] == pytest.approx(0.424, rel=0.005)
    assert found["convention"] is None
    assert "dense" in found["formula"]


def test_u117_from_tokens() -> None:
    """The rate that gives 420 TFLOP/s on a 32B model is 42.4 % as well."""
    graph = case_graph("qwen2.5-32b")
    assert graph.num_params() == pytest.approx(32.76e9, rel=0.02)
    found = Engine().utilization(graph, "h200_sxm", seq_len=4096, tokens_per_s=420e12 / flop_per_token(graph, 4096))
    assert found.mfu == pytest.approx(0.424, rel=0.005)


def test_u118_causal_and_non_causal_are_both_there_and_never_mixed(tmp_path: Path) -> None:
    given = ["--model", graph_file("llama-2-7b", tmp_path), "--device", "h100_sxm", "--tokens-per-s", "9600", "--seq-len", "4096"]
    full, causal, bare = (mfu(*given, "--attention", kind) for kind in ("full", "causal", "none"))
    assert full["mfu"] - bare["mfu"] == pytest.approx(2 * (causal["mfu"] - bare["mfu"]))
    assert "causal half" in causal["formula"]
    before = tmp_path / "before.json"
    before.write_text(json.dumps(full))
    same = mfu(*given, "--tokens-per-s", "4800", "--against", str(before))
    assert same["ratio"] == pytest.approx(0.5)
    refused = mfu(*given, "--attention", "causal", "--against", str(before), code=2)
    assert refused["error"]["errors"][0]["code"] == "mixed_flop_conventions"


def test_u118_a_rate_counted_by_someone_else_is_not_compared(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(mfu("--device", "h200_sxm", "--tflops", "420")))
    refused = mfu("--device", "h200_sxm", "--tflops", "400", "--against", str(other), code=2)
    assert refused["error"]["errors"][0]["code"] == "mixed_flop_conventions"


def test_planner_and_accounting_agree_on_the_convention() -> None:
    """A prediction counts the products of the graph and whole attention: the convention without the embedding table."""
    graph = case_graph("llama-2-7b")
    convention = FlopConvention(attention=AttentionFlop.FULL, embedding_table=False)
    assert flop_per_token(graph, 2048, convention) * 2048 == pytest.approx(graph.flop(batch=1, seq=2048), rel=1e-9)


def test_what_is_given_must_say_one_rate() -> None:
    assert mfu("--device", "h100_sxm", code=2)["error"]["errors"][0]["code"] == "rate_not_given"
    with pytest.raises(InvalidInput, match="none"):
        Engine().utilization(None, "h100_sxm", achieved_flop_per_s=0.0)
