"""One training step of a plan as tasks on streams: the event simulation.

Ranks that behave alike are folded: one representative per pipeline rank stands for its whole dp x cp x tp grid. Streams of a
representative: ``compute`` (the device's queue, with tensor-parallel collectives inside, as they run), ``comm`` (data-parallel
collectives) and one ``link`` per neighbour. The order of work is the contract of docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.cost_model import CostModel
from simulator.engine import Engine, Task
from simulator.pass_terms import PassTerms
from simulator.runtime_rules import RuntimeRules, rules_for
from simulator.stage_cost import StageCost, pipeline_stages, stage_cost
from simulator.state_comm import StateComm
from specs.plan import Pipeline, Plan
from specs.schedule import Action, Rows, dependencies, passes_of


@dataclass
class RankStep:
    """One pipeline rank of one pipeline after the simulation."""

    pipeline: int
    rank: int
    stages: dict[int, StageCost]
    row: tuple[Action, ...]
    compute: int
    comm: int
    link_bytes: dict[str, float] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)


@dataclass
class StepResult:
    """The simulated step."""

    step_time_s: float
    ranks: list[RankStep]
    engine: Engine


class StepSimulation:
    """Builds the tasks of a plan and runs them."""

    def __init__(self, model: CostModel, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.engine = Engine()
        self.rules: RuntimeRules = rules_for(model.cluster, model.profile)
        self.ranks: list[RankStep] = []
        self._done: dict[tuple[int, Action], int] = {}

    def run(self) -> StepResult:
        """Simulate the step."""
        for index, pipeline in enumerate(self.plan.pipelines):
            self._pipeline(index, pipeline)
        step = self.engine.run()
        for rank in self.ranks:
            rank.terms = self._rank_terms(rank, step)
        return StepResult(step, self.ranks, self.engine)

    def _pipeline(self, index: int, pipeline: Pipeline) -> None:
        costs = {number: stage_cost(self.model, self.plan, pipeline, stage) for number, stage in enumerate(pipeline.stages)}
        rows = pipeline_rows(self.plan, pipeline)
        ranks = []
        for number, held in enumerate(pipeline_stages(pipeline)):
            compute, comm = (
                self.engine.stream(f"p{index} rank {number} compute"),
                self.engine.stream(f"p{index} rank {number} comm"),
            )
            slowdowns = self.rules.slowdowns(costs[held[0]].dp_shape.tier)
            if max(slowdowns) > 1:
                self.engine.couple(compute, comm, *slowdowns)
            ranks.append(RankStep(index, number, {stage: costs[stage] for stage in held}, rows[number], compute, comm))
        self.ranks += ranks
        _PipelineTasks(self, index, pipeline, ranks, rows).add()

    def _rank_terms(self, rank: RankStep, step_s: float) -> dict[str, float]:
        """Exclusive seconds by term: task terms stretched with their real duration, gaps by the waiting task's term."""
        terms: dict[str, float] = {}
        now = 0.0
        for task in (task for task in self.engine.tasks if task.stream == rank.compute):
            gap = task.start_s - now
            if gap > 0:
                terms[task.wait_term] = terms.get(task.wait_term, 0.0) + gap
            stretch = (task.end_s - task.start_s) / task.duration_s if task.duration_s > 0 else 1.0
            for name, seconds in task.terms.items():
                terms[name] = terms.get(name, 0.0) + seconds * stretch
            now = task.end_s
        terms["wait"] = terms.get("wait", 0.0) + step_s - now
        return terms


def pipeline_rows(plan: Plan, pipeline: Pipeline) -> Rows:
    """Action rows of a pipeline; one rank accumulates micro-batches one after another."""
    if pipeline.pp == 1 and len(pipeline.stages) == 1:
        actions = [Action(0, kind, index) for index in range(pipeline.num_micro_batches) for kind in ("F", "B")]
        return (tuple(actions),)
    return plan.schedule.actions(num_ranks=pipeline.pp, num_micro_batches=pipeline.num_micro_batches)


