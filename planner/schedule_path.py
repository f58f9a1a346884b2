"""The longest path through a schedule's action rows: no execution of the rows is faster, collectives of data parallel left aside.

The rows are those of ``specs.schedule``, the rules those of the step simulation: a rank runs its actions one after another, a
forward waits for the forward of the stage before, a backward for that of the stage after, and a message takes its time between
ranks. Many candidates that share rows are walked at once, as columns.

Rows of very many micro-batches are walked with fewer. In the steady part of a schedule every rank repeats a pattern, so the times
of one repetition follow from those of the one before by maxima and sums: x' = max_j (A_j + x_j). If no entry of x' - x is below d,
none of any later repetition is (the map is monotone and commutes with shifts). So each repetition left out adds at least d; once
the pattern repeats exactly, as it does after a few rounds, exactly d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.prices import Floats
from specs.schedule import SCHEDULES, Action, dependencies, passes_of, rows_for, stage_ranks

Ints = NDArray[np.int64]
Pass = tuple[Action, ...]
KINDS = "FBIW"
# Passes that a rank repeats with the next micro-batch (interleaved: with the next group of micro-batches, by its sizes).
PASSES_PER_ROUND = {"gpipe": 1, "1f1b": 2, "zb_h1": 3, "zb_v": 6, "dualpipe_v": 2}
# Repetitions of the steady pattern that are walked before the rest is continued from them.
ROUNDS = 3
# Micro-batches times stages up to which all are walked.
MOST_WALKED = 2560


@dataclass(frozen=True)
class StageTimes:
    """Seconds, [candidate, stage]. ``first_s``: more in a stage's first forward; ``add_s``: less in the first pass that makes its
    gradients. ``there_s`` and ``back_s``: messages to the next stage and from it, nothing between stages of one rank. ``pair_s``:
    of a stage's forward beside the backward of the other stage of its rank, where such pairs run as one pass."""

    forward_s: Floats
    backward_s: Floats
    input_s: Floats
    weight_s: Floats
    first_s: Floats
    add_s: Floats
    there_s: Floats
    back_s: Floats
    pair_s: Floats | None = None


@dataclass(frozen=True)
class RankTimes:
    """Least times, [candidate, rank]: when the first pass can begin that makes the last gradient of a stage, and how long those
    from it on take; when the row has run."""

    last_gradients_s: Floats
    from_last_s: Floats
    end_s: Floats


def rank_times(schedule: str, *, num_ranks: int, num_micro_batches: int, stages_per_rank: int, times: StageTimes) -> RankTimes:
    """Of each rank of a schedule."""
    walked = num_micro_batches
    if num_micro_batches * num_ranks * stages_per_rank > MOST_WALKED:
        walked = few_micro_batches(schedule, num_ranks, num_micro_batches)
    graph = _compile(schedule, num_ranks, walked, stages_per_rank, times.pair_s is not None)
    durations = _durations(times)
    ends = graph.walk(times, durations)
    own = durations[graph.duration]
    starts = ends - own

    def sums(of_rank: list[Ints]) -> Floats:
        return np.stack([own[passes].sum(axis=0) for passes in of_rank])

    last = starts[[int(passes[0]) for passes in graph.last_gradients]]
    end = ends[graph.last_of_rank]
    if num_micro_batches > walked:
        left_out = (num_micro_batches - walked) / graph.micro_batches_per_round
        more = left_out * sum((ends[late] - ends[early]).min(axis=0) for early, late in graph.rounds)
        last, end = last + more, np.maximum(end + more, graph.busy(ends, own, left_out))
    return RankTimes(last.T, sums(graph.last_gradients).T, end.T)


def few_micro_batches(schedule: str, num_ranks: int, num_micro_batches: int) -> int:
    """Micro-batches that are walked: warm-up, some repetitions, cool-down."""
    rule = SCHEDULES[schedule]
    few = 4 * num_ranks if rule.in_groups else rule.least(num_ranks) + ROUNDS
    return min(num_micro_batches, few)


