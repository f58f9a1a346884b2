"""The integer linear program of an op sharding, and the cost of any assignment without it.

One binary a strategy; a flow from the state that a tensor is made in to the state that each reader wants. A change of state is paid
once, however many readers want its result. Storage is counted once per form in which anything keeps it. The flows make the linear
relaxation tight: it is integral on the blocks that were tried, so the search tree stays small.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortools.linear_solver import pywraplp

from planner.op_sharding.mesh import Sent, States
from planner.op_sharding.problem import Problem, Tensor

MICROSECOND = 1e6  # objective in microseconds: coefficients near one
STATUS = {pywraplp.Solver.OPTIMAL: "optimal", pywraplp.Solver.FEASIBLE: "feasible", pywraplp.Solver.INFEASIBLE: "infeasible"}


@dataclass(frozen=True)
class Choice:
    """An assignment: a strategy of every node, the state of every block input and output."""

    strategies: tuple[int, ...]
    inputs: dict[str, States]
    outputs: dict[str, States]


@dataclass(frozen=True)
class Solution:
    """What the solver found. ``bound_s``: no assignment is faster."""

    status: str
    choice: Choice | None
    seconds: float
    bound_s: float
    wall_s: float
    num_variables: int
    num_constraints: int


@dataclass(frozen=True)
class Evaluated:
    """Cost of an assignment. ``changes``: (tensor, from, to, seconds, collectives)."""

    seconds: float
    state_bytes: float
    kept_bytes: float
    changes: tuple[tuple[str, States, States, float, tuple[Sent, ...]], ...]


def evaluate(problem: Problem, choice: Choice) -> Evaluated | None:
    """Cost of an assignment straight from its definition; ``None`` where a tensor cannot get into a wanted state."""
    chosen = [options[index] for options, index in zip(problem.strategies, choice.strategies, strict=True)]
    seconds, changes = sum(item.seconds for item in chosen), []
    kept: dict[tuple[str, str], float] = {}
    for item in chosen:
        kept.update(item.kept)
    for tensor in problem.tensors:
        start = choice.inputs[tensor.name] if tensor.source is None else chosen[tensor.source].states[tensor.name]
        wanted = [chosen[reader].states[tensor.name] for reader in tensor.readers]
        if tensor.name in choice.outputs:
            wanted.append(choice.outputs[tensor.name])
        for target in dict.fromkeys(wanted):
            change = tensor.changes.get((start, target))
            if change is None:
                return None
            seconds += change[0]
            if start != target:
                changes.append((tensor.name, start, target, *change))
    kept_bytes = sum(kept.values()) + sum(item.extra_bytes for item in chosen)
    return Evaluated(seconds, sum(item.state_bytes for item in chosen), kept_bytes, tuple(changes))


def memory_bytes(problem: Problem, cost: Evaluated) -> float:
    """What the block holds on a rank: states, and what its passes in flight keep for backward."""
    return cost.state_bytes + problem.passes_in_flight * cost.kept_bytes


def ends_agree(problem: Problem, choice: Choice) -> bool:
    """Whether every output leaves in the state that it must."""
    return all(
        choice.outputs[name] == (choice.inputs[wanted] if isinstance(wanted, str) else wanted)
        for name, wanted in problem.ends.items()
        if name in choice.outputs
    )


class Program:
    """Builds and solves the program."""

    def __init__(self, problem: Problem, *, time_limit_s: float = 60.0, seed: int = 0, solver: str = "SCIP") -> None:
        self.problem, self.solver = problem, pywraplp.Solver.CreateSolver(solver)
        self.solver.SetTimeLimit(int(time_limit_s * 1000))
        if solver == "SCIP":
            self.solver.SetSolverSpecificParametersAsString(
                f"randomization/randomseedshift = {seed}\nrandomization/permutevars = FALSE\n"
            )
        self.objective = self.solver.Objective()
        self.x = [[self._binary(item.seconds) for item in options] for options in problem.strategies]
        for row in self.x:
            self.solver.Add(sum(row) == 1)
        self.inputs: dict[str, dict[States, Any]] = {}
        self.outputs: dict[str, dict[States, Any]] = {}

    def _binary(self, seconds: float = 0.0) -> Any:
        variable = self.solver.BoolVar("")
        self.objective.SetCoefficient(variable, seconds * MICROSECOND)
        return variable

    def _share(self, seconds: float = 0.0) -> Any:
        variable = self.solver.NumVar(0.0, 1.0, "")
        self.objective.SetCoefficient(variable, seconds * MICROSECOND)
        return variable

    def run(self) -> Solution:
        """Solve; deterministic for a seed as long as the time limit is not hit."""
        started = time.perf_counter()
        for tensor in self.problem.tensors:
            self._tensor(tensor)
        for name, wanted in self.problem.ends.items():
            if isinstance(wanted, str):
                for state in {*self.outputs[name], *self.inputs[wanted]}:
                    self.solver.Add(self.outputs[name].get(state, 0) == self.inputs[wanted].get(state, 0))
        if self.problem.memory_limit_bytes is not None:
            self._memory(self.problem.memory_limit_bytes)
        self.objective.SetMinimization()
        status = STATUS.get(self.solver.Solve(), "unknown")
        choice = self._choice() if status in ("optimal", "feasible") else None
        found = evaluate(self.problem, choice) if choice is not None else None
        seconds = found.seconds if found is not None else float("inf")
        bound = self.objective.BestBound() / MICROSECOND if choice is not None else float("inf")
        wall_s = time.perf_counter() - started
        return Solution(
            status, choice, seconds, min(bound, seconds), wall_s, self.solver.NumVariables(), self.solver.NumConstraints()
        )  # fmt: skip

    # --- tensors -----------------------------------------------------------------------------------------------

    def _ends_of(self, node: int, name: str) -> dict[States, list[Any]]:
        found: dict[States, list[Any]] = {}
        for variable, item in zip(self.x[node], self.problem.strategies[node], strict=True):
            found.setdefault(item.states[name], []).append(variable)
        return found

    def _tensor(self, tensor: Tensor) -> None:
        if tensor.source is None:
            self.inputs[tensor.name] = {form: self._binary() for form in tensor.forms}
            self.solver.Add(sum(self.inputs[tensor.name].values()) == 1)
            made = {form: [variable] for form, variable in self.inputs[tensor.name].items()}
        else:
            made = self._ends_of(tensor.source, tensor.name)
        readers = [self._ends_of(reader, tensor.name) for reader in tensor.readers]
        if tensor.name in self.problem.folded.block.outputs:
            forms = dict.fromkeys(target for _, target in tensor.changes)
            self.outputs[tensor.name] = {form: self._binary() for form in forms}
            self.solver.Add(sum(self.outputs[tensor.name].values()) == 1)
            readers.append({form: [variable] for form, variable in self.outputs[tensor.name].items()})
        self._flows(tensor, made, readers)

    def _flows(self, tensor: Tensor, made: dict[States, list[Any]], readers: Sequence[dict[States, list[Any]]]) -> None:
        paid: dict[tuple[States, States], Any] = {}
        for wanted in readers:
            flows: dict[tuple[States, States], Any] = {}
            for pair, (seconds, _) in tensor.changes.items():
                if pair[0] in made and pair[1] in wanted:
                    flows[pair] = self._share(seconds if len(readers) == 1 else 0.0)
                    if len(readers) > 1 and seconds > 0:
                        if pair not in paid:
                            paid[pair] = self._share(seconds)
                        self.solver.Add(paid[pair] >= flows[pair])
            for start, variables in made.items():
                self.solver.Add(sum(flow for pair, flow in flows.items() if pair[0] == start) == sum(variables))
            for target, variables in wanted.items():
                self.solver.Add(sum(flow for pair, flow in flows.items() if pair[1] == target) == sum(variables))

    # --- memory ------------------------------------------------------------------------------------------------

    def _memory(self, limit_bytes: float) -> None:
        kept: dict[tuple[str, str], tuple[float, Any]] = {}
        total: list[Any] = []
        for row, options in zip(self.x, self.problem.strategies, strict=True):
            keepers: dict[tuple[str, str], list[Any]] = {}
            for variable, item in zip(row, options, strict=True):
                held = item.state_bytes + self.problem.passes_in_flight * item.extra_bytes
                total.append(variable * (held / limit_bytes))
                for key, size in item.kept.items():
                    if key not in kept:
                        kept[key] = (size, self._share())
                    keepers.setdefault(key, []).append(variable)
            for key, variables in keepers.items():
                self.solver.Add(kept[key][1] >= sum(variables))
        total += [share * (self.problem.passes_in_flight * size / limit_bytes) for size, share in kept.values()]
        self.solver.Add(sum(total) <= 1)

    def _choice(self) -> Choice:
        def chosen(states: dict[States, Any]) -> States:
            return max(states, key=lambda state: states[state].solution_value())

        strategies = tuple(max(range(len(row)), key=lambda index: row[index].solution_value()) for row in self.x)
        return Choice(
            strategies, {name: chosen(item) for name, item in self.inputs.items()},
            {name: chosen(item) for name, item in self.outputs.items()},
        )  # fmt: skip
