"""The event engine against schedules worked by hand, and its invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine import Engine


def test_dependency_and_stream_order() -> None:
    engine = Engine()
    compute, link = engine.stream("compute"), engine.stream("link")
    first = engine.task(compute, 2.0)
    sent = engine.task(link, 3.0, after=[first])
    second = engine.task(compute, 1.0)
    last = engine.task(compute, 4.0, after=[sent])
    assert engine.run() == 9.0
    starts = [engine.tasks[index].start_s for index in (first, sent, second, last)]
    assert starts == [0.0, 2.0, 2.0, 5.0]


def test_coupled_streams_slow_each_other_only_while_both_run() -> None:
    engine = Engine()
    compute, comm = engine.stream("compute"), engine.stream("comm")
    engine.couple(compute, comm, 2.0, 1.0)
    engine.task(compute, 4.0)
    engine.task(comm, 3.0)
    # 3 s together: compute does 1.5 of 4; the remaining 2.5 run alone
    assert engine.run() == pytest.approx(5.5)
    assert engine.tasks[1].end_s == pytest.approx(3.0)


def test_rate_change_when_the_partner_starts_later() -> None:
    engine = Engine()
    compute, comm, other = engine.stream("compute"), engine.stream("comm"), engine.stream("other")
    engine.couple(compute, comm, 2.0, 2.0)
    engine.task(compute, 4.0)
    gate = engine.task(other, 1.0)
    engine.task(comm, 1.0, after=[gate])
    # alone 1 s (3 left); together at half rate until comm's 1 s of work is done after 2 s (2 left); alone 2 s
    assert engine.run() == pytest.approx(5.0)


def test_many_rate_changes_leave_no_stale_event() -> None:
    engine = Engine()
    compute, comm = engine.stream("compute"), engine.stream("comm")
    engine.couple(compute, comm, 1.5, 1.5)
    for _ in range(20):
        engine.task(compute, 0.3)
        engine.task(comm, 0.2)
    end = engine.run()
    # both busy until comm's 4 s of work are done at 1/1.5 rate, then compute alone
    assert end == pytest.approx(6.0 + (6.0 - 4.0))


def test_a_cycle_is_an_error() -> None:
    engine = Engine()
    stream = engine.stream("s")
    engine.task(stream, 1.0, label="x")
    engine._waiting_for[0] = 1
    with pytest.raises(RuntimeError, match="never start"):
        engine.run()


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.01, 5), st.sets(st.integers(0, 30), max_size=3)), min_size=1, max_size=30))
def test_invariants(tasks: list[tuple[int, float, set[int]]]) -> None:
    def build(scale: float) -> tuple[Engine, float]:
        engine = Engine()
        for name in "abc":
            engine.stream(name)
        for index, (stream, duration, after) in enumerate(tasks):
            engine.task(stream, duration * scale, after=[other for other in after if other < index])
        return engine, engine.run()

    engine, makespan = build(1.0)
    for stream in range(3):
        assert sum(task.duration_s for task in engine.tasks if task.stream == stream) <= makespan + 1e-9
    for index, (_, _, after) in enumerate(tasks):
        for other in after:
            if other < index:
                assert engine.tasks[index].start_s >= engine.tasks[other].end_s - 1e-9
    assert build(2.0)[1] == pytest.approx(2 * makespan)
    assert build(1.0)[1] == makespan


class _ByEvents(Engine):
    """Every task on a coupled stream goes through the heap."""

    def _is_alone(self, task: int, partner: int) -> bool:
        return False


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 5), st.sets(st.integers(1, 8), max_size=3)), min_size=1, max_size=60),
    st.tuples(st.floats(1, 3), st.floats(1, 3)),
)
def test_what_nothing_slows_down_needs_no_events(tasks: list[tuple[int, float, set[int]]], slowdowns: tuple[float, float]) -> None:
    """Times of tasks that run alone equal those of the event by event run. Streams 0 and 1 are coupled, 2 and 3 as well."""

    def times(engine: Engine, *, all_coupled: bool) -> list[tuple[float, float]]:
        for name in "abcdef":
            engine.stream(name)
        engine.couple(0, 1, *slowdowns)
        engine.couple(2, 3, *slowdowns)
        if all_coupled:
            engine.couple(4, 5, 1.0, 1.0)  # with a stream that has no task
        for index, (stream, duration, back) in enumerate(tasks):
            engine.task(stream, duration, after=[index - steps for steps in back if steps <= index])
        engine.run()
        return [(task.start_s, task.end_s) for task in engine.tasks]

    for found, wanted in zip(times(Engine(), all_coupled=False), times(_ByEvents(), all_coupled=True), strict=True):
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12)
