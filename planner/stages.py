"""The stage split: a chain of units onto pipeline stages.

Problem   U units in a chain, p stages in order on devices that may be unlike; each stage takes a contiguous, non-empty range.
          Minimise the time of one step of m micro-batches under each stage's memory.
Data      f[c,u], g[c,u]  forward and backward time of unit u on device class c; c(s) the class of stage s
          r[c,u]          more in its first forward;  k[c,u]  time of both resources, a micro-batch
          h, h', w        time of a boundary in both directions, backwards only; more when the first micro-batch crosses it
          e[s,a]          the furthest end of a stage s that starts at unit a and fits its memory
          d[b]            time of stage 0 = [0, b) before its first forward and after its last backward
          t[n,c,u], t0[n] pieces n of what a stage does after its last backward
Variables b[s] in 1..U-1  first unit of stage s (b[0] = 0, b[p] = U);  E[s], V the step;  z the longest stage
Derived   F_s, G_s, R_s, K_s, T[n]_s   sums of f, g, r, k, t[n] over [b[s], b[s+1]);  C_s = F_s + G_s;  q = p-1-s
          P_s = sum over i<s of C_i + R_i, + s (h + w);  Q_s = sum over i>s of C_i, + q h;  Q'_s = Q_s + sum over i>s of R_i, + q w
Rules     (1) b[s+1] >= b[s] + 1                                     no stage is empty, every unit is on one stage
          (2) b[s+1] <= e[s, b[s]]                                   memory
          (3) E[s] >= P_s + m C_s + R_s                              a stage works, then its last gradient travels back
  1F1B    (4) E[s] >= (3) + Q'_s - q F_s                             it waits for the first gradient to come back
          (5) E[s] >= (3) + Q_s - q G_s                              it waits for the last gradient to come back
          (6) E[s] >= (3) + Q'_s + Q_s - q C_s   if q < m-1          it waits for both, one after the other
  GPipe   (7) E[0] >= sum F + (m-1) max F + sum G + (m-1) max G + (p-1) h
          (8) V >= E[s] + d[b[1]]                                    the step ends when stage 0 has ended
          (9) V >= E[s] - sum over i<s of G_i - s h' + T[n]_s + t0[n]  and when every other stage has
         (10) V >= (m-1) K_s                                         both resources of a stage fit into the step
         (11) z >= C_s
Objective V, then z.

Every rule on E and V is a lower bound of what any execution in the order of the schedule takes, so the optimum is one too. With
equal stages it is (m + p - 1) C, the textbook time. ``planner.stage_program`` solves it; here are its data, the objective evaluated
for a given split, a greedy split (the hint) and a first bound. Brute force is the test.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats

# Schedules that the program knows; of others the split follows a rule (``planner.rank_split``).
PROGRAM_SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class StageProblem:
    """Data of one split; see the module docstring. Arrays: f, g, r, k (classes x U), e (p x U), d (U+1; index 0 unused),
    t (pieces x classes x U), t0 (pieces)."""

    forward_s: Floats
    backward_s: Floats
    first_s: Floats
    both_s: Floats
    stage_class: tuple[int, ...]
    num_micro_batches: int
    schedule: str
    boundary_s: float
    boundary_back_s: float
    boundary_first_s: float
    furthest_end: NDArray[np.int64]
    first_stage_s: Floats
    tails_s: Floats
    tail_constants_s: Floats

    @property
    def num_stages(self) -> int:
        """p."""
        return len(self.stage_class)

    @property
    def num_units(self) -> int:
        """U."""
        return int(self.forward_s.shape[1])

    def key(self) -> tuple[object, ...]:
        """What makes two problems the same."""
        return tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in vars(self).values())

    def step_work_s(self) -> Floats:
        """m C of each unit. (classes x U)"""
        return self.num_micro_batches * (self.forward_s + self.backward_s)


@dataclass(frozen=True)
class StageSplit:
    """A split. ``counts``: units of each stage. ``time_s``: its value of the objective; ``bound_s``: no split is faster."""

    counts: tuple[int, ...]
    time_s: float
    bound_s: float
    proven: bool


def split_time_s(problem: StageProblem, counts: tuple[int, ...]) -> float:
    """Rules (3) to (10) evaluated for a given split, in seconds: the objective without the solver."""
    ends = np.cumsum((0, *counts))
    spans = [(int(low), int(high), problem.stage_class[index]) for index, (low, high) in enumerate(pairwise(ends))]

    def sums(table: Floats) -> Floats:
        return np.array([table[cls, low:high].sum() for low, high, cls in spans])

    forward, backward, first = sums(problem.forward_s), sums(problem.backward_s), sums(problem.first_s)
    m, p, h, w = problem.num_micro_batches, problem.num_stages, problem.boundary_s, problem.boundary_first_s
    cost, work = forward + backward, m * (forward + backward)
    left = np.arange(p)[::-1]
    before = _exclusive(cost + first) + np.arange(p) * (h + w)
    after = _exclusive(cost[::-1])[::-1] + left * h
    first_after = after + _exclusive(first[::-1])[::-1] + left * w
    end = before + work + first
    if problem.schedule != "gpipe":
        both = np.where(left < m - 1, first_after + after - left * cost, 0.0)
        end = end + np.max([first_after - left * forward, after - left * backward, both, 0.0 * both], axis=0)
    else:
        end[0] = max(end[0], cost.sum() + (m - 1) * (forward.max() + backward.max()) + (p - 1) * h)
    own = end - _exclusive(backward) - np.arange(p) * problem.boundary_back_s
    tails = [own + sums(table) + constant for table, constant in zip(problem.tails_s, problem.tail_constants_s, strict=True)]
    step = max(float(end.max() + problem.first_stage_s[counts[0]]), *(float(tail.max()) for tail in tails))
    return max(step, float((m - 1) * sums(problem.both_s).max()))


def _exclusive(values: Floats) -> Floats:
    """Sum of the values before each one."""
    return np.concatenate([[0.0], np.cumsum(values)[:-1]])


def pipeline_bound_s(
    work_s: Any, bottleneck_s: Any, *, num_stages: Any, num_micro_batches: Any, boundary_s: Any, first_s: Any = 0.0,
    boundary_first_s: Any = 0.0, schedule: str,
) -> Any:  # fmt: skip
    """A bound on every E[s] for every split: ``work_s`` = W, one micro-batch through all stages; ``bottleneck_s`` <= c, the longest
    stage's C; ``first_s`` = R, all units' more in the first forward. Numbers or arrays.

    1F1B: rule (6) at the longest stage j, with sum over i<j of C_i <= j c, gives E >= 2 W + R + (m-p-1) c, growing in c if m > p
    (at m = p and j = 0 rule (6) of stage 1 gives the same); at m = p it falls with c and meets E >= m c at c = (2 W + R) / (m+1).
    GPipe: rule (7) gives E >= W + (m-1) c.
    """
    m, p = num_micro_batches, num_stages
    if schedule == "gpipe":
        return work_s + (m - 1) * bottleneck_s + (p - 1) * boundary_s
    twice = 2 * work_s + first_s + (p - 1) * (boundary_s + boundary_first_s)
    few = np.maximum(m * bottleneck_s, twice * m / (m + 1))
    return np.where(np.asarray(m) > p, twice + (m - p - 1) * bottleneck_s, few)


def first_bound_s(problem: StageProblem, bottleneck_s: float) -> float:
    """What no E[s] undercuts, whatever the solver finds; on unlike devices each unit counts on its fastest one.
    ``bottleneck_s``: of :func:`greedy_split`."""
    classes = sorted(set(problem.stage_class))
    work = float((problem.forward_s + problem.backward_s)[classes].min(axis=0).sum())
    m = problem.num_micro_batches
    bound = pipeline_bound_s(
        work, bottleneck_s / m, num_stages=problem.num_stages, num_micro_batches=m, boundary_s=problem.boundary_s,
        boundary_first_s=problem.boundary_first_s, first_s=float(problem.first_s[classes].min(axis=0).sum()),
        schedule=problem.schedule,
    )  # fmt: skip
    return float(bound) * (1 - 1e-9)


def greedy_split(problem: StageProblem) -> tuple[tuple[int, ...] | None, float]:
    """The split with the smallest longest stage under the memory limits, by bisection: fill each stage up to the bound in turn.
    With it the largest bound (seconds a step) that no split keeps."""
    prefix = prefix_sums(problem.step_work_s())
    low, high = 0.0, float(prefix[:, -1].max()) * (1 + 1e-9) + 1e-30
    best = _fill(problem, prefix, high)
    if best is None:
        return None, 0.0
    for _ in range(40):
        middle = (low + high) / 2
        found = _fill(problem, prefix, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best, low


def _fill(problem: StageProblem, prefix: Floats, limit: float) -> tuple[int, ...] | None:
    start, ends = 0, []
    for stage, cls in enumerate(problem.stage_class):
        reach = int(np.searchsorted(prefix[cls], prefix[cls, start] + limit, side="right")) - 1
        end = min(reach, int(problem.furthest_end[stage, start]), problem.num_units - (problem.num_stages - 1 - stage))
        if end <= start:
            return None
        ends.append(end)
        start = end
    return tuple(np.diff((0, *ends)).tolist()) if start == problem.num_units else None


def prefix_sums(table: NDArray[Any]) -> NDArray[Any]:
    """[c, b] -> sum of row c before b."""
    return np.concatenate([np.zeros((len(table), 1), table.dtype), np.cumsum(table, axis=1)], axis=1)
