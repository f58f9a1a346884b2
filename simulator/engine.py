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
from collections.abc import Iterable
from dataclasses import dataclass, field

END, START = 0, 1  # priorities of events at one time


@dataclass(slots=True)
class Task:
    """Work of ``duration_s`` on ``stream``. ``terms``: how the duration splits by time term (shared between tasks, so never
    changed). ``wait_term``: the term to which idle time of the stream just before this task belongs. ``position``: in its
    stream; ``gate``: the last position in the coupled stream that this task waits for. ``name``: see :attr:`label`."""

    index: int
    stream: int
    duration_s: float
    name: str | tuple[object, ...]
    terms: dict[str, float]
    wait_term: str
    position: int = 0
    gate: int = -1
    waiting_for: int = 0
    ready_s: float = 0.0
    start_s: float = -1.0
    end_s: float = -1.0
    dependents: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The task's name for people, put together only when asked for."""
        return self.name if isinstance(self.name, str) else " ".join(map(str, self.name))


class Engine:
    """Add streams and tasks, then :meth:`run`."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.stream_names: list[str] = []
        self.now_s = 0.0
        self._queues: list[list[Task]] = []
        self._position: list[int] = []
        self._free_s: list[float] = []
        self._partner: dict[int, tuple[int, float]] = {}
        self._running: dict[int, _Running] = {}
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._sequence = 0

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
        index, queue = len(self.tasks), self._queues[stream]
        task = Task(index, stream, duration_s, label, terms or {}, wait_term, len(queue))
        partner = self._partner.get(stream)
        for number in after:
            other = self.tasks[number]
            other.dependents.append(index)
            task.waiting_for += 1
            if partner is not None and other.stream == partner[0] and other.position > task.gate:
                task.gate = other.position
        self.tasks.append(task)
        queue.append(task)
        return index

    def tasks_on(self, stream: int) -> list[Task]:
        """The tasks of a stream in their order."""
        return self._queues[stream]

    def run(self) -> float:
        """Run to the end; returns the makespan. Raises RuntimeError if some task can never start (a dependency cycle)."""
        for stream in range(len(self._queues)):
            self._advance(stream)
        while self._heap:
            self._event()
        stuck = [task.label for task in self.tasks if task.end_s < 0]
        if stuck:
            raise RuntimeError(f"{len(stuck)} tasks can never start, first: {stuck[:3]}")
        return max((task.end_s for task in self.tasks), default=0.0)

    def _advance(self, stream: int) -> None:
        """Start what can start on ``stream`` and, as tasks get their end, on the streams that wait for them."""
        open_streams = [stream]
        while open_streams:
            stream = open_streams.pop()
            queue, position = self._queues[stream], self._position[stream]
            partner = self._partner.get(stream)
            while position < len(queue) and not queue[position].waiting_for and stream not in self._running:
                task = queue[position]
                start_s = max(self._free_s[stream], task.ready_s)
                if partner is not None and not self._is_alone(task, partner[0]):
                    self._begin(task, start_s)
                    break
                task.start_s, position = start_s, position + 1
                self._end(task, start_s + task.duration_s, open_streams)

    def _is_alone(self, task: Task, partner: int) -> bool:
        """Whether nothing on the coupled stream can run beside ``task``: there is nothing left, or it waits for ``task``."""
        if partner in self._running:
            return False
        queue, position = self._queues[partner], self._position[partner]
        return position == len(queue) or queue[position].gate >= task.position

    def _end(self, task: Task, end_s: float, freed: list[int]) -> None:
        """Note the end of a task; ``freed`` gets the streams on which a task waits for nothing any more."""
        task.end_s = self._free_s[task.stream] = end_s
        self._position[task.stream] += 1
        for index in task.dependents:
            other = self.tasks[index]
            other.waiting_for -= 1
            if other.ready_s < end_s:
                other.ready_s = end_s
            if not other.waiting_for:
                freed.append(other.stream)

    # --- tasks that may be slowed down ---------------------------------------------------------------------------

    def _begin(self, task: Task, start_s: float) -> None:
        """Start a task now, or put its start on the heap."""
        running = self._running[task.stream] = _Running(task, task.duration_s)
        if start_s > self.now_s:
            self._schedule(start_s, START, running)
        else:
            self._start(running)

    def _schedule(self, time_s: float, priority: int, running: _Running) -> None:
        """Put the start or end of a running task on the heap; an event of it that is there already counts no more."""
        self._sequence += 1
        running.event = self._sequence
        heapq.heappush(self._heap, (time_s, priority, self._sequence, running.task.stream, running.event))

    def _event(self) -> None:
        """Process one event."""
        time_s, priority, _, stream, event = heapq.heappop(self._heap)
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
        running.task.start_s = running.since_s = self.now_s
        running.started, running.rate = True, self._rate(running.task.stream)
        self._schedule(self.now_s + running.remaining_s / running.rate, END, running)
        self._rate_changed(running.task.stream)

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
        running.since_s, running.rate = self.now_s, self._rate(running.task.stream)
        self._schedule(self.now_s + max(0.0, running.remaining_s) / running.rate, END, running)


@dataclass(slots=True)
class _Running:
    """A task in progress: seconds of work left at full rate since ``since_s``, at ``rate``. Not ``started``: its start is on the
    heap. ``event``: the number of its event that counts."""

    task: Task
    remaining_s: float
    since_s: float = 0.0
    rate: float = 1.0
    started: bool = False
    event: int = 0
