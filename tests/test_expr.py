"""Sizes symbolic in B and S: text there and back, arithmetic as of numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from specs.expr import Expr

COEFFICIENTS = st.one_of(
    st.integers(-(2**60), 2**60).filter(lambda value: float(value) == value),
    st.floats(min_value=-1e12, max_value=1e12, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-12),
)
POWERS = st.tuples(st.integers(0, 4), st.integers(0, 4))
EXPRESSIONS = st.dictionaries(POWERS, COEFFICIENTS, max_size=5).map(Expr)
WHOLE = st.dictionaries(POWERS, st.integers(-1000, 1000), max_size=4).map(Expr)
SIZES = st.integers(0, 50)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("4096", {(0, 0): 4096}),
        ("B", {(1, 0): 1}),
        ("B*S", {(1, 1): 1}),
        ("2*B*S^2", {(1, 2): 2}),
        ("S*S*B", {(1, 2): 1}),
        ("B*S + 1", {(1, 1): 1, (0, 0): 1}),
        ("3 - B", {(0, 0): 3, (1, 0): -1}),
        ("-2*S", {(0, 1): -2}),
        ("2*3*B", {(1, 0): 6}),
        ("1e-3*S+2.5e6", {(0, 1): 0.001, (0, 0): 2.5e6}),
        (" B * S ", {(1, 1): 1}),
        ("B + B", {(1, 0): 2}),
        ("B - B", {}),
    ],
)
def test_parse(text, terms):
    assert Expr.parse(text) == Expr(terms)


@pytest.mark.parametrize(
    "text", ["", "  ", "B*", "*B", "B**2", "T", "B/2", "B^-1", "(B)", "2B", "B^1.5", "+", "B++S", "nan", "1_000", "B S"]
)
def test_no_polynomial(text):
    with pytest.raises(ValueError, match="is no polynomial in B and S"):
        Expr.parse(text)


def test_evaluation_keeps_integers_exact():
    assert Expr.parse("2*B*S^2 + 3")(4, 1_000_003) == 8 * 1_000_003**2 + 3
    assert isinstance(Expr.parse("B*S")(2, 3), int)
    assert Expr.parse("0.5*B")(3, 0) == 1.5
    assert Expr({})(5, 5) == 0


def test_evaluation_on_arrays():
    batch = np.array([1, 2, 4])
    np.testing.assert_array_equal(Expr.parse("2*B*S + 1")(batch, 8), [17, 33, 65])


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (Expr({(1, 1): 1}), "B*S"),
        (Expr({(1, 2): 2, (0, 0): 3}), "3 + 2*B*S^2"),
        (Expr({(1, 0): -1}), "-1*B"),
        (Expr({(0, 0): 1, (1, 0): -2}), "1 - 2*B"),
        (Expr({}), "0"),
        (Expr({(0, 1): 0.5}), "0.5*S"),
    ],
)
def test_text(expr, text):
    assert str(expr) == text


@given(EXPRESSIONS)
def test_text_there_and_back(expr):
    assert Expr.parse(str(expr)) == expr


@given(EXPRESSIONS)
def test_json_there_and_back(expr):
    adapter = TypeAdapter(Expr)
    assert adapter.validate_json(adapter.dump_json(expr)) == expr


@given(WHOLE, WHOLE, SIZES, SIZES)
def test_sum_and_product_are_those_of_the_values(left, right, batch, seq):
    assert (left + right)(batch, seq) == left(batch, seq) + right(batch, seq)
    assert (left * right)(batch, seq) == left(batch, seq) * right(batch, seq)


@given(WHOLE, WHOLE, WHOLE)
def test_ring_laws(a, b, c):
    assert a + b == b + a
    assert a * b == b * a
    assert a * (b + c) == a * b + a * c
    assert hash(a + b) == hash(b + a)


@given(WHOLE, st.integers(-9, 9))
def test_numbers_on_either_side(expr, number):
    assert number + expr == expr + number
    assert number * expr == expr * number
    assert (expr * number)(2, 3) == expr(2, 3) * number


def test_const():
    assert Expr.const(7).is_const
    assert Expr({}).is_const
    assert not Expr.parse("B").is_const
    assert Expr.of(Expr.const(2)) == Expr.of(2) == Expr.of("2")


@pytest.mark.parametrize("value", [True, None, [1], {"expr": "B"}, "B*X"])
def test_pydantic_refuses_others(value):
    with pytest.raises(ValidationError):
        TypeAdapter(Expr).validate_python(value)
