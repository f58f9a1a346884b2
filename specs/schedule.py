"""Pipeline schedules as action lists: the one generator and the one validator, for simulator and executor alike.

Grammar of an action: ``<stage><kind><micro_batch>``, kind ``F`` forward, ``B`` full backward, ``I`` input-gradient part,
``W`` weight-gradient part. ``2F0`` = forward of micro-batch 0 on stage 2. A schedule is one row of actions per pipeline
rank. A stage is a model chunk; with virtual stages one rank holds several.

Sources: GPipe (arXiv 1811.06965), 1F1B / PipeDream-flush (arXiv 2006.09503 §2.2).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specs.base import InvalidInputValue
from specs.errors import InvalidInput, Violation, nearest_name

_ACTION = re.compile(r"^(\d+)([FBIW])(\d+)$")
KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One step of one rank."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``2F0``; raises :class:`InvalidInputValue`."""
        match = _ACTION.match(text.strip())
        if not match:
            raise InvalidInputValue("bad_action", f"'{text}' is no action <stage><F|B|I|W><micro_batch>", actual=text)
        return cls(int(match[1]), match[2], int(match[3]))


Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """What a schedule asks of the pipeline. ``stages_per_rank`` ``None`` = any number from 2 up."""

    name: str
    stages_per_rank: int | None
    min_micro_batches_is_stages: bool
    summary: str


SCHEDULES: dict[str, ScheduleRule] = {
    "gpipe": ScheduleRule("gpipe", 1, False, "all forwards, then all backwards; holds every micro-batch's activations"),
    "1f1b": ScheduleRule("1f1b", 1, True, "one forward, one backward; stage i holds at most pp - i micro-batches"),
}


