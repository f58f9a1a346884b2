"""Train a small model under a plan on this machine's CPU, and check every loss against the same job in one process.

    python examples/train_with_plan.py "tp=2 micro_batch=8"
    python examples/train_with_plan.py "dp=2 micro_batch=2 zero=3 recompute=full"

A strategy is written as on the command line (`meshwright estimate --strategy ...`). Takes about a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

from executor.reference import reference_losses
from executor.run import run_plan
from planner.strategy import plan_from_strategy
from profiler.measure.cluster import local_cluster
from profiler.sources import load_model
from specs.training import TrainingSpec

HERE = Path(__file__).parent
STEPS, WARMUP_STEPS = 5, 2


def main(strategy: str) -> None:
    graph = load_model(str(HERE / "models" / "llama-demo.json"))
    workload = TrainingSpec.load(HERE / "workloads" / "demo.yaml")
    plan = plan_from_strategy(strategy, graph, local_cluster(2), workload)
    measurement = run_plan(
        plan, graph, workload, steps=STEPS, warmup_steps=WARMUP_STEPS, progress=lambda event: print(event.message)
    )
    for loss, expected in zip(measurement.losses, reference_losses(graph, workload, STEPS + WARMUP_STEPS), strict=True):
        print(f"loss {loss:.6f}, in one process {expected:.6f}")
    for term, seconds in measurement.waterfall.items():
        if seconds:
            print(f"{term:10s} {seconds:.3f} s")
    print(f"step {measurement.step_time_s:.3f} s, peak memory {measurement.peak_memory_bytes / 2**20:.0f} MiB per worker")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "dp=2 micro_batch=4 zero=1")
