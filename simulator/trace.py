"""The predicted step as a Chrome / Perfetto trace: a process per pipeline rank, a thread per stream, memory as a counter."""

from __future__ import annotations

from typing import Any

from simulator.cost_model import CostModel
from simulator.memory import RankMemory
from simulator.runtime_rules import memory_rules_for
from simulator.step import StepResult
from specs.plan import Plan


def chrome_trace(model: CostModel, plan: Plan, result: StepResult) -> dict[str, Any]:
    """Trace-event JSON (``ph`` X complete events, C counters; times in microseconds)."""
    events: list[dict[str, Any]] = []
    owner: dict[int, int] = {}
    for index, rank in enumerate(result.ranks):
        owner[rank.compute] = owner[rank.comm] = index
        devices = next(iter(rank.stages.values())).stage.devices
        name = f"pipeline {rank.pipeline} rank {rank.rank} (devices {devices[0]}..{devices[-1]})"
        events.append({"ph": "M", "name": "process_name", "pid": index, "args": {"name": name}})
        events += _memory_counters(model, plan, result, index)
    for stream, name in enumerate(result.engine.stream_names):
        pid = owner.get(stream, len(result.ranks))
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": stream, "args": {"name": name}})
    for task in result.engine.tasks:
        events.append(
            {
                "ph": "X", "name": task.label, "cat": max(task.terms, key=lambda key: task.terms[key]) if task.terms else "other",
                "pid": owner.get(task.stream, len(result.ranks)), "tid": task.stream, "ts": task.start_s * 1e6,
                "dur": (task.end_s - task.start_s) * 1e6, "args": dict(task.terms),
            }
        )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "metadata": {"plan": plan.strategy, "step_time_s": result.step_time_s}}


def _memory_counters(model: CostModel, plan: Plan, result: StepResult, index: int) -> list[dict[str, Any]]:
    """Bytes held during each action."""
    rank = result.ranks[index]
    num_stages = len(plan.pipelines[rank.pipeline].stages)
    memory = RankMemory(
        rank.stages,
        rank.row,
        num_stages=num_stages,
        options=plan.collectives,
        rules=memory_rules_for(model.cluster, model.software),
        overlaps=plan.schedule.overlaps,
    )
    memory.run()
    highest = {f"{action}": size for action, size in memory.highest.items()}
    ends: dict[str, float] = {}
    for task in result.engine.tasks:
        if task.stream == rank.compute:
            first, _, second = task.label.partition(" ")
            ends[first] = task.start_s
            if first in highest and second in highest:  # two passes beside one another
                ends[second] = task.end_s
    return [
        {"ph": "C", "name": "memory", "pid": index, "ts": ends[moment] * 1e6, "args": {"bytes": size}}
        for moment, size in highest.items()
        if moment in ends
    ]
