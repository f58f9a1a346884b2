"""From the ranks' samples to the records of a profile."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from profiler.measure.blocks import BlockSamples
from profiler.measure.clock import timing
from profiler.measure.collectives import CollectiveSamples, CollectivesJob, spans_to_seconds
from profiler.measure.operators import OperatorSamples
from profiler.measure.optimizer import OptimizerJob
from profiler.opset import OpClass
from profiler.placement import place_block
from profiler.shapes import OpCall, grad_add_key, record_key, sequence_lengths
from specs.graph import ModelGraph
from specs.profile import (
    CollectiveRecord,
    ContextFactor,
    CopyRecord,
    OpRecord,
    OptimizerRecord,
    OverlapRecord,
    RankSkew,
    Timing,
)
from specs.training import TrainingSpec

Watch = Callable[[float, float, str], None]


def merged(ranks: Sequence[Sequence[float]]) -> Timing:
    """One timing from the samples of all ranks."""
    return timing([seconds for rank in ranks for seconds in rank])


def middle(ranks: Sequence[Sequence[float]]) -> float:
    """Median over ranks and samples."""
    return statistics.median(seconds for rank in ranks for seconds in rank)


def rank_skew(ranks: Sequence[Sequence[float]], windows: Sequence[int]) -> tuple[RankSkew, ...]:
    """Excess of the slowest rank over windows of consecutive rounds of equal work; ``ranks``: seconds per rank and round."""
    found = []
    for window in windows:
        starts = range(0, len(ranks[0]) - window + 1, window)
        sums = [[sum(rank[start : start + window]) for rank in ranks] for start in starts]
        means = [sum(row) / len(row) for row in sums]
        mean = sum(means) / len(means)
        slowest = sum(max(row) for row in sums) / len(sums)
        found.append(RankSkew(horizon_s=mean, excess=max(0.0, slowest / mean - 1), samples=len(sums)))
    return tuple(found)


def drift(probes: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Median probe time at each moment of the measurement over that at its start; 1 = the machine kept its speed."""
    medians = [middle(probe) for probe in probes]
    return [round(value / medians[0], 4) for value in medians]


def op_records(calls: Sequence[OpCall], ranks: Sequence[Sequence[OperatorSamples]]) -> tuple[list[OpRecord], dict[str, str]]:
    """Records of the calls that ran, and key -> reason of those that did not."""
    records, skipped = [], {}
    for index, call in enumerate(calls):
        samples = [rank[index] for rank in ranks]
        problem = next((item.error for item in samples if item.error is not None), None)
        if problem is not None:
            skipped[call.key] = problem
            continue
        held = samples[0].footprint
        backward = [item.backward_s for item in samples]
        records.append(
            OpRecord(
                key=call.key,
                op_class=str(call.op_class),
                forward=merged([item.forward_s for item in samples]),
                backward=merged(backward) if any(backward) else None,
                saved_inputs=held.saved_inputs if held else None,
                saved_outputs=held.saved_outputs if held else None,
                saved_extra_bytes=held.saved_extra_bytes if held else None,
                forward_workspace_bytes=held.forward_workspace_bytes if held else None,
                backward_workspace_bytes=held.backward_workspace_bytes if held and any(backward) else None,
            )
        )
    return records, skipped


def grad_add_records(job: OptimizerJob, ranks: Sequence[Sequence[Sequence[float]]]) -> list[OpRecord]:
    """Additions of gradients, as ops under ``profiler.shapes.grad_add_key``."""
    return [
        OpRecord(
            key=grad_add_key(count, job.grad_dtype), op_class=str(OpClass.ELEMENTWISE),
            forward=merged([rank[index] for rank in ranks]),
        )
        for index, count in enumerate(job.grad_sizes)
    ]  # fmt: skip


def optimizer_record(job: OptimizerJob, ranks: Sequence[tuple[Sequence[Sequence[float]], Any]]) -> OptimizerRecord:
    """Optimizer steps by parameter count."""
    times = tuple(merged([steps[index] for steps, _ in ranks]) for index in range(len(job.num_params)))
    return OptimizerRecord(
        name=job.name, fused=job.fused, dtype=job.dtype, num_params=job.num_params, tensors=job.tensors, times=times
    )


