"""The process of one measured device: ``python -m profiler.measure.worker '{"rank": 0, ...}'``, started by ``pool``."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from profiler.worker_env import prepare_worker

if TYPE_CHECKING:
    from profiler.measure.context import Worker

# A collective that hangs (a peer died without closing its sockets) fails after this long.
GROUP_TIMEOUT_S = 180


def main(settings: dict[str, Any]) -> None:
    """Serve tasks until the caller closes the connection."""
    prepare_worker(settings["rank"], parent_pid=settings["parent_pid"])
    connection = Connection(settings["socket"])
    try:
        worker = _join(settings, connection)
        connection.send(("result", None))
        _serve(worker, connection, _tasks())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _leave()
    except Exception as error:
        sys.stderr.write(traceback.format_exc())
        connection.send(("error", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


def _join(settings: dict[str, Any], connection: Connection) -> Worker:
    """Import torch, take the device, meet the other ranks."""
    import torch
    import torch.distributed as dist

    from profiler.measure.context import Worker

    rank, world_size = settings["rank"], settings["world_size"]
    cuda = settings["device_type"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.FileStore(settings["store"], world_size), rank=rank,
            world_size=world_size, timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )  # fmt: skip
    return Worker(rank, world_size, device, lambda done, total, message: connection.send(("progress", (done, total, message))))


def _serve(worker: Worker, connection: Connection, tasks: dict[str, Callable[[Worker, Any], Any]]) -> None:
    while True:
        name, job = connection.recv()
        connection.send(("result", tasks[name](worker, job)))


def _leave() -> None:
    """End without the abort that a process group left open causes."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _tasks() -> dict[str, Callable[[Worker, Any], Any]]:
    from profiler.measure import basics, blocks, collectives, operators, optimizer, overlap

    return {
        "baseline": basics.measure_baseline,
        "probe": basics.measure_probe,
        "skew": basics.measure_skew,
        "rates": basics.measure_rates,
        "launch": basics.measure_launch,
        "copies": basics.measure_copies,
        "operators": operators.measure_operators,
        "blocks": blocks.measure_blocks,
        "collectives": collectives.measure_collectives,
        "optimizer": optimizer.measure_optimizer,
        "overlap": overlap.measure_overlap,
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
