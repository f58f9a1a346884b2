"""Errors that a person can act on: every violation at once, each with rule, numbers, allowed values and the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One broken rule.

    ``code`` is stable and machine readable (``heads_divisible_by_tp``); ``loc`` is the user's own key path
    (``("plan", "stages", 0, "mesh", "tp")``); ``allowed`` and ``nearest`` are ``None`` where they make no sense.
    """

    code: str
    message: str
    loc: tuple[str | int, ...] = ()
    actual: Any = None
    allowed: Any = None
    nearest: Any = None

    def render(self) -> str:
        """One line: where, what, allowed, nearest."""
        where = ".".join(str(part) for part in self.loc)
        text = f"{where}: {self.message}" if where else self.message
        if self.allowed is not None:
            text += f"; allowed: {_short(self.allowed)}"
        if self.nearest is not None:
            text += f"; nearest: {_short(self.nearest)}"
        return text

    def as_dict(self) -> dict[str, Any]:
        """JSON form, the shape of ``errors[]`` in a problem body."""
        return {
            "loc": list(self.loc),
            "code": self.code,
            "msg": self.message,
            "actual": self.actual,
            "allowed": self.allowed,
            "nearest": self.nearest,
        }


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return str(value)


class MeshwrightError(Exception):
    """Base of all errors shown to a person. ``exit_code`` is the command line's exit status for it."""

    exit_code = 1


class InvalidInput(MeshwrightError):
    """Bad input: carries **all** violations found, never only the first."""

    exit_code = 2

    def __init__(self, violations: Iterable[Violation], *, subject: str = "input") -> None:
        self.violations: tuple[Violation, ...] = tuple(violations)
        self.subject = subject
        super().__init__(self.render())

    @classmethod
    def single(cls, code: str, message: str, *, subject: str = "input", **fields: Any) -> InvalidInput:
        """An error with one violation."""
        return cls([Violation(code=code, message=message, **fields)], subject=subject)

    def render(self) -> str:
        """Readable text, one line per violation."""
        count = len(self.violations)
        head = f"{self.subject}: {count} violation{'s' if count != 1 else ''}"
        return "\n".join([head, *(f"  - {violation.render()}" for violation in self.violations)])


class Infeasible(MeshwrightError):
    """No plan can satisfy the limits; the violations name the limits that break and by how much."""

    exit_code = 3

    def __init__(self, message: str, violations: Sequence[Violation] = ()) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join([message, *(f"  - {violation.render()}" for violation in violations)]))


class NoAnswerInTime(MeshwrightError):
    """The time limit ended before any plan was found."""

    exit_code = 4


class ExecutionFailed(MeshwrightError):
    """A run failed; the message names the rank and its own error."""

    exit_code = 5


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or ``None`` if none is near."""
    names = list(known)
    lower = {candidate.lower(): candidate for candidate in names}
    matches = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.5)
    return lower[matches[0]] if matches else None


def nearest_number(value: float, allowed: Iterable[int]) -> int | None:
    """The allowed number nearest to ``value`` (ties go to the smaller one)."""
    candidates = sorted(allowed)
    return min(candidates, key=lambda item: (abs(item - value), item)) if candidates else None
