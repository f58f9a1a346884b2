"""Captured graphs against published parameter counts, closed-form FLOP, and the modules that they come from."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiler.capture import capture_config, capture_module
from profiler.hf import adapt
from profiler.models import build_model
from profiler.sources import read_preset
from specs.errors import InvalidInput
from specs.graph import ModelGraph

PUBLISHED_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "gpt-neox-20b": 20_554_567_680,
    "mixtral-8x7b": 46_702_792_704,
    "mistral-7b": 7_241_732_096,
    "qwen2-1.5b": 1_543_714_304,
    "gpt2": 124_439_808,
}
SHAPES = ((1, 128), (4, 2048), (2, 8192))


def preset(name: str) -> ModelGraph:
    return capture_config(read_preset(name), name)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_equal_the_published_count(name: str) -> None:
    assert preset(name).num_params() == PUBLISHED_PARAMETERS[name]


def closed_form_flop(name: str, batch: int, seq: int) -> float:
    """Forward: 2 per weight and token of every product, 4 s a d per token and layer for attention in full; backward twice."""
    config = adapt(read_preset(name))
    attention_weights = config.hidden * (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    one_mlp = (3 if config.gated_mlp else 2) * config.hidden * config.ffn
    mlp_weights = config.top_k * one_mlp + config.hidden * config.experts if config.experts else one_mlp
    weights = config.layers * (attention_weights + mlp_weights) + config.hidden * config.vocab
    scores = config.layers * 4 * seq * config.heads * config.head_dim
    return 3 * batch * seq * (2 * weights + scores)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-70b", "gpt3-175b", "gpt-neox-20b", "mixtral-8x7b", "qwen2-1.5b"])
def test_flop_equals_the_closed_form(name: str) -> None:
    graph = preset(name)
    for batch, seq in SHAPES:
        assert graph.flop(batch=batch, seq=seq) == pytest.approx(closed_form_flop(name, batch, seq), rel=1e-9)
        assert graph.flop(batch=batch, seq=seq, backward=False) == pytest.approx(closed_form_flop(name, batch, seq) / 3, rel=1e-9)


def test_gpt3_flop_equals_the_formula_of_megatron() -> None:
    """72 B s L h^2 (1 + s/6h + V/12Lh), without recompute (arXiv 2104.04473 equation 3 at 3/4)."""
    layers, hidden, vocab, batch, seq = 96, 12288, 51200, 8, 2048
    expected = 72 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert preset("gpt3-175b").flop(batch=batch, seq=seq) == pytest.approx(expected, rel=0.005)


def test_the_largest_model_is_small_on_disk() -> None:
    text = preset("llama-3-405b").to_json(indent=1)
    print(f"llama-3-405b graph: {len(text) / 1e3:.0f} kB")
    assert len(text) < 1_000_000


@pytest.mark.parametrize("name", ["llama-3-405b", "gpt2", "mixtral-8x7b"])
def test_round_trip(name: str) -> None:
    graph = preset(name)
    again = ModelGraph.parse(json.loads(graph.to_json()))
    assert again == graph
    assert again.content_hash() == graph.content_hash()


def test_a_decoder_is_embedding_layers_tail() -> None:
    graph = preset("llama-3-8b")
    assert [(segment.block, segment.count) for segment in graph.segments] == [("embed", 1), ("layers", 32), ("tail", 1)]
    assert graph.num_units() == 34
    embed, layers, tail = graph.segments
    assert embed.bind == {"tokens": "tokens"}
    (hidden,) = embed.produces.values()
    assert list(layers.bind.values()) == [hidden]
    assert set(layers.carry) == set(layers.bind)
    assert set(tail.bind.values()) == {"labels", *layers.produces.values()}
    assert graph.loss in tail.produces.values()
    layer = graph.block("layers")
    assert {param.fqn for param in layer.params} >= {"layers.{i}.attention.q.weight", "layers.{i}.mlp.down.weight"}
    assert {op.module_path for op in layer.ops} >= {"layers.{i}.attention.q", "layers.{i}.mlp_norm"}


def test_graph_keeps_config_and_numbers() -> None:
    graph = preset("mixtral-8x7b")
    assert graph.attributes["hf_config"] == read_preset("mixtral-8x7b")
    numbers = {key: graph.attributes[key] for key in ("heads", "kv_heads", "head_dim", "hidden", "ffn", "vocab", "layers")}
    assert numbers == {
        "heads": 32, "kv_heads": 8, "head_dim": 128, "hidden": 4096, "ffn": 14336, "vocab": 32000, "layers": 32,
    }  # fmt: skip
    assert (graph.attributes["experts"], graph.attributes["top_k"]) == (8, 2)
    assert "ops_without_rule" not in graph.attributes


def test_tied_embeddings_are_one_parameter() -> None:
    graph = preset("gpt2")
    assert graph.tied == (("tail.head.weight", "embed.weight"),)
    assert preset("llama-3-8b").tied == ()


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox-20b", "mixtral-8x7b", "qwen2-1.5b"])
def test_graph_has_exactly_the_parameters_of_the_module(name: str) -> None:
    config = read_preset(name)
    with torch.device("meta"):
        model = build_model(adapt(config))
    graph = preset(name)
    found = {}
    for segment, index in graph.units():
        for param in graph.block(segment.block).params:
            if not param.buffer:
                found[param.fqn.replace("{i}", str(segment.first_index + index))] = param.shape
    assert found == {key: tuple(value.shape) for key, value in model.named_parameters(remove_duplicate=False)}


def test_one_layer_and_two_layers() -> None:
    config = {**read_preset("llama-demo"), "num_hidden_layers": 1}
    assert [segment.count for segment in capture_config(config, "one").segments] == [1, 1, 1]
    config["num_hidden_layers"] = 2
    assert [segment.count for segment in capture_config(config, "two").segments] == [1, 2, 1]


def test_config_capture_equals_capture_of_the_whole_module() -> None:
    config = {**read_preset("llama-demo"), "num_hidden_layers": 5}
    with torch.device("meta"):
        model = build_model(adapt(config))
        example = torch.zeros(2, 16, dtype=torch.int64)
    whole, short = capture_module(model, (example, example), name="m"), capture_config(config, "m")
    assert (whole.blocks, whole.segments) == (short.blocks, short.segments)


@pytest.mark.parametrize(("batch", "seq"), [(2, 2), (3, 5), (2, 64)])
def test_sizes_evaluate_to_the_real_shapes(batch: int, seq: int) -> None:
    """Each op's symbolic output shape, at some batch and sequence, is what the module computes there."""
    config = {**read_preset("llama-demo"), "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 50}
    graph = capture_config(config, "small")
    model = build_model(adapt(config))
    seen: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(lambda _m, _a, out, name=name: seen.__setitem__(name, tuple(out.shape)))
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    model(tokens, tokens)
    checked = 0
    for segment, index in graph.units():
        for op in graph.block(segment.block).ops:
            path = op.module_path.replace("{i}", str(index))
            if op.target == "aten.linear.default":
                assert tuple(size(batch, seq) for size in op.outputs[0].shape) == seen[path]
                checked += 1
    assert checked == 2 * 7 + 1


def test_views_keep_minus_one_for_the_heads() -> None:
    ops = preset("llama-3-8b").block("layers").ops
    views = [op.args[1] for op in ops if op.target in ("aten.view.default", "aten.reshape.default")]
    assert [{"expr": "B"}, {"expr": "S"}, -1, 128] in views
    assert [{"expr": "B"}, {"expr": "S"}, -1] in views


# --- arbitrary modules ----------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Convolution-free image model: in-place ops, buffers that are written, no_grad and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 5)
        self.drop = nn.Dropout(0.0)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(image)), inplace=True)
        with torch.no_grad():
            scale = x.abs().mean() + torch.tensor(1.0)
        x = self.drop(x / scale).contiguous()
        return F.cross_entropy(self.last(x), label)


