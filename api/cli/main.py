"""The command line: ``meshwright VERB``, one verb a question."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from api.cli import accounting, calibrating, comparing, planning, robustness, running, serving, validating
from api.cli.output import ExitCodeGroup, NoColorOption, output

app = typer.Typer(
    cls=ExitCodeGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Meshwright: how should this model be parallelised on this cluster, how fast and how full will it be, and was that right?",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"meshwright {importlib.metadata.version('meshwright')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    no_color: NoColorOption = False,
) -> None:
    """Options of every verb."""
    output.as_json, output.no_color = False, no_color


for verb in (
    serving.demo, planning.capture, running.profile, planning.plan, planning.estimate, accounting.memory, planning.simulate,
    comparing.why, comparing.recommend, comparing.diff, comparing.export, running.run, running.compare, calibrating.calibrate,
    validating.validate, robustness.robust, robustness.diagnose, accounting.mfu, planning.devices, serving.token,
    serving.serve,
):  # fmt: skip
    app.command()(verb)
app.command("import")(comparing.import_)


def main() -> None:
    """Entry point of ``meshwright``."""
    app()


if __name__ == "__main__":
    main()
