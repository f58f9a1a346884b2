"""The command line of a benchmark whose table has one row a question."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar


class Named(Protocol):
    """A question of a benchmark."""

    @property
    def name(self) -> str:
        """What ``--only`` looks into."""


Asked = TypeVar("Asked", bound=Named)


def print_rows(
    description: str | None,
    questions: Iterable[Asked],
    row: Callable[[Asked], dict[str, Any]],
    line: Callable[[dict[str, Any]], str],
) -> None:
    """Ask the questions whose name holds a word of ``--only``, all without it; print each ``row`` as a ``line`` as soon as it is
    there, and with ``--json`` (then the lines go to stderr) all of them as one document."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    rows = []
    for question in questions:
        if arguments.only and not any(word in question.name for word in arguments.only):
            continue
        rows.append(row(question))
        print(line(rows[-1]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))