def rows_for(name: str, *, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> Rows:
    """The action rows of a named schedule, one per pipeline rank.

    Raises :class:`InvalidInput` when the schedule is unknown or its rules do not hold.
    """
    violations = check_rules(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank)
    if violations:
        raise InvalidInput(violations, subject=f"schedule {name}")
    generator = {"gpipe": _gpipe_row, "1f1b": _one_f_one_b_row}[name]
    return tuple(tuple(generator(rank, num_ranks, num_micro_batches)) for rank in range(num_ranks))


def check_rules(name: str, *, num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> list[Violation]:
    """All rules of the named schedule that these sizes break."""
    rule = SCHEDULES.get(name)
    if rule is None:
        return [
            Violation(
                code="unknown_schedule", message=f"schedule '{name}'", loc=("schedule", "name"), actual=name,
                allowed=sorted(SCHEDULES), nearest=nearest_name(name, SCHEDULES),
            )
        ]  # fmt: skip
    found = []
    if rule.stages_per_rank is not None and stages_per_rank != rule.stages_per_rank:
        found.append(
            Violation(
                code="stages_per_rank", loc=("schedule",), actual=stages_per_rank, allowed=[rule.stages_per_rank],
                message=f"{name} has {rule.stages_per_rank} stage(s) per rank, not {stages_per_rank}",
            )
        )  # fmt: skip
    if rule.min_micro_batches_is_stages and num_micro_batches < num_ranks:
        found.append(
            Violation(
                code="micro_batches_below_stages", loc=("schedule",), actual=num_micro_batches,
                allowed=f">= {num_ranks}", nearest=num_ranks,
                message=f"{name} needs at least as many micro-batches as stages: {num_micro_batches} < {num_ranks}",
            )
        )  # fmt: skip
    return found


def _gpipe_row(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    forwards = [Action(rank, "F", index) for index in range(num_micro_batches)]
    return forwards + [Action(rank, "B", index) for index in range(num_micro_batches)]


def _one_f_one_b_row(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    warmup = min(num_ranks - rank - 1, num_micro_batches)
    row = [Action(rank, "F", index) for index in range(warmup)]
    for index in range(num_micro_batches - warmup):
        row += [Action(rank, "F", warmup + index), Action(rank, "B", index)]
    return row + [Action(rank, "B", index) for index in range(num_micro_batches - warmup, num_micro_batches)]


def validate_rows(rows: Sequence[Sequence[Action]], *, num_stages: int, num_micro_batches: int) -> list[Violation]:
    """Check any schedule: every forward and backward of every stage exactly once, on one rank, and executable in order.

    Executable: walking all rows in order, an action may run when its inputs exist (F after the previous stage's F; B or I
    after its own F and the next stage's B or I; W after its I). A walk that stops early is a deadlock.
    """
    found: list[Violation] = []
    owner: dict[int, int] = {}
    seen: dict[Action, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            seen[action] = seen.get(action, 0) + 1
            if owner.setdefault(action.stage, rank) != rank:
                found.append(
                    _violation("stage_on_two_ranks", f"{action} stands on rank {rank}, its stage on {owner[action.stage]}")
                )
            if not (0 <= action.stage < num_stages and 0 <= action.micro_batch < num_micro_batches):
                found.append(_violation("action_out_of_range", f"{action} is outside {num_stages} stages x {num_micro_batches}"))
    found += [_violation("duplicate_action", f"{action} stands {count} times") for action, count in seen.items() if count > 1]
    for stage in range(num_stages):
        for micro_batch in range(num_micro_batches):
            split = Action(stage, "I", micro_batch) in seen and Action(stage, "W", micro_batch) in seen
            if Action(stage, "F", micro_batch) not in seen:
                found.append(_violation("missing_action", f"{stage}F{micro_batch} is missing"))
            if not split and Action(stage, "B", micro_batch) not in seen:
                found.append(_violation("missing_action", f"{stage}B{micro_batch} (or its I and W) is missing"))
    if not found:
        found += _deadlock(rows, num_stages)
    return found


def _violation(code: str, message: str) -> Violation:
    return Violation(code=code, message=message, loc=("schedule", "rows"))


def dependencies(action: Action, num_stages: int, done: set[Action] | None = None) -> list[tuple[Action, ...]]:
    """What must have run before ``action``: a list of alternatives-tuples; one of each tuple suffices."""
    stage, kind, micro_batch = action
    needed: list[tuple[Action, ...]] = []
    if kind == "F" and stage > 0:
        needed.append((Action(stage - 1, "F", micro_batch),))
    if kind in "BI":
        needed.append((Action(stage, "F", micro_batch),))
        if stage + 1 < num_stages:
            needed.append((Action(stage + 1, "B", micro_batch), Action(stage + 1, "I", micro_batch)))
    if kind == "W":
        needed.append((Action(stage, "I", micro_batch),))
    return needed


def _deadlock(rows: Sequence[Sequence[Action]], num_stages: int) -> list[Violation]:
    done: set[Action] = set()
    position = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                action = row[position[rank]]
                if not all(any(option in done for option in options) for options in dependencies(action, num_stages)):
                    break
                done.add(action)
                position[rank] += 1
                moved = True
    stuck = [f"rank {rank} waits at {row[position[rank]]}" for rank, row in enumerate(rows) if position[rank] < len(row)]
    return [_violation("deadlock", "the order can never finish: " + ", ".join(stuck))] if stuck else []


def max_in_flight(row: Sequence[Action]) -> int:
    """Most micro-batches (of all the row's stages together) whose forward has run and whose backward has not."""
    live = peak = 0
    for action in row:
        live += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak = max(peak, live)
    return peak


def to_text(rows: Sequence[Sequence[Action]]) -> list[str]:
    """One comma-separated line per rank."""
    return [",".join(str(action) for action in row) for row in rows]


def from_text(lines: Sequence[str]) -> Rows:
    """Inverse of :func:`to_text`; empty cells (bubbles) are skipped."""
    return tuple(tuple(Action.parse(cell) for cell in line.split(",") if cell.strip()) for line in lines)
