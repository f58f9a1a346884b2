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
    passes_of,
    rows_for,
    stage_ranks,
    stage_ranks_of,
    to_text,
    validate_rows,
)

SIZES = st.integers(1, 9).flatmap(lambda pp: st.tuples(st.just(pp), st.integers(pp, pp + 12)))


@st.composite
def schedules(draw, least_ranks=1):
    """A named schedule with sizes that its rules allow: (name, ranks, micro-batches, stages per rank)."""
    rule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    ranks = draw(st.integers(least_ranks, 9))
    micro_batches = rule.nearest(draw(st.integers(1, 3 * ranks + 6)), ranks)
    return rule.name, ranks, micro_batches, rule.stages_per_rank or draw(st.integers(2, 4))


def rows_of(name, num_ranks, num_micro_batches, per_rank):
    return rows_for(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=per_rank)


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


@given(schedules())
def test_generated_rows_are_valid(size):
    name, num_ranks, num_micro_batches, per_rank = size
    rows = rows_of(*size)
    assert len(rows) == num_ranks
    assert validate_rows(rows, num_stages=num_ranks * per_rank, num_micro_batches=num_micro_batches) == []
    placed = stage_ranks(name, num_ranks=num_ranks, stages_per_rank=per_rank)
    assert stage_ranks_of(rows) == dict(enumerate(placed))


def test_rows_of_two_ranks():
    """By hand, after the figures of the sources named in ``specs.schedule``."""
    expected = {
        "interleaved": ["0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3",
                        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3"],
        "zb_h1": ["0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0I3,0W3", "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3"],
        "zb_v": ["0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0F3,0I0,0W0,3F2,3I2,3W2,0I1,0W1,3F3,3I3,3W3,0I2,0W2,0I3,0W3",
                 "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1F3,1I1,1W1,2F3,2I2,2W2,1I2,2I3,1I3,1W2,2W3,1W3"],
        "dualpipe_v": ["0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3B1,3F2,0B0,3B2,3F3,0B1,3B3,0I2,0W2,0I3,0W3",
                       "1F0,2F0,1F1,2F1,1F2,2B0,2F2,1B0,1F3,2B1,2F3,1B1,2B2,1B2,2I3,1I3,2W3,1W3"],
    }  # fmt: skip
    for name, rows in expected.items():
        assert to_text(rows_of(name, 2, 4, SCHEDULES[name].stages_per_rank or 2)) == rows


def test_placements():
    assert stage_ranks("interleaved", num_ranks=3, stages_per_rank=2) == (0, 1, 2, 0, 1, 2)
    assert stage_ranks("zb_v", num_ranks=3, stages_per_rank=2) == (0, 1, 2, 2, 1, 0)


# Chunks held at most between forward and weight gradient, of all ranks, for enough micro-batches; sources as in specs.schedule.
HELD = {
    "gpipe": lambda p, m, v: m,
    "1f1b": lambda p, m, v: p,
    "interleaved": lambda p, m, v: m * v if m == p else (v + 1) * p - 1,  # p (1 + (p - 1) / (p v)) of v chunks each
    "zb_h1": lambda p, m, v: p,
    "zb_v": lambda p, m, v: 2 * p,
    "dualpipe_v": lambda p, m, v: 2 * p + 1,
}


@given(schedules())
def test_chunks_in_flight(size):
    name, num_ranks, num_micro_batches, per_rank = size
    held = [max_in_flight(row) for row in rows_of(*size)]
    assert max(held) == HELD[name](num_ranks, num_micro_batches, per_rank)
    if name in ("zb_h1", "zb_v", "dualpipe_v"):
        assert len(set(held)) == 1  # every rank fills the same memory


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


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "chunks", "codes_found", "nearest"), [
    ("interleaved", 6, 3, 2, ["micro_batches_below_stages"], 6),
    ("interleaved", 4, 10, 1, ["stages_per_rank", "micro_batches_in_groups"], 8),
    ("interleaved", 4, 11, 3, ["micro_batches_in_groups"], 12), ("zb_h1", 4, 3, 1, ["micro_batches_below_stages"], 4),
    ("zb_v", 4, 6, 2, ["micro_batches_below_stages"], 7), ("zb_v", 4, 7, 1, ["stages_per_rank"], 2),
    ("dualpipe_v", 4, 7, 3, ["stages_per_rank", "micro_batches_below_stages"], 8), ("dualpipe_v", 4, 8, 2, [], None),
    ("gpipe", 4, 1, 1, [], None),
])  # fmt: skip
def test_rules_of_each_schedule(name, ranks, micro_batches, chunks, codes_found, nearest):
    found = check_rules(name, num_ranks=ranks, num_micro_batches=micro_batches, stages_per_rank=chunks)
    assert [violation.code for violation in found] == codes_found
    if found:
        assert found[-1].nearest == nearest
        with pytest.raises(InvalidInput):
            rows_of(name, ranks, micro_batches, chunks)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 12), st.integers(1, 60))
