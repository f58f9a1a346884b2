"""Folding: which repetitions are found, and that a folded graph says the same as an unfolded one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiler.capture import capture_module
from specs.graph import ModelGraph

WIDTH = 8


class Dense(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner(x)


class Chain(nn.Module):
    """Stem, layers, head; ``call`` runs the layers."""

    def __init__(self, layers: list[nn.Module], call: Callable[[nn.ModuleList, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 1)
        self.call = call or _in_order

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.layers, self.stem(x))).mean()


def _in_order(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def capture(model: nn.Module) -> ModelGraph:
    return capture_module(model, (torch.randn(3, 5, 4),), {"x": {0: "B", 1: "S"}})


def shape_of(graph: ModelGraph) -> list[tuple[str, int, int]]:
    return [(segment.block, segment.count, segment.first_index) for segment in graph.segments]


def check_equal_to_module(graph: ModelGraph, model: nn.Module) -> None:
    """Folded or not, names and shapes of parameters are those of the module, each once."""
    names = {}
    for segment, index in graph.units():
        for param in graph.block(segment.block).params:
            if not param.buffer:
                names[param.fqn.replace("{i}", str(segment.first_index + index))] = param.shape
    assert names == {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert graph.num_params() == sum(parameter.numel() for parameter in model.parameters())


def unroll(graph: ModelGraph) -> list[tuple[str, tuple[str, ...]]]:
    """Every op instance in order, with the model-wide identity of each activation that it reads."""
    values: dict[str, str] = {tensor.name: tensor.name for tensor in graph.inputs}
    program = []
    for number, segment in enumerate(graph.segments):
        block = graph.block(segment.block)
        names = {name: values[value] for name, value in segment.bind.items()}
        for index in range(segment.count):
            local = dict(names) | {param.name: param.fqn.replace("{i}", str(segment.first_index + index)) for param in block.params}
            for op in block.ops:
                program.append((op.target, tuple(local[ref] for ref in op.input_refs())))
                local.update({tensor.name: f"{number}.{index}.{tensor.name}" for tensor in op.outputs})
            names.update({name: local[source] for name, source in segment.carry.items()})
        values.update({value: local[name] for name, value in segment.produces.items()})
    # call results by their place in the program
    places: dict[str, str] = {}
    return [(target, tuple(places.setdefault(ref, f"v{len(places)}") for ref in refs)) for target, refs in program]


def test_equal_layers_are_one_segment() -> None:
    model = Chain([Dense() for _ in range(6)])
    graph = capture(model)
    assert shape_of(graph) == [("stem", 1, 0), ("layers", 6, 0), ("head", 1, 0)]
    check_equal_to_module(graph, model)
    assert {param.fqn for param in graph.block("layers").params} >= {"layers.{i}.up.weight"}


def test_several_kinds_in_a_row_are_several_segments() -> None:
    model = Chain([Dense() for _ in range(3)] + [Gated() for _ in range(5)] + [Dense(hidden=32) for _ in range(2)])
    graph = capture(model)
    assert shape_of(graph) == [("stem", 1, 0), ("layers", 3, 0), ("layers_1", 5, 3), ("layers_2", 2, 8), ("head", 1, 0)]
    check_equal_to_module(graph, model)


def test_alternating_kinds_share_their_blocks() -> None:
    layers = [Dense(), Dense(), Gated(), Dense(), Gated()]
    model = Chain(layers)
    graph = capture(model)
    assert shape_of(graph) == [
        ("stem", 1, 0), ("layers", 2, 0), ("layers_1", 1, 2), ("layers", 1, 3), ("layers_1", 1, 4), ("head", 1, 0),
    ]  # fmt: skip
    check_equal_to_module(graph, model)


def test_a_bare_sequential_of_equal_blocks() -> None:
    model = Sum(nn.Sequential(*[Dense() for _ in range(4)]))
    graph = capture_module(model, (torch.randn(3, WIDTH),))
    assert [segment.count for segment in graph.segments] == [4, 1]
    check_equal_to_module(graph, model)


class Sum(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).sum()


def test_repetition_inside_an_unequal_sequential_is_found() -> None:
    body = nn.Sequential(nn.Linear(4, WIDTH), nn.Sequential(*[Dense() for _ in range(3)]), nn.Linear(WIDTH, 2))
    model = Sum(body)
    graph = capture_module(model, (torch.randn(3, 4),))
    assert [segment.count for segment in graph.segments] == [1, 3, 1]
    assert {param.fqn for param in graph.block(graph.segments[1].block).params} >= {"body.1.{i}.up.weight"}
    check_equal_to_module(graph, model)


def test_a_module_that_repeats_nothing_is_one_segment() -> None:
    model = Sum(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)))
    graph = capture_module(model, (torch.randn(3, 4),))
    assert [segment.count for segment in graph.segments] == [1]
    check_equal_to_module(graph, model)


def test_a_value_made_once_is_bound_for_every_repetition() -> None:
    """As rotary tables made by the model and given to each layer."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.linear(x) * scale

    def call(layers: nn.ModuleList, x: Tensor) -> Tensor:
        scale = x.mean(-1, keepdim=True)
        for layer in layers:
            x = layer(x, scale)
        return x

    graph = capture(Chain([Scaled() for _ in range(4)], call))
    stem, layers, _ = graph.segments
    assert layers.count == 4
    assert len(layers.bind) == 2
    assert len(layers.carry) == 1  # x changes, the scale stays
    assert set(layers.bind.values()) == set(stem.produces.values())


