"""What this executor can run. Everything it cannot is refused before any process starts, all reasons at once."""

from __future__ import annotations

from collections.abc import Iterator

from profiler.opset import OpClass
from specs.errors import InvalidInput, Violation
from specs.graph import ModelGraph
from specs.plan import Pipeline, Plan, RecomputeMode, RecomputeRun, Stage
from specs.schedule import stage_ranks_of
from specs.training import TrainingSpec

SUPPORTED_DTYPES = ("float32", "bfloat16", "float64")
TOKEN_FILE_SUFFIX = ".npy"


def require_supported(plan: Plan, graph: ModelGraph, workload: TrainingSpec) -> None:
    """Raise :class:`InvalidInput` with every reason why the plan cannot be executed for this model and workload."""
    violations = [*plan_violations(plan, graph), *workload_violations(plan, workload)]
    if violations:
        raise InvalidInput(violations, subject="plan cannot be executed")


def mismatches(plan: Plan, graph: ModelGraph, workload: TrainingSpec) -> list[str]:
    """Documents that are not those the plan was made for (by content hash)."""
    pairs = (("model", plan.model_hash, graph.content_hash()), ("workload", plan.workload_hash, workload.content_hash()))
    return [
        f"the plan was made for another {name}: hash {made_for[:12]}, given {given[:12]}"
        for name, made_for, given in pairs
        if made_for and made_for != given
    ]


def _violation(code: str, message: str, *loc: str | int, **fields: object) -> Violation:
    return Violation(code=code, message=message, loc=("plan", *loc), **fields)  # type: ignore[arg-type]


def plan_violations(plan: Plan, graph: ModelGraph) -> list[Violation]:
    """Rules on the plan and its model."""
    if len(plan.pipelines) != 1:
        return [_violation("one_pipeline", f"{len(plan.pipelines)} pipelines; the executor runs one", "pipelines", allowed=1)]
    pipeline = plan.pipelines[0]
    found = [*_unit_violations(pipeline, graph), *_mesh_violations(pipeline), *_batch_violations(plan, pipeline)]
    for index, stage in enumerate(pipeline.stages):
        found += _stage_violations(stage, index, plan.seq_len)
        found += _mixer_violations(stage, index, graph)
        found += _context_violations(plan, stage, index, graph)
    if not found:
        found += [*_schedule_violations(plan, pipeline), *_tied_violations(pipeline, graph)]
    return found


def _tied_violations(pipeline: Pipeline, graph: ModelGraph) -> Iterator[Violation]:
    """``fully_shard`` gives each stage shards of its own, so two stages of a rank cannot share a sharded parameter."""
    first = pipeline.stages[0]
    if not first.zero or first.mesh.dp * first.mesh.cp == 1:
        return
    unit_of = unit_of_params(graph)
    for alias, owner in graph.tied:
        held = [stage for stage in pipeline.stages for fqn in (alias, owner) if _holds(stage, unit_of[fqn])]
        if held[0] is not held[-1] and held[0].devices == held[-1].devices:
            yield _violation(
                "tied_over_stages_of_a_rank", f"'{alias}' and '{owner}' are tied and on two stages of one rank",
                "pipelines", 0, "stages", 0, "zero", actual=first.zero, allowed=[0], nearest=0,
            )  # fmt: skip


def unit_of_params(graph: ModelGraph) -> dict[str, int]:
    """Unit number of every parameter by full name."""
    found = {}
    for unit, (segment, repetition) in enumerate(graph.units()):
        for param in graph.block(segment.block).params:
            found[param.fqn.replace("{i}", str(segment.first_index + repetition))] = unit
    return found


def _holds(stage: Stage, unit: int) -> bool:
    return stage.first_unit <= unit < stage.first_unit + stage.num_units


def _unit_violations(pipeline: Pipeline, graph: ModelGraph) -> Iterator[Violation]:
    expected = 0
    for index, stage in enumerate(pipeline.stages):
        if stage.first_unit != expected:
            yield _violation(
                "units_in_order", f"stage {index} begins at unit {stage.first_unit}, not at unit {expected}",
                "pipelines", 0, "stages", index, "first_unit", actual=stage.first_unit, nearest=expected,
            )  # fmt: skip
        expected = stage.first_unit + stage.num_units
    if expected != graph.num_units():
        yield _violation(
            "units_cover_model", f"the stages end at unit {expected}, but model '{graph.name}' has {graph.num_units()} units",
            "pipelines", 0, "stages", actual=expected, allowed=graph.num_units(),
        )  # fmt: skip


def _mesh_violations(pipeline: Pipeline) -> Iterator[Violation]:
    first = pipeline.stages[0]
    for index, stage in enumerate(pipeline.stages):
        loc = ("pipelines", 0, "stages", index)
        fields = ("mesh", "zero", "shard_group", "sequence_parallel", "batch_share")
        if unlike := [name for name in fields if getattr(stage, name) != getattr(first, name)]:
            yield _violation("equal_stages", f"stage {index} differs from stage 0 in {', '.join(unlike)}", *loc)
        if len(stage.devices) != stage.mesh.size or len(set(stage.devices)) != len(stage.devices):
            yield _violation(
                "devices_of_mesh", f"{len(set(stage.devices))} distinct devices for a mesh of {stage.mesh.size}", *loc, "devices"
            )
    grids = pipeline.ranks()
    if len({device for grid in grids for device in grid}) != sum(len(grid) for grid in grids):
        yield _violation("disjoint_grids", "two pipeline ranks share a device", "pipelines", 0, "stages")


