"""Symbolic sizes of an export as polynomials in batch ``B`` and sequence ``S``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import FloorDiv, Mod

from specs.errors import InvalidInput
from specs.expr import Expr

BATCH, SEQ = sympy.Symbol("B", positive=True, integer=True), sympy.Symbol("S", positive=True, integer=True)
SYMBOLS: Mapping[str, sympy.Symbol] = {"B": BATCH, "S": SEQ}


class SizeTable:
    """Turns a torch size (int or SymInt) into an :class:`Expr`."""

    def __init__(self) -> None:
        self._meaning: dict[sympy.Symbol, sympy.Expr] = {}

    def learn(self, size: Any, axis: str) -> None:
        """An input dim of symbolic ``size`` is ``axis`` (``B`` or ``S``): solve the size's own symbol for it."""
        expression = _expression(size)
        symbols = sorted(expression.free_symbols, key=str)
        if len(symbols) == 1:
            solutions = sympy.solve(sympy.Eq(expression, SYMBOLS[axis]), symbols[0])
            if len(solutions) == 1:
                self._meaning.setdefault(symbols[0], solutions[0])

    def expr(self, size: Any, *, what: str) -> Expr:
        """The polynomial of ``size``; ``what`` (op and module path) is named when there is none."""
        if isinstance(size, int) and not isinstance(size, bool):
            return Expr.const(size)
        expression = sympy.expand(_expression(size).xreplace(self._meaning))
        try:
            polynomial = sympy.Poly(expression, BATCH, SEQ, domain="QQ")
        except (sympy.PolynomialError, sympy.CoercionFailed):
            raise _not_polynomial(expression, what) from None
        return Expr({(int(b), int(s)): _number(value) for (b, s), value in polynomial.terms()})


def _expression(size: Any) -> sympy.Expr:
    """The size as sympy writes it, a rounded-down quotient that the export has proved to be whole as a plain one."""
    node = getattr(size, "node", None)
    if node is None:
        return sympy.sympify(size)
    expression = node.expr
    whole = {
        quotient: quotient.args[0] / quotient.args[1]
        for quotient in expression.atoms(FloorDiv)
        if Mod(*quotient.args) in node.shape_env.divisible
    }
    return expression.xreplace(whole)


def _number(value: Any) -> float:
    return int(value) if value == int(value) else float(value)


def _not_polynomial(expression: sympy.Expr, what: str) -> InvalidInput:
    return InvalidInput.single(
        "size_not_polynomial",
        f"{what} has the size {expression}, which is no polynomial in B and S: sizes that are rounded, clipped or depend on "
        "data can't be planned for; make the size a product or sum of batch, sequence and constants",
        subject="model capture",
        actual=str(expression),
    )
