"""``load_model``: files, presets, factories; and the module behind a graph."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from profiler.sources import load_model, model_from_document, model_from_graph, preset_names, read_preset
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from tests.blocks import llama_layer

EXAMPLES = Path(__file__).parent.parent / "examples" / "models"

FACTORIES = """
import torch
from torch import nn
from profiler.hf import adapt
from profiler.models import build_model
from profiler.sources import read_preset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    def forward(self, x):
        return self.layers(x).mean()

def plain():
    return Net(), (torch.zeros(4, 6),)

def with_axes():
    return Net(), {"x": torch.zeros(4, 9, 6)}, {"x": {0: "B", 1: "S"}}

def decoder():
    return build_model(adapt({**read_preset("llama-demo"), "num_hidden_layers": 3}))

def computing():
    width = int(torch.tensor([6.0]).sum())
    assert width == 6
    return Net(), (torch.zeros(4, 6),)

def broken():
    raise KeyError("no such thing")

def wrong():
    return Net()

constant = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory, imported afresh."""
    name = "mesh_factories"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def code_of(text: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_model(text)
    assert caught.value.exit_code == 2
    return caught.value.violations[0].code


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.json")), ids=lambda path: path.stem)
def test_examples_are_the_presets(path: Path) -> None:
    assert json.loads(path.read_text()) == read_preset(path.stem)


def test_presets_are_there() -> None:
    assert {"llama-demo", "llama-3-405b", "gpt3-175b", "mixtral-8x7b", "gpt-neox-20b"} <= set(preset_names())
    graph = load_model("llama-demo")
    assert graph.name == "llama-demo"
    assert 25e6 < graph.num_params() < 40e6
    assert load_model(str(EXAMPLES / "llama-demo.json")) == graph


def test_a_saved_graph_is_read_back_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    graph = load_model("llama-demo")
    graph.save(path)
    assert load_model(str(path)) == graph
    code = f"import sys; from profiler.sources import load_model; load_model({str(path)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_directory_with_a_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(read_preset("llama-demo")))
    for text in (str(folder), str(folder / "config.json")):
        assert load_model(text).name == "my-model"


def test_a_config_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "model_type: gpt2\nn_embd: 32\nn_layer: 2\nn_head: 2\nvocab_size: 64\nlayer_norm_epsilon: 1e-5\nn_positions: 16\n"
    )
    graph = load_model(str(path))
    assert graph.attributes["hidden"] == 32
    assert graph.attributes["norm_eps"] == 1e-5


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_model("llama3-70b")
    assert caught.value.violations[0].nearest == "llama-3-70b"
    assert code_of("no/such/file.json") == "unreadable_file"
    (tmp_path / "cluster.json").write_text('{"nodes": []}')
    assert code_of(str(tmp_path / "cluster.json")) == "unknown_model_document"
    (tmp_path / "list.json").write_text("[]")
    assert code_of(str(tmp_path / "list.json")) == "not_a_mapping"
    (tmp_path / "bad.json").write_text("{")
    assert code_of(str(tmp_path / "bad.json")) == "unparsable_file"
    (tmp_path / "bert.json").write_text('{"model_type": "bert"}')
    assert code_of(str(tmp_path / "bert.json")) == "unknown_architecture"


def test_a_posted_graph_without_costs_is_priced() -> None:
    graph = load_model("llama-demo")
    document = json.loads(graph.to_json())
    for block in document["blocks"]:
        for op in block["ops"]:
            for key in ("forward_flop", "backward_flop", "forward_bytes", "backward_bytes"):
                op.pop(key, None)
    assert model_from_document(document, name="x") == graph


def test_factories(package: str) -> None:
    graph = load_model(f"{package}:plain")
    assert [segment.count for segment in graph.segments] == [3, 1]
    assert graph.attributes["factory"] == f"{package}:plain"
    assert str(graph.inputs[0].shape[0]) == "B"
    shapes = [str(size) for size in load_model(f"{package}:with_axes").inputs[0].shape]
    assert shapes == ["B", "S", "6"]
    assert load_model(f"{package}:computing").num_params() == graph.num_params()


def test_a_decoder_factory(package: str) -> None:
    graph = load_model(f"{package}:decoder")
    assert [segment.count for segment in graph.segments] == [1, 3, 1]
    assert graph.attributes["kv_heads"] == 4
    module = model_from_graph(graph, allow_factory=True)
    assert len(module.unit_modules()) == graph.num_units()  # type: ignore[operator]
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize(
    ("attribute", "code"),
    [
        ("broken", "factory_failed"),
        ("wrong", "wrong_factory_result"),
        ("constant", "not_callable"),
        ("plane", "unknown_factory"),
    ],
)
def test_bad_factories(package: str, attribute: str, code: str) -> None:
    assert code_of(f"{package}:{attribute}") == code


def test_a_factory_of_a_missing_module() -> None:
    assert code_of("no_such_package_at_all:f") == "import_failed"


def test_the_module_behind_a_graph() -> None:
    graph = load_model("qwen2-1.5b")
    module = model_from_graph(graph)
    assert sum(parameter.numel() for parameter in module.parameters()) == graph.num_params()
    assert len(module.unit_modules()) == graph.num_units() == 30  # type: ignore[operator]
    assert all(parameter.is_meta for parameter in module.parameters())


def test_no_code_runs_for_a_graph_that_is_not_trusted(package: str) -> None:
    graph = load_model(f"{package}:plain")
    with pytest.raises(InvalidInput) as caught:
        model_from_graph(graph)
    assert caught.value.violations[0].code == "code_not_allowed"


def test_a_graph_of_ops_alone_is_not_executable() -> None:
    from specs.graph import Segment, TensorSpec

    layer = llama_layer()
    graph = ModelGraph(
        name="ops",
        inputs=(TensorSpec(name="x", shape=layer.inputs[0].shape),),
        blocks=(layer,),
        segments=(Segment(block=layer.name, bind={"x": "x"}, produces={layer.outputs[0]: "y"}),),
        loss="y",
    )
    with pytest.raises(InvalidInput) as caught:
        model_from_graph(graph)
    assert caught.value.violations[0].code == "not_executable"
