"""Tasks of sharded and replicated states: gathers before passes, reductions after them, and what ends the step."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.pass_terms import PassTerms
from simulator.rank_step import RankStep, StepContext, Work
from simulator.stage_cost import StageCost
from simulator.state_comm import StateComm
from specs.plan import Pipeline
from specs.schedule import Action, Rows


class StateTasks:
    """Decides when a pipeline's states are gathered and reduced, and adds the tasks."""

    def __init__(self, context: StepContext, pipeline: Pipeline, rows: Rows, terms: PassTerms) -> None:
        self.context, self.pipeline, self.terms = context, pipeline, terms
        self.model, self.rules, self.software = context.model, context.rules, context.model.software
        self.num_stages = len(pipeline.stages)
        self.comm = StateComm(self.model.network, by_tensor=self.software.gathers_by_tensor)
        self.first, self.last = _first_and_last(rows)
        self._reductions: dict[int, list[int]] = {}
        self._priced: dict[tuple[str, int, int], tuple[float, float]] = {}

    # --- when -----------------------------------------------------------------------------------------------------

    def gathers(self, cost: StageCost, action: Action) -> bool:
        """Whether an action gathers each unit's parameters before it."""
        if cost.shard_degree == 1 or action.kind == "W":
            return False
        if cost.stage.zero == 3:
            return True
        once = action.kind == "F" and cost.stage.zero in (1, 2) and self.software.overlap_param_gather
        return once and action in self.first

    def reduces(self, cost: StageCost, action: Action) -> bool:
        """Whether an action reduces each unit's gradients into shards after it."""
        if cost.shard_degree == 1 or action.kind not in "BW":
            return False
        return cost.stage.zero in (2, 3) or (self.software.overlap_grad_reduce and action in self.last)

    def all_reduces(self, cost: StageCost, action: Action) -> bool:
        """Whether an action sums gradients over all replicas, bucket by bucket."""
        replicated = cost.stage.zero == 0 and action.kind in "BW" and cost.dp_shape.size > 1
        return replicated and action in self.last and not self._reduces_at_end(cost)

    def by_unit(self, cost: StageCost, action: Action) -> bool:
        """Whether an action is cut into units for its gathers or reductions."""
        return self.gathers(cost, action) or self.reduces(cost, action) or self.all_reduces(cost, action)

    def accumulates(self, action: Action) -> bool:
        """Whether an action adds its gradients to those of an earlier micro-batch."""
        return not self.software.fused_grad_add and action.kind in "BW" and action not in self.first

    def _reduces_at_end(self, cost: StageCost) -> bool:
        """Whether replicated or optimizer-sharded gradients wait for the end of the schedule."""
        if not self.software.overlap_grad_reduce:
            return cost.stage.zero in (0, 1)
        return cost.stage.zero == 0 and self.num_stages > 1 and not self.software.overlaps_under_pipeline

    # --- beside passes --------------------------------------------------------------------------------------------

    def gather(self, rank: RankStep, cost: StageCost, index: int, after: Sequence[int], label: tuple[object, ...]) -> int:
        """All-gather of a unit's parameters."""
        seconds, moved = self._of_unit("gather", cost, index)
        rank.count("dp", moved)
        prefetched = cost.stage.zero == 3 and self.context.plan.collectives.prefetch_units > 0
        inline = self.rules.prefetched_gather_inline if prefetched else self.rules.gather_inline
        return self._collective(rank, seconds, after, ("gather", *label), inline=inline)

    def reduce_unit(self, rank: RankStep, cost: StageCost, index: int, after: int, label: tuple[object, ...]) -> None:
        """Reduce-scatter of a unit's gradients in the shard group, all-reduce of the shard between replicas."""
        if not cost.unit_reduce_bytes(index):
            return
        seconds, moved = self._of_unit("reduce", cost, index)
        rank.count("dp", moved)
        inline = self.rules.reduce_inline or not self.software.overlap_grad_reduce
        task = self._collective(rank, seconds + self.terms.pack_s(cost, index), [after], ("reduce", *label), inline=inline)
        self._reductions.setdefault(rank.rank, []).append(task)

    def all_reduce(
        self, rank: RankStep, cost: StageCost, sizes: tuple[float, float], after: Sequence[int], *, overlapped: bool,
        label: tuple[object, ...],
    ) -> None:  # fmt: skip
        """All-reduce of gradients. ``sizes``: bytes of them that all of dp holds, and of the rank's experts."""
        if sum(sizes) <= 0:
            return
        seconds, moved = self.comm.all_reduce_s(cost, *sizes)
        rank.count("dp", moved)
        if overlapped and self.context.plan.collectives.overlap_grad_reduce:
            task = self.context.engine.task(rank.comm, seconds, after=after, label=label, terms={"dp_comm": seconds})
        else:
            task = self.context.compute(rank, Work.of({"dp_comm": seconds}), after, label, "dp_comm")
        self._reductions.setdefault(rank.rank, []).append(task)

    def _of_unit(self, what: str, cost: StageCost, index: int) -> tuple[float, float]:
        """Seconds and bytes of a unit's gather or reduction; units of equal parameters are priced once."""
        key = (what, id(cost), id(cost.params[index]))
        found = self._priced.get(key)
        if found is None:
            unit = range(index, index + 1)
            found = self.comm.gather_s(cost, unit) if what == "gather" else self.comm.reduce_scatter_s(cost, index)
            self._priced[key] = found
        return found

    def _collective(self, rank: RankStep, seconds: float, after: Sequence[int], label: tuple[object, ...], *, inline: bool) -> int:
        """A sharded-state collective: on its own stream, or in line where the runtime waits for it at once."""
        if inline:
            return self.context.compute(rank, Work.of({"dp_comm": seconds}), after, label, "dp_comm")
        terms = {"dp_comm": seconds}
        return self.context.engine.task(rank.comm, seconds, after=after, label=label, terms=terms, wait_term="dp_comm")

    # --- after the last pass --------------------------------------------------------------------------------------

    def finish(self, rank: RankStep) -> None:
        """After the last backward: remaining gradient reductions, then the optimizer step."""
        for number, cost in rank.stages.items():
            if self._reduces_at_end(cost) and cost.dp_shape.size > 1:
                for index in range(len(cost.units)):
                    self._reduce_at_end(rank, number, cost, index)
            self._partial_grads(rank, cost)
            self._tied(rank, number, cost)
            if cost.stage.zero == 0 and self.num_stages == 1:
                work_s = sum(unit.forward_s + unit.backward_s + unit.recompute_s for unit in cost.units)
                wait_s = self.terms.dp_wait_s(cost, cost.slowdown * work_s * self.pipeline.num_micro_batches)
                self.context.alone(rank, "dp_comm", wait_s, "slowest rank")
        self._optimizer(rank)
        if not self.software.overlap_param_gather:
            self._gather_at_end(rank)
        overhead_s = self.model.factors.host * (self.rules.step_overhead_s + self.software.step_host_s)
        if overhead_s:
            self.context.alone(rank, "other", overhead_s, "between steps")

    def _optimizer(self, rank: RankStep) -> None:
        local = sum(cost.num_trainable * cost.state_share for cost in rank.stages.values())
        device = next(iter(rank.stages.values()))
        passes = self.software.grad_passes * local * device.grad_bytes
        seconds = device.slowdown * (self.model.optimizer_s(device.device, local) + self.model.copy_s(device.device, passes / 2))
        reductions = self._reductions.get(rank.rank, [])
        self.context.compute(rank, Work.of({"optimizer": seconds}), reductions, ("optimizer",), "dp_comm")

    def _reduce_at_end(self, rank: RankStep, number: int, cost: StageCost, index: int) -> None:
        """Reduction of a unit's gradients that nothing hides."""
        label = f"reduce s{number} u{index}"
        if cost.stage.zero == 0:
            self.all_reduce(rank, cost, cost.unit_reduce_parts(index), [], overlapped=False, label=(label,))
            return
        seconds, moved = self._of_unit("reduce", cost, index)
        rank.count("dp", moved)
        self.context.alone(rank, "dp_comm", seconds, label)

    def _gather_at_end(self, rank: RankStep) -> None:
        """Updated parameters of a sharded optimizer, gathered when the step is over."""
        for cost in rank.stages.values():
            if cost.stage.zero in (1, 2) and cost.shard_degree > 1:
                seconds, moved = self.comm.gather_s(cost, range(len(cost.params)))
                rank.count("dp", moved)
                self.context.alone(rank, "dp_comm", seconds, "gather parameters")

    def _partial_grads(self, rank: RankStep, cost: StageCost) -> None:
        """Sequence parallel: gradients of whole parameters read by split tensors are summed over tp."""
        elements = sum(unit.partial_grad_elements for unit in cost.units)
        if elements and cost.tp_shape.size > 1:
            seconds = self.model.network.collective("all_reduce", elements * cost.grad_bytes, cost.tp_shape).seconds
            self.context.alone(rank, "tp_comm", seconds, "partial gradients")

    def _tied(self, rank: RankStep, number: int, cost: StageCost) -> None:
        """Copies of a tied parameter on the first and last stage sum their gradients."""
        alias = sum(item.tied_alias for item in cost.params)
        ends = (0, self.num_stages - 1)
        if not self.model.graph.tied or self.num_stages == 1 or number not in ends:
            return
        elements = alias or max((item.trainable for item in cost.params[:1]), default=0.0)
        first, last = self.pipeline.stages[0].devices[0], self.pipeline.stages[-1].devices[0]
        if first == last:  # a V holds both on one rank
            return
        network = self.model.network
        seconds = network.collective("all_reduce", elements * cost.grad_bytes, network.shape((first, last))).seconds
        self.context.alone(rank, "dp_comm", seconds, "tied gradients")


def _first_and_last(rows: Rows) -> tuple[set[Action], set[Action]]:
    """The first and the last action of each stage that run it forward, and that make gradients of its parameters."""
    first: dict[tuple[int, bool], Action] = {}
    last: dict[tuple[int, bool], Action] = {}
    for row in rows:
        for action in row:
            if action.kind != "I":
                key = (action.stage, action.kind == "F")
                first.setdefault(key, action)
                last[key] = action
    return set(first.values()), set(last.values())
