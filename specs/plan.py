"""Plan: everything an executor must know, explicit; nothing is decided again when it runs.

A plan holds one or more pipelines that train one model together. A pipeline is a list of stages in model order; a stage
owns a contiguous range of the model's units (``ModelGraph.units``) and a grid of devices ``dp x cp x tp`` (row-major in
``devices``: tp varies fastest). With virtual stages several stages name the same devices: which, the schedule says
(:meth:`PipelineSchedule.stage_ranks`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specs.base import Document, Spec
from specs.schedule import SCHEDULES, Rows, from_text, rows_for, stage_ranks, stage_ranks_of


class MeshAxis(StrEnum):
    """Axes of a stage's mesh."""

    DP = "dp"
    CP = "cp"
    TP = "tp"
    EP = "ep"


class Mesh(Spec):
    """Degrees of a stage. ``ep`` divides ``dp x cp`` and takes its ranks from there, each expert split over tp as well; with
    ``whole_experts`` it divides ``dp x cp x tp``, and no expert is split (needs sequence parallel)."""

    dp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    whole_experts: bool = Field(default=False, description="ep reaches over tp instead of experts being split over it")

    @property
    def size(self) -> int:
        """Devices of the stage."""
        return self.dp * self.cp * self.tp


class RecomputeMode(StrEnum):
    """none: save all. full: save the unit's inputs only. selective: recompute the listed op classes."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


class RecomputeRun(Spec):
    """Recompute of ``num_units`` units from ``first_unit`` on; units in no run save everything."""

    first_unit: int
    num_units: int
    mode: RecomputeMode
    op_classes: tuple[str, ...] = Field(default=(), description="selective only: classes of profiler.opset to recompute")


class Tier(StrEnum):
    """Where a tensor class lives."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class TierRun(Spec):
    """``fraction`` of ``tensor_class`` of some units in ``tier``; what no run names is on the device."""

    tensor_class: Literal["params", "grads", "optimizer", "activations"]
    tier: Tier
    first_unit: int
    num_units: int
    fraction: float = Field(default=1.0, gt=0, le=1)
    prefetch_distance: int = Field(default=1, ge=0)


class Stage(Spec):
    """A contiguous range of units on a grid of devices."""

    devices: tuple[int, ...]
    first_unit: int = Field(ge=0)
    num_units: int = Field(ge=1)
    mesh: Mesh = Mesh()
    zero: int = Field(default=0, ge=0, le=3, description="0 replicated (DDP), 1 optimizer, 2 + gradients, 3 + parameters sharded")
    shard_group: int | None = Field(default=None, ge=1, description="ranks of dp that share one set of shards; None = all of dp")
    sequence_parallel: bool = Field(
        default=False, description="norms and residuals sharded over tp along the sequence; no effect at tp 1"
    )
    placements: dict[str, str] = Field(
        default={}, description="tp placement by parameter fqn with {i} for the repetition: 'R' | 'S(dim)'; from profiler.placement"
    )
    recompute: tuple[RecomputeRun, ...] = ()
    tiers: tuple[TierRun, ...] = ()
    batch_share: tuple[int, ...] | None = Field(default=None, description="micro-batch of each dp rank where they differ")
    state_share: tuple[float, ...] | None = Field(
        default=None, description="share of the sharded states of each dp rank where unequal"
    )

    def recompute_of(self, unit: int) -> RecomputeRun | None:
        """The recompute run that covers ``unit``, if any."""
        for run in self.recompute:
            if run.first_unit <= unit < run.first_unit + run.num_units:
                return run
        return None


class Pipeline(Spec):
    """Stages in model order, and what flows through them. ``micro_batch``: sequences per dp rank and pass."""

    stages: tuple[Stage, ...] = Field(min_length=1)
    micro_batch: int = Field(ge=1)
    num_micro_batches: int = Field(ge=1)

    def ranks(self) -> list[tuple[int, ...]]:
        """The distinct device grids in order of first use: one entry per pipeline rank."""
        return list(dict.fromkeys(stage.devices for stage in self.stages))

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks())

    def sequences(self) -> int:
        """Sequences per step through this pipeline."""
        stage = self.stages[0]
        per_pass = sum(stage.batch_share) if stage.batch_share else self.micro_batch * stage.mesh.dp
        return per_pass * self.num_micro_batches


class PipelineSchedule(Spec):
    """A named schedule, or ``rows`` (one comma-separated line of actions per pipeline rank) when ``name`` is ``custom``.
    No effect with one pipeline rank: micro-batches are then accumulated one after another."""

    name: str = "1f1b"
    stages_per_rank: int = Field(default=1, ge=1)
    rows: tuple[str, ...] = ()

    def actions(self, *, num_ranks: int, num_micro_batches: int) -> Rows:
        """Action rows for a pipeline of ``num_ranks``."""
        if self.name == "custom":
            return from_text(self.rows)
        return rows_for(self.name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=self.stages_per_rank)

    @property
    def overlaps(self) -> bool:
        """Whether a forward and a full backward of another stage run beside one another (``specs.schedule.passes_of``)."""
        rule = SCHEDULES.get(self.name)
        return rule is not None and rule.overlaps

    def stage_ranks(self, *, num_ranks: int) -> tuple[int, ...]:
        """The pipeline rank that holds each stage."""
        if self.name == "custom":
            owner = stage_ranks_of(from_text(self.rows))
            return tuple(owner[stage] for stage in sorted(owner))
        return stage_ranks(self.name, num_ranks=num_ranks, stages_per_rank=self.stages_per_rank)


class CollectiveOptions(Spec):
    """How collectives run. ``bucket_bytes``: gradient bucket of DDP (zero 0 without pipeline). ``prefetch_units``: units
    whose parameters are gathered ahead (zero 3). ``context_parallel``: ``ring`` passes keys and values round (each rank holds an
    early and a late part of the sequence), ``ulysses`` exchanges the sequence for heads around attention (arXiv 2309.14509)."""

    bucket_bytes: float = Field(default=25 * 1024 * 1024, gt=0)
    overlap_grad_reduce: bool = True
    prefetch_units: int = Field(default=1, ge=0)
    context_parallel: Literal["ring", "ulysses"] = "ring"


class StragglerPolicy(Spec):
    """What the plan does about slow or failing devices; ``none`` unless planned."""

    response: str = "none"
    spares: tuple[int, ...] = ()


class Plan(Document):
    """An executable plan. ``*_hash`` tie it to the documents it was made for."""

    kind: ClassVar[str] = "plan"
    name: str = ""
    strategy: str = Field(default="", description="the short form a person reads: 'pp=2 dp=4 tp=8 micro_batch=1 zero=1 ...'")
    model_hash: str = ""
    cluster_hash: str = ""
    workload_hash: str = ""
    global_batch: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    pipelines: Annotated[tuple[Pipeline, ...], Field(min_length=1)]
    schedule: PipelineSchedule = PipelineSchedule()
    collectives: CollectiveOptions = CollectiveOptions()
    straggler: StragglerPolicy = StragglerPolicy()
    loss_kernel: Literal["", "full", "in_place", "fused"] = Field(
        default="", description="of the head and loss; '' = the workload's"
    )
    unused_devices: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        """Devices that take part."""
        return len({device for pipeline in self.pipelines for stage in pipeline.stages for device in stage.devices})