def test_a_module_without_sequence_or_repetition_is_one_segment() -> None:
    model = Classifier()
    graph = capture_module(model, (torch.randn(4, 12), torch.zeros(4, dtype=torch.int64)), name="classifier")
    (segment,) = graph.segments
    block = graph.block(segment.block)
    assert segment.count == 1
    assert graph.num_params() == sum(parameter.numel() for parameter in model.parameters())
    targets = [op.target for op in block.ops]
    assert "aten.relu.default" in targets  # in place in the module
    assert not [target for target in targets if "dropout" in target or "contiguous" in target]
    (division,) = [op for op in block.ops if op.target == "aten.div.Tensor"]
    assert division.input_refs()[0] == "relu"
    # the no_grad region is entered through detach, so its ops have no backward
    (mean,) = [op for op in block.ops if op.target == "aten.mean.default"]
    assert mean.backward_bytes.terms == {}
    assert "detach" in [ref for op in block.ops for ref in op.input_refs()]


def test_frozen_parameters_need_no_weight_gradient() -> None:
    model = Classifier()
    arguments = (torch.randn(4, 12), torch.zeros(4, dtype=torch.int64))
    free = capture_module(model, arguments)
    model.first.requires_grad_(False)
    frozen = capture_module(model, arguments)
    (before, after) = (
        next(op for op in graph.blocks[0].ops if op.module_path == "first" and op.target == "aten.linear.default")
        for graph in (free, frozen)
    )
    assert before.backward_flop(1, 1) == before.forward_flop(1, 1) == 2 * 12 * 8  # the input needs none, the weight does
    assert after.backward_flop(1, 1) == 0
    assert frozen.num_params(trainable_only=True) == free.num_params() - 12 * 8 - 8


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, : x.shape[1] // 3]).mean()