def _batch_violations(plan: Plan, pipeline: Pipeline) -> Iterator[Violation]:
    loc = ("pipelines", 0)
    stage = pipeline.stages[0]
    dp, shares = stage.mesh.dp, stage.batch_share
    if shares is not None and (len(shares) != dp or min(shares, default=0) < 1):
        message = f"batch_share {list(shares)} must name at least one sequence for each of the {dp} dp ranks"
        yield _violation("batch_share", message, *loc, "stages", 0, "batch_share", actual=list(shares))
    sequences = pipeline.sequences()
    if sequences != plan.global_batch:
        rows = f"batch_share {list(shares)}" if shares is not None else f"micro_batch {pipeline.micro_batch} x dp {dp}"
        yield _violation(
            "global_batch", f"{rows} x {pipeline.num_micro_batches} micro-batches = {sequences} sequences, not the global batch of "
            f"{plan.global_batch}", *loc, actual=sequences, allowed=plan.global_batch,
        )  # fmt: skip


def _stage_violations(stage: Stage, index: int, seq_len: int) -> Iterator[Violation]:
    loc = ("pipelines", 0, "stages", index)
    unsupported = {"tiers": bool(stage.tiers), "state_share": stage.state_share is not None}
    for name, used in unsupported.items():
        if used:
            yield _violation("not_executable", f"'{name}' is planned and simulated, but not executed", *loc, name)
    if stage.mesh.tp > 1 and not stage.placements:
        yield _violation("no_placements", f"tp {stage.mesh.tp} but no parameter is split", *loc, "placements")
    if stage.sequence_parallel and seq_len // stage.mesh.cp % stage.mesh.tp:
        yield _violation(
            "sequence_divisible_by_tp", f"sequence of {seq_len} is no multiple of cp {stage.mesh.cp} x tp {stage.mesh.tp}", *loc,
            actual=seq_len,
        )  # fmt: skip
    if stage.shard_group is not None and stage.mesh.dp % stage.shard_group:
        yield _violation("shard_group_divides_dp", f"shard_group {stage.shard_group} does not divide dp {stage.mesh.dp}", *loc)
    yield from _expert_violations(stage, loc)
    for run in stage.recompute:
        for violation in _op_class_violations(run):
            yield _violation(
                violation.code, violation.message, *loc, "recompute", actual=violation.actual, allowed=violation.allowed
            )


def _expert_violations(stage: Stage, loc: tuple[str | int, ...]) -> Iterator[Violation]:
    mesh = stage.mesh
    ranks = mesh.size if mesh.whole_experts else mesh.dp * mesh.cp
    if mesh.whole_experts and mesh.tp > 1 and not stage.sequence_parallel:
        yield _violation("whole_experts", "whole_experts needs sequence_parallel: each rank routes its own tokens", *loc, "mesh")
    if ranks % mesh.ep:
        yield _violation(
            "ep_divides_ranks", f"ep {mesh.ep} does not divide the {ranks} ranks that experts spread over", *loc, "mesh"
        )
        return
    replicas, shards = ranks // mesh.ep, (stage.shard_group or mesh.dp) * mesh.cp
    if mesh.ep > 1 and stage.zero and replicas > shards and replicas % shards:
        yield _violation(
            "expert_shards", f"{replicas} replicas of an expert are no multiple of {shards} shards", *loc, "shard_group"
        )


def _context_violations(plan: Plan, stage: Stage, index: int, graph: ModelGraph) -> Iterator[Violation]:
    cp, tp = stage.mesh.cp, stage.mesh.tp
    if cp == 1:
        return
    loc = ("pipelines", 0, "stages", index, "mesh", "cp")
    ring = plan.collectives.context_parallel == "ring"
    parts = 2 * cp if ring else cp
    if plan.seq_len % parts:
        message = f"sequence of {plan.seq_len} is not divisible into the {parts} equal parts of cp {cp}"
        yield _violation("sequence_divisible_by_cp", message, *loc, actual=plan.seq_len)
    heads = graph.attributes.get("heads")
    if not ring and isinstance(heads, int) and heads % (cp * tp):
        yield _violation("heads_divisible_by_cp", f"{heads} heads are no multiple of cp {cp} x tp {tp}", *loc, actual=heads)
    unsplit = {"mamba": "state-space mixers, which carry a state along the sequence"}
    if ring:
        unsplit["latent"] = "latent attention in a ring, whose values are narrower than its keys"
    for name, words in unsplit.items():
        if graph.attributes.get(name):
            yield _violation("not_executable", f"cp {cp} of {words}, is planned and simulated, but not executed", *loc, actual=cp)


# Settings of mixers in which tensor-parallel ranks share or slice tensors that are no weight of a product.
_NOT_SPLIT = {"latent": "latent attention, whose rotary keys all heads share", "mamba": "state-space mixers"}


