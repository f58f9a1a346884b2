"""Tasks of a pipeline's passes: forwards and backwards in the order of its rows, and what goes from stage to stage.

A long step has few kinds of passes and many of each: the work of a kind is put together once, a further pass is a look-up and a
task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.pass_terms import PassTerms
from simulator.rank_step import RankStep, StepContext, Work
from simulator.stage_cost import StageCost
from simulator.state_tasks import StateTasks
from specs.plan import Pipeline
from specs.schedule import Action, Rows, needs, passes_of


@dataclass(frozen=True, slots=True)
class _Route:
    """Where the result of a stage's pass goes. ``link``: the stream that carries it, ``None`` where the sender's compute stream
    waits for the send; ``work`` is ``None`` where the next stage lies on the same rank."""

    stage: int
    work: Work | None = None
    num_bytes: float = 0.0
    link: int | None = None


class PassTasks:
    """Adds the tasks of one pipeline in an order in which every dependency exists already."""

    def __init__(self, context: StepContext, index: int, pipeline: Pipeline, ranks: list[RankStep], rows: Rows) -> None:
        self.context, self.index, self.pipeline, self.ranks, self.rows = context, index, pipeline, ranks, rows
        self.rules, self.software = context.rules, context.model.software
        self.num_stages = len(pipeline.stages)
        self.wait_term = "pipeline" if self.num_stages > 1 else "other"
        self.owner = {stage: rank for rank in ranks for stage in rank.stages}
        self.terms = PassTerms(context.model, context.rules)
        self.states = StateTasks(context, pipeline, rows, self.terms)
        self.tp_bytes = {stage: sum(unit.tp_bytes for unit in rank.stages[stage].units) for stage, rank in self.owner.items()}
        self.kinds = {stage: _unit_kinds(rank.stages[stage]) for stage, rank in self.owner.items()}
        self.unit_names = [f"u{number}" for number in range(max(len(kinds) for kinds in self.kinds.values()))]
        self._arrived: dict[tuple[int, bool, int], int] = {}
        self._done: set[tuple[int, str, int]] = set()
        self._routes: dict[tuple[int, bool], _Route | None] = {}
        self._works: dict[tuple[object, ...], Work] = {}

    def add(self) -> None:
        """All tasks of the pipeline."""
        queues = [passes_of(row, overlaps=self.context.plan.schedule.overlaps) for row in self.rows]
        position = [0] * len(queues)
        moved = True
        while moved:
            moved = False
            for number, queue in enumerate(queues):
                at = position[number]
                while at < len(queue) and self._is_ready(queue[at]):
                    self._pass(self.ranks[number], queue[at])
                    self._done.update(queue[at])
                    at += 1
                    moved = True
                position[number] = at
        for rank in self.ranks:
            self.states.finish(rank)

    def _is_ready(self, actions: tuple[Action, ...]) -> bool:
        done = self._done
        for stage, kind, micro_batch in actions:
            for options in needs(stage, kind, self.num_stages):
                if not any((other, other_kind, micro_batch) in done for other, other_kind in options):
                    return False
        return True

    def _pass(self, rank: RankStep, actions: tuple[Action, ...]) -> None:
        """One action, or two that run beside one another; those that gather or reduce unit by unit run one after the other."""
        if len(actions) > 1 and not any(self.states.by_unit(rank.stages[action.stage], action) for action in actions):
            self._overlapped(rank, actions)
            return
        for action in actions:
            run = self._forward if action.kind == "F" else self._backward
            self._send(rank, action, run(rank, rank.stages[action.stage], action, self._inputs(action)))

    def _inputs(self, action: Action) -> list[int]:
        """The task that brings what an action reads from another rank."""
        found = None if action.kind == "W" else self._arrived.get((action.stage, action.kind == "F", action.micro_batch))
        return [] if found is None else [found]

    def _keep(self, key: tuple[object, ...], terms: Mapping[str, float]) -> Work:
        work = self._works[key] = Work.of(terms)
        return work

    # --- passes ---------------------------------------------------------------------------------------------------

    def _overlapped(self, rank: RankStep, actions: tuple[Action, ...]) -> None:
        first, second = actions
        accumulates = self.states.accumulates(second)
        key = ("FB", first.stage, second.stage, accumulates)
        work = self._works.get(key) or self._keep(
            key, self.terms.overlapped(rank.stages[first.stage], rank.stages[second.stage], accumulates)
        )
        rank.count("tp", self.tp_bytes[first.stage])
        after = [*self._inputs(first), *self._inputs(second)]
        last = self.context.compute(rank, work, after, actions, "pipeline")
        for action in actions:
            self._send(rank, action, last)

    def _forward(self, rank: RankStep, cost: StageCost, action: Action, after: list[int]) -> int:
        rank.count("tp", self.tp_bytes[action.stage])
        if self.states.gathers(cost, action):
            return self._forward_by_unit(rank, cost, action, after)
        key = ("F", action.stage)
        work = self._works.get(key) or self._keep(key, self.terms.forward(cost, range(len(cost.units))))
        return self.context.compute(rank, work, after, (action,), self.wait_term)

    def _forward_by_unit(self, rank: RankStep, cost: StageCost, action: Action, after: list[int]) -> int:
        """Forward with each unit's parameters gathered before it."""
        kinds, prefetch = self.kinds[action.stage], self.context.plan.collectives.prefetch_units
        last = -1
        computed: list[int] = []
        for index, unit in enumerate(cost.units):
            ahead = index - 1 - prefetch
            gate = after if index == 0 else ([computed[ahead]] if ahead >= 0 and cost.stage.zero == 3 else [])
            label = (action, self.unit_names[index])
            gathered = self.states.gather(rank, cost, index, gate, label)
            key = ("F", action.stage, kinds[index])
            work = self._works.get(key)
            if work is None:
                terms = self.terms.forward(cost, [index])
                terms["dp_comm"] = self.terms.unpack_s(cost, index) + self.terms.dp_wait_s(cost, unit.forward_s)
                work = self._keep(key, terms)
            last = self.context.compute(rank, work, [gathered, *(after if index == 0 else [])], label, "dp_comm")
            computed.append(last)
        return last

    def _backward(self, rank: RankStep, cost: StageCost, action: Action, after: list[int]) -> int:
        states = self.states
        gathers, reduces, ddp = states.gathers(cost, action), states.reduces(cost, action), states.all_reduces(cost, action)
        accumulates = states.accumulates(action)
        if reduces or ddp or gathers:
            return self._backward_by_unit(rank, cost, action, after, (gathers, reduces, ddp, accumulates))
        key = (action.kind, action.stage, accumulates)
        work = self._works.get(key) or self._keep(key, self.terms.backward(cost, range(len(cost.units)), accumulates, action.kind))
        return self.context.compute(rank, work, after, (action,), self.wait_term)

    def _backward_by_unit(
        self, rank: RankStep, cost: StageCost, action: Action, after: list[int], does: tuple[bool, bool, bool, bool]
    ) -> int:
        """Backward with each unit's parameters gathered before it or its gradients reduced after it. ``does``: whether it gathers,
        reduces into shards, sums over replicas, accumulates."""
        gathers, reduces, ddp, _ = does
        options = self.context.plan.collectives
        computed: list[int] = []
        gathered: dict[int, int] = {}  # the last unit's weights are still there from forward
        pending = (0.0, 0.0)

        def gather(index: int) -> None:
            if gathers and 0 <= index < len(cost.units) - 1 and index not in gathered:
                ahead = len(computed) - 1 - options.prefetch_units
                gate = [computed[ahead]] if ahead >= 0 else after[:1]
                gathered[index] = self.states.gather(rank, cost, index, gate, (action, self.unit_names[index]))

        for index in reversed(range(len(cost.units))):
            first, label = not computed, (action, self.unit_names[index])
            gate = list(after) if first else []
            gather(index)
            gate += [gathered[index]] if index in gathered else []
            task = self.context.compute(
                rank, self._unit_backward(cost, action, index, does), gate, label, self.wait_term if first else "dp_comm"
            )
            computed.append(task)
            if options.prefetch_units:  # asked for when this unit's backward begins, so queued ahead of its reduction
                gather(index - 1)
            if reduces:
                self.states.reduce_unit(rank, cost, index, task, label)
            if ddp:
                dense, expert = cost.unit_reduce_parts(index)
                pending = (pending[0] + dense, pending[1] + expert)
                if sum(pending) >= options.bucket_bytes or index == 0:
                    self.states.all_reduce(rank, cost, pending, [task], overlapped=True, label=(action, "bucket"))
                    pending = (0.0, 0.0)
        return computed[-1]

    def _unit_backward(self, cost: StageCost, action: Action, index: int, does: tuple[bool, bool, bool, bool]) -> Work:
        """Work of one unit's backward with the copies and waits around its collectives."""
        gathers, reduces, ddp, accumulates = does
        unpacks = gathers and index < len(cost.units) - 1
        key = (action.kind, action.stage, self.kinds[action.stage][index], unpacks, does)
        found = self._works.get(key)
        if found is not None:
            return found
        terms = self.terms.backward(cost, [index], accumulates and cost.stage.zero not in (2, 3), action.kind)
        if unpacks:
            terms["dp_comm"] = self.terms.unpack_s(cost, index)
        if reduces or gathers:
            work_s = terms["backward"] + terms.get("recompute", 0.0)
            terms["dp_comm"] = terms.get("dp_comm", 0.0) + self.terms.dp_wait_s(cost, work_s)
        if ddp:
            copied_s = self.context.model.copy_s(cost.device, cost.unit_grad_bytes(index))
            terms["backward"] += self.rules.bucket_copies * copied_s
        return self._keep(key, terms)

    # --- from stage to stage --------------------------------------------------------------------------------------

    def _send(self, rank: RankStep, action: Action, last: int) -> None:
        """Send to the neighbour stage; what arrives there enables its own action."""
        stage, kind, micro_batch = action
        if kind == "W":
            return
        forward = kind == "F"
        if (stage, forward) not in self._routes:
            self._routes[stage, forward] = self._route(rank, stage, forward)
        route = self._routes[stage, forward]
        if route is None:
            return
        arrived = last
        if route.work is not None:
            label = ("send", action)
            if route.link is None:
                arrived = self.context.compute(rank, route.work, [last], label, "pipeline")
            else:
                seconds, terms = route.work
                arrived = self.context.engine.task(route.link, seconds, after=(last,), label=label, terms=terms)
            rank.count("pp", route.num_bytes)
        self._arrived[route.stage, forward, micro_batch] = arrived

    def _route(self, rank: RankStep, stage: int, forward: bool) -> _Route | None:
        """Where the result of a stage goes; ``None`` from the ends of the pipeline."""
        target = stage + (1 if forward else -1)
        if not 0 <= target < self.num_stages:
            return None
        if self.owner[target] is rank:
            return _Route(target)
        cost = rank.stages[stage]
        size_bytes = cost.units[-1].output_bytes if forward else cost.units[0].input_bytes
        source, other = self.pipeline.stages[stage], self.pipeline.stages[target]
        seconds = self.terms.p2p_s(cost, size_bytes, source.devices[-1], other.devices[-1])
        link = None if self.software.p2p_blocking else self.context.engine.stream(f"p{self.index} link {stage}>{target}")
        return _Route(target, Work.of({"pipeline": seconds}), size_bytes, link)


def _unit_kinds(cost: StageCost) -> Sequence[int]:
    """A number for each unit, the same for units of equal cost and parameters (which are the same objects, priced once)."""
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault((id(unit), id(params)), len(numbers)) for unit, params in zip(cost.units, cost.params, strict=True)]