@pytest.mark.parametrize("before", [True, False])
def test_ops_of_the_parent_between_layers_go_with_a_layer(before: bool) -> None:
    def call(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x * 0.5) if before else layer(x) * 0.5
        return x

    graph = capture(Chain([Dense() for _ in range(5)], call))
    counts = [segment.count for segment in graph.segments]
    assert max(counts) == 4  # one end of the chain has no neighbour on that side
    assert graph.num_units() <= 7


def test_skip_connections_stay_right() -> None:
    """Each of the first three layers also feeds one of the last three: no chain, but one block for all."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([Dense() for _ in range(3)])
            self.up = nn.ModuleList([Dense() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for layer in self.down:
                x = layer(x)
                kept.append(x)
            for layer in self.up:
                x = layer(x + kept.pop())
            return x.sum()

    model = Skip()
    graph = capture_module(model, (torch.randn(3, WIDTH),))
    check_equal_to_module(graph, model)
    assert {segment.count for segment in graph.segments} == {1}
    assert len(graph.blocks) < graph.num_units()


def test_collected_outputs_stay_right() -> None:
    """Every layer's result is read at the end (auxiliary losses): a chain would lose all but the last."""

    def call(layers: nn.ModuleList, x: Tensor) -> Tensor:
        total = x
        results = []
        for layer in layers:
            x = layer(x)
            results.append(x)
        for result in results:
            total = total + result
        return total

    graph = capture(Chain([Dense() for _ in range(3)], call))
    assert [segment.count for segment in graph.segments] == [1, 1, 1, 1, 1]
    assert len([block for block in graph.blocks if block.name.startswith("layers")]) == 1
    head = graph.segments[-1]
    assert len(head.bind) == 4


def test_a_layer_used_again_and_again_is_counted_once() -> None:
    shared = Dense()

    def call(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for _ in range(3):
            x = layers[0](x)
        return x

    model = Chain([shared], call)
    graph = capture(model)
    assert graph.num_params() == sum(parameter.numel() for parameter in model.parameters())


def test_a_weight_shared_by_all_layers_is_counted_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList([Dense() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.linear(layer(x), self.common.weight)
            return x.sum()

    model = Shared()
    model.common.bias = None  # type: ignore[assignment]
    graph = capture_module(model, (torch.randn(3, WIDTH),))
    assert graph.num_params() == sum(parameter.numel() for parameter in model.parameters())


def test_tied_weights_go_by_the_name_in_their_module() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, WIDTH)
            self.layers = nn.ModuleList([Dense() for _ in range(2)])
            self.head = nn.Linear(WIDTH, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x).mean()

    model = Tied()
    graph = capture_module(model, (torch.zeros(2, 6, dtype=torch.int64),))
    assert graph.tied == (("head.weight", "embed.weight"),)
    assert graph.num_params() == sum(parameter.numel() for parameter in model.parameters())
    assert [segment.count for segment in graph.segments] == [1, 2, 1]


def test_a_tied_weight_read_in_one_place_only_is_a_plain_parameter() -> None:
    class OneUser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, 10, bias=False)
            self.second = nn.Linear(WIDTH, 10, bias=False)
            self.second.weight = self.first.weight
            self.never = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x).mean()

    graph = capture_module(OneUser(), (torch.randn(3, WIDTH),))
    assert graph.tied == ()
    assert graph.num_params() == 10 * WIDTH
    assert graph.attributes["unused_parameters"] == ["never.bias", "never.weight"]


@pytest.mark.parametrize("kind", ["dense", "mixed", "skip"])
def test_folding_changes_nothing(kind: str) -> None:
    """Unrolled, the folded graph is the very op sequence of the module whose layers can't fold (each of another width)."""
    layers: dict[str, list[nn.Module]] = {
        "dense": [Dense() for _ in range(4)],
        "mixed": [Dense(), Dense(), Gated(), Gated(), Gated()],
        "skip": [Dense() for _ in range(4)],
    }

    def skipping(modules: nn.ModuleList, x: Tensor) -> Tensor:
        first = modules[0](x)
        return modules[3](modules[2](modules[1](first))) + first

    call = skipping if kind == "skip" else None
    folded = capture(Chain(layers[kind], call))
    torch_order = _flat(Chain(layers[kind], call))
    assert unroll(folded) == torch_order


def _flat(model: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    """The same sequence straight from the flat trace."""
    from profiler.capture_export import export_module
    from profiler.capture_trace import trace_of

    program, axes = export_module(model, (torch.randn(3, 5, 4),), {"x": {0: "B", 1: "S"}}, "flat")
    places: dict[str, str] = {}
    trace = trace_of(program, model, axes, "flat")
    return [(op.target, tuple(places.setdefault(ref, f"v{len(places)}") for ref in op.refs())) for op in trace.ops]


def test_a_first_layer_without_input_gradient_is_priced_as_the_others() -> None:
    graph = capture_module(Sum(nn.Sequential(*[Dense() for _ in range(3)])), (torch.randn(3, WIDTH),))
    (up,) = [op for op in graph.block(graph.segments[0].block).ops if op.module_path.endswith(".up")]
    assert up.backward_flop(1, 1) == 2 * up.forward_flop(1, 1)


def test_blocks_do_not_depend_on_the_number_of_layers() -> None:
    short, long = (capture(Chain([Dense() for _ in range(count)])) for count in (2, 7))
    assert short.blocks == long.blocks
