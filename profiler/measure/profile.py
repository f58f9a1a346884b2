"""Measures a model's ops and a cluster's links on the devices here, and puts the profile together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from profiler.fingerprint import fingerprint_id, gpu_names, load_average, machine_fingerprint
from profiler.measure import assemble
from profiler.measure.basics import resident_bytes
from profiler.measure.blocks import BlocksJob
from profiler.measure.collectives import OPS, CollectivesJob
from profiler.measure.operators import OperatorsJob
from profiler.measure.optimizer import OptimizerJob
from profiler.measure.pool import WorkerPool
from profiler.measure.sizes import collective_sizes, copy_sizes, gradient_sizes, group_sizes, optimizer_sizes, tensors_per_step
from profiler.shapes import default_micro_batches, default_tps, degrees_of, op_calls, sequence_lengths
from profiler.store import request_hash
from specs.cluster import ClusterSpec, DeviceType
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.profile import DeviceProfile, Profile
from specs.progress import Progress, ProgressSink, ignore
from specs.training import TrainingSpec

QUICK_BUDGET_S, FULL_BUDGET_S = 38.0, 240.0
# Shares of the time that is left once the workers stand. Whole blocks are run before and after their ops, so that a machine
# that changes its speed meanwhile does not turn up as a context factor.
SHARES = {"blocks before": 0.09, "operators": 0.54, "blocks after": 0.09, "collectives": 0.18, "optimizer": 0.10}
SKEW_REPEATS, SKEW_WINDOWS = 24, (1, 8)
FIXED_S = 9.0  # probe, copies, launch, overlap
PROBE_REPEATS = 5
OPERAND_FRACTION = 0.25  # of a device's memory


@dataclass(frozen=True, slots=True)
class Degrees:
    """What is measured: tensor-parallel degrees, micro-batches, sequence parallel on and off."""

    tps: tuple[int, ...]
    micro_batches: tuple[int, ...]
    sequence_parallel: tuple[bool, ...]


def profile_cluster(
    graph: ModelGraph,
    cluster: ClusterSpec,
    workload: TrainingSpec,
    *,
    tps: Sequence[int] | None = None,
    micro_batches: Sequence[int] | None = None,
    plans: Sequence[Plan] | None = None,
    progress: ProgressSink = ignore,
    quick: bool = True,
    time_budget_s: float | None = None,
    allow_factory: bool = False,
) -> Profile:
    """Measure ``graph`` on the devices of ``cluster``, which must be those of this machine (``local_cluster``).

    ``tps`` and ``micro_batches`` say at which degrees; else those of ``plans``; else all divisors of the device count and the
    micro-batches of the workload. ``time_budget_s`` bounds the measuring (default 38 s, 240 s when not ``quick``); every op is
    measured at least twice whatever it says. ``allow_factory``: may run the code that a graph names (trusted graphs only).

    Raises :class:`InvalidInput` when the devices are not here, :class:`ExecutionFailed` when a worker fails or dies.
    """
    device = _checked_device(cluster)
    degrees = _degrees(graph, cluster, workload, tps, micro_batches, plans)
    budget_s = time_budget_s if time_budget_s is not None else (QUICK_BUDGET_S if quick else FULL_BUDGET_S)
    session = _Session(graph, cluster, device, workload, degrees, budget_s, progress, allow_factory)
    return session.run()


def _checked_device(cluster: ClusterSpec) -> DeviceType:
    names = {group.device for group in cluster.nodes}
    if len(names) != 1 or None in names:
        raise InvalidInput.single(
            "several_device_types",
            "a profile is measured on devices of one type",
            subject="cluster",
            actual=sorted(map(str, names)),
        )
    device = cluster.device_type(next(iter(name for name in names if name is not None)))
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.kind != "cpu_process" and here < cluster.num_devices:
        raise InvalidInput.single(
            "devices_not_here",
            f"the cluster has {cluster.num_devices} x {device.name}; this machine has {here} CUDA devices"
            + (f" ({', '.join(gpu_names())})" if here else ""),
            subject="cluster",
            actual=cluster.num_devices,
        )
    return device


def _degrees(
    graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, tps: Sequence[int] | None,
    micro_batches: Sequence[int] | None, plans: Sequence[Plan] | None,
) -> Degrees:  # fmt: skip
    plan_tps, plan_batches, plan_splits = degrees_of(plans) if plans else ((), (), (False, True))
    chosen_tps = tuple(sorted(set(tps))) if tps is not None else plan_tps or default_tps(graph, cluster.num_devices)
    batches = tuple(sorted(set(micro_batches))) if micro_batches is not None else plan_batches or default_micro_batches(workload)
    return Degrees(tuple(sorted({1, *chosen_tps})), batches, plan_splits)


class _Session:
    """One measurement from the first worker's start to the profile."""

    def __init__(
        self, graph: ModelGraph, cluster: ClusterSpec, device: DeviceType, workload: TrainingSpec, degrees: Degrees,
        budget_s: float, progress: ProgressSink, allow_factory: bool,
    ) -> None:  # fmt: skip
        self.graph, self.cluster, self.device, self.workload, self.degrees = graph, cluster, device, workload, degrees
        self.budget_s, self.progress, self.allow_factory = budget_s, progress, allow_factory
        self.started = time.monotonic()
        self.percent = 0.0
        self.budgets: dict[str, float] = {}
        self.cuda = device.kind != "cpu_process"
        self.calls = op_calls(graph, workload, degrees.tps, degrees.micro_batches, degrees.sequence_parallel)
        self.limit_bytes = device.memory_bytes * OPERAND_FRACTION

    def run(self) -> Profile:
        self._tell("starting workers", left_s=self.budget_s)
        with WorkerPool(self.cluster.num_devices, device_type="cuda" if self.cuda else "cpu") as pool:
            return self._measured(pool)

    def _measured(self, pool: WorkerPool) -> Profile:
        baselines = pool.call("baseline")
        probes = [pool.call("probe", PROBE_REPEATS)]
        left_s = max(5.0, self.budget_s - (time.monotonic() - self.started) - FIXED_S)
        self.budgets = {name: share * left_s for name, share in SHARES.items()}
        launches = pool.call("launch")
        copies = pool.call("copies", copy_sizes())
        skews = pool.call("skew", SKEW_REPEATS)
        blocks_before = pool.call("blocks", self._blocks_job(self.budgets["blocks before"]), self._watch("blocks before"))
        operators = pool.call("operators", self._operators_job(self.budgets["operators"]), self._watch("operators"))
        probes.append(pool.call("probe", PROBE_REPEATS))
        blocks_after = pool.call("blocks", self._blocks_job(self.budgets["blocks after"]), self._watch("blocks after"))
        collectives_job = self._collectives_job(self.budgets["collectives"])
        collectives = pool.call("collectives", collectives_job, self._watch("collectives"))
        overlaps = pool.call("overlap", ("all_reduce", "all_gather", "reduce_scatter"))
        optimizer_job = self._optimizer_job(self.budgets["optimizer"])
        optimizer = pool.call("optimizer", optimizer_job, self._watch("optimizer"))
        probes.append(pool.call("probe", PROBE_REPEATS))

        ops, skipped = assemble.op_records(self.calls, [samples for samples, _ in operators])
        ops += assemble.grad_add_records(optimizer_job, [adds for _, adds in optimizer])
        factors, factor_note = assemble.context_factors(self.graph, self.workload, ops, [blocks_before, blocks_after])
        fingerprint = machine_fingerprint()
        measured = DeviceProfile(
            device=self.device.name, fingerprint={**fingerprint, "autograd_call_s": operators[0][1]}, ops=tuple(ops),
            copies=assemble.copy_records(copy_sizes(), copies), optimizers=(assemble.optimizer_record(optimizer_job, optimizer),),
            overlap=assemble.overlap_records(overlaps), context_factors=factors, launch_s=assemble.middle(launches),
            baseline_bytes=max(baselines), rank_skew=assemble.rank_skew(skews, SKEW_WINDOWS),
            probe_s=assemble.merged([rank for probe in probes for rank in probe]),
        )  # fmt: skip
        self._tell("done", left_s=0.0)
        return Profile(
            name=f"{self.graph.name} on {self.cluster.name}", created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            cluster=self.cluster.name, devices=(measured,),
            collectives=assemble.collective_records(collectives_job, collectives, self.cluster.backend),
            environment={
                "machine_id": fingerprint_id(fingerprint), "request": request_hash(self.graph, self.workload),
                "tps": list(self.degrees.tps), "micro_batches": list(self.degrees.micro_batches),
                "sequence_lengths": sequence_lengths(self.workload), "wall_s": round(time.monotonic() - self.started, 2),
                "drift": assemble.drift(probes), "load_average": load_average(), "launcher_bytes": resident_bytes(),
                "not_measured": skipped, "context_factors": factor_note,
            },
        )  # fmt: skip

    # --- jobs --------------------------------------------------------------------------------------------------

    def _operators_job(self, budget_s: float) -> OperatorsJob:
        blocks = {block.name: block for block in self.graph.blocks}
        return OperatorsJob(tuple(self.calls), blocks, self.workload.precision.compute_dtype, budget_s, self.limit_bytes)

    def _blocks_job(self, budget_s: float) -> BlocksJob:
        sizes = self.degrees.micro_batches
        batches = tuple(sorted({sizes[0], sizes[len(sizes) // 2]}))
        dtype = self.workload.precision.compute_dtype
        return BlocksJob(
            self.graph, batches, sequence_lengths(self.workload)[-1], dtype, budget_s, self.limit_bytes, self.allow_factory
        )

    def _collectives_job(self, budget_s: float) -> CollectivesJob:
        sizes = collective_sizes(self.graph, self.workload, max(self.degrees.micro_batches), self.limit_bytes)
        groups = group_sizes(self.cluster.num_devices)
        return CollectivesJob(OPS, groups, sizes, self.workload.precision.reduce_dtype, budget_s)

    def _optimizer_job(self, budget_s: float) -> OptimizerJob:
        precision, optimizer = self.workload.precision, self.workload.optimizer
        return OptimizerJob(
            optimizer.name, optimizer.fused, precision.master_dtype or precision.param_dtype,
            optimizer_sizes(self.graph, self.limit_bytes), tensors_per_step(self.graph),
            gradient_sizes(self.graph, self.limit_bytes), precision.grad_dtype, budget_s,
        )  # fmt: skip

    # --- progress ----------------------------------------------------------------------------------------------

    def _watch(self, stage: str) -> assemble.Watch:
        later_s = sum(self.budgets[name] for name in list(SHARES)[list(SHARES).index(stage) + 1 :])

        def on_progress(elapsed_s: float, total_s: float, message: str) -> None:
            self._tell(message, stage=stage, left_s=total_s - elapsed_s + later_s)

        return on_progress

    def _tell(self, message: str, *, left_s: float, stage: str = "") -> None:
        """Percent done never falls; the time left may grow where the machine turns out slower than planned."""
        elapsed = time.monotonic() - self.started
        self.percent = max(self.percent, 100.0 * elapsed / max(elapsed + left_s, 1e-9))
        data = {"part": stage, "ops": len(self.calls)}
        self.progress(Progress(stage="profile", message=message, done=self.percent, total=100.0, eta_s=left_s, data=data))
