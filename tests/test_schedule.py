"""Pipeline schedules: the generators against hand-written rows, the validator against broken ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specs.base import InvalidInputValue
from specs.errors import InvalidInput
from specs.schedule import (
    SCHEDULES,
    Action,
    check_rules,
    dependencies,
    from_text,
    max_in_flight,
    rows_for,
    to_text,
    validate_rows,
)

SIZES = st.integers(1, 9).flatmap(lambda pp: st.tuples(st.just(pp), st.integers(pp, pp + 12)))


def codes(rows, num_stages, num_micro_batches):
    return {violation.code for violation in validate_rows(rows, num_stages=num_stages, num_micro_batches=num_micro_batches)}


def test_gpipe_rows():
    rows = rows_for("gpipe", num_ranks=2, num_micro_batches=3)
    assert to_text(rows) == ["0F0,0F1,0F2,0B0,0B1,0B2", "1F0,1F1,1F2,1B0,1B1,1B2"]


def test_1f1b_rows():
    rows = rows_for("1f1b", num_ranks=3, num_micro_batches=4)
    assert to_text(rows) == [
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3",
        "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3",
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3",
    ]


def test_one_rank():
    assert to_text(rows_for("1f1b", num_ranks=1, num_micro_batches=2)) == ["0F0,0B0,0F1,0B1"]


@given(SIZES)
def test_generated_rows_are_valid(size):
    num_ranks, num_micro_batches = size
    for name, rule in SCHEDULES.items():
        per_rank = rule.stages_per_rank or 2
        if check_rules(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=per_rank):
            continue
        rows = rows_for(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=per_rank)
        assert len(rows) == num_ranks
        assert validate_rows(rows, num_stages=num_ranks * per_rank, num_micro_batches=num_micro_batches) == []


@given(SIZES)
def test_micro_batches_in_flight(size):
    num_ranks, num_micro_batches = size
    for rank, row in enumerate(rows_for("1f1b", num_ranks=num_ranks, num_micro_batches=num_micro_batches)):
        assert max_in_flight(row) == num_ranks - rank  # with at least pp micro-batches the bound is reached
    for row in rows_for("gpipe", num_ranks=num_ranks, num_micro_batches=num_micro_batches):
        assert max_in_flight(row) == num_micro_batches


def test_rules_are_all_reported():
    found = check_rules("1f1b", num_ranks=4, num_micro_batches=2, stages_per_rank=3)
    assert [violation.code for violation in found] == ["stages_per_rank", "micro_batches_below_stages"]
    assert found[1].nearest == 4
    with pytest.raises(InvalidInput, match="at least as many micro-batches as stages: 2 < 4"):
        rows_for("1f1b", num_ranks=4, num_micro_batches=2)


def test_unknown_schedule_names_the_nearest():
    (found,) = check_rules("gpip", num_ranks=1, num_micro_batches=1, stages_per_rank=1)
    assert (found.code, found.nearest) == ("unknown_schedule", "gpipe")
    with pytest.raises(InvalidInput, match="gpipe"):
        rows_for("gpip", num_ranks=1, num_micro_batches=1)


def test_missing_action():
    found = validate_rows(from_text(["0F0,0B0", "1F0"]), num_stages=2, num_micro_batches=1)
    assert [violation.message for violation in found] == ["1B0 (or its I and W) is missing"]


def test_missing_weight_part():
    assert codes(from_text(["0F0,0I0"]), 1, 1) == {"missing_action"}
    assert codes(from_text(["0F0,0I0,0W0"]), 1, 1) == set()


def test_duplicate_action():
    found = validate_rows(from_text(["0F0,0F0,0B0"]), num_stages=1, num_micro_batches=1)
    assert [(violation.code, violation.message) for violation in found] == [("duplicate_action", "0F0 stands 2 times")]


def test_stage_on_two_ranks_and_out_of_range():
    assert codes(from_text(["0F0", "0B0"]), 1, 1) == {"stage_on_two_ranks"}
    assert codes(from_text(["0F0,0B0,0F1,0B1"]), 1, 1) == {"action_out_of_range"}
    assert codes(from_text(["0F0,0B0,1F0,1B0"]), 1, 1) == {"action_out_of_range"}


def test_deadlock_names_where_each_rank_waits():
    rows = from_text(["0F0,0B0,0F1,0B1", "1F1,1F0,1B0,1B1"])
    (found,) = validate_rows(rows, num_stages=2, num_micro_batches=2)
    assert found.code == "deadlock"
    assert "rank 0 waits at 0B0" in found.message
    assert "rank 1 waits at 1F1" in found.message


def test_backward_before_forward_is_a_deadlock():
    assert codes(from_text(["0B0,0F0"]), 1, 1) == {"deadlock"}
    assert codes(from_text(["0F0,0W0,0I0"]), 1, 1) == {"deadlock"}


def test_all_violations_at_once():
    found = codes(from_text(["0F0,0F0", "1F5,1B0"]), 2, 1)
    assert found == {"duplicate_action", "action_out_of_range", "missing_action"}


def test_split_backward_across_stages():
    rows = from_text(["0F0,0F1,0I0,0W0,0B1", "1F0,1I0,1F1,1B1,1W0"])
    assert validate_rows(rows, num_stages=2, num_micro_batches=2) == []
    assert dependencies(Action(0, "B", 0), 2) == [(Action(0, "F", 0),), (Action(1, "B", 0), Action(1, "I", 0))]


def test_virtual_stages_on_one_rank():
    rows = from_text(["0F0,2F0,2B0,0B0", "1F0,3F0,3B0,1B0"])
    assert validate_rows(rows, num_stages=4, num_micro_batches=1) == []


ACTIONS = st.builds(Action, st.integers(0, 999), st.sampled_from("FBIW"), st.integers(0, 9999))


@given(st.lists(st.lists(ACTIONS, min_size=1).map(tuple), min_size=1).map(tuple))
def test_text_there_and_back(rows):
    assert from_text(to_text(rows)) == rows


def test_empty_cells_are_bubbles():
    assert from_text(["0F0, ,,0B0 ,"]) == ((Action(0, "F", 0), Action(0, "B", 0)),)


@pytest.mark.parametrize("text", ["F0", "0F", "0X1", "0f1", "-1F0", "0F1.5", "0F 1", ""])
def test_bad_actions(text):
    with pytest.raises(InvalidInputValue, match="is no action"):
        Action.parse(text)


@given(SIZES, st.data())
def test_dropping_any_action_is_found(size, data):
    num_ranks, num_micro_batches = size
    rows = [list(row) for row in rows_for("1f1b", num_ranks=num_ranks, num_micro_batches=num_micro_batches)]
    row = data.draw(st.sampled_from(rows))
    row.pop(data.draw(st.integers(0, len(row) - 1)))
    assert "missing_action" in codes(rows, num_ranks, num_micro_batches)