@dataclass(frozen=True)
class _Graph:
    """Passes by level: those of one level depend on earlier levels only. Entry 0 is the start. Per pass: the one before on its
    rank, the (at most two) whose messages it waits for, the rows of these messages, the row of its duration. ``rounds``: passes
    of one repetition and the same passes of the next, for each steady part of the schedule. ``steady``: for each rank a pass in
    its steady part, those of one repetition, and all that come after it. ``last_gradients``: for each rank
    its passes from the first one on that makes the last gradient of a stage."""

    levels: list[tuple[int, int]]
    before: Ints
    senders: Ints
    messages: Ints
    duration: Ints
    last_of_rank: Ints
    last_gradients: list[Ints]
    rounds: list[tuple[Ints, Ints]]
    steady: list[tuple[int, Ints, Ints]]
    micro_batches_per_round: int

    def busy(self, ends: Floats, own: Floats, left_out: float) -> Floats:
        """[rank, candidate] -> its end if from its steady part on it never waits, ``left_out`` repetitions put in."""
        return np.stack([
            ends[at] + left_out * own[repeated].sum(axis=0) + own[after].sum(axis=0)
            for at, repeated, after in self.steady
        ])  # fmt: skip

    def walk(self, times: StageTimes, durations: Floats) -> Floats:
        """[pass, candidate] -> end."""
        messages = _messages(times)
        ends, width = np.zeros((len(self.before), durations.shape[1])), 1 if times.pair_s is None else 2
        for low, high in self.levels:
            ready = ends[self.before[low:high]]
            for sender, message in zip(self.senders[:width], self.messages, strict=False):
                ready = np.maximum(ready, ends[sender[low:high]] + messages[message[low:high]])
            ends[low:high] = ready + durations[self.duration[low:high]]
        return ends


def _durations(times: StageTimes) -> Floats:
    """Rows in the order of :func:`_duration_row`: kinds, the same the first time, pairs, pairs with a first backward."""
    later = [times.forward_s, times.backward_s, times.input_s, times.weight_s]
    first = [times.forward_s + times.first_s, times.backward_s - times.add_s, times.input_s, times.weight_s - times.add_s]
    pairs = [] if times.pair_s is None else [times.pair_s, times.pair_s - times.add_s[:, ::-1]]
    return np.concatenate([*later, *first, *pairs], axis=1).T


def _duration_row(actions: Pass, first: set[Action], num_stages: int) -> int:
    if len(actions) == 1:
        block = KINDS.index(actions[0].kind) + (4 if actions[0] in first else 0)
    else:
        block = 9 if actions[1] in first else 8
    return block * num_stages + actions[0].stage


def _messages(times: StageTimes) -> Floats:
    """Nothing, then forwards from each stage, then backwards to each stage."""
    none = np.zeros((len(times.there_s), 1))
    return np.concatenate([none, times.there_s, times.back_s], axis=1).T


