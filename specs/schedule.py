"""Pipeline schedules as action lists: the one generator and the one validator, for simulator, planner and executor alike.

Grammar of an action: ``<stage><kind><micro_batch>``, kind ``F`` forward, ``B`` full backward, ``I`` input-gradient part,
``W`` weight-gradient part. ``2F0`` = forward of micro-batch 0 on stage 2. A schedule is one row of actions per pipeline
rank. A stage is a model chunk; with virtual stages one rank holds several, placed in a ``loop`` (stage s on rank s mod p) or a
``v`` (down the ranks and back up: the first rank holds the first and the last stage).

Sources: GPipe (arXiv 1811.06965), 1F1B / PipeDream-flush (arXiv 2006.09503 §2.2), interleaved 1F1B (arXiv 2104.04473 §2.2),
ZB-H1 (arXiv 2401.10241 §2.1), ZB-V (arXiv 2405.15362), DualPipeV (the half of DualPipe, arXiv 2412.19437 §3.2.1, that is left
when each rank's two directions are folded into one V; github.com/deepseek-ai/DualPipe). Rows are those of the sources at equal
times of F, I and W; where times are unlike the order stays and waits appear.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

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


# --- generators: what one rank does, written as patterns ------------------------------------------------------------


class _Row:
    """A rank's actions. A step of a pattern names kind and chunk, ``F0``: the next micro-batch of that kind on the rank's chunk 0.
    ``W`` is the oldest weight gradient that waits."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._next: Counter[tuple[bool, int]] = Counter()
        self._waiting: deque[Action] = deque()

    def play(self, pattern: str, times: int = 1) -> None:
        """Append the pattern's steps ``times`` times."""
        for step in pattern.split() * times:
            if step == "W":
                self.actions.append(self._waiting.popleft())
                continue
            kind, chunk = step[0], int(step[1:])
            stage, counter = self._stages[chunk], (kind == "F", chunk)
            action = Action(stage, kind, self._next[counter])
            self._next[counter] += 1
            self.actions.append(action)
            if kind == "I":
                self._waiting.append(action._replace(kind="W"))


def _gpipe(row: _Row, rank: int, ranks: int, micro_batches: int, chunks: int) -> None:
    row.play("F0", micro_batches)
    row.play("B0", micro_batches)


def _one_f_one_b(row: _Row, rank: int, ranks: int, micro_batches: int, chunks: int) -> None:
    warmup = ranks - rank - 1
    row.play("F0", warmup)
    row.play("F0 B0", micro_batches - warmup)
    row.play("B0", warmup)