def test_a_size_that_is_no_polynomial_names_op_and_module() -> None:
    with pytest.raises(InvalidInput, match=r"slice.*no polynomial in B and S") as caught:
        capture_module(Pooling(), (torch.randn(4, 30, 4),), {"x": {0: "B", 1: "S"}})
    assert caught.value.violations[0].code == "size_not_polynomial"


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        left, right = x.view(x.shape[0], 2, -1).unbind(1)
        return (left * right).mean()


def test_sizes_that_are_a_fraction_of_an_axis() -> None:
    graph = capture_module(Halves(), (torch.randn(4, 30),), {"x": {0: "B", 1: "S"}})
    product = next(op for op in graph.blocks[0].ops if op.target == "aten.mul.Tensor")
    assert [str(size) for size in product.outputs[0].shape] == ["B", "0.5*S"]
    unbind = next(op for op in graph.blocks[0].ops if op.target == "aten.unbind.int")
    assert [tensor.name for tensor in unbind.outputs] == ["unbind.0", "unbind.1"]
    assert product.input_refs() == ["unbind.0", "unbind.1"]


class Positions(nn.Module):
    """Learned positions up to 32: export finds that S is bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.table[: x.shape[1]]).square().mean()


def test_a_bounded_sequence_is_accepted() -> None:
    graph = capture_module(Positions(), (torch.randn(2, 16, 4),), {"x": {0: "B", 1: "S"}})
    assert [str(size) for size in graph.blocks[0].ops[1].outputs[0].shape] == ["B", "S", "4"]


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, 8, 2).sum()


def test_a_fixed_batch_is_refused() -> None:
    with pytest.raises(InvalidInput, match="symbolic batch and sequence") as caught:
        capture_module(Fixed(), (torch.randn(4, 16),))
    assert caught.value.violations[0].code == "not_exportable"


class Logits(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": x * 2}


class LossFirst(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (x * 2).mean(), "logits": x * 2}


def test_the_result_must_be_a_scalar_loss() -> None:
    with pytest.raises(InvalidInput, match="must return the mean loss") as caught:
        capture_module(Logits(), (torch.randn(4, 16),))
    assert caught.value.violations[0].code == "no_scalar_loss"
    assert capture_module(LossFirst(), (torch.randn(4, 16),)).loss.endswith("mean")


@pytest.mark.parametrize(
    ("example", "dynamic", "code"),
    [
        ((torch.zeros(2), torch.zeros(2)), None, "wrong_example_args"),
        ({"y": torch.zeros(2, 2)}, None, "wrong_example_args"),
        (([torch.zeros(2)],), None, "nested_example_args"),
        ((torch.zeros(2, 2),), {"z": {0: "B"}}, "unknown_argument"),
        ((torch.zeros(2, 2),), {"x": {0: "T"}}, "unknown_axis"),
        ((torch.zeros(2, 2),), {"x": {5: "B"}}, "unknown_axis"),
    ],
)
def test_bad_example_arguments(example: Any, dynamic: Any, code: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        capture_module(LossFirst(), example, dynamic)
    assert caught.value.violations[0].code == code


def test_an_example_of_size_one_still_varies() -> None:
    graph = capture_module(LossFirst(), (torch.zeros(1, 4),))
    assert str(graph.inputs[0].shape[0]) == "B"
