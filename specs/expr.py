"""Sizes symbolic in batch ``B`` and sequence ``S``: polynomials with number coefficients, written as text in files.

``"B*S"``, ``"2*B*S^2"``, ``"4096"``, ``"B*S + 1"``. Evaluation takes numbers or NumPy arrays alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

Terms = dict[tuple[int, int], float]
_FACTOR = re.compile(r"^(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<symbol>[BS])(?:\^(?P<power>\d+))?)$")


class Expr:
    """An immutable polynomial in ``B`` and ``S``: ``{(power of B, power of S): coefficient}``."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[tuple[int, int], float]) -> None:
        self.terms: Terms = {powers: value for powers, value in sorted(terms.items()) if value != 0}
        self._hash = hash(tuple(self.terms.items()))

    @classmethod
    def const(cls, value: float) -> Expr:
        """The constant ``value``."""
        return cls({(0, 0): value})

    @classmethod
    def of(cls, value: Expr | float | str) -> Expr:
        """From a number, text or an Expr."""
        if isinstance(value, Expr):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        return cls.const(value)

    @classmethod
    def parse(cls, text: str) -> Expr:
        """From text such as ``"2*B*S^2 + 3"``; raises ValueError when it is no such polynomial."""
        terms: Terms = {}
        pieces = re.split(r"(?<![eE])([+-])", text.strip())
        pairs = list(zip(pieces[1::2], pieces[2::2], strict=True))
        for sign, part in ([("+", pieces[0])] if pieces[0].strip() else []) + pairs:
            coefficient, b_power, s_power = (-1.0 if sign == "-" else 1.0), 0, 0
            for factor in part.strip().split("*"):
                match = _FACTOR.match(factor.strip())
                if not match:
                    raise ValueError(f"'{text}' is no polynomial in B and S")
                if match["number"]:
                    coefficient *= float(match["number"])
                elif match["symbol"] == "B":
                    b_power += int(match["power"] or 1)
                else:
                    s_power += int(match["power"] or 1)
            terms[b_power, s_power] = terms.get((b_power, s_power), 0.0) + coefficient
        if not terms:
            raise ValueError(f"'{text}' is no polynomial in B and S")
        return cls(terms)

    def __call__(self, batch: Any, seq: Any) -> Any:
        """Value at batch ``B`` and sequence ``S`` (numbers or arrays); exact integers stay integers."""
        total: Any = 0
        for (b_power, s_power), coefficient in self.terms.items():
            factor: Any = int(coefficient) if coefficient == int(coefficient) else coefficient
            total = total + factor * batch**b_power * seq**s_power
        return total

    def __add__(self, other: Expr | float) -> Expr:
        result = dict(self.terms)
        for powers, value in Expr.of(other).terms.items():
            result[powers] = result.get(powers, 0.0) + value
        return Expr(result)

    def __mul__(self, other: Expr | float) -> Expr:
        result: Terms = {}
        for (b1, s1), v1 in self.terms.items():
            for (b2, s2), v2 in Expr.of(other).terms.items():
                key = (b1 + b2, s1 + s2)
                result[key] = result.get(key, 0.0) + v1 * v2
        return Expr(result)

    __radd__ = __add__
    __rmul__ = __mul__

    @property
    def is_const(self) -> bool:
        """True when neither B nor S appears."""
        return all(powers == (0, 0) for powers in self.terms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        return " + ".join(_term_text(b, s, value) for (b, s), value in self.terms.items()).replace("+ -", "- ")

    def __repr__(self) -> str:
        return f"Expr('{self}')"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any) -> Expr:
            if isinstance(value, (Expr, str, int, float)) and not isinstance(value, bool):
                return cls.of(value)
            raise ValueError(f"{value!r} is neither a number nor a polynomial in B and S")

        def serialize(value: Expr) -> int | float | str:
            if value.is_const:
                number = value(1, 1)
                return number if isinstance(number, (int, float)) else float(number)
            return str(value)

        return core_schema.no_info_plain_validator_function(
            validate, serialization=core_schema.plain_serializer_function_ser_schema(serialize)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "number"}, {"type": "string"}], "description": "number or polynomial in B and S, e.g. 'B*S'"}


def _term_text(b_power: int, s_power: int, value: float) -> str:
    number = str(int(value)) if value == int(value) else repr(value)
    symbols = [name if power == 1 else f"{name}^{power}" for name, power in (("B", b_power), ("S", s_power)) if power]
    if not symbols:
        return number
    return "*".join(symbols if number == "1" else [number, *symbols])