def _mixer_violations(stage: Stage, index: int, graph: ModelGraph) -> Iterator[Violation]:
    for name, words in _NOT_SPLIT.items():
        if stage.mesh.tp > 1 and graph.attributes.get(name):
            yield _violation(
                "not_executable", f"tp {stage.mesh.tp} of {words} is planned and simulated, but not executed",
                "pipelines", 0, "stages", index, "mesh", "tp", actual=stage.mesh.tp, allowed=[1], nearest=1,
            )  # fmt: skip


def _op_class_violations(run: RecomputeRun) -> list[Violation]:
    """Classes of a selective run that do not exist, or none at all; ``loc`` is the caller's to add."""
    if run.mode is not RecomputeMode.SELECTIVE:
        return []
    known = sorted(str(item) for item in OpClass)
    unknown = [name for name in run.op_classes if name not in known]
    found = [Violation(code="unknown_op_class", message=f"op class '{name}'", actual=name, allowed=known) for name in unknown]
    if not run.op_classes:
        found.append(Violation(code="no_op_class", message="selective recompute lists no op class", allowed=known))
    return found


def _schedule_violations(plan: Plan, pipeline: Pipeline) -> list[Violation]:
    if pipeline.pp == 1:
        return []
    found = []
    if pipeline.stages[0].zero == 3:
        found.append(
            _violation(
                "zero_3_with_pipeline", f"zero 3 with pp {pipeline.pp}: parameters stay gathered under a pipeline",
                "pipelines", 0, "stages", 0, "zero", actual=3, allowed=[0, 1, 2], nearest=2,
            )
        )  # fmt: skip
    try:
        rows = plan.schedule.actions(num_ranks=pipeline.pp, num_micro_batches=pipeline.num_micro_batches)
    except InvalidInput as error:
        return found + list(error.violations)
    grids = pipeline.ranks()
    placed = {index: grids.index(stage.devices) for index, stage in enumerate(pipeline.stages)}
    if placed != stage_ranks_of(rows):
        message = f"stages lie on pipeline ranks {list(placed.values())}, the schedule's rows run them elsewhere"
        found.append(_violation("stage_on_other_rank", message, "pipelines", 0, "stages", actual=list(placed.values())))
    return found


def workload_violations(plan: Plan, workload: TrainingSpec) -> list[Violation]:
    """Rules on the workload."""
    found = []
    if workload.global_batch != plan.global_batch:
        found.append(
            _violation("global_batch", f"the plan is for {plan.global_batch} sequences, the workload has {workload.global_batch}")
        )
    if workload.seq_len is None:
        found.append(
            Violation(code="fixed_length", message="runs need a fixed seq_len, not a histogram", loc=("workload", "seq_len"))
        )
    elif workload.seq_len != plan.seq_len:
        found.append(_violation("seq_len", f"the plan is for sequences of {plan.seq_len}, the workload has {workload.seq_len}"))
    precision = workload.precision
    if precision.param_dtype not in SUPPORTED_DTYPES:
        found.append(_workload("precision", f"parameters in {precision.param_dtype}", allowed=SUPPORTED_DTYPES))
    if len({precision.param_dtype, precision.compute_dtype, precision.grad_dtype}) > 1:
        found.append(
            _workload("precision", "runs compute and keep gradients in the parameters' dtype; master weights may be float32")
        )
    if precision.accumulate_dtype is not None:
        found.append(_workload("precision", f"a second gradient buffer in {precision.accumulate_dtype}", allowed=[None]))
    if precision.frozen_dtype not in (None, precision.param_dtype):
        message = f"frozen parameters in {precision.frozen_dtype}, the others in {precision.param_dtype}"
        found.append(_workload("precision", message, allowed=[None, precision.param_dtype]))
    if workload.optimizer.state_dtype != (precision.master_dtype or precision.param_dtype):
        found.append(
            _workload("optimizer", f"optimizer state in {workload.optimizer.state_dtype}, weights that it updates are not")
        )
    if plan.loss_kernel not in ("", "full"):
        found.append(_violation("loss_kernel", f"the plan's loss kernel is '{plan.loss_kernel}'", "loss_kernel", allowed=["full"]))
    if workload.adapters is not None:
        found.append(_workload("adapters", "low-rank adapters beside a frozen model", allowed=[None]))
    if workload.loss_kernel != "full":
        found.append(_workload("loss_kernel", f"loss kernel '{workload.loss_kernel}'", allowed=["full"]))
    if workload.attention_kernel != "flash":
        found.append(_workload("attention_kernel", f"attention kernel '{workload.attention_kernel}'", allowed=["flash"]))
    if workload.data_source != "synthetic" and not workload.data_source.endswith(TOKEN_FILE_SUFFIX):
        found.append(
            _workload("data_source", f"data source '{workload.data_source}'", allowed=["synthetic", "a .npy file of token ids"])
        )
    return found


def _workload(field: str, message: str, **fields: object) -> Violation:
    return Violation(code="not_executable", message=message, loc=("workload", field), **fields)  # type: ignore[arg-type]
