"""A plan as other frameworks think of one: the same degrees everywhere, ranks in order, layers between embedding and head.

:func:`uniform_view` reads those numbers off an explicit plan and says by name where the plan has no such form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from specs.cluster import ClusterSpec
from specs.errors import Violation
from specs.graph import ModelGraph
from specs.plan import Plan, RecomputeMode, Stage, Tier
from specs.training import TrainingSpec

Loc = tuple[str | int, ...]
# Per stage: recompute mode, op classes, number of layers covered from the stage's first layer on.
Recompute = tuple[RecomputeMode, tuple[str, ...], int]


@dataclass(frozen=True, kw_only=True)
class View:
    """The numbers of a uniform plan. ``layers``: layers of each stage, embedding and head (on the ends) not counted."""

    plan: Plan
    workload: TrainingSpec | None
    graph: ModelGraph | None
    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    whole_experts: bool
    zero: int
    shard_group: int | None
    sequence_parallel: bool
    micro_batch: int
    num_micro_batches: int
    chunks: int
    layers: tuple[int, ...]
    recompute: Recompute
    optimizer_on_host: float = 0.0
    params_on_host: bool = False
    devices_per_node: int = 1

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(self.layers)

    @property
    def world_size(self) -> int:
        """Devices that take part."""
        return self.plan.world_size

    @property
    def per_rank(self) -> int:
        """Sequences of a dp rank and step."""
        return self.micro_batch * self.num_micro_batches

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule."""
        return self.plan.schedule.name

    @property
    def even(self) -> bool:
        """Whether all stages hold as many layers."""
        return len(set(self.layers)) == 1

    def loss(self) -> str:
        """The loss kernel that runs."""
        return self.plan.loss_kernel or (self.workload.loss_kernel if self.workload else "full")

    def size(self, name: str) -> int | None:
        """A size of the model (``heads``, ``kv_heads``, ``hidden``), where the graph is given and tells."""
        value = None if self.graph is None else self.graph.attributes.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def precision(self) -> str:
        """``bf16``, ``fp16`` or ``fp32``, by the compute dtype of the workload; bf16 where none is given."""
        dtype = self.workload.precision.compute_dtype if self.workload else "bfloat16"
        return {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")


def devices_per_node(plan: Plan, cluster: ClusterSpec | None) -> int:
    """Devices of the plan on each node: the cluster's, or the largest divisor of the plan's devices up to 8."""
    sizes = {group.devices_per_node for group in cluster.nodes} if cluster is not None else set()
    size = sizes.pop() if len(sizes) == 1 else None
    most = min(size or 8, plan.world_size)
    return next(count for count in range(most, 0, -1) if plan.world_size % count == 0)


def bare_view(plan: Plan, graph: ModelGraph | None, workload: TrainingSpec | None, cluster: ClusterSpec | None) -> View:
    """A view for targets that need only ranks and the schedule: no rule about the plan's shape."""
    pipeline = plan.pipelines[0]
    mesh = pipeline.stages[0].mesh
    return View(
        plan=plan, workload=workload, graph=graph, tp=mesh.tp, pp=pipeline.pp, dp=mesh.dp, cp=mesh.cp, ep=mesh.ep,
        whole_experts=mesh.whole_experts, zero=0, shard_group=None, sequence_parallel=False, micro_batch=pipeline.micro_batch,
        num_micro_batches=pipeline.num_micro_batches, chunks=plan.schedule.stages_per_rank, layers=_layers(pipeline.stages),
        recompute=_NONE, devices_per_node=devices_per_node(plan, cluster),
    )  # fmt: skip


def uniform_view(
    plan: Plan, graph: ModelGraph | None, workload: TrainingSpec | None, cluster: ClusterSpec | None
) -> tuple[View | None, list[Violation]]:
    """The view, or ``None`` and every reason why other frameworks have no word for this plan's shape."""
    found = _structure(plan)
    if found:
        return None, found
    pipeline = plan.pipelines[0]
    first = pipeline.stages[0]
    recompute, broken = _recompute(plan)
    tiers, off = _tiers(pipeline.stages)
    layers = _layers(pipeline.stages)
    if not any(layers):
        off.append(no("no_layers", "the plan has nothing between embedding and head", ("plan", "pipelines", 0, "stages")))
    if broken or off:
        return None, [*broken, *off]
    view = View(
        plan=plan, workload=workload, graph=graph, tp=first.mesh.tp, pp=pipeline.pp, dp=first.mesh.dp, cp=first.mesh.cp,
        ep=first.mesh.ep, whole_experts=first.mesh.whole_experts, zero=first.zero, shard_group=_shard_group(first),
        sequence_parallel=first.sequence_parallel and first.mesh.tp > 1, micro_batch=pipeline.micro_batch,
        num_micro_batches=pipeline.num_micro_batches, chunks=plan.schedule.stages_per_rank if pipeline.pp > 1 else 1,
        layers=layers, recompute=recompute, optimizer_on_host=tiers.get("optimizer", 0.0), params_on_host="params" in tiers,
        devices_per_node=devices_per_node(plan, cluster),
    )  # fmt: skip
    return view, []


def _shard_group(stage: Stage) -> int | None:
    return None if stage.shard_group in (None, stage.mesh.dp) else stage.shard_group


def no(code: str, message: str, loc: Loc, **fields: Any) -> Violation:
    """A thing that a target has no word for."""
    return Violation(code=code, message=message, loc=loc, **fields)


def _structure(plan: Plan) -> list[Violation]:
    """What no framework's flags can say."""
    found: list[Violation] = []
    if len(plan.pipelines) > 1:
        found.append(
            no("several_pipelines", f"{len(plan.pipelines)} unlike pipelines train one model", ("plan", "pipelines"), allowed=[1])
        )
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    same: dict[str, Callable[[Stage], Any]] = {
        "mesh": lambda stage: (stage.mesh.dp, stage.mesh.cp, stage.mesh.tp, stage.mesh.ep),
        "zero": lambda stage: stage.zero,
        "shard_group": lambda stage: stage.shard_group,
        "sequence_parallel": lambda stage: stage.sequence_parallel or stage.mesh.tp == 1,
    }
    for name, value in same.items():
        values = list(dict.fromkeys(value(stage) for stage in stages))
        if len(values) > 1:
            message = f"stages differ in {name}: {' and '.join(map(str, values))}; the target takes one value for all"
            found.append(no(f"{name}_differs_by_stage", message, ("plan", "pipelines", 0, "stages"), actual=values))
    for index, stage in enumerate(stages):
        loc = ("plan", "pipelines", 0, "stages", index)
        if stage.batch_share is not None and len(set(stage.batch_share)) > 1:
            found.append(no("uneven_batch", f"dp ranks take unlike batches {list(stage.batch_share)}", (*loc, "batch_share")))
        if stage.state_share is not None and len(set(stage.state_share)) > 1:
            found.append(no("uneven_states", "dp ranks hold unlike shares of the states", (*loc, "state_share")))
    if plan.straggler.response != "none":
        found.append(no("straggler_policy", f"straggler response '{plan.straggler.response}'", ("plan", "straggler")))
    order = [device for pipeline in plan.pipelines for devices in pipeline.ranks() for device in devices]
    if order != sorted(order):
        message = "devices of the stages are not in rising order, and launchers number ranks that way"
        found.append(no("device_order", message, ("plan", "pipelines", 0, "stages")))
    return found


def _layers(stages: Iterable[Stage]) -> tuple[int, ...]:
    """Units of each stage without the embedding (the first unit) and the head (the last)."""
    counts = [stage.num_units for stage in stages]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def _recompute(plan: Plan) -> tuple[Recompute, list[Violation]]:
    """One recompute setting for all stages: all their layers, or as many first ones of each."""
    stages = plan.pipelines[0].stages
    last_unit = stages[-1].first_unit + stages[-1].num_units - 1
    seen: list[Recompute] = []
    whole = True
    for stage in stages:
        own = range(max(stage.first_unit, 1), min(stage.first_unit + stage.num_units, last_unit))
        runs = [stage.recompute_of(unit) for unit in own]
        kinds = {(run.mode, run.op_classes) for run in runs if run is not None and run.mode != RecomputeMode.NONE}
        covered = [run is not None and run.mode != RecomputeMode.NONE for run in runs]
        if len(kinds) > 1 or covered != sorted(covered, reverse=True):
            return _NONE, [_recompute_differs(stage)]
        whole = whole and all(covered)
        if own:
            mode, classes = next(iter(kinds), (RecomputeMode.NONE, ()))
            seen.append((mode, classes, sum(covered)))
    settings = {(mode, classes) for mode, classes, _ in seen}
    counts = {count for *_, count in seen}
    if len(settings) > 1 or (len(counts) > 1 and not whole):
        return _NONE, [_recompute_differs(stages[0])]
    mode, classes = next(iter(settings), (RecomputeMode.NONE, ()))
    return (mode, classes, -1 if whole else max(counts, default=0)), []


_NONE: Recompute = (RecomputeMode.NONE, (), 0)


def _recompute_differs(stage: Stage) -> Violation:
    return no(
        "recompute_differs_by_layer", "layers differ in recompute beyond 'the first n of every stage'",
        ("plan", "pipelines", 0, "stages", "recompute"), actual=[run.model_dump(mode="json") for run in stage.recompute],
        allowed=["none", "all layers", "the first n layers of every stage"],
    )  # fmt: skip


def _tiers(stages: Iterable[Stage]) -> tuple[dict[str, float], list[Violation]]:
    """Host shares by tensor class when they are the same everywhere."""
    shares: list[dict[str, float]] = []
    found: list[Violation] = []
    for index, stage in enumerate(stages):
        loc = ("plan", "pipelines", 0, "stages", index, "tiers")
        here: dict[str, float] = {}
        for run in stage.tiers:
            if run.tier == Tier.DEVICE:
                continue
            covers = run.first_unit <= stage.first_unit and run.num_units >= stage.num_units
            if run.tier == Tier.NVME or not covers or run.tensor_class in ("activations", "grads"):
                message = f"{run.tensor_class} of units {run.first_unit} to {run.first_unit + run.num_units - 1} on {run.tier}"
                found.append(no("memory_tier", message, loc, allowed=["optimizer or params of all units on the host"]))
            here[run.tensor_class] = run.fraction
        shares.append(here)
    if len({tuple(sorted(share.items())) for share in shares}) > 1:
        found.append(no("tiers_differ_by_stage", "stages differ in what lies on the host", ("plan", "pipelines", 0, "stages")))
    return (shares[0] if shares else {}), found
