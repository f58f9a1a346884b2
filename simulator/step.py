"""One training step of a plan as tasks on streams: the event simulation.

Ranks that behave alike are folded: one representative per pipeline rank stands for its whole dp x cp x tp grid. Streams of a
representative: ``compute`` (the device's queue, with tensor-parallel collectives inside, as they run), ``comm`` (data-parallel
collectives) and one ``link`` per neighbour. The order of work is the contract of docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.cost_model import CostModel
from simulator.engine import Engine, Task
from simulator.pass_tasks import PassTasks
from simulator.rank_step import RankStep, StepContext
from simulator.runtime_rules import rules_for
from simulator.stage_cost import pipeline_stages, stage_cost
from specs.plan import Pipeline, Plan
from specs.schedule import Action, Rows


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
        self.context = StepContext(self.engine, model, plan, rules_for(model.cluster, model.profile))
        self.ranks: list[RankStep] = []

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
            slowdowns = self.context.rules.slowdowns(costs[held[0]].dp_shape.tier)
            if max(slowdowns) > 1:
                self.engine.couple(compute, comm, *slowdowns)
            ranks.append(RankStep(index, number, {stage: costs[stage] for stage in held}, rows[number], compute, comm))
        self.ranks += ranks
        PassTasks(self.context, index, pipeline, ranks, rows).add()

    def _rank_terms(self, rank: RankStep, step_s: float) -> dict[str, float]:
        """Exclusive seconds by term: task terms stretched with their real duration, gaps by the waiting task's term."""
        terms: dict[str, float] = {}
        now = 0.0
        for start_s, end_s, duration_s, parts, wait_term in self.engine.spans(rank.compute):
            gap = start_s - now
            if gap > 0:
                terms[wait_term] = terms.get(wait_term, 0.0) + gap
            stretch = (end_s - start_s) / duration_s if duration_s > 0 else 1.0
            for name, seconds in parts.items():
                terms[name] = terms.get(name, 0.0) + seconds * stretch
            now = end_s
        terms["wait"] = terms.get("wait", 0.0) + step_s - now
        return terms


def pipeline_rows(plan: Plan, pipeline: Pipeline) -> Rows:
    """Action rows of a pipeline; one rank accumulates micro-batches one after another."""
    if pipeline.pp == 1 and len(pipeline.stages) == 1:
        actions = [Action(0, kind, index) for index in range(pipeline.num_micro_batches) for kind in ("F", "B")]
        return (tuple(actions),)
    return plan.schedule.actions(num_ranks=pipeline.pp, num_micro_batches=pipeline.num_micro_batches)


def timeline(result: StepResult) -> list[tuple[str, Task]]:
    """Every task with its stream's name, in start order."""
    tasks = sorted(result.engine.tasks, key=lambda task: (task.start_s, task.index))
    return [(result.engine.stream_names[task.stream], task) for task in tasks]
