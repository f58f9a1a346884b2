"""Bad input gets every violation at once, each with its place, what is allowed and the nearest valid value."""

import pytest

from specs.cluster import ClusterSpec
from specs.errors import ExecutionFailed, Infeasible, InvalidInput, NoAnswerInTime, Violation, nearest_name, nearest_number
from specs.graph import ModelGraph
from specs.training import TrainingSpec


def violations(document, data):
    with pytest.raises(InvalidInput) as caught:
        document.parse(data)
    return caught.value.violations


def test_unknown_key_names_the_nearest():
    (found,) = violations(TrainingSpec, {"global_batch": 8, "seq_length": 128, "seq_len": 128})
    assert (found.code, found.loc, found.nearest) == ("unknown_key", ("seq_length",), "seq_len")


def test_unknown_nested_key_knows_its_own_neighbours():
    (found,) = violations(
        ClusterSpec,
        {
            "name": "c",
            "nodes": [{"preset": "p", "count": 1, "intra": {"bandwidth_gbyte_s": 1, "latency_us": 1, "bandwith_gbit_s": 3}}],
        },
    )
    assert found.loc == ("nodes", 0, "intra", "bandwith_gbit_s")
    assert found.nearest == "bandwidth_gbit_s"
    assert "latency_us" in found.allowed
    assert "count" not in found.allowed


def test_every_violation_at_once():
    found = violations(
        ClusterSpec,
        {
            "nodes": [
                {"preset": "p", "count": 0},
                {"preset": "p", "count": "many", "colour": "red"},
                {"preset": "p", "count": 1, "intra": {"bandwidth_gbyte_s": -1}},
            ],
            "oversubscription": 0.5,
        },
    )
    places = {violation.loc: violation.code for violation in found}
    assert places == {
        ("name",): "missing",
        ("nodes", 0, "count"): "greater_than_equal",
        ("nodes", 1, "count"): "int_parsing",
        ("nodes", 1, "colour"): "unknown_key",
        ("nodes", 2, "intra", "bandwidth_bytes_per_s"): "greater_than",
        ("nodes", 2, "intra", "latency_s"): "missing",
        ("oversubscription",): "greater_than_equal",
    }


def test_a_failed_item_does_not_make_the_list_too_short():
    found = violations(ClusterSpec, {"name": "c", "nodes": [{"preset": "p", "count": 0}]})
    assert [violation.loc for violation in found] == [("nodes", 0, "count")]


def test_a_list_that_is_too_short_says_so():
    (found,) = violations(ClusterSpec, {"name": "c", "nodes": []})
    assert (found.code, found.loc) == ("too_short", ("nodes",))


def test_all_broken_rules_of_a_cluster():
    found = violations(
        ClusterSpec,
        {
            "name": "c",
            "nodes": [
                {"count": 1},
                {"count": 1, "device": "d"},
                {"count": 1, "device": "d", "devices_per_node": 2, "slowdown": {"0": 0.5, "1": 0.9}},
            ],
        },
    )
    assert [(violation.code, violation.loc) for violation in found] == [
        ("incomplete_node_group", ("nodes", 0)),
        ("incomplete_node_group", ("nodes", 1)),
        ("slowdown_below_one", ("nodes", 2, "slowdown", 0)),
        ("slowdown_below_one", ("nodes", 2, "slowdown", 1)),
    ]


def test_unknown_precision_beside_a_missing_batch():
    found = violations(TrainingSpec, {"seq_len": 128, "precision": "bf16_mixd"})
    by_place = {violation.loc: violation for violation in found}
    assert set(by_place) == {("global_batch",), ("precision",)}
    assert by_place["precision",].nearest == "bf16_mixed"


def test_all_broken_rules_of_a_workload():
    found = violations(TrainingSpec, {"global_batch": 8, "loss_kernel": "fuse", "attention_kernel": "flsh"})
    assert [(violation.code, violation.nearest) for violation in found] == [
        ("sequence_length", None),
        ("unknown_loss_kernel", "fused"),
        ("unknown_attention_kernel", "flash"),
    ]


def test_unknown_dtypes_and_optimizer():
    found = violations(
        TrainingSpec,
        {
            "global_batch": 8,
            "seq_len": 1,
            "precision": {"param_dtype": "bfloat", "grad_dtype": "half"},
            "optimizer": {"name": "adamww"},
        },
    )
    places = [(violation.code, violation.loc, violation.nearest) for violation in found]
    assert ("unknown_dtype", ("precision", "param_dtype"), "bfloat16") in places
    assert any(place[:2] == ("unknown_dtype", ("precision", "grad_dtype")) for place in places)
    assert ("unknown_optimizer", ("optimizer", "name"), "adamw") in places


def test_both_lengths_or_none():
    histogram = [{"length": 4, "weight": 1}]
    assert violations(TrainingSpec, {"global_batch": 8})[0].code == "sequence_length"
    assert violations(TrainingSpec, {"global_batch": 8, "seq_len": 4, "seq_len_histogram": histogram})[0].code == "sequence_length"
    spec = TrainingSpec.parse({"global_batch": 8, "seq_len_histogram": [*histogram, {"length": 9, "weight": 0.1}]})
    assert spec.max_seq_len == 9


@pytest.mark.parametrize("batch", [0, -1, 1.5, "eight", None])
def test_bad_batches(batch):
    assert [violation.loc for violation in violations(TrainingSpec, {"global_batch": batch, "seq_len": 1})] == [("global_batch",)]


def test_rendering_names_place_allowed_and_nearest():
    violation = Violation(
        code="c", message="tp 6 does not divide 32 heads", loc=("plan", "tp"), actual=6, allowed=[1, 2, 4], nearest=4
    )
    assert violation.render() == "plan.tp: tp 6 does not divide 32 heads; allowed: 1, 2, 4; nearest: 4"
    error = InvalidInput([violation, violation], subject="plan x")
    assert str(error).startswith("plan x: 2 violations\n  - plan.tp: ")
    assert violation.as_dict()["loc"] == ["plan", "tp"]
    assert str(InvalidInput.single("c", "m")) == "input: 1 violation\n  - m"


def test_exit_codes():
    assert [kind.exit_code for kind in (InvalidInput, Infeasible, NoAnswerInTime, ExecutionFailed)] == [2, 3, 4, 5]
    assert "  - m" in str(Infeasible("no plan", [Violation(code="c", message="m")]))


def test_nearest():
    assert nearest_name("H100-SXM", ["h100_sxm", "a100"]) == "h100_sxm"
    assert nearest_name("zzz", ["h100_sxm"]) is None
    assert nearest_number(6, [1, 2, 4, 8]) == 4
    assert nearest_number(7, [1, 2, 4, 8]) == 8
    assert nearest_number(3, []) is None


def test_a_bad_size_in_a_graph():
    tensor = {"name": "x", "shape": ["B*", 3]}
    found = violations(ModelGraph, {"name": "m", "inputs": [tensor], "blocks": [], "segments": [], "loss": "x"})
    assert found[0].loc == ("inputs", 0, "shape", 0)
    assert "polynomial" in found[0].message