@lru_cache(maxsize=512)
def _compile(schedule: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int, pairs: bool) -> _Graph:
    rule = SCHEDULES[schedule]
    rows = rows_for(schedule, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank)
    queues = [passes_of(row, overlaps=pairs) for row in rows]
    owner = stage_ranks(schedule, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    ordered = _Ordered(queues, owner)
    ordered.run()
    per_round = num_ranks if rule.in_groups else 1
    length = (
        2 * num_ranks * stages_per_rank if rule.in_groups else PASSES_PER_ROUND[schedule] * (1 if pairs or not rule.overlaps else 2)
    )
    walked_in_part = num_micro_batches == few_micro_batches(schedule, num_ranks, num_micro_batches + 1)
    rounds, steady = _rounds(queues, ordered.number, length, per_round) if walked_in_part else ([], [])
    return ordered.graph(rounds, steady, per_round)


@dataclass
class _Ordered:
    """Puts passes into levels: a breadth-first walk over all rows at once."""

    queues: list[list[Pass]]
    owner: Sequence[int]
    number: dict[Action, int] = field(default_factory=dict)
    levels: list[tuple[int, int]] = field(default_factory=list)
    columns: list[tuple[int, ...]] = field(default_factory=lambda: [(0,) * 6])

    def run(self) -> None:
        """Number all passes."""
        first = _first_actions(self.queues)
        position, last = [0] * len(self.queues), [0] * len(self.queues)
        remaining = sum(map(len, self.queues))
        while remaining:
            low, ready = len(self.columns), []
            for rank, queue in enumerate(self.queues):
                if position[rank] < len(queue):
                    found = self._needs(queue[position[rank]])
                    if found is not None:
                        ready.append((rank, found))
            for rank, found in ready:
                actions = self.queues[rank][position[rank]]
                self.columns.append((last[rank], *found, _duration_row(actions, first, len(self.owner))))
            for offset, (rank, _) in enumerate(ready):
                for action in self.queues[rank][position[rank]]:
                    self.number[action] = low + offset
                last[rank] = low + offset
                position[rank] += 1
            self.levels.append((low, len(self.columns)))
            remaining -= len(ready)

    def _needs(self, actions: Pass) -> tuple[int, int, int, int] | None:
        """(two passes, rows of their messages) that ``actions`` wait for, 0 for none; ``None`` while one has no number."""
        senders, messages = [0, 0], [0, 0]
        for slot, action in enumerate(actions):
            for options in dependencies(action, len(self.owner)):
                known = next((self.number[option] for option in options if option in self.number), None)
                if known is None:
                    return None
                stage, other = action.stage, options[0].stage
                if stage != other:
                    row = 1 + other if other < stage else 1 + len(self.owner) + stage
                    senders[slot], messages[slot] = known, row
        return senders[0], senders[1], messages[0], messages[1]

    def graph(self, rounds: list[tuple[Ints, Ints]], steady: list[tuple[int, Ints, Ints]], per_round: int) -> _Graph:
        """The arrays."""
        columns = np.array(self.columns, dtype=np.int64).T
        last = np.array([self.number[queue[-1][0]] for queue in self.queues])
        of_last = [self._last_gradients(queue) for queue in self.queues]
        return _Graph(
            self.levels, columns[0], columns[1:3], columns[3:5], columns[5],
            last, of_last, rounds, steady, per_round,
        )  # fmt: skip

    def _last_gradients(self, queue: Sequence[Pass]) -> Ints:
        seen: set[int] = set()
        at = len(queue)
        for index in reversed(range(len(queue))):
            makes = {action.stage for action in queue[index] if action.kind in "BW"}
            if makes - seen:
                at = index
            seen |= makes
        return np.array([self.number[actions[0]] for actions in queue[at:]])


def _first_actions(queues: Sequence[Sequence[Pass]]) -> set[Action]:
    """The first action of each stage that runs it forward, and the first that makes gradients of its parameters."""
    first: dict[tuple[int, bool], Action] = {}
    for queue in queues:
        for action in (action for actions in queue for action in actions):
            if action.kind != "I":
                first.setdefault((action.stage, action.kind == "F"), action)
    return set(first.values())


def _rounds(
    queues: Sequence[Sequence[Pass]], number: dict[Action, int], length: int, per_round: int
) -> tuple[list[tuple[Ints, Ints]], list[tuple[int, Ints, Ints]]]:
    """``rounds`` and ``steady`` of :class:`_Graph`, from the last but one repetition that every rank has and the next."""
    parts = [_steady_parts(queue, length, per_round) for queue in queues]
    numbers = [np.array([number[actions[0]] for actions in queue]) for queue in queues]
    early: list[list[Ints]] = [[] for _ in parts[0]]
    late: list[list[Ints]] = [[] for _ in parts[0]]
    for index in range(len(parts[0])):
        repeats = min((of_rank[index][1] - of_rank[index][0]) // length for of_rank in parts)
        for own, of_rank in zip(numbers, parts, strict=True):
            middle = of_rank[index][0] + (repeats - 1) * length
            early[index].append(own[middle - length : middle])
            late[index].append(own[middle : middle + length])
    steady = []
    for rank, own in enumerate(numbers):
        at = int(late[0][rank][-1])
        repeated = np.concatenate([part[rank] for part in late])
        steady.append((at, repeated, own[int(np.flatnonzero(own == at)[0]) + 1 :]))
    return [(np.concatenate(a), np.concatenate(b)) for a, b in zip(early, late, strict=True)], steady


def _steady_parts(queue: Sequence[Pass], length: int, per_round: int) -> list[tuple[int, int]]:
    """(start, stop) of the stretches in which every pass returns ``length`` passes and ``per_round`` micro-batches later: all of
    those of single passes (all forwards, all backwards), else the longest."""
    found, start = [], None
    for index in range(len(queue) - length + 1):
        returns = index + length < len(queue) and queue[index + length] == _later(queue[index], per_round)
        if returns and start is None:
            start = index
        if not returns and start is not None:
            found.append((start, index + length))
            start = None
    return found if length == 1 else [max(found, key=lambda part: part[1] - part[0])]


def _later(actions: Pass, micro_batches: int) -> Pass:
    return tuple(action._replace(micro_batch=action.micro_batch + micro_batches) for action in actions)
