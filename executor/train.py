"""The training loop of one worker: warm-up steps, then measured ones."""

from __future__ import annotations

import gc
import json
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

from executor.batch import DataSource
from executor.job import RankResult, StepResult
from executor.materialize import Program
from executor.memory import MemoryMeter
from executor.timers import StepRecord
from profiler.probe import run_probe
from profiler.worker_env import allowed_cores

# Passes of the probe on each core before the first step: they say how fast the machine is at the start of the run.
START_PROBES = 5


class StepLog:
    """Where a rank writes that it has finished a step (rank 0, for the caller to read) and which step it is in (every rank)."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._state = os.open(folder / f"rank{rank}.state", os.O_CREAT | os.O_WRONLY, 0o644)
        self._lines = (folder / "progress.jsonl").open("a") if rank == 0 else None
        self.step: int | None = None

    def enter(self, step: int) -> None:
        """The rank begins ``step``."""
        self.step = step
        os.pwrite(self._state, f"{step:<20}".encode(), 0)

    def finish(self, step: int, loss: float, step_time_s: float, *, warmup: bool) -> None:
        """The rank has finished ``step``."""
        if self._lines is not None:
            self._lines.write(json.dumps({"step": step, "loss": loss, "step_time_s": step_time_s, "warmup": warmup}) + "\n")
            self._lines.flush()


class Trainer:
    """Runs the steps of a program and measures them."""

    def __init__(self, program: Program, data: DataSource, memory: MemoryMeter, log: StepLog, device: torch.device) -> None:
        self._program, self._data, self._memory, self._log, self._device = program, data, memory, log, device
        self._timers = program.timers
        self._losses: list[float] = []
        self._start_probes: list[float] = []
        self._probes: list[float] = []

    def run(self, *, steps: int, warmup_steps: int, probe: bool) -> RankResult:
        """Train. The garbage collector is off inside steps and runs between them."""
        gc.collect()
        gc.freeze()
        gc.disable()
        for _ in range(START_PROBES if probe else 0):
            self._probe(self._start_probes)
        self._memory.reset_peak()
        for step in range(warmup_steps):
            self._step(step, warmup=True)
        warmup_peak = self._memory.peak_bytes()
        self._memory.reset_peak()
        records = []
        for step in range(warmup_steps, warmup_steps + steps):
            records.append(self._step(step, warmup=False))
            if probe:
                self._probe(self._probes)
        return RankResult(
            rank=self._program.place.rank,
            steps=tuple(_step_result(record) for record in records),
            losses=tuple(self._losses),
            peak_memory_bytes=self._memory.peak_bytes(),
            warmup_peak_memory_bytes=warmup_peak,
            baseline_bytes=self._memory.baseline_bytes,
            probe_s=statistics.median(self._probes) if self._probes else None,
            start_probe_s=statistics.median(self._start_probes) if self._start_probes else None,
            environment=_environment(),
        )

    def _step(self, step: int, *, warmup: bool) -> StepRecord:
        """One step between two barriers, of which the second is part of it. The loss is averaged outside of the timed part."""
        self._log.enter(step)
        program, timers = self._program, self._timers
        batch = self._data.local_batch(step, program.place, program.layout, self._device)
        gc.collect()
        dist.barrier()
        timers.start()
        loss = program.forward_backward(batch)
        program.finish_gradients()
        with timers.phase("optimizer"):
            program.optimizer.step()
        program.optimizer.zero_grad()
        with timers.phase("wait"):
            self._synchronize()
            dist.barrier()
        record = timers.stop()
        self._losses.append(self._mean_loss(loss))
        self._log.finish(step, self._losses[-1], record.step_time_s, warmup=warmup)
        return record

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _mean_loss(self, loss: torch.Tensor | None) -> float:
        """The mean over all tokens of the step: the ranks that hold the loss, one of each tp group, add their shares."""
        share = torch.zeros(1, dtype=torch.float64, device=self._device)
        if loss is not None and self._program.place.tp == 0:
            share += loss.to(torch.float64) * self._program.layout.share(self._program.place)
        dist.all_reduce(share)
        value = float(share)
        if value != value:
            raise FloatingPointError(f"the loss of step {len(self._losses)} is not a number")
        return value

    def _probe(self, samples: list[float]) -> None:
        """The probe on each core in turn, alone."""
        rank, world_size = self._program.place.rank, self._program.layout.world_size
        for turn in range(min(world_size, os.cpu_count() or 1)):
            if turn == rank:
                samples.append(run_probe())
            dist.barrier()


def _step_result(record: StepRecord) -> StepResult:
    traffic = {kind: (item.calls, item.num_bytes) for kind, item in record.traffic.items()}
    return StepResult(step_time_s=record.step_time_s, terms=record.terms, traffic=traffic)


def _environment() -> dict[str, object]:
    return {"torch": str(torch.__version__), "threads": torch.get_num_threads(), "cores": allowed_cores(), "pid": os.getpid()}