def copy_records(sizes: Sequence[int], ranks: Sequence[dict[str, list[list[float]]]]) -> tuple[CopyRecord, ...]:
    """Copies by direction."""
    return tuple(
        CopyRecord(
            direction=direction,
            sizes_bytes=tuple(float(size) for size in sizes),
            times=tuple(merged([rank[direction][index] for rank in ranks]) for index in range(len(sizes))),
        )
        for direction in ranks[0]
    )


def overlap_records(ranks: Sequence[dict[str, tuple[float, float]]]) -> tuple[OverlapRecord, ...]:
    """Slowdowns of compute and a collective that run at once, the mean over ranks."""
    return tuple(
        OverlapRecord(
            first="compute",
            second=op,
            first_slowdown=statistics.fmean(rank[op][0] for rank in ranks),
            second_slowdown=statistics.fmean(rank[op][1] for rank in ranks),
        )
        for op in ranks[0]
    )


def collective_records(
    job: CollectivesJob, ranks: Sequence[Sequence[CollectiveSamples]], backend: str
) -> tuple[CollectiveRecord, ...]:
    """One record of each op and group size; point-to-point messages are those of pairs."""
    times: dict[tuple[str, int], list[tuple[float, Timing]]] = {}
    for samples in zip(*ranks, strict=True):
        seconds = spans_to_seconds(list(samples))
        if seconds:
            first = samples[0]
            times.setdefault((first.op, first.group_size), []).append((float(first.size_bytes), timing(seconds)))
    return tuple(
        CollectiveRecord(
            op=op, group_size=group_size, backend=backend,
            sizes_bytes=tuple(size for size, _ in points), times=tuple(item for _, item in points),
        )
        for (op, group_size), points in times.items()
    )  # fmt: skip


def context_factors(
    graph: ModelGraph, workload: TrainingSpec, ops: Sequence[OpRecord], runs: Sequence[Sequence[list[BlockSamples] | str]]
) -> tuple[tuple[ContextFactor, ...], str]:
    """Whole-block time over the sum of its ops, by block, and where they come from. ``runs``: the ranks' samples of each run of
    the blocks. A block with an unmeasured op has no factor."""
    whole: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    for rank in (rank for run in runs for rank in run):
        if isinstance(rank, str):
            return (), f"none: {rank}"
        for sample in rank:
            forward, backward = whole.setdefault((sample.block, sample.micro_batch), ([], []))
            forward += sample.forward_s
            backward += sample.backward_s
    table = {record.key: record for record in ops}
    ratios: dict[str, list[tuple[float, float]]] = {}
    for (block, micro_batch), (forward, backward) in whole.items():
        isolated = _isolated(graph, workload, block, micro_batch, table)
        if isolated is not None:
            # a step is a sum of units, so what counts is a unit's mean, slow moments included
            backward_ratio = statistics.fmean(backward) / isolated[1] if isolated[1] > 0 else 1.0
            ratios.setdefault(block, []).append((statistics.fmean(forward) / isolated[0], backward_ratio))
    factors = tuple(
        ContextFactor(
            block=block,
            forward=statistics.geometric_mean(forward for forward, _ in pairs),
            backward=statistics.geometric_mean(backward for _, backward in pairs),
            samples=len(pairs),
        )
        for block, pairs in ratios.items()
    )
    return factors, f"measured at micro-batches {sorted({micro_batch for _, micro_batch in whole})}"


def _isolated(
    graph: ModelGraph, workload: TrainingSpec, block: str, micro_batch: int, table: dict[str, OpRecord]
) -> tuple[float, float] | None:
    """Forward and backward seconds of the block's ops by themselves."""
    forward = backward = 0.0
    seq = sequence_lengths(workload)[-1]
    for op in place_block(graph.block(block)).ops:
        if op.op_class == OpClass.VIEW:
            continue
        record = table.get(record_key(op, micro_batch, seq, workload.precision.compute_dtype))
        if record is None:
            return None
        forward += record.forward.median_s
        backward += record.backward.median_s if record.backward is not None else 0.0
    return (forward, backward) if forward > 0 else None
