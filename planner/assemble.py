"""From a strategy with its stage split to an explicit :class:`specs.plan.Plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from planner.layout import Pool
from planner.prices import layer_range
from planner.strategy_text import Strategy
from profiler.placement import place_block
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.plan import Mesh, Pipeline, PipelineSchedule, Plan, RecomputeMode, RecomputeRun, Stage
from specs.training import TrainingSpec


class Assembler:
    """Builds plans of one model on one cluster for one workload; hashes and placements are computed once."""

    def __init__(self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, loss: str | None = None) -> None:
        """``loss``: loss kernel of strategies that name none."""
        self.graph, self.cluster, self.workload, self.loss = graph, cluster, workload, loss
        self.unit_blocks = [segment.block for segment, _ in graph.units()]
        self.layers = layer_range(graph)
        self._placements: dict[tuple[str, int, bool, bool], dict[str, str]] = {}

    @cached_property
    def _hashes(self) -> dict[str, str]:
        return {
            "model_hash": self.graph.content_hash(), "cluster_hash": self.cluster.content_hash(),
            "workload_hash": self.workload.content_hash(),
        }  # fmt: skip

    def plan(self, strategy: Strategy, pool: Pool) -> Plan:
        """The plan; ``strategy`` has, with several stages, a ``split``. Devices beyond pp x dp x cp x tp stay unused."""
        schedule = PipelineSchedule(name=strategy.schedule, stages_per_rank=strategy.stages_per_rank)
        ranks = schedule.stage_ranks(num_ranks=strategy.pp) if strategy.pp > 1 else (0,)
        dp = strategy.dp_of(pool.size)
        split = strategy.split if strategy.split is not None and strategy.pp > 1 else (len(self.unit_blocks),)
        size = dp * strategy.cp * strategy.tp
        stages, first = [], 0
        for rank, count in zip(ranks, split, strict=True):
            stages.append(self._stage(strategy, pool.devices[rank * size : (rank + 1) * size], dp, first, count))
            first += count
        used = {device for stage in stages for device in stage.devices}
        loss = strategy.loss or self.loss
        explicit = replace(strategy, dp=dp, split=split if strategy.pp > 1 else None, loss=loss)
        micro_batches = self.workload.global_batch // (dp * strategy.micro_batch)
        return Plan(
            name=f"{self.graph.name} on {len(used)} devices of {self.cluster.name}", strategy=explicit.text(),
            global_batch=self.workload.global_batch, seq_len=self.workload.max_seq_len,
            pipelines=(Pipeline(stages=tuple(stages), micro_batch=strategy.micro_batch, num_micro_batches=micro_batches),),
            schedule=schedule, loss_kernel=loss or "",
            unused_devices=tuple(device for device in range(self.cluster.num_devices) if device not in used),
            **self._hashes,
        )  # fmt: skip

    def _stage(self, strategy: Strategy, devices: tuple[int, ...], dp: int, first: int, count: int) -> Stage:
        blocks = list(dict.fromkeys(self.unit_blocks[first : first + count]))
        placements: dict[str, str] = {}
        for block in blocks:
            placements |= self._placed(block, strategy)
        mesh = Mesh(dp=dp, cp=strategy.cp, tp=strategy.tp, ep=strategy.ep, whole_experts=strategy.whole_experts)
        return Stage(
            devices=devices, first_unit=first, num_units=count, mesh=mesh, zero=strategy.zero,
            shard_group=strategy.shard_group, sequence_parallel=strategy.sequence_parallel and strategy.tp > 1,
            placements=placements, recompute=self._recompute(strategy, first, count),
        )  # fmt: skip

    def _placed(self, block: str, strategy: Strategy) -> dict[str, str]:
        key = (block, strategy.tp, strategy.sequence_parallel, strategy.whole_experts)
        if key not in self._placements:
            placed = place_block(
                self.graph.block(block), strategy.tp, strategy.sequence_parallel, whole_experts=strategy.whole_experts
            )
            self._placements[key] = placed.plan_placements()
        return self._placements[key]

    def _recompute(self, strategy: Strategy, first: int, count: int) -> Sequence[RecomputeRun]:
        """The run over those units of the stage that recompute covers (``planner.prices.layer_range``)."""
        low, high = max(first, self.layers.start), min(first + count, self.layers.stop)
        if strategy.recompute == RecomputeMode.NONE or low >= high:
            return ()
        return (RecomputeRun(first_unit=low, num_units=high - low, mode=strategy.recompute, op_classes=strategy.op_classes),)
