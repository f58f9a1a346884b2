"""Times collectives by message size and group size, through the calls that the executor uses.

A sample is the time from the last rank's start to the last rank's end, by the clock that all processes of one host share (on
GPUs: the shortest duration that a rank saw, which is that of the last to start; not yet seen on a GPU).
Results that a step allocates anew (gathered and scattered tensors, received messages) are allocated inside the sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from profiler.measure.context import TORCH_DTYPES, Deadline, Worker, pilot
from specs.graph import DTYPE_BYTES

# What the executor calls. Routed experts and Ulysses exchange tokens by all_to_all.
OPS = ("all_reduce", "all_gather", "reduce_scatter", "p2p", "all_to_all")
LEAST_REPEATS, MOST_REPEATS = 4, 40
WARM_UP_CALLS = 2


@dataclass(frozen=True, slots=True)
class CollectivesJob:
    """Sizes are bytes of the full tensor (p2p: of the message; all_to_all: of what one rank sends)."""

    ops: tuple[str, ...]
    group_sizes: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    dtype: str
    budget_s: float


@dataclass(frozen=True, slots=True)
class CollectiveSamples:
    """One op, group size and message size on one rank: start and end of each call. Empty on ranks outside the group."""

    op: str
    group_size: int
    size_bytes: int
    spans: tuple[tuple[float, float], ...]
    group_index: int


def measure_collectives(worker: Worker, job: CollectivesJob) -> list[CollectiveSamples]:
    """Samples of every op, group size and message size, in the same order on all ranks."""
    found = []
    deadline = Deadline(worker, job.budget_s)
    cases = [(op, group, size) for group in job.group_sizes for op in job.ops for size in job.sizes_bytes]
    weight = sum(size for _, _, size in cases) + 1.0
    for index, (op, group_size, size) in enumerate(cases):
        share = job.budget_s * (0.5 / len(cases) + 0.5 * size / weight)
        found.append(_case(worker, op, group_size, size, job.dtype, share))
        deadline.report((index + 1) / len(cases), f"{op}, collective {index + 1} of {len(cases)}")
    return found


def _case(worker: Worker, op: str, group_size: int, size: int, dtype: str, share_s: float) -> CollectiveSamples:
    group = worker.group(group_size)
    call = None if group is None else collective_call(worker, op, group, group_size, size, dtype)
    first = pilot(call, WARM_UP_CALLS) if call is not None else 0.0
    repeats = worker.repeats(first, share_s, LEAST_REPEATS, MOST_REPEATS)
    spans = _spans(worker, call, repeats)
    return CollectiveSamples(op, group_size, size, tuple(spans), worker.rank // group_size)


def _spans(worker: Worker, call: Callable[[], None] | None, repeats: int) -> list[tuple[float, float]]:
    clock = worker.clock
    marks = []
    for _ in range(repeats):
        worker.meet()
        if call is None:
            continue
        clock.run_ahead()
        start = clock.mark()
        call()
        marks.append((start, clock.mark()))
    clock.settle()
    if worker.device.type == "cuda":  # events of two devices share no clock; the last to start waits least, so ends coincide
        return [(-clock.seconds(start, end), 0.0) for start, end in marks]
    return [(float(start), float(end)) for start, end in marks]


def collective_call(
    worker: Worker, op: str, group: dist.ProcessGroup, group_size: int, size_bytes: int, dtype: str
) -> Callable[[], None]:
    """A function that runs one collective on ``size_bytes`` and returns when this rank has its result."""
    count = max(1, round(size_bytes / DTYPE_BYTES[dtype] / group_size)) * group_size
    kind = TORCH_DTYPES[dtype]
    full = torch.zeros(count, dtype=kind, device=worker.device)
    shard = full[: count // group_size].clone()
    first = dist.get_global_rank(group, 0)
    position = worker.rank - first

    def fresh(elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=kind, device=worker.device)

    def all_reduce() -> None:
        dist.all_reduce(full, group=group)

    def all_gather() -> None:
        dist.all_gather_single(fresh(count), shard, group=group)

    def reduce_scatter() -> None:
        dist.reduce_scatter_single(fresh(count // group_size), full, group=group)

    def all_to_all() -> None:
        dist.all_to_all_single(fresh(count), full, group=group)

    def p2p() -> None:
        partner = first + (position ^ 1)
        if position ^ 1 >= group_size:
            return
        if position % 2 == 0:
            dist.send(full, partner, group=group)
        else:
            dist.recv(fresh(count), partner, group=group)

    calls = {
        "all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all, "p2p": p2p,
    }  # fmt: skip
    return calls[op]


def spans_to_seconds(ranks: list[CollectiveSamples]) -> list[float]:
    """Seconds of each call from what its ranks saw: last start to last end, the slowest of the groups that ran at once."""
    groups: dict[int, list[CollectiveSamples]] = {}
    for samples in ranks:
        if samples.spans:
            groups.setdefault(samples.group_index, []).append(samples)
    per_group = [
        [
            max(end for _, end in call) - max(start for start, _ in call)
            for call in zip(*(item.spans for item in members), strict=True)
        ]
        for members in groups.values()
    ]
    return [max(seconds) for seconds in zip(*per_group, strict=True)]
