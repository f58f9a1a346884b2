"""Op sharding of whole blocks: what is found and how long it takes: ``python -m benchmarks.op_sharding_speed``.

Prints one line a case: process CPU seconds of building the program and solving it (the graph is captured before), its size, the
optimum with its gap, and the states of the parameters. Two layers are written out as one block of twice the ops, nothing shared.
"""

from __future__ import annotations

import time

from planner.op_sharding.mesh import device_mesh
from planner.op_sharding.shard import ShardOptions, shard_ops
from profiler.catalogue import resolve_cluster
from profiler.decoder_graph import decoder_graph
from profiler.hf import adapt
from profiler.sources import read_preset
from simulator.cost_model import CostModel
from specs.cluster import ClusterSpec
from specs.graph import Block, Op, ParamSpec
from specs.op_sharding import OpSharding
from specs.training import TrainingSpec


def two_layers(block: Block) -> Block:
    """The block twice in a row, the second reading what the first gives out."""
    entry, (left,) = block.inputs[0].name, block.outputs

    def renamed(value: object) -> object:
        if isinstance(value, dict) and set(value) == {"ref"}:
            return {"ref": left if value["ref"] == entry else value["ref"] + "'"}
        return [renamed(item) for item in value] if isinstance(value, (list, tuple)) else value

    def second(op: Op) -> Op:
        outputs = tuple(tensor.replace(name=tensor.name + "'") for tensor in op.outputs)
        kwargs = {key: renamed(value) for key, value in op.kwargs.items()}
        return op.replace(name=op.name + "'", args=tuple(renamed(value) for value in op.args), kwargs=kwargs, outputs=outputs)

    params: tuple[ParamSpec, ...] = tuple(param.replace(name=param.name + "'", fqn=param.fqn + "'") for param in block.params)
    ops = (*block.ops, *(second(op) for op in block.ops))
    return block.replace(name=f"2 x {block.name}", params=(*block.params, *params), ops=ops, outputs=(left + "'",))


def words(found: OpSharding) -> str:
    """States of the parameters, those of equal states together."""
    groups: dict[str, list[str]] = {}
    for name, states in found.params().items():
        groups.setdefault(states, []).append(name.removesuffix(".weight"))
    return "; ".join(f"{states}: {', '.join(names)}" for states, names in groups.items())


def main() -> None:
    cluster = resolve_cluster(ClusterSpec.parse({"name": "node", "nodes": [{"preset": "dgx_h100", "count": 1}]}))
    cases = (
        ("llama-3-8b", "layers", 1, (8,), 1, None), ("llama-3-8b", "layers", 2, (4, 2), 1, None),
        ("llama-3-8b", "layers", 2, (4, 2), 4, 2.5), ("mixtral-8x7b", "layers", 1, (8,), 8, None),
        ("llama-3-8b", "embed", 1, (8,), 8, None), ("llama-3-8b", "tail", 1, (8,), 1, None),
    )  # fmt: skip
    for name, block_name, layers, sizes, batch, limit_gib in cases:
        model = CostModel(decoder_graph(adapt(read_preset(name)), name), cluster, TrainingSpec(global_batch=8, seq_len=4096))
        block = model.graph.block(block_name)
        block = two_layers(block) if layers == 2 else block
        options = ShardOptions(memory_limit_bytes=limit_gib * 2**30 if limit_gib else None)
        start = time.process_time()
        found = shard_ops(block, device_mesh(model.network, sizes), model, batch=batch, options=options)
        took = time.process_time() - start
        mesh = "x".join(map(str, sizes))
        size = f"{found.num_variables} variables, {found.num_constraints} constraints"
        if found.seconds is None or found.best_bound_s is None:
            print(f"{name} {block.name} on {mesh}: {found.status}, {took:.2f} CPU s ({size})")
            continue
        gap = 1 - found.best_bound_s / found.seconds
        print(f"{name} {block.name} on {mesh}, batch {batch}, limit {limit_gib} GiB: {took:.2f} CPU s ({size}), {found.status}, "
              f"{found.seconds * 1e3:.3f} ms, gap {gap:.1e}; {words(found)}")  # fmt: skip


if __name__ == "__main__":
    main()
