"""``shard_ops``: the placement of a block's ops on a mesh that takes the least time within a memory limit, with its reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.op_sharding.mesh import DeviceMesh, Sent, State, States, states_text
from planner.op_sharding.problem import Builder, Problem, Strategy
from planner.op_sharding.rules import BY_RULE
from planner.op_sharding.solve import Choice, Evaluated, Program, Solution, evaluate, memory_bytes
from profiler.opset import base_name, op_class_of
from simulator.cost_model import CostModel
from specs.graph import Block
from specs.op_sharding import OpChoice, OpSharding, Redistribution


@dataclass(frozen=True)
class ShardOptions:
    """``micro_batches``: passes that share one sum of gradients. ``passes_in_flight``: whose kept activations are held at once.
    ``ends``: block input or output -> its states, one word an axis (``"S(0) R"``), or the input whose state an output takes;
    by default an output of the first input's shape leaves as that came in, as in a chain of equal blocks."""

    micro_batches: int = 1
    passes_in_flight: int = 1
    memory_limit_bytes: float | None = None
    ends: dict[str, str] | None = None
    time_limit_s: float = 60.0
    seed: int = 0


def shard_ops(block: Block, mesh: DeviceMesh, model: CostModel, *, batch: int, options: ShardOptions | None = None) -> OpSharding:
    """The fastest placement of ``block`` on ``mesh`` for ``batch`` sequences on the whole mesh.

    Exact for the rules of ``op_sharding.rules`` and the folding of ``op_sharding.fold``; collectives are exposed (no overlap) and
    launches of kernels are not counted.
    """
    options = options or ShardOptions()
    builder = Builder(
        block, mesh, model, batch=batch, micro_batches=options.micro_batches, memory_limit_bytes=options.memory_limit_bytes,
        passes_in_flight=options.passes_in_flight, ends=_ends(block, options.ends),
    )  # fmt: skip
    problem = builder.build()
    found = Program(problem, time_limit_s=options.time_limit_s, seed=options.seed).run()
    answer = OpSharding(
        block=block.name, mesh={axis.name: axis.size for axis in mesh.axes}, batch=batch, seq_len=model.seq, status=found.status,
        memory_limit_bytes=options.memory_limit_bytes, num_variables=found.num_variables, num_constraints=found.num_constraints,
        wall_s=found.wall_s, unknown_ops=tuple(sorted({op.target for op in problem.folded.steps if not _has_rule(op.target)})),
    )  # fmt: skip
    if found.choice is None:
        return answer.replace(least_memory_bytes=_least_memory(problem, options))
    cost = evaluate(problem, found.choice)
    return answer if cost is None else _answer(answer, problem, found, found.choice, cost)


def _has_rule(target: str) -> bool:
    return base_name(target) in BY_RULE or op_class_of(target) in BY_RULE


def _ends(block: Block, given: dict[str, str] | None) -> dict[str, States | str]:
    inputs = {tensor.name: tensor for tensor in block.inputs}
    if given is not None:
        return {name: text if text in inputs else parse_states(text) for name, text in given.items()}
    tensors = block.tensors()
    ends: dict[str, States | str] = {}
    for name in block.outputs:
        alike = [item.name for item in block.inputs if item.shape == tensors[name].shape and item.dtype == tensors[name].dtype]
        if alike and name not in inputs:
            ends[name] = alike[0]
    return ends


def parse_states(text: str) -> States:
    """``"S(0) R"`` -> states; the inverse of ``states_text``."""
    return tuple(State("R") if word == "R" else State("S", int(word.removeprefix("S(").removesuffix(")"))) for word in text.split())


def _least_memory(problem: Problem, options: ShardOptions) -> float | None:
    """Memory of the placement that needs least: the same program with memory as its objective."""
    by_memory = [
        [replace(item, seconds=(item.state_bytes + problem.passes_in_flight * (item.extra_bytes + sum(item.kept.values()))) / 1e12)
         for item in options_of]
        for options_of in problem.strategies
    ]  # fmt: skip
    relaxed = replace(problem, strategies=by_memory, memory_limit_bytes=None)
    found = Program(relaxed, time_limit_s=options.time_limit_s, seed=options.seed).run()
    cost = evaluate(problem, found.choice) if found.choice is not None else None
    return memory_bytes(problem, cost) if cost is not None else None


def _answer(answer: OpSharding, problem: Problem, found: Solution, choice: Choice, cost: Evaluated) -> OpSharding:
    chosen = [items[index] for items, index in zip(problem.strategies, choice.strategies, strict=True)]
    return answer.replace(
        seconds=cost.seconds, best_bound_s=found.bound_s, compute_s=sum(item.compute_s for item in chosen),
        memory_bytes=memory_bytes(problem, cost),
        choices=tuple(_choice(problem, choice, cost.seconds, index) for index in range(len(chosen))),
        redistributions=tuple(_redistribution(problem, *change) for change in cost.changes),
        inputs={name: states_text(item) for name, item in choice.inputs.items()},
        outputs={name: states_text(item) for name, item in choice.outputs.items()},
    )  # fmt: skip


def _choice(problem: Problem, choice: Choice, seconds: float, index: int) -> OpChoice:
    node, item = problem.nodes[index], problem.strategies[index][choice.strategies[index]]
    nearest, params = _nearest(problem, choice, index), tuple(name for name in item.states if name in problem.folded.params)
    return OpChoice(
        ops=tuple(op.name for op in node.ops), params=_texts(item, params),
        inputs=_texts(item, node.entries), outputs=_texts(item, node.made), seconds=item.seconds, compute_s=item.compute_s,
        state_bytes=item.state_bytes, gathered=item.gathered, alternative=nearest[1] if nearest else None,
        alternative_extra_s=nearest[0] - seconds if nearest else None,
    )  # fmt: skip


def _texts(item: Strategy, names: tuple[str, ...]) -> dict[str, str]:
    return {name: states_text(item.states[name]) for name in names}


def _nearest(problem: Problem, choice: Choice, index: int) -> tuple[float, str] | None:
    """The cheapest other strategy of one node with all others as they are, and the block's seconds with it."""
    best: tuple[float, str] | None = None
    for other, item in enumerate(problem.strategies[index]):
        if other == choice.strategies[index]:
            continue
        strategies = (*choice.strategies[:index], other, *choice.strategies[index + 1 :])
        cost = evaluate(problem, Choice(strategies, choice.inputs, choice.outputs))
        limit = problem.memory_limit_bytes
        if cost is None or (limit is not None and memory_bytes(problem, cost) > limit):
            continue
        if best is None or cost.seconds < best[0]:
            best = (cost.seconds, item.text() + (", parameters gathered for each pass" if item.gathered else ""))
    return best


def _redistribution(
    problem: Problem, tensor: str, before: States, after: States, seconds: float, sent: tuple[Sent, ...]
) -> Redistribution:
    names = [axis.name for axis in problem.mesh.axes]
    return Redistribution(
        tensor=tensor, before=states_text(before), after=states_text(after), seconds=seconds,
        collectives=tuple(f"{'backward' if item.backward else 'forward'} {item.op} over {names[item.axis]}" for item in sent),
        sizes_bytes=tuple(item.size_bytes for item in sent),
    )  # fmt: skip
