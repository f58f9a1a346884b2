"""The stage split as an integer program in OR-Tools (CP-SAT); problem, data and rules in ``planner.stages``.

Whole numbers: times are ticks (:class:`Scale`). Where all units between the ends are alike, sums are linear in b; else they are
element constraints. The domains of b are cut down to what a split as good as the greedy one can have. One worker, a fixed seed and
the solver's own clock: the same answer everywhere.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from planner.prices import Floats
from planner.stages import StageProblem, StageSplit, first_bound_s, greedy_split, prefix_sums, split_time_s

# Ticks of one micro-batch through the whole model.
TICKS_PER_PASS = 2**24
# Weight of V against the longest stage, the tie-break.
TIE_WEIGHT = 64
# The solver's own clock (not seconds).
DETERMINISTIC_TIME = 2.0
RELATIVE_GAP = 1e-3


class Scale:
    """Seconds to whole ticks, so that one pass through the model has ``TICKS_PER_PASS``."""

    def __init__(self, problem: StageProblem) -> None:
        one_pass = float((problem.forward_s + problem.backward_s).sum(axis=1).max())
        self.tick_s = max(one_pass, 1e-12) / TICKS_PER_PASS
        self.rounding_s = self.tick_s * problem.num_units * (problem.num_micro_batches + 6)

    def ticks(self, values: Floats | float) -> NDArray[np.int64]:
        """Rounded to the nearest tick."""
        return np.rint(np.asarray(values, dtype=float) / self.tick_s).astype(np.int64)


def solve_split(problem: StageProblem, *, seed: int = 0) -> StageSplit | None:
    """The best split, or ``None`` when no split fits the memory."""
    start = greedy_start(problem)
    return None if start is None else improve_split(problem, start, seed=seed)


def greedy_start(problem: StageProblem) -> StageSplit | None:
    """The greedy split with the bound that it proves, in a fraction of the program's time; ``None`` when no split fits."""
    counts, bottleneck_s = greedy_split(problem)
    if counts is None:
        return None
    time_s = split_time_s(problem, counts)
    if problem.num_stages == 1:
        return StageSplit(counts, time_s, time_s, proven=True)
    bound_s = first_bound_s(problem, bottleneck_s) + float(problem.first_stage_s[1:].min())
    return StageSplit(counts, time_s, min(bound_s, time_s), proven=False)


def improve_split(problem: StageProblem, start: StageSplit, *, seed: int = 0) -> StageSplit:
    """The best split, from a greedy one (:func:`greedy_start`)."""
    if start.proven:
        return start
    return _Program(problem, start.counts, start.bound_s - float(problem.first_stage_s[1:].min())).solve(seed)


