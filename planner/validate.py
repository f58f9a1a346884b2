"""Judging a plan: every rule that it breaks on this model, cluster and workload, all at once.

A rule about numbers of the strategy lives in ``planner.rules``; here are those about the plan's structure: units covered once,
devices used once, sequences that add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planner import rules
from planner.rules import Loc
from simulator.predict import fits, predict
from specs.cluster import ClusterSpec
from specs.errors import Violation, nearest_number
from specs.graph import ModelGraph
from specs.plan import Pipeline, Plan, Stage
from specs.profile import Profile
from specs.schedule import validate_rows
from specs.training import TrainingSpec
from specs.units import format_bytes


def validate(
    plan: Plan,
    graph: ModelGraph,
    cluster: ClusterSpec,
    workload: TrainingSpec,
    *,
    check_memory: bool = False,
    profile: Profile | None = None,
) -> list[Violation]:
    """All broken rules, none when the plan is sound. ``check_memory``: also predict the peak of every rank (only of a plan that is
    sound otherwise)."""
    found = _Validator(plan, graph, cluster, workload).run()
    if check_memory and not found:
        found = memory_violations(plan, graph, cluster, workload, profile)
    return found


def memory_violations(
    plan: Plan, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, profile: Profile | None = None
) -> list[Violation]:
    """Ranks whose predicted peak exceeds their memory, with the term that is largest."""
    prediction = predict(graph, cluster, workload, plan, profile)
    if fits(prediction):
        return []
    found = []
    for rank in prediction.ranks:
        needed = rank.memory.reserved_bytes or rank.memory.peak_bytes
        if needed > rank.memory.capacity_bytes:
            largest = max(rank.memory.terms, key=lambda name: rank.memory.terms[name])
            found.append(
                Violation(
                    code="memory", loc=("plan", "pipelines", rank.pipeline, "stages", rank.stage), actual=needed,
                    allowed=f"<= {rank.memory.capacity_bytes:.0f}",
                    message=f"stage {rank.stage} needs {format_bytes(needed)} with margin and process baseline, its devices "
                    f"have {format_bytes(rank.memory.capacity_bytes)}; most is {largest} "
                    f"({format_bytes(rank.memory.terms[largest])})",
                )
            )  # fmt: skip
    return found


class _Validator:
    """One plan under the rules."""

    def __init__(self, plan: Plan, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec) -> None:
        self.plan, self.graph, self.cluster, self.workload = plan, graph, cluster, workload
        self.places = cluster.device_table()
        self.found: list[Violation] = []

    def run(self) -> list[Violation]:
        self._hashes()
        self._batch()
        self._device_use()
        for index, pipeline in enumerate(self.plan.pipelines):
            self._pipeline(pipeline, ("plan", "pipelines", index))
        return _each_once(self.found)

    def _add(self, code: str, message: str, loc: Loc, **fields: object) -> None:
        self.found.append(Violation(code=code, message=message, loc=loc, **fields))  # type: ignore[arg-type]

    # --- the whole plan ----------------------------------------------------------------------------------------

    def _hashes(self) -> None:
        """A plan made for other documents is a plan for something else."""
        for name, document in (("model", self.graph), ("workload", self.workload)):
            stated = getattr(self.plan, f"{name}_hash")
            if stated and stated != document.content_hash():
                self._add("other_document", f"the plan was made for another {name}", ("plan", f"{name}_hash"), actual=stated)

    def _batch(self) -> None:
        plan, workload = self.plan, self.workload
        if plan.global_batch != workload.global_batch:
            self._add(
                "global_batch_changed", f"the plan trains {plan.global_batch} sequences a step, the workload asks for "
                f"{workload.global_batch}; a plan never changes the global batch", ("plan", "global_batch"),
                actual=plan.global_batch, allowed=[workload.global_batch], nearest=workload.global_batch,
            )  # fmt: skip
        sequences = [pipeline.sequences() for pipeline in plan.pipelines]
        if sum(sequences) != plan.global_batch:
            terms = " + ".join(
                f"{pipeline.num_micro_batches} x {pipeline.micro_batch} x dp {pipeline.stages[0].mesh.dp}"
                for pipeline in plan.pipelines
            )
            self._add(
                "sequences_add_up", f"{terms} = {sum(sequences)} sequences, the global batch is {plan.global_batch}",
                ("plan", "pipelines"), actual=sum(sequences), allowed=[plan.global_batch], nearest=plan.global_batch,
            )  # fmt: skip
        if plan.seq_len != workload.max_seq_len:
            self._add(
                "sequence_length",
                f"the plan is for sequences of {plan.seq_len}, the workload's longest has {workload.max_seq_len}",
                ("plan", "seq_len"), actual=plan.seq_len, allowed=[workload.max_seq_len], nearest=workload.max_seq_len,
            )  # fmt: skip

    def _device_use(self) -> None:
        """Devices exist, and each belongs to one pipeline rank only."""
        count = len(self.places)
        owners: Counter[int] = Counter()
        for pipeline in self.plan.pipelines:
            for devices in pipeline.ranks():
                owners.update(devices)
        beyond = sorted(device for device in owners if not 0 <= device < count)
        if beyond:
            self._add(
                "unknown_device", f"devices {_some(beyond)} do not exist: the cluster has {count}", ("plan", "pipelines"),
                actual=beyond, allowed=f"0 to {count - 1}", nearest=count - 1,
            )  # fmt: skip
        twice = sorted(device for device, uses in owners.items() if uses > 1)
        if twice:
            message = f"devices {_some(twice)} are used by more than one stage or pipeline"
            self._add("device_used_twice", message, ("plan", "pipelines"), actual=twice)
        both = sorted(set(self.plan.unused_devices) & set(owners))
        if both:
            self._add(
                "unused_device_used", f"devices {_some(both)} are called unused and used", ("plan", "unused_devices"), actual=both
            )
        limit = self.workload.limits.max_devices
        if limit is not None:
            self.found += rules.devices_enough(len(owners), limit, ("plan", "pipelines"), limit="the workload allows")

    # --- pipelines ---------------------------------------------------------------------------------------------

    def _pipeline(self, pipeline: Pipeline, loc: Loc) -> None:
        self._units(pipeline, loc)
        self._micro_batches(pipeline, loc)
        self._schedule(pipeline, loc)
        for index, stage in enumerate(pipeline.stages):
            self._stage(stage, pipeline, (*loc, "stages", index))

    def _units(self, pipeline: Pipeline, loc: Loc) -> None:
        """Every unit of the model exactly once, in order."""
        total = self.graph.num_units()
        covered = Counter(unit for stage in pipeline.stages for unit in range(stage.first_unit, stage.first_unit + stage.num_units))
        missing = [unit for unit in range(total) if unit not in covered]
        if missing:
            self._add(
                "units_missing", f"units {_some(missing)} of {total} are on no stage: they would be dropped", (*loc, "stages"),
                actual=[stage.num_units for stage in pipeline.stages], allowed=f"counts that add up to {total}",
            )  # fmt: skip
        twice = sorted(unit for unit, uses in covered.items() if uses > 1)
        if twice:
            self._add("unit_on_two_stages", f"units {_some(twice)} are on several stages", (*loc, "stages"), actual=twice)
        beyond = sorted(unit for unit in covered if unit >= total)
        if beyond:
            self._add(
                "unknown_unit", f"units {_some(beyond)} do not exist: the model has {total}", (*loc, "stages"), actual=beyond,
                allowed=f"0 to {total - 1}",
            )  # fmt: skip
        starts = [stage.first_unit for stage in pipeline.stages]
        if starts != sorted(starts):
            self._add("stages_out_of_order", f"stages start at units {starts}: not in model order", (*loc, "stages"), actual=starts)

    def _micro_batches(self, pipeline: Pipeline, loc: Loc) -> None:
        shares = {
            sum(stage.batch_share) if stage.batch_share else pipeline.micro_batch * stage.mesh.dp for stage in pipeline.stages
        }
        if len(shares) > 1:
            self._add(
                "unequal_micro_batch",
                f"stages of one pipeline pass {' and '.join(map(str, sorted(shares)))} sequences a micro-batch: "
                "what one sends the next must take", (*loc, "stages"), actual=sorted(shares),
            )  # fmt: skip
        self.found += rules.micro_batch_allowed(self.workload, pipeline.micro_batch, (*loc, "micro_batch"))

    def _schedule(self, pipeline: Pipeline, loc: Loc) -> None:
        plan, pp, where = self.plan, pipeline.pp, ("plan", "schedule")
        per_rank = len(pipeline.stages) / pp
        if plan.schedule.name == "custom":
            rows = plan.schedule.actions(num_ranks=pp, num_micro_batches=pipeline.num_micro_batches)
            if len(rows) != pp:
                self._add(
                    "rows_per_rank", f"{len(rows)} schedule rows for {pp} pipeline ranks", where, actual=len(rows), allowed=[pp]
                )
                return
            broken = validate_rows(rows, num_stages=len(pipeline.stages), num_micro_batches=pipeline.num_micro_batches)
            self.found += broken
            if not broken:
                self._stage_places(pipeline, loc)
            return
        if per_rank != plan.schedule.stages_per_rank:
            self._add(
                "stages_per_rank", f"{len(pipeline.stages)} stages on {pp} pipeline ranks, the schedule says "
                f"{plan.schedule.stages_per_rank} a rank", (*loc, "stages"), actual=per_rank,
                allowed=[plan.schedule.stages_per_rank],
            )  # fmt: skip
            return
        found = rules.schedule_rules(
            plan.schedule.name, pp=pp, num_micro_batches=pipeline.num_micro_batches, stages_per_rank=plan.schedule.stages_per_rank,
            loc=where, micro_batch=pipeline.micro_batch, dp=pipeline.stages[0].mesh.dp,
        )  # fmt: skip
        self.found += found
        if not found:
            self._stage_places(pipeline, loc)

    def _stage_places(self, pipeline: Pipeline, loc: Loc) -> None:
        """Each stage on the pipeline rank that runs it."""
        grids = pipeline.ranks()
        placed = [grids.index(stage.devices) for stage in pipeline.stages]
        wanted = list(self.plan.schedule.stage_ranks(num_ranks=pipeline.pp))
        if placed != wanted:
            self._add(
                "stage_on_other_rank", f"stages lie on pipeline ranks {_some(placed)}, the schedule runs them on {_some(wanted)}",
                (*loc, "stages"), actual=placed, allowed=wanted,
            )  # fmt: skip

    # --- stages ------------------------------------------------------------------------------------------------

    def _stage(self, stage: Stage, pipeline: Pipeline, loc: Loc) -> None:
        mesh, workload = stage.mesh, self.workload
        self._mesh(stage, loc)
        self.found += rules.tp_divides_sizes(self.graph, mesh.tp, (*loc, "mesh", "tp"))
        self.found += rules.zero_with_pipeline(stage.zero, pipeline.pp, (*loc, "zero"))
        self.found += rules.shard_group_divides_dp(stage.shard_group, mesh.dp, stage.zero, (*loc, "shard_group"))
        self.found += rules.sequence_divisible_by_tp(
            workload.max_seq_len, mesh.tp, stage.sequence_parallel, (*loc, "sequence_parallel")
        )
        self.found += rules.sequence_divisible_by_cp(
            workload.max_seq_len, mesh.cp, mesh.tp, stage.sequence_parallel, (*loc, "mesh", "cp")
        )
        self.found += rules.cp_splits_attention(self.graph, mesh.cp, (*loc, "mesh", "cp"))
        if mesh.ep > 1:
            ranks, of = (mesh.size, "dp x cp x tp") if mesh.whole_experts else (mesh.dp * mesh.cp, "dp x cp")
            self.found += rules.ep_divides_experts(rules.num_experts(self.graph), mesh.ep, (*loc, "mesh", "ep"))
            self.found += rules.ep_divides_ranks(mesh.ep, ranks, (*loc, "mesh", "ep"), of=of)
        for index, run in enumerate(stage.recompute):
            self.found += rules.recompute_classes(run.mode, run.op_classes, (*loc, "recompute", index))
            last = stage.first_unit + stage.num_units
            if run.first_unit < stage.first_unit or run.first_unit + run.num_units > last:
                self._add(
                    "recompute_outside_stage",
                    f"recompute of units {run.first_unit} to {run.first_unit + run.num_units - 1} reaches "
                    f"outside the stage ({stage.first_unit} to {last - 1})", (*loc, "recompute", index),
                )  # fmt: skip

    def _mesh(self, stage: Stage, loc: Loc) -> None:
        mesh = stage.mesh
        if mesh.size != len(stage.devices):
            self._add(
                "mesh_size",
                f"dp {mesh.dp} x cp {mesh.cp} x tp {mesh.tp} = {mesh.size} devices, the stage lists {len(stage.devices)}",
                (*loc, "mesh"), actual=mesh.size, allowed=[len(stage.devices)], nearest=len(stage.devices),
            )  # fmt: skip
            return
        if len(set(stage.devices)) != len(stage.devices):
            self._add("device_listed_twice", "a device stands twice in the stage's grid", (*loc, "devices"))
        if any(not 0 <= device < len(self.places) for device in stage.devices):
            return
        groups = [stage.devices[start : start + mesh.tp] for start in range(0, len(stage.devices), mesh.tp)]
        crossing = [group for group in groups if len({self.places[device].node for device in group}) > 1]
        if crossing:
            sizes = {self.cluster.nodes[self.places[device].group].devices_per_node or 1 for device in crossing[0]}
            allowed = [value for value in rules.divisors(min(sizes)) if not rules.tp_divides_sizes(self.graph, value, ())]
            self._add(
                "tp_inside_node", f"tp group of devices {_some(crossing[0])} crosses nodes", (*loc, "devices"), actual=mesh.tp,
                allowed=allowed, nearest=nearest_number(mesh.tp, allowed),
            )  # fmt: skip


def _each_once(violations: Sequence[Violation]) -> list[Violation]:
    """The same rule broken alike on many stages is one violation, at the first of them."""
    first: dict[tuple[str, str], Violation] = {}
    for violation in violations:
        first.setdefault((violation.code, violation.message), violation)
    return list(first.values())


def _some(values: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(str(item) for item in values[:most])
    return f"{shown} and {len(values) - most} more" if len(values) > most else shown
