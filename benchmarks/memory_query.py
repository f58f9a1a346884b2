"""How long the memory question takes beside the questions it saves: ``python -m benchmarks.memory_query``.

Prints one line a model: seconds of the memory report of a strategy once the model is captured, and how many times longer pricing
the same strategy and searching for one take on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from planner.search import SearchOptions, search
from planner.strategy import plan_from_strategy
from profiler.catalogue import resolve_cluster
from profiler.decoder_graph import decoder_graph
from profiler.hf import adapt
from profiler.sources import read_preset
from simulator.cost_model import CostModel
from simulator.memory_report import memory_report
from simulator.predict import predict
from specs.cluster import ClusterSpec
from specs.training import TrainingSpec

CASES = (
    ("llama-2-7b", 1, "zero=3 micro_batch=1 recompute=full"),
    ("llama-3-70b", 8, "pp=4 tp=8 micro_batch=1 zero=1"),
    ("llama-3-405b", 64, "pp=16 tp=8 micro_batch=1 zero=1"),
)


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    workload = TrainingSpec(global_batch=256, seq_len=4096)
    for name, nodes, strategy in CASES:
        graph = decoder_graph(adapt(read_preset(name)), name)
        cluster = resolve_cluster(ClusterSpec.parse({"name": name, "nodes": [{"preset": "dgx_h100", "count": nodes}]}))

        def report() -> None:
            model = CostModel(graph, cluster, workload)  # noqa: B023
            memory_report(model, plan_from_strategy(strategy, graph, cluster, workload, cost_model=model))  # noqa: B023

        def price() -> None:
            predict(graph, cluster, workload, plan_from_strategy(strategy, graph, cluster, workload))  # noqa: B023

        def plan() -> None:
            search(graph, cluster, workload, options=SearchOptions(time_limit_s=60, top=1))  # noqa: B023

        report()  # placements are kept once made
        took = seconds(report)
        print(f"{name}: memory {took:.3f} s, price {seconds(price) / took:.1f} x, search {seconds(plan) / took:.1f} x")


if __name__ == "__main__":
    main()
