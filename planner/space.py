"""The strategy space: every skeleton that the rules allow, as columns of a NumPy array, and counts of what they forbid.

A *skeleton* is a strategy without its stage split. A *layout* is what skeletons share: a pool of devices cut into
``pp x dp x tp``. What breaks a rule is counted once at the level where it breaks (a tp that the heads forbid counts once per
pool, not once per strategy that it would have had).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner import rules
from planner.layout import Pool
from planner.strategy_text import Strategy, recompute_text
from profiler.opset import OpClass
from simulator.unit_cost import RecomputeChoice
from specs.errors import Violation
from specs.graph import ModelGraph
from specs.plan import RecomputeMode
from specs.training import TrainingSpec

ROW = np.dtype(
    [
        ("layout", np.int32), ("micro_batch", np.int32), ("num_micro_batches", np.int32), ("zero", np.int8),
        ("shard_group", np.int32), ("sequence_parallel", np.bool_), ("recompute", np.int8), ("schedule", np.int8),
    ]
)  # fmt: skip
Rows = NDArray[np.void]


@dataclass(frozen=True)
class Layout:
    """A pool of devices as ``pp`` stages of ``dp x tp``."""

    pool: Pool
    pp: int
    dp: int
    tp: int


@dataclass
class Space:
    """Skeletons and what was rejected before pricing. ``examples``: one violation of each broken rule."""

    layouts: list[Layout]
    rows: Rows
    recomputes: list[RecomputeChoice]
    schedules: list[str]
    rejected: dict[str, int] = field(default_factory=dict)
    examples: dict[str, Violation] = field(default_factory=dict)

    def strategy(self, index: int) -> Strategy:
        """The skeleton in row ``index``."""
        row = self.rows[index]
        layout, recompute = self.layouts[int(row["layout"])], self.recomputes[int(row["recompute"])]
        return Strategy(
            pp=layout.pp, dp=layout.dp, tp=layout.tp, micro_batch=int(row["micro_batch"]), zero=int(row["zero"]),
            shard_group=int(row["shard_group"]) or None, sequence_parallel=bool(row["sequence_parallel"]),
            recompute=recompute.mode, op_classes=recompute.op_classes, schedule=self.schedules[int(row["schedule"])],
        )  # fmt: skip

    def layout(self, index: int) -> Layout:
        """The layout of row ``index``."""
        return self.layouts[int(self.rows[index]["layout"])]

    def dimensions(self) -> dict[str, list[int | str]]:
        """The values tried per dimension."""
        used = [self.layouts[index] for index in np.unique(self.rows["layout"]).tolist()]
        columns: dict[str, list[int | str]] = {
            "devices": sorted({layout.pool.size for layout in used}),
            "pp": sorted({layout.pp for layout in used}), "dp": sorted({layout.dp for layout in used}),
            "tp": sorted({layout.tp for layout in used}),
        }  # fmt: skip
        for name in ("micro_batch", "zero", "sequence_parallel"):
            columns[name] = [int(value) for value in np.unique(self.rows[name])]
        columns["shard_group"] = [int(value) or "dp" for value in np.unique(self.rows["shard_group"])]
        columns["recompute"] = [recompute_text(choice.mode, choice.op_classes) for choice in self.recomputes]
        columns["schedule"] = list(self.schedules)
        return columns


class _Enumeration:
    """Walks pools, then tp, pp, micro-batch and the rest, dropping what a rule forbids."""

    def __init__(self, graph: ModelGraph, workload: TrainingSpec, fixed: Mapping[str, Any]) -> None:
        self.graph, self.workload, self.fixed = graph, workload, fixed
        self.num_units = graph.num_units()
        self.rejected: dict[str, int] = {}
        self.examples: dict[str, Violation] = {}
        self.layouts: list[Layout] = []
        self.recomputes = self._recomputes()
        self.schedules = [str(fixed.get("schedule", "1f1b"))]
        self._size_violations: dict[int, list[Violation]] = {}

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
                if self.fixed.get("dp") not in (None, groups // pp):
                    continue
                yield from self._layout(Layout(pool, pp, groups // pp, tp))

    def _tp_violations(self, tp: int) -> list[Violation]:
        if tp not in self._size_violations:
            self._size_violations[tp] = rules.tp_divides_sizes(self.graph, tp, ("tp",))
        return self._size_violations[tp]

    def _layout(self, layout: Layout) -> Iterator[Rows]:
        batch, dp = self.workload.global_batch, layout.dp
        if batch % dp:
            self._reject(rules.batch_splits(batch, dp, 1, ()))
            return
        sizes = [size for size in self._micro_batches(batch // dp) if not self._reject(self._schedule(layout, batch // dp, size))]
        variants = self._variants(layout)
        if not sizes or not variants:
            return
        self.layouts.append(layout)
        parallel = self._sequence_parallel(layout.tp)
        rows = np.empty(len(sizes) * len(variants) * len(parallel) * len(self.recomputes), ROW)
        grid = np.meshgrid(
            np.arange(len(sizes)),
            np.arange(len(variants)),
            np.arange(len(parallel)),
            np.arange(len(self.recomputes)),
            indexing="ij",
        )
        size_index, variant, parallel_index, recompute = (axis.ravel() for axis in grid)
        rows["layout"] = len(self.layouts) - 1
        rows["micro_batch"] = np.array(sizes)[size_index]
        rows["num_micro_batches"] = batch // dp // rows["micro_batch"]
        rows["zero"] = np.array([zero for zero, _ in variants])[variant]
        rows["shard_group"] = np.array([group for _, group in variants])[variant]
        rows["sequence_parallel"] = np.array(parallel)[parallel_index]
        rows["recompute"], rows["schedule"] = recompute, 0
        yield rows

    def _micro_batches(self, sequences: int) -> list[int]:
        """Micro-batches that divide the sequences of one dp rank and that the workload allows."""
        sizes = self._wanted("micro_batch", rules.divisors(sequences))
        allowed = [size for size in sizes if not self._reject(rules.micro_batch_allowed(self.workload, size, ("micro_batch",)))]
        return [size for size in allowed if not self._reject(rules.batch_splits(sequences, 1, size, ()))]

    def _schedule(self, layout: Layout, sequences: int, size: int) -> list[Violation]:
        return rules.schedule_rules(
            self.schedules[0],
            pp=layout.pp,
            num_micro_batches=sequences // size,
            loc=("micro_batch",),
            micro_batch=size,
            dp=layout.dp,
        )

    def _sequence_parallel(self, tp: int) -> list[bool]:
        if tp == 1:
            return [False]
        values = [self.fixed["sequence_parallel"]] if "sequence_parallel" in self.fixed else [True, False]
        seq = self.workload.max_seq_len
        fitting = [
            value for value in values if not self._reject(rules.sequence_divisible_by_tp(seq, tp, value, ("sequence_parallel",)))
        ]
        return fitting

    def _variants(self, layout: Layout) -> list[tuple[int, int]]:
        """(zero, shard group) pairs; 0 as group = all of dp. States may also be sharded inside each node only."""
        variants: list[tuple[int, int]] = []
        for zero in self._wanted("zero", range(4) if layout.dp > 1 else range(1)):
            if self._reject(rules.zero_with_pipeline(zero, layout.pp, ("zero",))):
                continue
            groups = [0] if zero == 0 else [0, *self._node_groups(layout)]
            if self.fixed.get("shard_group") is not None:
                groups = [self.fixed["shard_group"]]
            for group in groups:
                if not self._reject(rules.shard_group_divides_dp(group or None, layout.dp, zero, ("shard_group",))):
                    variants.append((zero, group))
        return variants

    def _node_groups(self, layout: Layout) -> list[int]:
        """dp ranks of one node as a shard group, where a stage spans several nodes."""
        inside = min(layout.pool.node_sizes) // layout.tp
        return [inside] if 1 < inside < layout.dp and layout.dp % inside == 0 else []


def _natural_order(pool: Pool) -> bool:
    return all(low < high for low, high in zip(pool.devices, pool.devices[1:], strict=False))


def enumerate_space(
    graph: ModelGraph, workload: TrainingSpec, pools: Sequence[Pool], fixed: Mapping[str, Any] | None = None
) -> Space:
    """All skeletons on ``pools``. ``fixed``: strategy fields (``planner.strategy_text.parse_fields``) that must hold."""
    return _Enumeration(graph, workload, fixed or {}).run(pools)
