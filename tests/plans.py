"""Plans for tests, written without the planner."""

from __future__ import annotations

from typing import Literal

from profiler.placement import place_block
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.plan import CollectiveOptions, Mesh, Pipeline, PipelineSchedule, Plan, RecomputeMode, RecomputeRun, Stage


def make_plan(
    graph: ModelGraph,
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    whole_experts: bool = False,
    context_parallel: Literal["ring", "ulysses"] = "ring",
    batch_share: tuple[int, ...] | None = None,
    shard_group: int | None = None,
    micro_batch: int = 1,
    num_micro_batches: int = 1,
    zero: int = 0,
    sequence_parallel: bool = False,
    recompute: RecomputeMode = RecomputeMode.NONE,
    schedule: str = "1f1b",
    chunks: int = 1,
    split: list[int] | None = None,
    seq_len: int = 128,
) -> Plan:
    units, count = graph.num_units(), pp * chunks
    split = split or [units // count + (1 if index < units % count else 0) for index in range(count)]
    order = PipelineSchedule(name=schedule, stages_per_rank=chunks)
    placements: dict[str, str] = {}
    for block in graph.blocks:
        placements |= place_block(block, tp, sequence_parallel, whole_experts=whole_experts).plan_placements()
    stages, first = [], 0
    for rank, count in zip(order.stage_ranks(num_ranks=pp), split, strict=True):
        size = dp * cp * tp
        runs = (RecomputeRun(first_unit=first, num_units=count, mode=recompute),) if recompute != RecomputeMode.NONE else ()
        stages.append(
            Stage(
                devices=tuple(range(rank * size, (rank + 1) * size)), first_unit=first, num_units=count,
                mesh=Mesh(dp=dp, cp=cp, tp=tp, ep=ep, whole_experts=whole_experts), zero=zero, shard_group=shard_group,
                batch_share=batch_share, sequence_parallel=sequence_parallel, placements=placements, recompute=runs,
            )
        )  # fmt: skip
        first += count
    return Plan(
        global_batch=(sum(batch_share) if batch_share else dp * micro_batch) * num_micro_batches, seq_len=seq_len, schedule=order,
        collectives=CollectiveOptions(context_parallel=context_parallel),
        pipelines=(Pipeline(stages=tuple(stages), micro_batch=micro_batch, num_micro_batches=num_micro_batches),),
    )  # fmt: skip


def gpu_cluster(num_devices: int = 8, *, nodes: int = 1, device: str = "toy", memory_gib: float = 80.0) -> ClusterSpec:
    """Resolved by construction: every link and device described."""
    return ClusterSpec.parse(
        {
            "name": "toy",
            "nodes": [
                {
                    "count": nodes, "device": device, "devices_per_node": num_devices // nodes,
                    "intra": {"bandwidth_gbyte_s": 300, "latency_us": 10}, "inter": {"bandwidth_gbyte_s": 100, "latency_us": 20},
                }
            ],
            "device_types": [
                {
                    "name": device, "memory_gib": memory_gib, "memory_bandwidth_gbyte_s": 2000, "sm_count": 100,
                    "peak_flop_per_s": {"bfloat16": 300e12, "float32": 20e12}, "tdp_w": 400, "price_usd_per_hour": 2,
                }
            ],
        }
    )  # fmt: skip