def test_nearest_number_of_micro_batches(name, ranks, micro_batches):
    rule = SCHEDULES[name]
    allowed = [number for number in range(1, 200) if rule.allows(number, ranks)]
    distance = min(abs(number - micro_batches) for number in allowed)
    assert rule.nearest(micro_batches, ranks) in allowed
    assert abs(rule.nearest(micro_batches, ranks) - micro_batches) == distance


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


def test_backward_whole_and_in_parts():
    assert codes(from_text(["0F0,0I0,0W0,0B0"]), 1, 1) == {"backward_twice"}
    assert codes(from_text(["0F0,0B0,0W0"]), 1, 1) == {"backward_twice"}
    assert codes(from_text(["0F0,0W0"]), 1, 1) == {"missing_action"}


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


def broken_codes(size, data, mutate):
    """Codes that the validator finds after ``mutate(rows, rank, position)`` of a valid schedule."""
    _, num_ranks, num_micro_batches, per_rank = size
    rows = [list(row) for row in rows_of(*size)]
    rank = data.draw(st.integers(0, num_ranks - 1))
    mutate(rows, rank, data.draw(st.integers(0, len(rows[rank]) - 1)))
    return codes(rows, num_ranks * per_rank, num_micro_batches)


@given(schedules(), st.data())
def test_dropping_any_action_is_found(size, data):
    assert "missing_action" in broken_codes(size, data, lambda rows, rank, position: rows[rank].pop(position))


@given(schedules(), st.data())
def test_repeating_any_action_is_found(size, data):
    found = broken_codes(size, data, lambda rows, rank, position: rows[rank].append(rows[rank][position]))
    assert found == {"duplicate_action"}


@given(schedules(least_ranks=2), st.data())
def test_moving_any_action_to_another_rank_is_found(size, data):
    found = broken_codes(size, data, lambda rows, rank, position: rows[rank - 1].append(rows[rank].pop(position)))
    assert "stage_on_two_ranks" in found


@given(schedules(), st.data())
def test_an_action_before_what_it_needs_is_found(size, data):
    """The last action of a row needs an earlier one of its own row: at the front it can never run."""
    found = broken_codes(size, data, lambda rows, rank, position: rows[rank].insert(0, rows[rank].pop()))
    assert found == {"deadlock"}


@given(schedules(), st.data())
def test_another_micro_batch_is_found(size, data):
    def mutate(rows, rank, position):
        rows[rank][position] = rows[rank][position]._replace(micro_batch=size[2])

    assert broken_codes(size, data, mutate) == {"action_out_of_range", "missing_action"}


@given(schedules())
def test_pairs_only_where_the_schedule_overlaps(size):
    for row in rows_of(*size):
        assert passes_of(row, overlaps=False) == [(action,) for action in row]
        pairs = [item for item in passes_of(row, overlaps=True) if len(item) == 2]
        assert [action for item in passes_of(row, overlaps=True) for action in item] == list(row)
        assert all([a.kind for a in pair] == ["F", "B"] and pair[0].stage != pair[1].stage for pair in pairs)
