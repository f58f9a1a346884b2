"""Where the command line writes: results on stdout (a table, or one JSON document and nothing else), progress on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer.core import TyperGroup

from api.problem_body import problem_of
from specs.errors import MeshwrightError
from specs.progress import Progress as ProgressEvent
from specs.progress import ProgressSink

PLAIN_INTERVAL_S = 2.0


class Output:
    """The two streams of one invocation."""

    def __init__(self) -> None:
        self.as_json = False
        self.no_color = False

    @property
    def out(self) -> Console:
        """Results for people."""
        return Console(no_color=self.no_color or None, highlight=False, quiet=self.as_json, width=_width(sys.stdout))

    @property
    def err(self) -> Console:
        """Progress, warnings and errors."""
        return Console(stderr=True, no_color=self.no_color or None, highlight=False, width=_width(sys.stderr))

    def document(self, value: Any, show: Callable[[Console], None]) -> None:
        """The result: ``value`` as JSON with ``--json``, else what ``show`` prints."""
        if self.as_json:
            typer.echo(json.dumps(value, indent=1))
        else:
            show(self.out)

    def note(self, text: str) -> None:
        """A line beside the result, on stderr."""
        self.err.print(text, markup=False, soft_wrap=True)

    def fail(self, error: MeshwrightError) -> None:
        """An error: readable on stderr; with ``--json`` the one document on stdout is its problem body."""
        if self.as_json:
            typer.echo(json.dumps({"error": problem_of(error)}, indent=1))
        self.err.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)


def _width(stream: Any) -> int | None:
    """Piped tables keep their columns; a terminal decides itself."""
    if stream.isatty() or os.environ.get("COLUMNS"):
        return None
    return 132


output = Output()


def _set_json(value: bool) -> bool:
    output.as_json = value
    return value


def _set_no_color(value: bool) -> bool:
    output.no_color = output.no_color or value
    return value


JsonOption = Annotated[
    bool, typer.Option("--json", callback=_set_json, is_eager=True, help="Print one JSON document on stdout, nothing else.")
]
NoColorOption = Annotated[bool, typer.Option("--no-color", callback=_set_no_color, is_eager=True, help="No colours.")]


class ExitCodeGroup(TyperGroup):
    """Turns our errors into messages and exit codes (0 ok, 2 bad input, 3 infeasible, 4 no answer in time, 5 run failed)."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        try:
            return super().invoke(ctx)
        except MeshwrightError as error:
            output.fail(error)
            raise typer.Exit(error.exit_code) from None


@contextmanager
def progress_display(describe: Callable[[ProgressEvent], str | None] = lambda event: None) -> Iterator[ProgressSink]:
    """A sink that shows progress on stderr: a bar with ETA on a terminal, plain lines otherwise.

    ``describe`` may turn an event into a line of its own that stays on the screen.
    """
    console = output.err
    if console.is_terminal:
        with _bars(console) as bars:
            yield _BarSink(bars, describe)
    else:
        yield _LineSink(console, describe)


def _bars(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}", markup=False))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


class _BarSink:
    """One bar per stage."""

    def __init__(self, bars: Progress, describe: Callable[[ProgressEvent], str | None]) -> None:
        self._bars, self._describe = bars, describe
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, event: ProgressEvent) -> None:
        line = self._describe(event)
        if line is not None:
            self._bars.console.print(line, markup=False)
        if event.stage not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, visible=False)
            self._tasks[event.stage] = self._bars.add_task(event.stage, total=event.total, note="")
        self._bars.update(self._tasks[event.stage], completed=event.done, total=event.total, note=event.message[:60])


class _LineSink:
    """A line per stage and one every few seconds."""

    def __init__(self, console: Console, describe: Callable[[ProgressEvent], str | None]) -> None:
        self._console, self._describe = console, describe
        self._stage, self._last = "", 0.0

    def __call__(self, event: ProgressEvent) -> None:
        line = self._describe(event)
        if line is not None:
            self._console.print(line, markup=False)
            return
        now = time.monotonic()
        if event.stage == self._stage and now - self._last < PLAIN_INTERVAL_S:
            return
        self._stage, self._last = event.stage, now
        count = f" {event.done:.0f}/{event.total:.0f}" if event.total else ""
        self._console.print(f"{event.stage}{count} {event.message}".rstrip(), markup=False)
