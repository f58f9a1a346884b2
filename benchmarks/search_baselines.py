"""The planner's plan against rules that people follow: ``python -m benchmarks.search_baselines [--json] [--only WORD ...]``.

For each model on each cluster, in the event simulation: the planner's plan; FSDP over all devices; Megatron's rule (tensor parallel
inside the node, pipeline across, the rest data parallel with a sharded optimizer, 1F1B); DDP. Each rule is tuned over micro-batch
and recompute, Megatron's also over how many stages and over tp up to the node: the planner with the rule's fields given. So a rule
never wins by its tuning, and what its plan takes is simulated like any other. A dash: no tuning of the rule fits the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.rows import print_rows
from benchmarks.search_speed import graph_of
from planner.search import SearchOptions, search
from profiler.catalogue import resolve_cluster
from simulator.cost_model import CostModel
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.training import TrainingSpec


@dataclass(frozen=True)
class Pair:
    """A model on nodes of one preset."""

    model: str
    preset: str
    nodes: int
    global_batch: int
    seq_len: int

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.model} on {self.nodes} {self.preset}"


PAIRS = (
    Pair("opt-350m", "dgx_a100_320gb", 1, 256, 2048),
    Pair("opt-350m", "dgx_a100_320gb", 4, 1024, 2048),
    Pair("llama-3-8b", "dgx_h100", 1, 128, 8192),
    Pair("llama-3-8b", "dgx_h100", 16, 512, 8192),
    Pair("llama-2-7b", "rtx_4090_8x_pcie", 2, 128, 4096),
    Pair("llama-2-13b", "dgx_a100_640gb", 4, 512, 4096),
    Pair("mixtral-8x7b", "dgx_h100", 8, 512, 4096),
    Pair("gpt-neox-20b", "dgx_a100_320gb", 12, 1536, 2048),
    Pair("llama-3-70b", "dgx_h100", 8, 512, 8192),
    Pair("llama-3-70b", "dgx_h100", 64, 1024, 8192),
    Pair("gpt3-175b", "dgx_a100_640gb", 128, 1536, 2048),
    Pair("gpt3-175b", "dgx_a100_640gb", 512, 4096, 2048),
)
RULES = {
    "fsdp": "pp=1 tp=1 cp=1 ep=1 zero=3 {all}",
    "ddp": "pp=1 tp=1 cp=1 ep=1 zero=0 {all}",
    "megatron": "tp={node} cp=1 ep=1 zero=1 schedule=1f1b sequence_parallel=true {all}",
}


def best_s(
    graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, model: CostModel, strategy: str | None
) -> tuple[float | None, str]:
    """(step time of the best plan with these fields, its strategy)."""
    options = SearchOptions(top=0, explain=False, strategy=strategy)
    answer = search(graph, cluster, workload, options=options, cost_model=model)
    if answer.prediction is None or answer.plan is None:
        return None, ""
    return answer.prediction.step_time_s, answer.plan.strategy


def row(pair: Pair) -> dict[str, Any]:
    """One line of the table. The rules are searched over what they leave open, on all devices."""
    graph = graph_of(pair.model)
    cluster = resolve_cluster(ClusterSpec.parse({"name": pair.name, "nodes": [{"preset": pair.preset, "count": pair.nodes}]}))
    workload = TrainingSpec(global_batch=pair.global_batch, seq_len=pair.seq_len)
    model, found = CostModel(graph, cluster, workload), {"name": pair.name}
    found["planner"], found["strategy"] = best_s(graph, cluster, workload, model, None)  # type: ignore[assignment]
    node = cluster.nodes[0].devices_per_node or 1
    for rule, text in RULES.items():
        degrees = [2**power for power in range(node.bit_length()) if 2**power <= node] if rule == "megatron" else [1]
        dp = f"dp={cluster.num_devices}" if rule != "megatron" else ""
        texts = [text.format(node=degree, all=dp) for degree in degrees if rule != "megatron" or degree > 1]
        times = [best_s(graph, cluster, workload, model, item)[0] for item in texts]
        fitting = [time for time in times if time is not None]
        found[rule] = min(fitting) if fitting else None  # type: ignore[assignment]
    return found


def line(found: dict[str, Any]) -> str:
    """A row for people."""
    times = {rule: found[rule] for rule in RULES}
    shown = "  ".join(
        f"{rule} {time:8.3f} s ({time / found['planner']:.2f}x)" if time else f"{rule:8} -" for rule, time in times.items()
    )
    return f"{found['name']:40} planner {found['planner'] or 0:8.3f} s  {shown}  {found['strategy']}"


if __name__ == "__main__":
    print_rows(__doc__, PAIRS, row, line)
