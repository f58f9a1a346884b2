"""How long the search takes: ``python -m benchmarks.search_speed [--json] [--only WORD ...]``.

One line a question: strategies in the space, how many of them a second were priced and bounded (``bounds``: enumeration and all
array bounds), candidates prepared and simulated, seconds of the first search of the process (``cold``: model and cluster are
loaded, no price is known), of the same search again with the cost model kept (``warm``), and the certificate. Seconds are CPU
time of this process, one core, and wall time beside it where the two differ. ``limit_s`` is passed as the search's time limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.rows import print_rows
from planner.bounds import compute_bounds, first_bounds
from planner.layout import pools
from planner.prices import Prices
from planner.search import SearchOptions, search
from planner.space import enumerate_space
from profiler.catalogue import resolve_cluster
from profiler.decoder_graph import decoder_graph
from profiler.hf import adapt
from profiler.sources import read_preset
from simulator.cost_model import CostModel
from specs.answer import PlanAnswer
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.training import TrainingSpec


@dataclass(frozen=True)
class Question:
    """A model, nodes (preset or device, count), a workload; ``tolerance``: gap that is called optimal."""

    name: str
    model: str
    nodes: tuple[dict[str, Any], ...]
    global_batch: int
    seq_len: int
    tolerance: float = 0.01
    precision: str = "bf16_mixed"
    limit_s: float = 300.0

    def cluster(self) -> ClusterSpec:
        """The resolved cluster."""
        return resolve_cluster(ClusterSpec.parse({"name": self.name, "nodes": list(self.nodes)}))

    def workload(self) -> TrainingSpec:
        """The workload."""
        return TrainingSpec.parse({"global_batch": self.global_batch, "seq_len": self.seq_len, "precision": self.precision})


IB_100 = {"kind": "IB EDR", "bandwidth_gbit_s": 100, "latency_us": 40}
ETHERNET = {"kind": "Ethernet", "bandwidth_gbit_s": 10, "latency_us": 60}
V100_NODES = {"device": "v100_sxm2_16gb", "count": 12, "devices_per_node": 8, "inter": IB_100}
OPT_350M = {
    "model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_inner": 4096, "vocab_size": 50272, "n_positions": 2048,
    "layer_norm_epsilon": 1e-5, "activation_function": "relu",
}  # fmt: skip
QUESTIONS = (
    Question("gpt3-175b 4096xA100", "gpt3-175b", ({"preset": "dgx_a100_640gb", "count": 512},), 4096, 2048, tolerance=0.0),
    Question("llama-3-405b 16384xH100", "llama-3-405b", ({"preset": "dgx_h100", "count": 2048},), 2048, 8192),
    Question("deepseek-v3 2048xH100", "deepseek-v3", ({"preset": "dgx_h100", "count": 256},), 15360, 4096),
    Question("llama-3-70b 128k 512xH100", "llama-3-70b", ({"preset": "dgx_h100", "count": 64},), 64, 131072),
    Question("llama-3-70b 8k 512xH100", "llama-3-70b", ({"preset": "dgx_h100", "count": 64},), 1024, 8192),
    Question(
        "llama-2-13b 3x(2x3080+2x4090)", "llama-2-13b",
        (
            {"device": "rtx_3080", "count": 3, "devices_per_node": 2, "inter": ETHERNET},
            {"device": "rtx_4090", "count": 3, "devices_per_node": 2, "inter": ETHERNET},
        ), 64, 2048,
    ),
    Question("opt-350m 32xA100", "opt-350m", ({"preset": "dgx_a100_320gb", "count": 4},), 1024, 2048),
    Question(
        "opt-350m 32xA100+96xV100", "opt-350m",
        ({"preset": "dgx_a100_320gb", "count": 4}, V100_NODES),
        1024, 2048, precision="fp16_mixed",
    ),
)  # fmt: skip


def graph_of(model: str) -> ModelGraph:
    """A preset's graph, or one of the configs here."""
    config = OPT_350M if model == "opt-350m" else read_preset(model)
    return decoder_graph(adapt(config), model)


def timed(question: Question, graph: ModelGraph, cluster: ClusterSpec, model: CostModel) -> tuple[PlanAnswer, float, float]:
    """(answer, CPU seconds, wall seconds)."""
    options = SearchOptions(top=0, explain=False, tolerance=question.tolerance, time_limit_s=question.limit_s)
    cpu, wall = time.process_time(), time.perf_counter()
    answer = search(graph, cluster, question.workload(), options=options, cost_model=model)
    return answer, time.process_time() - cpu, time.perf_counter() - wall


def pricing_rate(graph: ModelGraph, cluster: ClusterSpec, question: Question, model: CostModel) -> tuple[float, float]:
    """Candidates a CPU second, prices of units known: enumeration and first bounds; both bounds of what fits."""
    start = time.process_time()
    space = enumerate_space(graph, question.workload(), pools(cluster), {})
    first_bounds(Prices(model), space)
    first = time.process_time() - start
    start = time.process_time()
    bounds = compute_bounds(Prices(model), space)
    return len(space.rows) / first, int(bounds.is_close.sum()) / (time.process_time() - start)


def row(question: Question) -> dict[str, Any]:
    """One line of the table."""
    graph, cluster = graph_of(question.model), question.cluster()
    model = CostModel(graph, cluster, question.workload())
    cold, cold_s, cold_wall_s = timed(question, graph, cluster, model)
    warm, warm_s, warm_wall_s = timed(question, graph, cluster, model)
    first_rate, close_rate = pricing_rate(graph, cluster, question, model)
    if cold.plan != warm.plan:
        raise RuntimeError(f"{question.name}: two searches gave two plans")
    return {
        "name": question.name, "status": cold.status, "gap": cold.search.gap, "candidates": cold.search.candidates,
        "simulated": cold.search.confirmed, "cold_s": cold_s, "cold_wall_s": cold_wall_s, "warm_s": warm_s,
        "warm_wall_s": warm_wall_s,
        "first_bounds_per_s": first_rate, "all_bounds_per_s": close_rate,
        "step_time_s": cold.prediction.step_time_s if cold.prediction else None,
        "strategy": cold.plan.strategy if cold.plan else "",
    }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    """A row for people."""
    gap = f"{found['gap']:.2%}" if found["gap"] is not None else "-"
    return (
        f"{found['name']:32} {found['status']:9} gap {gap:>7} {found['candidates']:>9,} candidates, "
        f"{found['first_bounds_per_s'] / 1e6:5.2f} M/s bounded once, {found['all_bounds_per_s'] / 1e6:5.2f} M/s in full, "
        f"{found['simulated']} simulated; cold {found['cold_s']:6.2f} s, warm {found['warm_s']:6.2f} s CPU "
        f"(wall {found['cold_wall_s']:.2f}, {found['warm_wall_s']:.2f}) "
        f"{found['step_time_s'] or 0:.3f} s  {found['strategy']}"
    )


if __name__ == "__main__":
    print_rows(__doc__, QUESTIONS, row, line)