def _interleaved(row: _Row, rank: int, ranks: int, micro_batches: int, chunks: int) -> None:
    """Micro-batches pass through the chunks in groups of as many as ranks; forwards go up the chunks, backwards down."""
    total = micro_batches * chunks
    order = [step % (ranks * chunks) // ranks for step in range(total)]
    forwards = [f"F{chunk}" for chunk in order]
    backwards = [f"B{chunks - 1 - chunk}" for chunk in order]
    warmup = total if micro_batches == ranks else min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
    row.play(" ".join(forwards[:warmup]))
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row.play(f"{forward} {backward}")
    row.play(" ".join(backwards[total - warmup :]))


def _zb_h1(row: _Row, rank: int, ranks: int, micro_batches: int, chunks: int) -> None:
    """1F1B whose weight gradients wait ``rank`` micro-batches: later ranks have the memory, and fill their end with them."""
    warmup = ranks - rank - 1
    row.play("F0", warmup)
    row.play("F0 I0", rank)
    row.play("F0 I0 W", micro_batches - warmup - rank)
    row.play("I0 W", warmup)
    row.play("W", rank)


def _zb_v(row: _Row, rank: int, ranks: int, micro_batches: int, chunks: int) -> None:
    row.play("F0", 2 * (ranks - rank) - 1)
    row.play("F1 F0", rank)
    row.play("F1 I1 W", ranks - rank)
    row.play("F0 I0 W F1 I1 W", micro_batches - 2 * ranks + rank + 1)
    row.play("I0 W F1 I1 W", ranks - rank - 1)
    row.play("I0 I1", rank)
    row.play("I0 W", ranks - rank)
    row.play("W", 2 * rank)


def _dualpipe_v(row: _Row, rank: int, ranks: int, micro_batches: int, chunks: int) -> None:
    """Forward of one chunk beside backward of the other; of the last backwards the second half is split to fill the end."""
    after = ranks - rank - 1
    row.play("F0", 2 * after)
    row.play("F0 F1", rank + 1)
    row.play("I1 W F1", after)
    row.play("F0 B1 F1 B0", micro_batches - 2 * ranks + rank + 1)
    row.play("B1 F1 B0", after)
    last = ["1", "0"] * (rank + 1)
    row.play(" ".join(f"{'B' if index <= rank else 'I'}{chunk}" for index, chunk in enumerate(last)))
    row.play("W I0", after)
    row.play("W", rank + 1)


# --- named schedules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """What a schedule asks of the pipeline. ``stages_per_rank`` ``None`` = any number from 2 up. ``least``: micro-batches that
    it needs at least, by the number of ranks; ``in_groups``: in multiples of the ranks. ``overlaps``: a forward and the full
    backward of another stage after it run beside one another, and end together (:func:`passes_of`)."""

    name: str
    stages_per_rank: int | None
    summary: str
    generate: Callable[[_Row, int, int, int, int], None]
    least: Callable[[int], int] = lambda ranks: ranks
    least_text: str = "as many micro-batches as stages"
    in_groups: bool = False
    placement: Literal["loop", "v"] = "loop"
    overlaps: bool = False

    def allows(self, num_micro_batches: int, num_ranks: int) -> bool:
        """Whether the schedule runs that many micro-batches."""
        return num_micro_batches >= self.least(num_ranks) and not (self.in_groups and num_micro_batches % num_ranks)

    def nearest(self, num_micro_batches: int, num_ranks: int) -> int:
        """The number of micro-batches next to the given one that the schedule runs."""
        step = num_ranks if self.in_groups else 1
        least = -(-self.least(num_ranks) // step) * step
        down = num_micro_batches // step * step
        up = -(-num_micro_batches // step) * step
        return max(least, down if num_micro_batches - down <= up - num_micro_batches else up)


SCHEDULES: dict[str, ScheduleRule] = {
    rule.name: rule
    for rule in (
        ScheduleRule(
            "gpipe", 1, "all forwards, then all backwards; holds every micro-batch's activations", _gpipe, least=lambda _: 1
        ),
        ScheduleRule("1f1b", 1, "one forward, one backward; stage i holds at most pp - i micro-batches", _one_f_one_b),
        ScheduleRule(
            "interleaved", None, "1F1B over several chunks a rank: a bubble 1/chunks as long, more activations and sends",
            _interleaved, least_text="as many micro-batches as pipeline ranks, in multiples of them", in_groups=True,
        ),
        ScheduleRule(
            "zb_h1", 1, "1F1B with split backward: weight gradients fill a third of the bubble, at most pp micro-batches held",
            _zb_h1,
        ),
        ScheduleRule(
            "zb_v", 2, "two chunks a rank in a V, split backward: no bubble at equal times, the memory of 1F1B", _zb_v,
            least=lambda ranks: 2 * ranks - 1, least_text="2 pp - 1 micro-batches", placement="v",
        ),
        ScheduleRule(
            "dualpipe_v", 2, "two chunks a rank in a V, one's forward beside the other's backward; half a micro-batch more memory",
            _dualpipe_v, least=lambda ranks: 2 * ranks, least_text="2 pp micro-batches", placement="v", overlaps=True,
        ),
    )
}  # fmt: skip


@lru_cache(maxsize=256)
def rows_for(name: str, *, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> Rows:
    """The action rows of a named schedule, one per pipeline rank.

    Raises :class:`InvalidInput` when the schedule is unknown or its rules do not hold.
    """
    violations = check_rules(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank)
    if violations:
        raise InvalidInput(violations, subject=f"schedule {name}")
    owner = stage_ranks(name, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    rows = []
    for rank in range(num_ranks):
        row = _Row([stage for stage, held_by in enumerate(owner) if held_by == rank])
        SCHEDULES[name].generate(row, rank, num_ranks, num_micro_batches, stages_per_rank)
        rows.append(tuple(row.actions))
    return tuple(rows)


def stage_ranks(name: str, *, num_ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """The rank that holds each stage under a named schedule."""
    down = range(num_ranks)
    back = reversed(down) if SCHEDULES[name].placement == "v" else down
    turns = (tuple(down), tuple(back))
    return tuple(rank for chunk in range(stages_per_rank) for rank in turns[chunk % 2])


def stage_ranks_of(rows: Sequence[Sequence[Action]]) -> dict[int, int]:
    """Stage -> rank, of any rows."""
    return {action.stage: rank for rank, row in enumerate(rows) for action in row}


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
    return _check_chunks(rule, stages_per_rank) + _check_micro_batches(rule, num_ranks, num_micro_batches)


def _check_chunks(rule: ScheduleRule, stages_per_rank: int) -> list[Violation]:
    wanted = rule.stages_per_rank
    if stages_per_rank == wanted or (wanted is None and stages_per_rank > 1):
        return []
    count = wanted if wanted is not None else "2 or more"
    return [
        Violation(
            code="stages_per_rank", loc=("schedule",), actual=stages_per_rank, allowed=[wanted] if wanted else ">= 2",
            nearest=wanted or 2, message=f"{rule.name} has {count} stage(s) per rank, not {stages_per_rank}",
        )
    ]  # fmt: skip


def _check_micro_batches(rule: ScheduleRule, num_ranks: int, num_micro_batches: int) -> list[Violation]:
    if rule.allows(num_micro_batches, num_ranks):
        return []
    least, groups = rule.least(num_ranks), f", multiples of {num_ranks}" if rule.in_groups else ""
    below = num_micro_batches < least
    broken = f"{num_micro_batches} < {least}" if below else f"{num_micro_batches} is no multiple of {num_ranks}"
    return [
        Violation(
            code="micro_batches_below_stages" if below else "micro_batches_in_groups", loc=("schedule",), actual=num_micro_batches,
            allowed=f">= {least}{groups}", nearest=rule.nearest(num_micro_batches, num_ranks),
            message=f"{rule.name} needs at least {rule.least_text}: {broken}",
        )
    ]  # fmt: skip


# --- validator ------------------------------------------------------------------------------------------------------


def validate_rows(rows: Sequence[Sequence[Action]], *, num_stages: int, num_micro_batches: int) -> list[Violation]:
    """Check any schedule: every forward and backward of every stage exactly once, on one rank, and executable in order.

    Backward is B, or I and W; not both. Executable: walking all rows in order, an action may run when its inputs exist (F after the
    previous stage's F; B or I after its own F and the next stage's B or I; W after its I). A walk that stops early is a deadlock.
    Sends never block their sender and receives are posted ahead, so the order of the rows alone decides.
    """
    found: list[Violation] = []
    owner: dict[int, int] = {}
    seen: Counter[Action] = Counter()
    for rank, row in enumerate(rows):
        for action in row:
            seen[action] += 1
            if owner.setdefault(action.stage, rank) != rank:
                found.append(
                    _violation("stage_on_two_ranks", f"{action} stands on rank {rank}, its stage on {owner[action.stage]}")
                )
            if not (0 <= action.stage < num_stages and 0 <= action.micro_batch < num_micro_batches):
                found.append(_violation("action_out_of_range", f"{action} is outside {num_stages} stages x {num_micro_batches}"))
    found += [_violation("duplicate_action", f"{action} stands {count} times") for action, count in seen.items() if count > 1]
    for stage in range(num_stages):
        for micro_batch in range(num_micro_batches):
            found += _complete(stage, micro_batch, seen)
    if not found:
        found += _deadlock(rows, num_stages)
    return found


def _complete(stage: int, micro_batch: int, seen: Counter[Action]) -> list[Violation]:
    """One forward, and one backward in one of its two forms."""
    has = {kind: Action(stage, kind, micro_batch) in seen for kind in KINDS}
    found = []
    if not has["F"]:
        found.append(_violation("missing_action", f"{stage}F{micro_batch} is missing"))
    if has["B"] and (has["I"] or has["W"]):
        found.append(_violation("backward_twice", f"{stage}B{micro_batch} stands beside its own I or W"))
    elif not has["B"] and not (has["I"] and has["W"]):
        found.append(_violation("missing_action", f"{stage}B{micro_batch} (or its I and W) is missing"))
    return found


def _violation(code: str, message: str) -> Violation:
    return Violation(code=code, message=message, loc=("schedule", "rows"))


@lru_cache(maxsize=65536)
def needs(stage: int, kind: str, num_stages: int) -> tuple[tuple[tuple[int, str], ...], ...]:
    """What must have run, for the same micro-batch, before an action of this kind on this stage: alternatives of (stage, kind), one
    of each tuple suffices."""
    needed: list[tuple[tuple[int, str], ...]] = []
    if kind == "F" and stage > 0:
        needed.append(((stage - 1, "F"),))
    if kind in "BI":
        needed.append(((stage, "F"),))
        if stage + 1 < num_stages:
            needed.append(((stage + 1, "B"), (stage + 1, "I")))
    if kind == "W":
        needed.append(((stage, "I"),))
    return tuple(needed)


def dependencies(action: Action, num_stages: int) -> list[tuple[Action, ...]]:
    """What must have run before ``action``: a list of alternatives-tuples; one of each tuple suffices."""
    return [
        tuple(Action(stage, kind, action.micro_batch) for stage, kind in options)
        for options in needs(action.stage, action.kind, num_stages)
    ]


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


def passes_of(row: Sequence[Action], *, overlaps: bool) -> list[tuple[Action, ...]]:
    """What a rank runs at a time: single actions, where the schedule ``overlaps`` also pairs of a forward and a full backward."""
    passes: list[tuple[Action, ...]] = []
    for action in row:
        before = passes[-1] if passes else ()
        if overlaps and action.kind == "B" and [item.kind for item in before] == ["F"] and before[0].stage != action.stage:
            passes[-1] = (*before, action)
        else:
            passes.append((action,))
    return passes


def splits_backward(rows: Sequence[Sequence[Action]]) -> bool:
    """Whether any backward runs in two parts."""
    return any(action.kind == "W" for row in rows for action in row)


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
