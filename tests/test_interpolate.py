"""Curves and tables by hand-computed values and by properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.interpolate import CollectiveTable, OpTable, curve
from profiler.shapes import grad_add_key
from specs.base import Provenance
from specs.errors import InvalidInput
from specs.profile import CollectiveRecord, DeviceProfile, OpRecord, Profile, Timing, op_key


def timing(seconds: float) -> Timing:
    return Timing(median_s=seconds, p10_s=seconds, p90_s=seconds, samples=3)


def linear_record(batch: int, seconds: float, *, hidden: int = 64, out: int = 128, extra: float = 0.0) -> OpRecord:
    key = op_key("aten.linear.default", [((batch, 16, hidden), "float32"), ((out, hidden), "float32")], [["%", "%"], []])
    return OpRecord(key=key, op_class="gemm", forward=timing(seconds), backward=timing(2 * seconds), saved_extra_bytes=extra)


def test_between_two_points_the_curve_is_straight_in_log_log() -> None:
    line = curve([1.0, 100.0], [1.0, 10.0])  # time = size^(1/2)
    seconds, provenance = line(10.0)
    assert seconds == pytest.approx(math.sqrt(10.0))
    assert provenance == Provenance.INTERPOLATED


def test_a_measured_point_is_given_back_as_measured() -> None:
    assert curve([4.0, 1.0], [8.0, 2.0])(4.0) == (8.0, Provenance.MEASURED)


def test_beyond_the_last_point_time_grows_along_the_last_segment() -> None:
    seconds, provenance = curve([1.0, 2.0], [1.5, 2.5])(4.0)  # slope 1 per unit
    assert seconds == pytest.approx(4.5)
    assert provenance == Provenance.EXTRAPOLATED


def test_below_the_first_point_a_fixed_cost_stays() -> None:
    line = curve([10.0, 20.0], [15.0, 25.0])  # 5 + size
    assert line(1.0)[0] == pytest.approx(6.0)
    assert line(1.0)[1] == Provenance.EXTRAPOLATED
    assert curve([10.0], [15.0])(5.0)[0] == pytest.approx(7.5)  # one point: in proportion


def test_repeated_sizes_are_averaged_and_no_point_is_refused() -> None:
    assert curve([2.0, 2.0], [1.0, 3.0])(2.0)[0] == pytest.approx(2.0)
    with pytest.raises(InvalidInput, match="at least one point"):
        curve([], [])


POINTS = st.lists(
    st.tuples(st.floats(1.0, 1e9), st.floats(1e-6, 10.0)),
    min_size=1,
    max_size=8,
    unique_by=lambda point: round(math.log(point[0]), 3),
)


@given(POINTS, st.floats(0.5, 1e10), st.floats(1.0, 10.0))
def test_a_curve_through_rising_points_never_falls(points: list[tuple[float, float]], size: float, factor: float) -> None:
    sizes = sorted(size for size, _ in points)
    times = sorted(seconds for _, seconds in points)
    line = curve(sizes, times)
    assert line(size * factor)[0] >= line(size)[0] * (1 - 1e-9)


@given(POINTS, st.lists(st.floats(0.5, 1e10), min_size=1, max_size=5))
def test_many_sizes_at_once_equal_one_by_one(points: list[tuple[float, float]], sizes: list[float]) -> None:
    line = curve(*zip(*points, strict=True))
    np.testing.assert_allclose(line.seconds(sizes), [line(size)[0] for size in sizes], rtol=1e-9)


def test_an_op_at_its_own_shape_is_measured() -> None:
    record = linear_record(2, 1e-3)
    found = OpTable(DeviceProfile(device="d", ops=(record,))).lookup(record.key)
    assert found is not None
    assert (found.forward_s, found.backward_s, found.provenance) == (1e-3, 2e-3, Provenance.MEASURED)


def test_an_op_at_another_batch_is_interpolated_and_its_bytes_scaled() -> None:
    table = OpTable(DeviceProfile(device="d", ops=(linear_record(2, 1e-3, extra=200.0), linear_record(8, 4e-3, extra=800.0))))
    found = table.lookup(linear_record(4, 0.0).key)
    assert found is not None
    assert found.forward_s == pytest.approx(2e-3)
    assert found.backward_s == pytest.approx(4e-3)
    assert found.provenance == Provenance.INTERPOLATED
    assert found.record.saved_extra_bytes == pytest.approx(400.0)
    beyond = table.lookup(linear_record(16, 0.0).key)
    assert beyond is not None
    assert beyond.forward_s == pytest.approx(8e-3)
    assert beyond.provenance == Provenance.EXTRAPOLATED


def test_an_op_with_other_feature_dims_is_not_guessed() -> None:
    table = OpTable(DeviceProfile(device="d", ops=(linear_record(2, 1e-3), linear_record(8, 4e-3))))
    assert table.lookup(linear_record(2, 0.0, out=64).key) is None
    assert table.lookup(linear_record(2, 0.0, hidden=32).key) is None


def test_attention_grows_with_the_square_of_the_sequence() -> None:
    def key(batch: int, seq: int) -> str:
        return op_key("aten.scaled_dot_product_attention.default", [((batch, 4, seq, 16), "float32")] * 3, [["%"] * 3, []])

    records = [OpRecord(key=key(batch, 64), op_class="attention", forward=timing(batch * 1e-3)) for batch in (1, 4)]
    found = OpTable(DeviceProfile(device="d", ops=tuple(records))).lookup(key(1, 128))
    assert found is not None
    assert found.forward_s == pytest.approx(4e-3)  # four times the work of (1, 64), that of (4, 64)
    assert found.provenance == Provenance.INTERPOLATED


def test_broadcast_operands_are_another_family() -> None:
    def key(second: tuple[int, ...]) -> str:
        return op_key("aten.mul.Tensor", [((4, 16, 8), "float32"), (second, "float32")], [["%", "%"], []])

    table = OpTable(DeviceProfile(device="d", ops=(OpRecord(key=key((4, 16, 8)), op_class="elementwise", forward=timing(1.0)),)))
    assert table.lookup(key((1, 1, 8))) is None


def test_loss_and_embedding_follow_the_number_of_tokens() -> None:
    def loss(tokens: int) -> str:
        return op_key("aten.cross_entropy_loss.default", [((tokens, 100), "float32"), ((tokens,), "int64")], [["%", "%"], []])

    def embedding(batch: int) -> str:
        return op_key("aten.embedding.default", [((100, 8), "float32"), ((batch, 16), "int64")], [["%", "%"], []])

    records = [OpRecord(key=loss(n), op_class="loss", forward=timing(n * 1e-6)) for n in (16, 64)]
    records += [OpRecord(key=embedding(n), op_class="embedding", forward=timing(n * 1e-6)) for n in (1, 4)]
    table = OpTable(DeviceProfile(device="d", ops=tuple(records)))
    for key, seconds in ((loss(32), 32e-6), (embedding(2), 2e-6)):
        found = table.lookup(key)
        assert found is not None
        assert found.forward_s == pytest.approx(seconds)


def test_gradient_additions_are_interpolated_by_size() -> None:
    records = [
        OpRecord(key=grad_add_key(n, "float32"), op_class="elementwise", forward=timing(n * 1e-9)) for n in (1000, 1_000_000)
    ]
    found = OpTable(DeviceProfile(device="d", ops=tuple(records))).grad_add(30_000, "float32")
    assert found is not None
    assert found[0] == pytest.approx(30e-6)


def collectives(*group_sizes: int) -> CollectiveTable:
    records = tuple(
        CollectiveRecord(op="all_reduce", group_size=n, sizes_bytes=(1e3, 1e6), times=(timing(1e-4), timing(1e-2)))
        for n in group_sizes
    )
    return CollectiveTable(Profile(devices=(), collectives=records))


def test_collectives_by_size_and_group() -> None:
    table = collectives(2)
    assert table.lookup("all_reduce", 2, "intra", 1e6) == (1e-2, Provenance.MEASURED)
    assert table.lookup("all_reduce", 2, "inter", 1e6) is None
    assert table.lookup("broadcast", 2, "intra", 1e6) is None
    found = table.lookup("all_reduce", 4, "intra", 1e6)
    assert found is not None
    assert found[0] == pytest.approx(1e-2 * (3 / 4) / (1 / 2))  # bytes on a link: 2 (n-1)/n S
    assert found[1] == Provenance.EXTRAPOLATED
