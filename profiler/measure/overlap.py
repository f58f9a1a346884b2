"""What computing and communicating at once do to each other."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from profiler.measure.context import Worker, pilot

MESSAGE_BYTES = 8 * 1024 * 1024
PRODUCT_SIZE = 256  # on an accelerator 16 times as wide
ROUNDS = 5
ALONE_PRODUCTS = 20


def measure_overlap(worker: Worker, ops: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """By collective: (slowdown of matrix products while it is in flight, its own slowdown); medians over rounds."""
    if worker.world_size == 1:
        return {}
    cuda = worker.device.type == "cuda"
    size = PRODUCT_SIZE * (16 if cuda else 1)
    left, right, out = (torch.rand(size, size, device=worker.device) for _ in range(3))

    def product() -> None:
        torch.mm(left, right, out=out)
        worker.clock.settle()

    return {op: _pair(worker, product, _starter(worker, op, MESSAGE_BYTES * (8 if cuda else 1))) for op in ops}


def _pair(worker: Worker, product: Callable[[], None], start: Callable[[], Any]) -> tuple[float, float]:
    pilot(product, 3)
    start().wait()
    product_slowdowns, collective_slowdowns = [], []
    for _ in range(ROUNDS):
        alone_product = _alone_product(worker, product)
        alone_collective = _alone_collective(worker, start)
        both_product, both_collective = _both(worker, product, start)
        product_slowdowns.append(both_product / alone_product)
        collective_slowdowns.append(both_collective / alone_collective)
    return max(1.0, statistics.median(product_slowdowns)), max(1.0, statistics.median(collective_slowdowns))


def _alone_product(worker: Worker, product: Callable[[], None]) -> float:
    worker.meet()
    started = time.perf_counter()
    for _ in range(ALONE_PRODUCTS):
        product()
    return (time.perf_counter() - started) / ALONE_PRODUCTS


def _alone_collective(worker: Worker, start: Callable[[], Any]) -> float:
    worker.meet()
    started = time.perf_counter()
    start().wait()
    worker.clock.settle()
    return time.perf_counter() - started


def _both(worker: Worker, product: Callable[[], None], start: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a product, and of the collective, while both run: products are computed until the collective is done.

    A thread waits for the collective: some of gloo's report completion only to one who waits.
    """
    worker.meet()
    started = time.perf_counter()
    waiter = threading.Thread(target=start().wait)
    waiter.start()
    products = 0
    while products == 0 or waiter.is_alive():
        product()
        products += 1
    elapsed = time.perf_counter() - started
    waiter.join()
    return elapsed / products, elapsed


def _starter(worker: Worker, op: str, num_bytes: int) -> Callable[[], Any]:
    count = num_bytes // 4 // worker.world_size * worker.world_size
    full = torch.zeros(count, device=worker.device)
    shard = torch.zeros(count // worker.world_size, device=worker.device)
    starters: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(full, async_op=True),
        "all_gather": lambda: dist.all_gather_single(full, shard, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, full, async_op=True),
    }
    return starters[op]
