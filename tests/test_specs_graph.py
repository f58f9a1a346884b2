"""ModelGraph: units, parameters and FLOP of a tiny hand-made model, and every way it can be inconsistent."""

import copy
import json

import pytest

from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.profile import op_key

TINY = {
    "name": "tiny",
    "inputs": [{"name": "tokens", "shape": ["B", "S"], "dtype": "int64"}],
    "blocks": [
        {
            "name": "embed",
            "inputs": [{"name": "ids", "shape": ["B", "S"], "dtype": "int64"}],
            "params": [{"name": "w", "fqn": "embed.weight", "shape": [10, 4]}],
            "ops": [
                {
                    "name": "embedding",
                    "target": "aten.embedding.default",
                    "args": [{"ref": "w"}, {"ref": "ids"}],
                    "outputs": [{"name": "out", "shape": ["B", "S", 4]}],
                }
            ],
            "outputs": ["out"],
        },
        {
            "name": "layer",
            "inputs": [{"name": "x", "shape": ["B", "S", 4]}],
            "params": [
                {"name": "w", "fqn": "layers.{i}.weight", "shape": [4, 4]},
                {"name": "table", "fqn": "rope", "shape": [7], "buffer": True},
                {"name": "frozen", "fqn": "layers.{i}.bias", "shape": [4], "trainable": False},
            ],
            "ops": [
                {
                    "name": "linear",
                    "target": "aten.linear.default",
                    "args": [{"ref": "x"}, {"ref": "w"}, {"ref": "frozen"}],
                    "outputs": [{"name": "y", "shape": ["B", "S", 4]}],
                    "forward_flop": "32*B*S",
                    "backward_flop": "64*B*S",
                }
            ],
            "outputs": ["y"],
        },
        {
            "name": "head",
            "inputs": [{"name": "h", "shape": ["B", "S", 4]}],
            "params": [{"name": "w", "fqn": "head.weight", "shape": [10, 4]}],
            "ops": [
                {
                    "name": "loss",
                    "target": "own.loss",
                    "args": [{"ref": "h"}, [{"ref": "w"}]],
                    "outputs": [{"name": "loss", "shape": []}],
                    "forward_flop": "80*B*S",
                    "backward_flop": "160*B*S",
                }
            ],
            "outputs": ["loss"],
        },
    ],
    "segments": [
        {"block": "embed", "bind": {"ids": "tokens"}, "produces": {"out": "h0"}},
        {"block": "layer", "count": 3, "bind": {"x": "h0"}, "carry": {"x": "y"}, "produces": {"y": "h3"}},
        {"block": "head", "bind": {"h": "h3"}, "produces": {"loss": "loss"}},
    ],
    "loss": "loss",
    "tied": [["head.weight", "embed.weight"]],
}


def changed(*path, value):
    data = copy.deepcopy(TINY)
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return data


def test_units():
    graph = ModelGraph.parse(TINY)
    assert [(segment.block, index) for segment, index in graph.units()] == [
        ("embed", 0),
        ("layer", 0),
        ("layer", 1),
        ("layer", 2),
        ("head", 0),
    ]
    assert graph.num_units() == 5


def test_parameters():
    graph = ModelGraph.parse(TINY)
    assert graph.num_params() == 40 + 3 * (16 + 4)  # head tied to the embedding, the buffer not counted
    assert graph.num_params(trainable_only=True) == 40 + 3 * 16
    assert ModelGraph.parse(changed("tied", value=[])).num_params() == 80 + 3 * 20
    assert graph.block("layer").num_params() == 20


def test_flop():
    graph = ModelGraph.parse(TINY)
    assert graph.flop(batch=2, seq=8, backward=False) == (3 * 32 + 80) * 16
    assert graph.flop(batch=2, seq=8) == 3 * (3 * 32 + 80) * 16


def test_tensors_and_refs():
    block = ModelGraph.parse(TINY).block("head")
    assert block.ops[0].input_refs() == ["h", "w"]
    assert set(block.tensors()) == {"h", "w", "loss"}
    assert block.inputs[0].num_elements()(2, 3) == 24


def test_json_there_and_back():
    graph = ModelGraph.parse(TINY)
    again = ModelGraph.parse(json.loads(graph.to_json()))
    assert again == graph
    assert again.content_hash() == graph.content_hash()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (changed("segments", 1, "block", value="layr"), "unknown_block"),
        (changed("loss", value="nothing"), "unknown_value"),
        (changed("segments", 0, "bind", value={"ids": "h3"}), "cyclic_or_unknown_value"),
        (changed("segments", 0, "bind", value={}), "unbound_input"),
        (changed("segments", 0, "bind", value={"ids": "tokens", "x": "tokens"}), "unknown_value"),
        (changed("segments", 1, "carry", value={"x": "z"}), "unknown_value"),
        (changed("blocks", 1, "ops", 0, "args", value=[{"ref": "y"}]), "cyclic_graph"),
        (changed("blocks", 1, "ops", 0, "args", value=[{"ref": "q"}]), "unknown_tensor"),
        (changed("blocks", 1, "outputs", value=["y", "q"]), "unknown_tensor"),
        (changed("blocks", 1, "ops", 0, "outputs", value=[{"name": "x", "shape": []}]), "duplicate_tensor"),
        (changed("blocks", 2, "name", value="layer"), "duplicate_block"),
    ],
)
def test_inconsistent_graphs(data, code):
    with pytest.raises(InvalidInput) as caught:
        ModelGraph.parse(data)
    assert caught.value.violations[0].code == code


def test_op_key_is_canonical():
    key = op_key("aten.linear.default", [((2, 8, 4), "float32"), ((4, 4), "float32")], {"b": 1, "a": [2]})
    assert key == 'aten.linear.default|float32[2,8,4];float32[4,4]|{"a":[2],"b":1}'
