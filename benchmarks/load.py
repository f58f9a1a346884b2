"""Requests per second and their times at one service process: ``python -m benchmarks.load [SECONDS]``."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.openapi_fuzz import service

BASE = {
    "cluster": {"name": "two", "nodes": [{"preset": "dgx_h100", "count": 2}]}, "workload": {"global_batch": 64, "seq_len": 4096},
    "model": "llama-2-7b",
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "estimate asked before": ("/v1/estimates", {**BASE, "strategy": "tp=8 dp=2 micro_batch=1 zero=1"}),
    "memory report": ("/v1/memory", {**BASE, "strategy": "zero=3 micro_batch=1 recompute=full"}),
    "config judged": ("/v1/imports", {"framework": "megatron", "text": "--tensor-model-parallel-size 8 --micro-batch-size 1"}),
    "catalogue": ("/v1/catalogue", None),
    "list of plans": ("/v1/plans", None),
}
CLIENTS = 4


def hammer(base: str, path: str, body: dict[str, Any] | None, seconds: float) -> list[float]:
    """Seconds of every request of some clients that ask as fast as they get answers."""
    times: list[float] = []
    end = time.monotonic() + seconds

    def run() -> None:
        with httpx.Client(base_url=base, timeout=60) as client:
            while time.monotonic() < end:
                started = time.perf_counter()
                response = client.get(path) if body is None else client.post(path, json=body)
                times.append(time.perf_counter() - started)
                response.raise_for_status()

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(times)


def main(arguments: list[str]) -> int:
    """Print a row per kind of request."""
    seconds = float(arguments[0]) if arguments else 5.0
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as base:
        print(f"{'request':24} {'requests/s':>10} {'p50 ms':>8} {'p99 ms':>8}")
        for name, (path, body) in KINDS.items():
            hammer(base, path, body, 0.2)  # the first one captures the model
            times = hammer(base, path, body, seconds)
            p50, p99 = (times[int(share * (len(times) - 1))] * 1e3 for share in (0.5, 0.99))
            print(f"{name:24} {len(times) / seconds:10.0f} {p50:8.1f} {p99:8.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