class _PipelineTasks:
    """Adds the tasks of one pipeline in an order in which every dependency exists already."""

    def __init__(self, sim: StepSimulation, index: int, pipeline: Pipeline, ranks: list[RankStep], rows: Rows) -> None:
        self.sim, self.index, self.pipeline, self.ranks, self.rows = sim, index, pipeline, ranks, rows
        self.engine, self.model, self.rules, self.software = sim.engine, sim.model, sim.rules, sim.model.software
        self.num_stages = len(pipeline.stages)
        self.owner = {stage: rank for rank in ranks for stage in rank.stages}
        self.links: dict[tuple[int, int], int] = {}
        self.arrived: dict[Action, int] = {}
        self.done: set[Action] = set()
        self.last_backward: dict[tuple[int, int], int] = {}
        self.reductions: dict[int, list[int]] = {rank.rank: [] for rank in ranks}
        self.first, self.last = _first_and_last(rows)
        self.terms = PassTerms(sim.model, sim.rules)
        self.state_comm = StateComm(self.model.network, by_tensor=self.software.gathers_by_tensor)

    def add(self) -> None:
        queues = [passes_of(row, overlaps=self.sim.plan.schedule.overlaps) for row in self.rows]
        position = [0] * len(queues)
        moved = True
        while moved:
            moved = False
            for number, queue in enumerate(queues):
                while position[number] < len(queue) and self._is_ready(queue[position[number]]):
                    self._pass(self.ranks[number], queue[position[number]])
                    self.done.update(queue[position[number]])
                    position[number] += 1
                    moved = True
        for rank in self.ranks:
            self._finish(rank)

    # --- forward and backward -----------------------------------------------------------------------------------

    def _is_ready(self, actions: tuple[Action, ...]) -> bool:
        needed = [options for action in actions for options in dependencies(action, self.num_stages)]
        return all(any(option in self.done for option in options) for options in needed)

    def _pass(self, rank: RankStep, actions: tuple[Action, ...]) -> None:
        """One action, or two that run beside one another; those that gather or reduce unit by unit run one after the other."""
        after = [self.arrived[action] for action in actions if action in self.arrived]
        if len(actions) > 1 and not any(self._by_unit(rank, action) for action in actions):
            costs = [rank.stages[action.stage] for action in actions]
            terms = self.terms.overlapped(costs[0], costs[1], self._accumulates(actions[1]))
            self._count_tp(rank, costs[0])
            last = self._compute(rank, terms, after, " ".join(map(str, actions)), "pipeline")
            for action in actions:
                self._send(rank, action, last)
            return
        for action in actions:
            run = self._forward if action.kind == "F" else self._backward
            needed = [self.arrived[action]] if action in self.arrived else []
            self._send(rank, action, run(rank, rank.stages[action.stage], action, needed))

    def _send(self, rank: RankStep, action: Action, last: int) -> None:
        """Send to the neighbour stage; what arrives there enables its own action."""
        forward, cost = action.kind == "F", rank.stages[action.stage]
        target_stage = action.stage + (1 if forward else -1)
        if not 0 <= target_stage < self.num_stages or action.kind == "W":
            return
        size_bytes = cost.units[-1].output_bytes if forward else cost.units[0].input_bytes
        kinds = ("F",) if forward else ("B", "I")
        target = self.owner[target_stage]
        if target is rank:
            arrived = last
        else:
            stage, other = self.pipeline.stages[action.stage], self.pipeline.stages[target_stage]
            seconds = self.terms.p2p_s(cost, size_bytes, stage.devices[-1], other.devices[-1])
            if self.software.p2p_blocking:
                arrived = self._compute(rank, {"pipeline": seconds}, [last], f"send {action}", "pipeline")
            else:
                link = self.links.setdefault((action.stage, target_stage), self._link(action.stage, target_stage))
                arrived = self.engine.task(link, seconds, after=[last], label=f"send {action}", terms={"pipeline": seconds})
            rank.link_bytes["pp"] = rank.link_bytes.get("pp", 0.0) + size_bytes
        for kind in kinds:
            self.arrived[Action(target_stage, kind, action.micro_batch)] = arrived

    def _link(self, source: int, target: int) -> int:
        return self.engine.stream(f"p{self.index} link {source}>{target}")

    def _gathers(self, cost: StageCost, action: Action) -> bool:
        """Whether an action gathers each unit's parameters before it."""
        if cost.shard_degree == 1 or action.kind == "W":
            return False
        first = cost.stage.zero in (1, 2) and action in self.first and self.software.overlap_param_gather
        return cost.stage.zero == 3 or (action.kind == "F" and first)

    def _reduces(self, cost: StageCost, action: Action) -> bool:
        """Whether an action reduces each unit's gradients into shards after it."""
        if cost.shard_degree == 1 or action.kind not in "BW":
            return False
        return cost.stage.zero in (2, 3) or (action in self.last and self.software.overlap_grad_reduce)

    def _all_reduces(self, cost: StageCost, action: Action) -> bool:
        """Whether an action sums gradients over all replicas, bucket by bucket."""
        is_last = action.kind in "BW" and action in self.last
        return cost.stage.zero == 0 and cost.dp_shape.size > 1 and is_last and not self._reduces_at_end(cost)

    def _by_unit(self, rank: RankStep, action: Action) -> bool:
        cost = rank.stages[action.stage]
        return self._gathers(cost, action) or self._reduces(cost, action) or self._all_reduces(cost, action)

    def _accumulates(self, action: Action) -> bool:
        return action.kind in "BW" and action not in self.first and not self.software.fused_grad_add

    def _count_tp(self, rank: RankStep, cost: StageCost) -> None:
        _count(rank, "tp", sum(unit.tp_bytes for unit in cost.units))

    def _forward(self, rank: RankStep, cost: StageCost, action: Action, after: list[int]) -> int:
        self._count_tp(rank, cost)
        wait = "pipeline" if self.num_stages > 1 else "other"
        if not self._gathers(cost, action):
            return self._compute(rank, self.terms.forward(cost, range(len(cost.units))), after, f"{action}", wait)
        last = -1
        computed: list[int] = []
        for index, unit in enumerate(cost.units):
            ahead = index - 1 - self.sim.plan.collectives.prefetch_units
            gate = after if index == 0 else ([computed[ahead]] if ahead >= 0 and cost.stage.zero == 3 else [])
            gathered = self._gather(rank, cost, index, gate, action)
            terms = self.terms.forward(cost, [index])
            terms["dp_comm"] = self.terms.unpack_s(cost, index) + self.terms.dp_wait_s(cost, unit.forward_s)
            last = self._compute(rank, terms, [gathered, *(after if index == 0 else [])], f"{action} u{index}", "dp_comm")
            computed.append(last)
        return last

    def _backward(self, rank: RankStep, cost: StageCost, action: Action, after: list[int]) -> int:
        gathers, reduces, ddp = self._gathers(cost, action), self._reduces(cost, action), self._all_reduces(cost, action)
        accumulates = self._accumulates(action)
        wait = "pipeline" if self.num_stages > 1 else "other"
        if not (reduces or ddp or gathers):
            terms = self.terms.backward(cost, range(len(cost.units)), accumulates, action.kind)
            return self._compute(rank, terms, after, f"{action}", wait)
        computed: list[int] = []
        prefetch = self.sim.plan.collectives.prefetch_units
        gathered: dict[int, int] = {}  # the last unit's weights are still there from forward
        pending, first = (0.0, 0.0), True

        def gather(index: int) -> None:
            if gathers and 0 <= index < len(cost.units) - 1 and index not in gathered:
                ahead = len(computed) - 1 - prefetch
                gathered[index] = self._gather(rank, cost, index, [computed[ahead]] if ahead >= 0 else after[:1], action)

        for index in reversed(range(len(cost.units))):
            gate = list(after) if first else []
            gather(index)
            gate += [gathered[index]] if index in gathered else []
            terms = self.terms.backward(cost, [index], accumulates and cost.stage.zero not in (2, 3), action.kind)
            if gathers and index < len(cost.units) - 1:
                terms["dp_comm"] = self.terms.unpack_s(cost, index)
            if reduces or gathers:
                work_s = terms["backward"] + terms.get("recompute", 0.0)
                terms["dp_comm"] = terms.get("dp_comm", 0.0) + self.terms.dp_wait_s(cost, work_s)
            if ddp:
                terms["backward"] += self.rules.bucket_copies * self.model.copy_s(cost.device, cost.unit_grad_bytes(index))
            task = self._compute(rank, terms, gate, f"{action} u{index}", wait if first else "dp_comm")
            computed.append(task)
            first = False
            if prefetch:  # asked for when this unit's backward begins, so ahead of its reduction in the communicator's queue
                gather(index - 1)
            if reduces:
                self._reduce_unit(rank, cost, index, task, action)
            if ddp:
                dense, expert = cost.unit_reduce_parts(index)
                pending = (pending[0] + dense, pending[1] + expert)
                if sum(pending) >= self.sim.plan.collectives.bucket_bytes or index == 0:
                    self._all_reduce(rank, cost, pending, [task], overlapped=True, label=f"{action} bucket")
                    pending = (0.0, 0.0)
        return computed[-1]

    def _reduces_at_end(self, cost: StageCost) -> bool:
        """Whether replicated or optimizer-sharded gradients wait for the end of the schedule."""
        if not self.software.overlap_grad_reduce:
            return cost.stage.zero in (0, 1)
        return cost.stage.zero == 0 and self.num_stages > 1 and not self.software.overlaps_under_pipeline

    def _compute(self, rank: RankStep, terms: dict[str, float], after: list[int], label: str, wait_term: str) -> int:
        used = {name: seconds for name, seconds in terms.items() if seconds > 0}
        return self.engine.task(rank.compute, sum(used.values()), after=after, label=label, terms=used, wait_term=wait_term)

    # --- data parallel ------------------------------------------------------------------------------------------

    def _gather(self, rank: RankStep, cost: StageCost, index: int, after: list[int], action: Action) -> int:
        """All-gather of a unit's parameters."""
        seconds, moved = self.state_comm.gather_s(cost, range(index, index + 1))
        _count(rank, "dp", moved)
        prefetched = cost.stage.zero == 3 and self.sim.plan.collectives.prefetch_units > 0
        inline = self.rules.prefetched_gather_inline if prefetched else self.rules.gather_inline
        return self._comm(rank, seconds, after, f"gather {action} u{index}", inline=inline)

    def _reduce_unit(self, rank: RankStep, cost: StageCost, index: int, after: int, action: Action) -> None:
        """Reduce-scatter of a unit's gradients in the shard group, all-reduce of the shard between replicas."""
        size = cost.unit_reduce_bytes(index)
        if not size:
            return
        seconds, moved = self.state_comm.reduce_scatter_s(cost, index)
        pack = self.terms.pack_s(cost, index)
        _count(rank, "dp", moved)
        label = f"reduce {action} u{index}"
        inline = self.rules.reduce_inline or not self.software.overlap_grad_reduce
        self.reductions[rank.rank].append(self._comm(rank, seconds + pack, [after], label, inline=inline))

    def _all_reduce(
        self, rank: RankStep, cost: StageCost, sizes: tuple[float, float], after: list[int], *, overlapped: bool, label: str
    ) -> None:
        """All-reduce of gradients. ``sizes``: bytes of them that all of dp holds, and of the rank's experts."""
        if sum(sizes) <= 0:
            return
        seconds, moved = self.state_comm.all_reduce_s(cost, *sizes)
        _count(rank, "dp", moved)
        stream_overlaps = overlapped and self.sim.plan.collectives.overlap_grad_reduce
        if stream_overlaps:
            task = self.engine.task(rank.comm, seconds, after=after, label=label, terms={"dp_comm": seconds})
        else:
            task = self._compute(rank, {"dp_comm": seconds}, after, label, "dp_comm")
        self.reductions[rank.rank].append(task)

    def _comm(self, rank: RankStep, seconds: float, after: list[int], label: str, *, inline: bool) -> int:
        """A sharded-state collective: on its own stream, or in line where the runtime waits for it at once."""
        if inline:
            return self._compute(rank, {"dp_comm": seconds}, after, label, "dp_comm")
        return self.engine.task(rank.comm, seconds, after=after, label=label, terms={"dp_comm": seconds}, wait_term="dp_comm")

    def _finish(self, rank: RankStep) -> None:
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
                self._compute(rank, {"dp_comm": wait_s}, [], "slowest rank", "dp_comm")
        local = sum(cost.num_trainable * cost.state_share for cost in rank.stages.values())
        device = next(iter(rank.stages.values()))
        passes = self.software.grad_passes * local * device.grad_bytes
        seconds = device.slowdown * (self.model.optimizer_s(device.device, local) + self.model.copy_s(device.device, passes / 2))
        self._compute(rank, {"optimizer": seconds}, list(self.reductions[rank.rank]), "optimizer", "dp_comm")
        if not self.software.overlap_param_gather:
            self._gather_at_end(rank)
        overhead_s = self.model.factors.host * (self.rules.step_overhead_s + self.software.step_host_s)
        if overhead_s:
            self._compute(rank, {"other": overhead_s}, [], "between steps", "other")

    def _reduce_at_end(self, rank: RankStep, number: int, cost: StageCost, index: int) -> None:
        """Reduction of a unit's gradients that nothing hides."""
        label = f"reduce s{number} u{index}"
        if cost.stage.zero == 0:
            self._all_reduce(rank, cost, cost.unit_reduce_parts(index), [], overlapped=False, label=label)
            return
        seconds, moved = self.state_comm.reduce_scatter_s(cost, index)
        _count(rank, "dp", moved)
        self._compute(rank, {"dp_comm": seconds}, [], label, "dp_comm")

    def _gather_at_end(self, rank: RankStep) -> None:
        """Updated parameters of a sharded optimizer, gathered when the step is over."""
        for cost in rank.stages.values():
            if cost.stage.zero in (1, 2) and cost.shard_degree > 1:
                seconds, moved = self.state_comm.gather_s(cost, range(len(cost.params)))
                _count(rank, "dp", moved)
                self._compute(rank, {"dp_comm": seconds}, [], "gather parameters", "dp_comm")

    def _partial_grads(self, rank: RankStep, cost: StageCost) -> None:
        """Sequence parallel: gradients of whole parameters read by split tensors are summed over tp."""
        elements = sum(unit.partial_grad_elements for unit in cost.units)
        if elements and cost.tp_shape.size > 1:
            seconds = self.model.network.collective("all_reduce", elements * cost.grad_bytes, cost.tp_shape).seconds
            self._compute(rank, {"tp_comm": seconds}, [], "partial gradients", "tp_comm")

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
        seconds = self.model.network.collective(
            "all_reduce", elements * cost.grad_bytes, self.model.network.shape((first, last))
        ).seconds
        self._compute(rank, {"dp_comm": seconds}, [], "tied gradients", "dp_comm")


def _count(rank: RankStep, axis: str, num_bytes: float) -> None:
    """Add to the bytes that a rank sends along an axis."""
    rank.link_bytes[axis] = rank.link_bytes.get(axis, 0.0) + num_bytes


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


def timeline(result: StepResult) -> list[tuple[str, Task]]:
    """Every task with its stream's name, in start order."""
    tasks = sorted(result.engine.tasks, key=lambda task: (task.start_s, task.index))
    return [(result.engine.stream_names[task.stream], task) for task in tasks]
