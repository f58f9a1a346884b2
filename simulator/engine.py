"""The event engine: tasks with dependencies on in-order streams, deterministic, with streams that slow each other down.

A *stream* runs its tasks one at a time in the order they were added (a device's compute queue, its communication queue, a
link). A task starts when its stream is free and its dependencies have ended. Two streams may be *coupled*: while both
are busy each runs at 1 / its slowdown factor (compute beside collectives, arXiv 2507.03114).

The core is a heap of (time, priority, sequence number, event); equal inputs give equal outputs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Task:
    """Work of ``duration_s`` on ``stream``. ``terms``: how the duration splits by time term. ``wait_term``: the term to which
    idle time of the stream just before this task belongs."""

    index: int
    stream: int
    duration_s: float
    label: str
    terms: dict[str, float]
    wait_term: str
    waiting_for: int = 0
    ready_s: float = 0.0
    start_s: float = -1.0
    end_s: float = -1.0
    dependents: list[int] = field(default_factory=list)


class Engine:
    """Add streams and tasks, then :meth:`run`."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.stream_names: list[str] = []
        self._queues: list[list[int]] = []
        self._position: list[int] = []
        self._partner: dict[int, tuple[int, float]] = {}
        self._running: dict[int, _Running] = {}
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._sequence = 0
        self._version = 0
        self.now_s = 0.0

    def stream(self, name: str) -> int:
        """A new in-order stream."""
        self.stream_names.append(name)
        self._queues.append([])
        self._position.append(0)
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
        label: str = "",
        terms: dict[str, float] | None = None,
        wait_term: str = "other",
    ) -> int:
        """Queue a task on ``stream`` after the tasks ``after``; returns its index."""
        index = len(self.tasks)
        task = Task(index, stream, duration_s, label, terms or {}, wait_term)
        for other in set(after):
            self.tasks[other].dependents.append(index)
            task.waiting_for += 1
        self.tasks.append(task)
        self._queues[stream].append(index)
        return index

    def schedule(self, time_s: float, stream: int, version: int, priority: int = 0) -> None:
        """Put the end of the stream's running task on the heap."""
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, priority, self._sequence, stream, version))

    def peek(self) -> float:
        """Time of the next event, infinity when there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def step(self) -> None:
        """Process one event."""
        time_s, _, _, stream, version = heapq.heappop(self._heap)
        running = self._running.get(stream)
        if running is None or running.version != version:
            return  # the rate changed since: a newer event stands for it
        self.now_s = time_s
        del self._running[stream]
        task = self.tasks[running.task]
        task.end_s = time_s
        self._rate_changed(stream)
        self._position[stream] += 1
        freed = {stream}
        for dependent in task.dependents:
            other = self.tasks[dependent]
            other.waiting_for -= 1
            other.ready_s = max(other.ready_s, time_s)
            freed.add(other.stream)
        for candidate in sorted(freed):
            self._start_next(candidate)

    def run(self) -> float:
        """Run to the end; returns the makespan. Raises RuntimeError if some task can never start (a dependency cycle)."""
        for stream in range(len(self._queues)):
            self._start_next(stream)
        while self._heap:
            self.step()
        stuck = [task.label for task in self.tasks if task.end_s < 0]
        if stuck:
            raise RuntimeError(f"{len(stuck)} tasks can never start, first: {stuck[:3]}")
        return max((task.end_s for task in self.tasks), default=0.0)

    def _start_next(self, stream: int) -> None:
        if stream in self._running or self._position[stream] >= len(self._queues[stream]):
            return
        task = self.tasks[self._queues[stream][self._position[stream]]]
        if task.waiting_for:
            return
        task.start_s = self.now_s
        running = _Running(task.index, task.duration_s, self.now_s, self._rate(stream), self._next_version())
        self._running[stream] = running
        self.schedule(self.now_s + running.remaining_s / running.rate, stream, running.version)
        self._rate_changed(stream)

    def _next_version(self) -> int:
        self._version += 1
        return self._version

    def _rate(self, stream: int) -> float:
        partner = self._partner.get(stream)
        if partner is None or partner[0] not in self._running:
            return 1.0
        return 1.0 / partner[1]

    def _rate_changed(self, stream: int) -> None:
        """The partner of ``stream`` now runs faster or slower: re-time its end."""
        partner = self._partner.get(stream)
        if partner is None:
            return
        running = self._running.get(partner[0])
        if running is None:
            return
        running.remaining_s -= (self.now_s - running.since_s) * running.rate
        running.since_s, running.rate = self.now_s, self._rate(partner[0])
        running.version = self._next_version()
        self.schedule(self.now_s + max(0.0, running.remaining_s) / running.rate, partner[0], running.version)


@dataclass(slots=True)
class _Running:
    """A task in progress: seconds of work left at full rate since ``since_s``, at ``rate``."""

    task: int
    remaining_s: float
    since_s: float
    rate: float
    version: int