class _Program:
    """Variables and constraints; rule numbers are those of ``planner.stages``."""

    def __init__(self, problem: StageProblem, hint: tuple[int, ...], first_bound: float) -> None:
        self.problem, self.hint, self.first_bound_s = problem, hint, first_bound
        self.scale = Scale(problem)
        self.model = cp_model.CpModel()
        units, stages = problem.num_units, problem.num_stages
        self.ends = _useful_ends(problem, split_time_s(problem, hint))
        domains = _boundary_domains(self.ends)
        inner = [self.model.new_int_var(*domains[stage - 1], f"b[{stage}]") for stage in range(1, stages)]
        self.bounds: list[Any] = [0, *inner, units]
        for variable, value in zip(inner, np.cumsum(hint)[:-1].tolist(), strict=True):
            self.model.add_hint(variable, value)
        self._found: dict[tuple[int, str, int], Any] = {}
        tables = {"f": problem.forward_s, "g": problem.backward_s, "r": problem.first_s, "k": problem.both_s}
        tables |= {f"t{piece}": table for piece, table in enumerate(problem.tails_s)}
        self._prefixes = {name: prefix_sums(self.scale.ticks(table)) for name, table in tables.items()}
        horizon = int(self.scale.ticks(split_time_s(problem, hint) * 2)) + int(self.scale.ticks(self.scale.rounding_s)) + 1
        self.horizon = max(horizon, TICKS_PER_PASS)
        self.step = self.model.new_int_var(0, self.horizon, "V")
        self.longest = self.model.new_int_var(0, self.horizon, "z")
        self.stage_end = [self.model.new_int_var(-self.horizon, self.horizon, f"E[{stage}]") for stage in range(stages)]

    def solve(self, seed: int) -> StageSplit:
        """Build, solve, and evaluate the split again without the solver."""
        self._no_empty_stage()
        self._memory()
        self._stage_ends()
        self._step()
        self.model.minimize(TIE_WEIGHT * self.step + self.longest)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = DETERMINISTIC_TIME
        solver.parameters.relative_gap_limit = RELATIVE_GAP
        status = solver.solve(self.model)
        found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        counts = self._counts(solver) if found else self.hint
        times = {split_time_s(self.problem, item): item for item in (self.hint, counts)}
        time_s = min(times)
        bound_s = max(self.first_bound_s + float(self.problem.first_stage_s[1:].min()), self._bound_s(solver))
        return StageSplit(times[time_s], time_s, min(bound_s, time_s), proven=status == cp_model.OPTIMAL)

    def _counts(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        ends = [bound if isinstance(bound, int) else int(solver.value(bound)) for bound in self.bounds]
        return tuple(high - low for low, high in pairwise(ends))

    def _bound_s(self, solver: cp_model.CpSolver) -> float:
        """No split is faster: the objective's bound without the tie-break's part (z <= V / m) and the rounding of ticks."""
        ticks = solver.best_objective_bound / (TIE_WEIGHT + 1 / self.problem.num_micro_batches)
        return float(ticks * self.scale.tick_s - self.scale.rounding_s)

    # (1)
    def _no_empty_stage(self) -> None:
        """Rule (1): b[s+1] >= b[s] + 1."""
        for low, high in pairwise(self.bounds):
            self.model.add(high >= low + 1)

    # (2)
    def _memory(self) -> None:
        """Rule (2): b[s+1] <= e[s, b[s]]."""
        for stage, (low, high) in enumerate(pairwise(self.bounds)):
            ends = self.ends[stage]
            if isinstance(low, int):
                self.model.add(high <= int(ends[low]))
            elif isinstance(high, int):
                starts = [start for start in range(self.problem.num_units) if ends[start] >= high]
                self.model.add(low >= min(starts, default=self.problem.num_units))
            else:
                self.model.add(high <= self._lookup(low, ends, f"e[{stage}]"))

    # (3) to (7), (11)
    def _stage_ends(self) -> None:
        """Rules (3) to (7) and (11): what E and z must reach, and what no E undercuts."""
        m, p = self.problem.num_micro_batches, self.problem.num_stages
        h, w = int(self.scale.ticks(self.problem.boundary_s)), int(self.scale.ticks(self.problem.boundary_first_s))
        least = int((self.first_bound_s - self.scale.rounding_s) / self.scale.tick_s)
        latest = self.model.new_int_var(least, self.horizon, "max E")
        for stage in range(p):
            left = p - 1 - stage
            forward, backward = self._sum("f", stage), self._sum("g", stage)
            cost, end = forward + backward, self.stage_end[stage]
            own = m * cost + self._sum("r", stage)
            base = self._before("f", stage) + self._before("g", stage) + self._before("r", stage) + stage * (h + w) + own
            self.model.add(self.longest >= cost)
            self.model.add(end >= base)
            self.model.add(latest >= end)
            self.model.add(self.step >= end)
            if self.problem.schedule != "gpipe" and left:
                after = self._after("f", stage) + self._after("g", stage) + left * h
                first_after = after + self._after("r", stage) + left * w
                self.model.add(end >= base + first_after - left * forward)
                self.model.add(end >= base + after - left * backward)
                if left < m - 1:
                    self.model.add(end >= base + first_after + after - left * cost)
        self.model.add(self.step >= latest + self._lookup(self.bounds[1], self.scale.ticks(self.problem.first_stage_s), "d"))  # (8)
        if self.problem.schedule == "gpipe":
            self._gpipe(h)

    def _gpipe(self, h: int) -> None:
        """Rule (7)."""
        m, p = self.problem.num_micro_batches, self.problem.num_stages
        most = [self.model.new_int_var(0, self.horizon, name) for name in ("max F", "max G")]
        for stage in range(p):
            self.model.add(most[0] >= self._sum("f", stage))
            self.model.add(most[1] >= self._sum("g", stage))
        total = sum(self._sum(name, stage) for name in "fg" for stage in range(p))
        self.model.add(self.stage_end[0] >= total + (m - 1) * (most[0] + most[1]) + (p - 1) * h)

    # (9), (10)
    def _step(self) -> None:
        """Rules (9) and (10): the step lasts until every stage has ended, and both resources of a stage fit into it."""
        back = int(self.scale.ticks(self.problem.boundary_back_s))
        for stage in range(self.problem.num_stages):
            own = self.stage_end[stage] - self._before("g", stage) - stage * back
            for piece, constant in enumerate(self.problem.tail_constants_s):
                self.model.add(self.step >= own + self._sum(f"t{piece}", stage) + int(self.scale.ticks(float(constant))))
            if self.problem.both_s.any():
                self.model.add(self.step >= (self.problem.num_micro_batches - 1) * self._sum("k", stage))

    # --- sums ---------------------------------------------------------------------------------------------------

    def _before(self, name: str, stage: int) -> Any:
        """Sum of a table over the stages before; one class: a prefix sum."""
        if len(set(self.problem.stage_class)) == 1:
            return self._prefix(name, self.problem.stage_class[0], stage)
        return sum((self._sum(name, other) for other in range(stage)), start=0)

    def _after(self, name: str, stage: int) -> Any:
        """Sum of a table over the stages after."""
        if len(set(self.problem.stage_class)) == 1:
            cls = self.problem.stage_class[0]
            return int(self._prefixes[name][cls, -1]) - self._prefix(name, cls, stage + 1)
        return sum((self._sum(name, other) for other in range(stage + 1, self.problem.num_stages)), start=0)

    def _sum(self, name: str, stage: int) -> Any:
        """Sum of a table over the units of a stage."""
        cls = self.problem.stage_class[stage]
        return self._prefix(name, cls, stage + 1) - self._prefix(name, cls, stage)

    def _prefix(self, name: str, cls: int, bound: int) -> Any:
        """Prefix sum of a table up to boundary number ``bound``."""
        key = (cls, name, bound)
        if key not in self._found:
            self._found[key] = self._lookup(self.bounds[bound], self._prefixes[name][cls], f"{name}[{cls},{bound}]")
        return self._found[key]

    def _lookup(self, index: Any, table: NDArray[np.int64], name: str) -> Any:
        """``table[index]``: a number for a fixed index, linear where the table is, else an element constraint."""
        if isinstance(index, int):
            return int(table[index])
        inner = table[1 : self.problem.num_units]
        steps = np.diff(inner)
        if len(steps) == 0 or (steps == steps[0]).all():
            step = int(steps[0]) if len(steps) else 0
            return int(inner[0]) + step * (index - 1)
        result = self.model.new_int_var(int(table.min()), int(table.max()), name)
        self.model.add_element(index, table.tolist(), result)
        return result


def _useful_ends(problem: StageProblem, known_s: float) -> NDArray[np.int64]:
    """[stage, a] -> the furthest end that memory allows and that a split at least as good as ``known_s`` can have: m C <= V."""
    limit = (known_s - float(problem.first_stage_s[1:].min())) * (1 + 1e-9)
    prefix = prefix_sums(problem.step_work_s())
    reach = np.stack([np.searchsorted(row, row[:-1] + limit, side="right") - 1 for row in prefix])
    return np.minimum(problem.furthest_end, reach[list(problem.stage_class)])


def _boundary_domains(ends: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(least, largest) first unit of stages 1 to p-1, from filling all stages before, or all after, as far as they go."""
    stages, units = ends.shape
    latest, earliest = [0], [units]
    for stage in range(stages - 1):
        latest.append(min(int(ends[stage, : latest[-1] + 1].max()), units - (stages - 1 - stage)))
    for stage in range(stages - 1, 0, -1):
        starts = np.flatnonzero(ends[stage] >= earliest[-1])
        earliest.append(max(stage, int(starts[0]) if len(starts) else units))
    return [(min(low, high), high) for low, high in zip(reversed(earliest[1:]), latest[1:], strict=True)]
