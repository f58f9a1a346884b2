"""A fixed piece of work of about 50 ms: its time beside a run, over its time in the profile, says how far the machine drifted.

Shared machines change speed within minutes. The probe holds half matrix products and half memory traffic, as a training
step does. Run it alone (one process at a time) in the environment of ``profiler.worker_env``.
"""

from __future__ import annotations

import time
from functools import lru_cache

import torch

PRODUCT_SIZE = 512
NUM_PRODUCTS = 14
STREAM_ELEMENTS = 4 * 1024 * 1024  # 16 MiB, more than a core's own caches
NUM_STREAMS = 14


def run_probe() -> float:
    """Seconds of one pass of the probe on this process's CPU threads.

    The first call also allocates its operands (19 MiB), which stay: make it before a memory baseline is taken.
    """
    left, right, product, stream = _operands()
    started = time.perf_counter()
    for _ in range(NUM_PRODUCTS):
        torch.mm(left, right, out=product)
    for _ in range(NUM_STREAMS):
        stream.mul_(1.0)
        stream.add_(0.0)
    return time.perf_counter() - started


@lru_cache(maxsize=1)
def _operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(PRODUCT_SIZE, PRODUCT_SIZE, generator=generator)
    right = torch.rand(PRODUCT_SIZE, PRODUCT_SIZE, generator=generator)
    return left, right, torch.empty_like(left), torch.ones(STREAM_ELEMENTS)
