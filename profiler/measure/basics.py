"""Small facts about a device: baseline memory, probe, peak rates, launch time, copies."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from profiler.measure.context import TORCH_DTYPES, Worker, pilot, samples_of
from profiler.probe import run_probe

PRODUCT_SIZE = 1024
STREAM_BYTES = 64 * 1024 * 1024
LINK_SIZES_BYTES = (1024, 16 * 1024 * 1024)
LAUNCH_CALLS = 2000
COPY_SHARE_S = 0.3


def measure_baseline(worker: Worker, job: Any) -> float:
    """Bytes that the worker holds with torch imported, groups initialised and the probe's operands made, but no model."""
    run_probe()
    if worker.device.type == "cuda":
        torch.empty(1, device=worker.device)
        worker.baseline_bytes = float(torch.cuda.memory_allocated(worker.device))
        return worker.baseline_bytes
    gc.collect()
    worker.baseline_bytes = resident_bytes()
    return worker.baseline_bytes


def resident_bytes() -> float:
    """Resident size of this process; 0 where the kernel does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def measure_probe(worker: Worker, repeats: int) -> list[float]:
    """The fixed probe, one rank after the other, the others waiting."""
    seconds: list[float] = []
    for turn in range(worker.world_size):
        if turn == worker.rank:
            seconds = [run_probe() for _ in range(repeats)]
        worker.meet()
    return seconds


def measure_skew(worker: Worker, repeats: int) -> list[float]:
    """The probe on all ranks at once, again and again: how unevenly equal work proceeds."""
    run_probe()
    worker.meet()
    return [run_probe() for _ in range(repeats)]


@dataclass(frozen=True, slots=True)
class Rates:
    """What one device reaches while all others do the same: FLOP/s by dtype, bytes/s of its memory, its memory's bytes, and
    seconds of a point-to-point message by size (start and end by the host's clock, comparable between ranks)."""

    flop_per_s: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: float | None
    name: str
    messages: dict[int, list[tuple[float, float]]]


def measure_rates(worker: Worker, budget_s: float) -> Rates:
    """Best matrix-product rates, memory bandwidth by a copy, and messages between neighbours."""
    cuda = worker.device.type == "cuda"
    flop = {}
    for name in ("float32", "bfloat16", "float16") if cuda else ("float32", "bfloat16"):
        rate = _product_rate(worker, TORCH_DTYPES[name], PRODUCT_SIZE * (8 if cuda else 1), budget_s / 4)
        if rate is not None:
            flop[name] = rate
    stream = torch.zeros(STREAM_BYTES // 4 * (8 if cuda else 1), device=worker.device)
    copy = torch.zeros_like(stream)
    seconds = _best(worker, lambda: copy.copy_(stream), budget_s / 4)
    bandwidth = 2.0 * stream.numel() * 4 / seconds
    properties = torch.cuda.get_device_properties(worker.device) if cuda else None
    return Rates(
        flop, bandwidth, float(properties.total_memory) if properties else None, properties.name if properties else "cpu",
        _messages(worker),
    )  # fmt: skip


def _product_rate(worker: Worker, dtype: torch.dtype, size: int, budget_s: float) -> float | None:
    left = torch.randn(size, size, device=worker.device).to(dtype)
    right = torch.randn(size, size, device=worker.device).to(dtype)
    try:
        torch.mm(left, right)
    except RuntimeError:
        return None  # this device has no product in that dtype
    return 2.0 * size**3 / _best(worker, lambda: torch.mm(left, right), budget_s)


def _best(worker: Worker, work: Callable[[], Any], budget_s: float) -> float:
    repeats = worker.repeats(pilot(work), budget_s, 3, 100)
    return min(samples_of(worker, work, repeats))


def _messages(worker: Worker) -> dict[int, list[tuple[float, float]]]:
    """Ranks 0 and 1 exchange messages; the others wait."""
    found: dict[int, list[tuple[float, float]]] = {}
    if worker.world_size == 1:
        return found
    clock = worker.clock
    for size in LINK_SIZES_BYTES:
        buffer = torch.zeros(size // 4, device=worker.device)
        marks: list[tuple[Any, Any]] = []
        for _ in range(8):
            worker.meet()
            start = clock.mark()
            if worker.rank == 0:
                dist.send(buffer, 1)
            elif worker.rank == 1:
                dist.recv(buffer, 0)
            marks.append((start, clock.mark()))
        clock.settle()
        if worker.device.type == "cuda":
            found[size] = [(-clock.seconds(start, end), 0.0) for start, end in marks]
        else:
            found[size] = [(start, end) for start, end in marks]
    return found


def measure_launch(worker: Worker, job: Any) -> list[float]:
    """Host seconds to launch an op that does next to nothing."""
    one, out = torch.ones(1, device=worker.device), torch.empty(1, device=worker.device)
    pilot(lambda: torch.add(one, one, out=out), 100)
    clock = worker.clock
    clock.settle()
    worker.meet()
    host = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(LAUNCH_CALLS // 10):
            torch.add(one, one, out=out)
        host.append((time.perf_counter() - start) / (LAUNCH_CALLS // 10))
        clock.settle()
    return host


def measure_copies(worker: Worker, sizes_bytes: Sequence[int]) -> dict[str, list[list[float]]]:
    """Seconds of copies by direction and size; all ranks copy at once. Host directions exist only beside an accelerator.

    ``local`` writes memory that is there already, ``local_fresh`` memory that is allocated for it (its pages are touched first).
    """
    found = {"local": [_copy(worker, size, worker.device, worker.device, pinned=False) for size in sizes_bytes]}
    found["local_fresh"] = [_clone(worker, size) for size in sizes_bytes]
    if worker.device.type == "cuda":
        host = torch.device("cpu")
        for suffix, pinned in (("", True), ("_pageable", False)):
            found["h2d" + suffix] = [_copy(worker, size, host, worker.device, pinned=pinned) for size in sizes_bytes]
            found["d2h" + suffix] = [_copy(worker, size, worker.device, host, pinned=pinned) for size in sizes_bytes]
    return found


def _clone(worker: Worker, size: int) -> list[float]:
    one = torch.zeros(max(1, size // 4), device=worker.device)

    def work() -> None:
        one.clone()

    return list(samples_of(worker, work, worker.repeats(pilot(work), COPY_SHARE_S / 4, 3, 50)))


def _copy(worker: Worker, size: int, source: torch.device, target: torch.device, *, pinned: bool) -> list[float]:
    count = max(1, size // 4)
    one = torch.zeros(count, device=source, pin_memory=pinned and source.type == "cpu")
    two = torch.zeros(count, device=target, pin_memory=pinned and target.type == "cpu")

    def work() -> None:
        two.copy_(one, non_blocking=pinned)

    repeats = worker.repeats(pilot(work), COPY_SHARE_S / 4, 3, 50)
    return list(samples_of(worker, work, repeats))
