"""The event engine: tasks with dependencies on in-order streams, deterministic, with streams that slow each other down.

A *stream* runs its tasks one at a time in the order they were added (a device's compute queue, its communication queue, a
link). A task starts when its stream is free and its dependencies have ended. Two streams may be *coupled*: while both
are busy each runs at 1 / its slowdown factor (compute beside collectives, arXiv 2507.03114).

Only what may be slowed down needs events in order of time: a heap of (time, priority, sequence number, event). A task that
nothing can slow down, because its stream is not coupled or the partner's next task waits for it, gets its times as soon as its
dependencies have theirs. Equal inputs give equal outputs, and both ways give the same times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

END, START = 0, 1  # priorities of events at one time
_NO_TERMS: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Task:
    """Work of ``duration_s`` on ``stream``. ``terms``: how the duration splits by time term (shared between tasks). ``wait_term``:
    the term to which idle time of the stream just before this task belongs. Times are -1 before the run."""

    index: int
    stream: int
    duration_s: float
    label: str
    terms: dict[str, float]
    wait_term: str
    start_s: float
    end_s: float


class Engine:
    """Add streams and tasks, then :meth:`run`.

    A step has many thousands of tasks, so they are columns, not objects. ``_positions``: in the stream. ``_gates``: the last
    position in the coupled stream that a task waits for. ``_edges``: pairs of a waiting task and the next edge of the same source,
    from ``_first_edge`` on.
    """

    def __init__(self) -> None:
        self.stream_names: list[str] = []
        self.now_s = 0.0
        self._streams: list[int] = []
        self._durations: list[float] = []
        self._names: list[str | tuple[object, ...]] = []
        self._terms: list[dict[str, float]] = []
        self._wait_terms: list[str] = []
        self._positions: list[int] = []
        self._gates: list[int] = []
        self._waiting_for: list[int] = []
        self._ready_s: list[float] = []
        self._start_s: list[float] = []
        self._end_s: list[float] = []
        self._first_edge: list[int] = []
        self._edges: list[int] = []
        self._queues: list[list[int]] = []
        self._position: list[int] = []
        self._free_s: list[float] = []
        self._partner: dict[int, tuple[int, float]] = {}
        self._running: dict[int, _Running] = {}
        self._heap: list[tuple[float, int, int, int]] = []
        self._sequence = 0

    @property
    def tasks(self) -> list[Task]:
        """All tasks as they are now, for reports."""
        return [
            Task(
                index, self._streams[index], self._durations[index], name if isinstance(name, str) else " ".join(map(str, name)),
                self._terms[index], self._wait_terms[index], self._start_s[index], self._end_s[index],
            )
            for index, name in enumerate(self._names)
        ]  # fmt: skip

    def dependencies(self) -> list[list[int]]:
        """For each task, those that it was queued after."""
        found: list[list[int]] = [[] for _ in self._streams]
        for source, first in enumerate(self._first_edge):
            edge = first
            while edge >= 0:
                waiting, edge = self._edges[edge], self._edges[edge + 1]
                found[waiting].append(source)
        return found

    def stream(self, name: str) -> int:
        """A new in-order stream."""
        self.stream_names.append(name)
        self._queues.append([])
        self._position.append(0)
        self._free_s.append(0.0)
        return len(self.stream_names) - 1

    def couple(self, first: int, second: int, first_slowdown: float, second_slowdown: float) -> None:
        """While both run, ``first`` takes ``first_slowdown`` times as long, ``second`` ``second_slowdown`` times."""
        self._partner[first] = (second, first_slowdown)
        self._partner[second] = (first, second_slowdown)

    def task(
        self,
        stream: int,
        duration_s: float,
        *,
        after: Iterable[int] = (),
        label: str | tuple[object, ...] = "",
        terms: dict[str, float] | None = None,
        wait_term: str = "other",
    ) -> int:
        """Queue a task on ``stream`` after the tasks ``after``; returns its index. A ``label`` in parts is joined by spaces."""
        index, queue, gate, waiting_for = len(self._streams), self._queues[stream], -1, 0
        partner = self._partner[stream][0] if stream in self._partner else -1
        for other in after:
            self._edges += (index, self._first_edge[other])
            self._first_edge[other] = len(self._edges) - 2
            waiting_for += 1
            if self._streams[other] == partner and self._positions[other] > gate:
                gate = self._positions[other]
        self._streams.append(stream)
        self._durations.append(duration_s)
        self._names.append(label)
        self._terms.append(_NO_TERMS if terms is None else terms)
        self._wait_terms.append(wait_term)
        self._positions.append(len(queue))
        self._gates.append(gate)
        self._waiting_for.append(waiting_for)
        self._ready_s.append(0.0)
        self._start_s.append(-1.0)
        self._end_s.append(-1.0)
        self._first_edge.append(-1)
        queue.append(index)
        return index

    def spans(self, stream: int) -> Iterator[tuple[float, float, float, dict[str, float], str]]:
        """(start, end, duration alone, terms, wait term) of the tasks of a stream in their order; all times in seconds."""
        for task in self._queues[stream]:
            yield self._start_s[task], self._end_s[task], self._durations[task], self._terms[task], self._wait_terms[task]

    def run(self) -> float:
        """Run to the end; returns the makespan. Raises RuntimeError if some task can never start (a dependency cycle)."""
        for stream in range(len(self._queues)):
            self._advance(stream)
        while self._heap:
            self._event()
        if min(self._end_s, default=0.0) < 0:
            stuck = [task.label for task in self.tasks if task.end_s < 0]
            raise RuntimeError(f"{len(stuck)} tasks can never start, first: {stuck[:3]}")
        return max(self._end_s, default=0.0)

    def _advance(self, stream: int) -> None:
        """Start what can start on ``stream`` and, as tasks get their end, on the streams that wait for them."""
        open_streams = [stream]
        while open_streams:
            stream = open_streams.pop()
            queue, partner = self._queues[stream], self._partner.get(stream)
            while stream not in self._running and self._position[stream] < len(queue):
                task = queue[self._position[stream]]
                if self._waiting_for[task]:
                    break
                start_s = max(self._free_s[stream], self._ready_s[task])
                if partner is not None and not self._is_alone(task, partner[0]):
                    self._begin(task, start_s)
                    break
                self._start_s[task] = start_s
                self._end(task, start_s + self._durations[task], open_streams)

    def _is_alone(self, task: int, partner: int) -> bool:
        """Whether nothing on the coupled stream can run beside ``task``: there is nothing left, or it waits for ``task``."""
        if partner in self._running:
            return False
        queue, position = self._queues[partner], self._position[partner]
        return position == len(queue) or self._gates[queue[position]] >= self._positions[task]

    def _end(self, task: int, end_s: float, freed: list[int]) -> None:
        """Note the end of a task; ``freed`` gets the streams on which a task waits for nothing any more."""
        stream = self._streams[task]
        self._end_s[task] = self._free_s[stream] = end_s
        self._position[stream] += 1
        edges, edge = self._edges, self._first_edge[task]
        while edge >= 0:
            other, edge = edges[edge], edges[edge + 1]
            self._waiting_for[other] -= 1
            if self._ready_s[other] < end_s:
                self._ready_s[other] = end_s
            if not self._waiting_for[other]:
                freed.append(self._streams[other])

    # --- tasks that may be slowed down ---------------------------------------------------------------------------

    def _begin(self, task: int, start_s: float) -> None:
        """Start a task now, or put its start on the heap."""
        running = self._running[self._streams[task]] = _Running(task, self._streams[task], self._durations[task])
        if start_s > self.now_s:
            self._schedule(start_s, START, running)
        else:
            self._start(running)

    def _schedule(self, time_s: float, priority: int, running: _Running) -> None:
        """Put the start or end of a running task on the heap; an event of it that is there already counts no more."""
        self._sequence += 1
        running.event = self._sequence
        heapq.heappush(self._heap, (time_s, priority, self._sequence, running.stream))

    def _event(self) -> None:
        """Process one event."""
        time_s, priority, event, stream = heapq.heappop(self._heap)
        running = self._running.get(stream)
        if running is None or running.event != event:
            return  # the rate changed since: a newer event stands for it
        self.now_s = time_s
        if priority == START:
            self._start(running)
            return
        del self._running[stream]
        self._rate_changed(stream)
        freed = [stream]
        self._end(running.task, time_s, freed)
        for candidate in freed:
            self._advance(candidate)

    def _start(self, running: _Running) -> None:
        self._start_s[running.task] = running.since_s = self.now_s
        running.started, running.rate = True, self._rate(running.stream)
        self._schedule(self.now_s + running.remaining_s / running.rate, END, running)
        self._rate_changed(running.stream)

    def _rate(self, stream: int) -> float:
        partner, slowdown = self._partner[stream]
        beside = self._running.get(partner)
        return 1.0 / slowdown if beside is not None and beside.started else 1.0

    def _rate_changed(self, stream: int) -> None:
        """The partner of ``stream`` now runs faster or slower: re-time its end."""
        running = self._running.get(self._partner[stream][0])
        if running is None or not running.started:
            return
        running.remaining_s -= (self.now_s - running.since_s) * running.rate
        running.since_s, running.rate = self.now_s, self._rate(running.stream)
        self._schedule(self.now_s + max(0.0, running.remaining_s) / running.rate, END, running)


@dataclass(slots=True)
class _Running:
    """A task in progress: seconds of work left at full rate since ``since_s``, at ``rate``. Not ``started``: its start is on the
    heap. ``event``: the number of its event that counts."""

    task: int
    stream: int
    remaining_s: float
    since_s: float = 0.0
    rate: float = 1.0
    started: bool = False
    event: int = 0
