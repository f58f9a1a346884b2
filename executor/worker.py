"""One rank of a run: joins the group, builds its program, trains, and leaves a result or its own error behind."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from executor.batch import DataSource, vocabulary_size
from executor.emulate.dilation import DilatedTimers
from executor.emulate.quotas import join_group
from executor.failures import is_consequence
from executor.groups import create_groups
from executor.job import Job, RankError, RankResult, write_json
from executor.layout import Layout
from executor.materialize import materialize
from executor.memory import MemoryMeter
from executor.timers import Timers
from executor.train import StepLog, Trainer
from executor.warm_up import warm_up
from profiler.sources import model_from_graph
from profiler.worker_env import prepare_worker

LAUNCHER_PID = "MESHWRIGHT_LAUNCHER_PID"
CAUSE_FIRST_S = 1.0


def worker_main(folder: str) -> None:
    """Entry of a worker that torch elastic has started (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set)."""
    path, rank = Path(folder), int(os.environ["RANK"])
    log: StepLog | None = None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the launcher's handlers, inherited by the fork, would turn these into errors
    try:
        job = Job.load(path)
        # nodes that are made of one machine share its cores
        core = rank if job.nodes else int(os.environ["LOCAL_RANK"])
        prepare_worker(core, parent_pid=int(os.environ[LAUNCHER_PID]), pin=job.pin)
        log = StepLog(path, rank)
        write_json(path / f"rank{rank}.result.json", run_rank(job, rank, log))
    except BaseException as error:
        _report(path, rank, log.step if log else None, error)
        if is_consequence(str(error)):
            time.sleep(CAUSE_FIRST_S)  # the launcher takes the first exit it sees for the cause
        os._exit(1)  # no teardown: a process group that waits for dead peers would keep the worker from ending


def run_rank(job: Job, rank: int, log: StepLog) -> RankResult:
    """Join, build, train, leave."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if job.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(job.backend, timeout=timedelta(seconds=job.collective_timeout_s))
    layout = Layout(job.plan)
    groups = create_groups(
        layout, layout.place(rank), device_type=device.type, zero=layout.pipeline.stages[0].zero, timeout_s=job.collective_timeout_s
    )
    model = model_from_graph(job.graph, allow_factory=job.allow_factory)
    warm_up(model, job.graph, job.plan, getattr(torch, job.workload.precision.param_dtype), device)
    del model
    memory = MemoryMeter(device)
    program = materialize(
        job.plan, model_from_graph(job.graph, allow_factory=job.allow_factory), job.graph, job.workload, rank, device=device,
        timers=DilatedTimers(job.dilation[rank]) if job.dilation else Timers(), timeout_s=job.collective_timeout_s, groups=groups,
    )  # fmt: skip
    data = DataSource(job.workload, vocabulary_size(job.graph))
    if job.groups:
        join_group(job.groups[rank])  # not before: starting up need not be slow
    probe = job.probe and device.type == "cpu"  # it is CPU work: it says nothing about the speed of a GPU
    result = Trainer(program, data, memory, log, device).run(steps=job.steps, warmup_steps=job.warmup_steps, probe=probe)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _report(folder: Path, rank: int, step: int | None, error: BaseException) -> None:
    text = str(error) or type(error).__name__
    trace = "".join(traceback.format_exception(error))
    sys.stderr.write(trace)
    sys.stderr.flush()
    report = RankError(rank=rank, time_s=time.time(), step=step, error=f"{type(error).__name__}: {text}", traceback=trace)
    write_json(folder / f"rank{rank}.error.json", report)
