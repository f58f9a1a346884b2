"""Verbs that run the service: serve, demo."""

from __future__ import annotations

import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.cli.output import JsonOption, NoColorOption, output


class LogLevel(StrEnum):
    """Levels of the log."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback a token is required.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 = any free one.")] = None,
    database_url: Annotated[
        str | None, typer.Option("--database-url", help="sqlite:///file or postgresql://user@host/name; none: a file of this user.")
    ] = None,
    local_devices: Annotated[
        int | None, typer.Option("--local-devices", min=0, max=64, help="Register this machine as cluster 'local' of N processes.")
    ] = None,
    token: Annotated[str | None, typer.Option(envvar="MESHWRIGHT_TOKEN", help="Bearer token that requests must carry.")] = None,
    log_level: Annotated[LogLevel, typer.Option(help="How much to log on stderr.")] = LogLevel.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON object a line, with request and job ids.")] = False,
    stop_with_parent: Annotated[bool, typer.Option("--stop-with-parent", hidden=True)] = False,
    no_color: NoColorOption = False,
) -> None:
    """Serve the HTTP API. Jobs that a crash or a stop interrupted go on.

    Example: meshwright serve --port 8400 --local-devices 2
    """
    import uvicorn

    from api.app import create_app
    from api.isolate import set_parent_death_signal
    from api.logs import configure
    from api.service import exclusive
    from api.settings import load_settings

    if stop_with_parent:
        set_parent_death_signal(signal.SIGTERM)
    settings = load_settings(host=host, port=port, database_url=database_url, local_devices=local_devices, token=token)
    configure(log_level, as_json=log_json)
    app = create_app(settings)
    with exclusive(settings.url):
        output.note(f"Meshwright on http://{settings.host}:{settings.port}, API at /docs; database {settings.shown_url}")
        # Our middleware logs requests with their ids; uvicorn's own access lines would repeat them without.
        uvicorn.run(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            log_level=log_level,
            access_log=False,
            timeout_graceful_shutdown=3,
        )


def token(
    scopes: Annotated[str, typer.Option("--scopes", help="read | plan | execute, with commas.")] = "read,plan",
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """Make a bearer token for a service: the token is shown once, its entry goes into MESHWRIGHT_TOKEN_HASHES.

    Example: meshwright token --scopes read,plan
    """
    from api.tokens import new_token

    text, entry = new_token([scope.strip() for scope in scopes.split(",")])

    def show(console: Console) -> None:
        console.print(text, markup=False, soft_wrap=True)
        output.note(f"for the service: MESHWRIGHT_TOKEN_HASHES='{entry.text()}' (several with ; between)")

    output.document({"token": text, "entry": entry.text()}, show)


def demo(
    out: Annotated[Path, typer.Option("-o", "--output", help="Folder for report.html, result.json and the database.")] = Path(
        "demo"
    ),
    devices: Annotated[int, typer.Option(min=2, max=8, help="Worker processes that stand for devices.")] = 2,
    steps: Annotated[int, typer.Option(min=3, help="Measured steps per plan.")] = 8,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """The main job end to end on this machine: serve, capture, profile, plan, execute, compare.

    Example: meshwright demo --output demo
    """
    from api.cli.demo_view import DemoView
    from api.demo import DemoOptions, run_demo

    view = DemoView(output.err)
    with view:
        result = run_demo(DemoOptions(output_dir=out, num_devices=devices, steps=steps), view)
    output.document(result.to_dict(), lambda console: view.show(console, result, out))
