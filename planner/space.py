"""The strategy space: every skeleton that the rules allow, as columns of a NumPy array, and counts of what they forbid.

A *skeleton* is a strategy without its stage split. A *layout* is what skeletons share: a pool of devices cut into
``pp x dp x cp x tp``. What breaks a rule is counted once at the level where it breaks (a tp that the heads forbid counts once per
pool, not once per strategy that it would have had).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner import rules
from planner.layout import Pool
from planner.prices import layer_range
from planner.sites import Degrees
from planner.strategy_text import Strategy, recompute_text
from profiler.opset import OpClass
from simulator.unit_cost import RecomputeChoice
from specs.errors import Violation
from specs.graph import ModelGraph
from specs.plan import RecomputeMode
from specs.schedule import SCHEDULES
from specs.training import TrainingSpec

ROW = np.dtype(
    [
        ("layout", np.int32), ("combination", np.int32), ("variant", np.int32), ("schedule", np.int8), ("micro_batch", np.int32),
        ("num_micro_batches", np.int32), ("zero", np.int8), ("shard_group", np.int32), ("sequence_parallel", np.bool_),
        ("recompute", np.int8),
    ]
)  # fmt: skip
Rows = NDArray[np.void]
# Context parallel leaves a rank at least this many tokens of a sequence, unless a degree is given.
LEAST_TOKENS = 512
# Between the shard groups that are tried: one node, then this many times as large, and so on.
GROUP_STEP = 4


@dataclass(frozen=True)
class Layout:
    """A pool of devices as ``pp`` pipeline ranks of ``dp x cp x tp``; experts over ``ep`` of those (:class:`specs.plan.Mesh`)."""

    pool: Pool
    pp: int
    dp: int
    tp: int
    cp: int = 1
    ep: int = 1
    whole_experts: bool = False

    def degrees(self, shard_group: int | None = None) -> Degrees:
        """How a stage's devices are split."""
        return Degrees(self.tp, self.cp, self.ep, self.whole_experts, shard_group)


@dataclass(frozen=True)
class Schedule:
    """A named schedule with its stages per pipeline rank."""

    name: str
    chunks: int = 1

    def __str__(self) -> str:
        return self.name if self.chunks == 1 else f"{self.name} x{self.chunks}"


@dataclass
class Space:
    """Skeletons and what was rejected before pricing. ``examples``: one violation of each broken rule.

    Rows of one ``combination`` have layout, micro-batch, sequence parallel and recompute in common, so the prices of their units;
    rows of one ``variant`` layout, zero stage and shard group, so how states are kept and reduced. ``*_rows``: one row of each.
    """

    layouts: list[Layout]
    rows: Rows
    recomputes: list[RecomputeChoice]
    schedules: list[Schedule]
    rejected: dict[str, int] = field(default_factory=dict)
    examples: dict[str, Violation] = field(default_factory=dict)

    def strategy(self, index: int) -> Strategy:
        """The skeleton in row ``index``."""
        row = self.rows[index]
        layout, recompute = self.layouts[int(row["layout"])], self.recomputes[int(row["recompute"])]
        schedule = self.schedules[int(row["schedule"])]
        return Strategy(
            pp=layout.pp, dp=layout.dp, cp=layout.cp, tp=layout.tp, ep=layout.ep, whole_experts=layout.whole_experts,
            micro_batch=int(row["micro_batch"]), zero=int(row["zero"]), shard_group=int(row["shard_group"]) or None,
            sequence_parallel=bool(row["sequence_parallel"]),
            recompute=recompute.mode, op_classes=recompute.op_classes, schedule=schedule.name,
            chunks=schedule.chunks if layout.pp > 1 and schedule.chunks > 1 else None,
        )  # fmt: skip

    @cached_property
    def combination_rows(self) -> NDArray[np.int64]:
        """A row of each combination."""
        return _one_of_each(self.rows["combination"])

    @cached_property
    def variant_rows(self) -> NDArray[np.int64]:
        """A row of each variant."""
        return _one_of_each(self.rows["variant"])

    def layout(self, index: int) -> Layout:
        """The layout of row ``index``."""
        return self.layouts[int(self.rows[index]["layout"])]

    def dimensions(self) -> dict[str, list[int | str]]:
        """The values tried per dimension."""
        used = [self.layouts[index] for index in np.unique(self.rows["layout"]).tolist()]
        columns: dict[str, list[int | str]] = {
            "devices": sorted({layout.pool.size for layout in used}),
            "pp": sorted({layout.pp for layout in used}), "dp": sorted({layout.dp for layout in used}),
            "cp": sorted({layout.cp for layout in used}), "tp": sorted({layout.tp for layout in used}),
            "ep": sorted({layout.ep for layout in used}),
        }  # fmt: skip
        for name in ("micro_batch", "zero", "sequence_parallel"):
            columns[name] = [int(value) for value in np.unique(self.rows[name])]
        columns["shard_group"] = [int(value) or "dp" for value in np.unique(self.rows["shard_group"])]
        columns["recompute"] = [recompute_text(choice.mode, choice.op_classes) for choice in self.recomputes]
        columns["schedule"] = [str(self.schedules[index]) for index in np.unique(self.rows["schedule"]).tolist()]
        return columns


