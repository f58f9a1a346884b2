"""The launcher of the workers of one node: ``python -m executor.launch <folder> <caller's process id> <node>``.

A process of its own between the caller and the workers: it has the workers' environment from its start (the allocator's
settings work no other way), imports torch once, and lets torch elastic fork the workers from itself. It dies with its caller,
and the workers die with it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from executor.job import Job, LaunchReport, write_json
from profiler.worker_env import die_with_parent

MONITOR_INTERVAL_S = 0.05
SHUTDOWN_TIMEOUT_S = 1
MEETING_TIMEOUT_S = 60


def main(folder: Path, caller_pid: int, node: int) -> int:
    """Run the job of ``folder`` on ``node``; the exit status is 0 when every worker succeeded."""
    die_with_parent(caller_pid)
    from executor.worker import LAUNCHER_PID

    os.environ[LAUNCHER_PID] = str(os.getpid())
    report = _launch(folder, Job.load(folder), node)
    write_json(folder / f"launch{node}.json", report)
    return 1 if report.error else 0


def _launch(folder: Path, job: Job, node: int) -> LaunchReport:
    """Start the workers through torch elastic and wait for them. CUDA does not survive a fork, so its workers are spawned."""
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from executor.worker import worker_main

    importlib.import_module("torch._dynamo")  # FSDP and checkpoint import it at their first use; here it is once for all
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    config = LaunchConfig(
        **_meeting(job, node), max_restarts=0,
        start_method="spawn" if job.backend == "nccl" else "fork", monitor_interval=MONITOR_INTERVAL_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs" / f"node{node}"), redirects=Std.ALL),
    )  # fmt: skip
    try:
        elastic_launch(config, worker_main)(str(folder))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return LaunchReport(exit_codes=codes, error=f"worker failed: ranks {sorted(codes)}")
    except Exception as error:  # whatever the launcher library raises is the run's failure
        return LaunchReport(error=f"{type(error).__name__}: {error}")
    return LaunchReport()


def _meeting(job: Job, node: int) -> dict[str, Any]:
    """Where the nodes meet: one alone anywhere, several at the first one's address, in the order of the job."""
    if len(job.nodes) <= 1:
        return {
            "min_nodes": 1, "max_nodes": 1, "nproc_per_node": job.plan.world_size, "run_id": uuid.uuid4().hex,
            "local_addr": "127.0.0.1", "rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "rdzv_configs": {"is_host": True},
        }  # fmt: skip
    count = len(job.nodes)
    return {
        "min_nodes": count, "max_nodes": count, "nproc_per_node": job.nodes[node].num_ranks, "run_id": "run",
        "local_addr": job.nodes[node].address, "rdzv_backend": "static", "rdzv_endpoint": f"{job.nodes[0].address}:{job.port}",
        "rdzv_configs": {"rank": node, "timeout": MEETING_TIMEOUT_S},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