class _Enumeration:
    """Walks pools, then tp, cp, pp, ep, micro-batch and the rest, dropping what a rule forbids."""

    def __init__(self, graph: ModelGraph, workload: TrainingSpec, fixed: Mapping[str, Any]) -> None:
        self.graph, self.workload, self.fixed = graph, workload, fixed
        self.num_units = graph.num_units()
        self.num_layers = len(layer_range(graph))
        self.num_experts = rules.num_experts(graph)
        self.rejected: dict[str, int] = {}
        self.examples: dict[str, Violation] = {}
        self.layouts: list[Layout] = []
        self.recomputes = self._recomputes()
        self.schedules: list[Schedule] = []
        self.num_combinations = self.num_variants = 0
        self._size_violations: dict[int, list[Violation]] = {}
        self._cp_violations: dict[int, list[Violation]] = {}
        self._schedules_at: dict[int, list[Schedule]] = {}
        self._runs: dict[tuple[int, int], tuple[list[int], list[Violation]]] = {}

    def _recomputes(self) -> list[RecomputeChoice]:
        if "recompute" in self.fixed:
            return [RecomputeChoice(self.fixed["recompute"], tuple(self.fixed.get("op_classes", ())))]
        choices = [RecomputeChoice(), RecomputeChoice(RecomputeMode.FULL)]
        if self.workload.attention_kernel == "math":  # drops the scores; flash attention keeps none, so there it saves nothing
            choices.insert(1, RecomputeChoice(RecomputeMode.SELECTIVE, (OpClass.ATTENTION.value,)))
        return choices

    def _reject(self, violations: Sequence[Violation], count: int = 1) -> bool:
        for violation in violations:
            self.rejected[violation.code] = self.rejected.get(violation.code, 0) + count
            self.examples.setdefault(violation.code, violation)
        return bool(violations)

    def _wanted(self, name: str, values: Sequence[int]) -> list[int]:
        return [self.fixed[name]] if self.fixed.get(name) is not None else list(values)

    def run(self, pools: Sequence[Pool]) -> Space:
        parts = [part for pool in pools for part in self._pool(pool)]
        rows = np.concatenate(parts) if parts else np.empty(0, ROW)
        return Space(self.layouts, rows, self.recomputes, self.schedules, self.rejected, self.examples)

    # --- layouts -----------------------------------------------------------------------------------------------

    def _pool(self, pool: Pool) -> Iterator[Rows]:
        for tp in self._wanted("tp", range(1, max(pool.node_sizes) + 1)):
            if self._reject(self._tp_violations(tp)) or self._reject(rules.tp_inside_node(tp, pool.node_sizes, ("tp",))):
                continue
            groups = pool.size // tp
            for pp in self._wanted("pp", rules.divisors(groups)):
                if self._reject(rules.pp_at_most_units(pp, self.num_units, ("pp",))) or groups % pp:
                    continue
                if pp == 1 and not _natural_order(pool):
                    continue  # the order of the groups only orders stages
                for cp in self._cps(groups // pp):
                    dp = groups // pp // cp
                    if self.fixed.get("dp") not in (None, dp):
                        continue
                    for ep, whole in self._eps(dp, cp, tp):
                        yield from self._layout(Layout(pool, pp, dp, tp, cp, ep, whole))

    def _tp_violations(self, tp: int) -> list[Violation]:
        if tp not in self._size_violations:
            self._size_violations[tp] = rules.tp_divides_sizes(self.graph, tp, ("tp",))
        return self._size_violations[tp]

    def _cps(self, ranks: int) -> list[int]:
        """Context-parallel degrees of ``ranks`` that the sequence and the model allow."""
        most = max(1, self.workload.max_seq_len // LEAST_TOKENS)
        found = []
        for cp in self._wanted("cp", [cp for cp in rules.divisors(ranks) if cp <= most]):
            if cp not in self._cp_violations:
                given = rules.sequence_divisible_by_cp(self.workload.max_seq_len, cp, 1, False, ("cp",))
                self._cp_violations[cp] = given + rules.cp_splits_attention(self.graph, cp, ("cp",))
            if not self._reject(self._cp_violations[cp]) and ranks % cp == 0:
                found.append(cp)
        return found

    def _eps(self, dp: int, cp: int, tp: int) -> list[tuple[int, bool]]:
        """(expert-parallel degree, whole experts) that the model and the ranks allow."""
        found = []
        for ep in self._wanted("ep", rules.divisors(self.num_experts) if self.num_experts else [1]):
            if self._reject(rules.ep_divides_experts(self.num_experts, ep, ("ep",))):
                continue
            for whole in [self.fixed["whole_experts"]] if "whole_experts" in self.fixed else (False, True):
                if whole and (ep == 1 or tp == 1):
                    continue
                if (dp * cp * (tp if whole else 1)) % ep == 0:
                    found.append((ep, whole))
        return found

    # --- rows of a layout --------------------------------------------------------------------------------------

    def _layout(self, layout: Layout) -> Iterator[Rows]:
        batch, dp = self.workload.global_batch, layout.dp
        if batch % dp:
            self._reject(rules.batch_splits(batch, dp, 1, ()))
            return
        sizes, variants = self._micro_batches(batch // dp), self._variants(layout)
        timed = [(size, schedule) for size in sizes for schedule in self._schedules_of(layout, batch // dp, size)]
        parallel = self._sequence_parallel(layout)
        if not timed or not variants or not parallel:
            return
        self.layouts.append(layout)
        sizes = sorted({size for size, _ in timed})
        shape = (len(parallel), len(self.recomputes), len(timed), len(variants))
        rows = np.empty(shape, ROW)
        size_of = np.array([size for size, _ in timed])
        each = len(parallel) * len(self.recomputes)
        own = np.searchsorted(sizes, size_of)[None, None, :, None] * each
        own = own + np.arange(each).reshape(len(parallel), len(self.recomputes))[:, :, None, None]
        rows["layout"] = len(self.layouts) - 1
        rows["combination"] = self.num_combinations + own
        rows["variant"] = self.num_variants + np.arange(len(variants))
        rows["micro_batch"] = size_of[:, None]
        rows["num_micro_batches"] = (batch // dp // size_of)[:, None]
        rows["schedule"] = np.array([schedule for _, schedule in timed])[:, None]
        rows["zero"] = np.array([zero for zero, _ in variants])
        rows["shard_group"] = np.array([group for _, group in variants])
        rows["sequence_parallel"] = np.array(parallel)[:, None, None, None]
        rows["recompute"] = np.arange(len(self.recomputes))[:, None, None]
        self.num_combinations += len(sizes) * each
        self.num_variants += len(variants)
        yield rows.ravel()

    def _micro_batches(self, sequences: int) -> list[int]:
        """Micro-batches that divide the sequences of one dp rank and that the workload allows."""
        sizes = self._wanted("micro_batch", rules.divisors(sequences))
        allowed = [size for size in sizes if not self._reject(rules.micro_batch_allowed(self.workload, size, ("micro_batch",)))]
        return [size for size in allowed if not self._reject(rules.batch_splits(sequences, 1, size, ()))]

    def _schedules_of(self, layout: Layout, sequences: int, size: int) -> list[int]:
        """Numbers of the schedules that the layout can run with micro-batches of ``size``; one stands for all at pp 1."""
        if layout.pp == 1:
            return [self._number(Schedule(str(self.fixed.get("schedule", "1f1b")), self.fixed.get("chunks") or 1))]
        key = (layout.pp, sequences // size)
        if key not in self._runs:
            numbers, broken = [], []
            for schedule in self._possible(layout.pp):
                violations = rules.schedule_rules(
                    schedule.name, pp=layout.pp, num_micro_batches=sequences // size, stages_per_rank=schedule.chunks,
                    loc=("micro_batch",), micro_batch=size, dp=layout.dp,
                )  # fmt: skip
                broken += violations
                if not violations:
                    numbers.append(self._number(schedule))
            self._runs[key] = (numbers, broken)
        numbers, broken = self._runs[key]
        self._reject(broken)
        if layout.pool.uniform or "schedule" in self.fixed:
            return numbers
        # Over unlike devices each 1F1B or GPipe candidate needs an integer program, and GPipe, which holds every micro-batch, can
        # only win where messages are long: there it is tried with too few micro-batches for 1F1B alone.
        few = sequences // size < layout.pp
        return [number for number in numbers if few or self.schedules[number].name != "gpipe"]

    def _possible(self, pp: int) -> list[Schedule]:
        """Schedules with the chunks that share a rank's layers evenly."""
        if pp not in self._schedules_at:
            self._schedules_at[pp] = self._find_possible(pp)
        return self._schedules_at[pp]

    def _find_possible(self, pp: int) -> list[Schedule]:
        names = [self.fixed["schedule"]] if "schedule" in self.fixed else list(SCHEDULES)
        of_rank = {self.num_layers // pp, -(-self.num_layers // pp)}
        several = sorted({value for count in of_rank for value in rules.divisors(max(count, 1)) if value > 1})
        found = []
        for name in names:
            wanted = SCHEDULES[name].stages_per_rank
            for chunks in [wanted] if wanted is not None else self._wanted("chunks", several):
                given = self.fixed.get("split")
                if self.fixed.get("chunks") not in (None, chunks) or (given is not None and len(given) != pp * chunks):
                    continue
                if not self._reject(rules.pp_at_most_units(pp, self.num_units, ("pp",), chunks)):
                    found.append(Schedule(name, chunks))
        return found

    def _number(self, schedule: Schedule) -> int:
        if schedule not in self.schedules:
            self.schedules.append(schedule)
        return self.schedules.index(schedule)

    def _sequence_parallel(self, layout: Layout) -> list[bool]:
        if layout.tp == 1:
            return [False]
        values = [self.fixed["sequence_parallel"]] if "sequence_parallel" in self.fixed else [True, False]
        seq, tp, loc = self.workload.max_seq_len, layout.tp, ("sequence_parallel",)
        return [
            value
            for value in values
            if not self._reject(rules.sequence_divisible_by_tp(seq, tp, value, loc))
            and not self._reject(rules.sequence_divisible_by_cp(seq, layout.cp, tp, value, loc))
            and not self._reject(rules.whole_experts_rule(layout.whole_experts, layout.ep, tp, value, loc))
        ]

    def _variants(self, layout: Layout) -> list[tuple[int, int]]:
        """(zero, shard group) pairs; 0 as group = all of dp. States may also be sharded inside some nodes only."""
        variants: list[tuple[int, int]] = []
        for zero in self._wanted("zero", range(4) if layout.dp * layout.cp > 1 else range(1)):
            if self._reject(rules.zero_with_pipeline(zero, layout.pp, ("zero",))):
                continue
            groups = [0] if zero == 0 else [0, *self._groups(layout)]
            if self.fixed.get("shard_group") is not None:
                groups = [self.fixed["shard_group"]]
            for group in groups:
                if not self._reject(rules.shard_group_divides_dp(group or None, layout.dp, zero, ("shard_group",))):
                    variants.append((zero, group))
        return variants

    def _groups(self, layout: Layout) -> list[int]:
        """dp ranks of one node, of four, of sixteen ... as a shard group, where a stage spans more."""
        inside = min(layout.pool.node_sizes) // (layout.tp * layout.cp)
        found, group = [], max(inside, 1)
        while group < layout.dp:
            if group > 1 and layout.dp % group == 0:
                found.append(group)
            group *= GROUP_STEP
        return found


def _one_of_each(column: NDArray[np.int32]) -> NDArray[np.int64]:
    """A position of each value 0, 1, 2 ... of a column that has them all."""
    found = np.zeros(int(column.max(initial=-1)) + 1, dtype=np.int64)
    found[column] = np.arange(len(column))
    return found


def _natural_order(pool: Pool) -> bool:
    return all(low < high for low, high in zip(pool.devices, pool.devices[1:], strict=False))


def enumerate_space(
    graph: ModelGraph, workload: TrainingSpec, pools: Sequence[Pool], fixed: Mapping[str, Any] | None = None
) -> Space:
    """All skeletons on ``pools``. ``fixed``: strategy fields (``planner.strategy_text.parse_fields``) that must hold."""
    return _Enumeration(graph, workload, fixed or {}).run(pools)
