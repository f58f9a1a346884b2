"""A service of our own on loopback, for as long as a ``with`` block lasts."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from api.client import Client
from specs.errors import MeshwrightError

START_LIMIT_S = 240.0
STOP_LIMIT_S = 20.0


@contextmanager
def local_service(folder: Path, *, num_devices: int) -> Iterator[Client]:
    """Serve on a free loopback port with a fresh SQLite database in ``folder``; its log is ``folder/service.log``.

    Stopped in order at the end of the block, by an exception or Ctrl-C too, and by the kernel if this process is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    database = (folder / "service.sqlite").absolute()
    for suffix in ("", "-wal", "-shm"):
        Path(f"{database}{suffix}").unlink(missing_ok=True)
    port = _free_port()
    command = [
        sys.executable, "-m", "api.cli.main", "serve", "--host", "127.0.0.1", "--port", str(port),
        "--database-url", f"sqlite:///{database}", "--local-devices", str(num_devices), "--no-color", "--stop-with-parent",
    ]  # fmt: skip
    with (folder / "service.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us: we stop the service in order
        )  # fmt: skip
        try:
            with Client(f"http://127.0.0.1:{port}") as client:
                _wait_ready(client, process, folder / "service.log")
                yield client
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_ready(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not client.is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            with contextlib.suppress(OSError):
                tail = log.read_text()[-2000:]
                raise MeshwrightError(f"the service did not start; the end of {log}:\n{tail}")
            raise MeshwrightError("the service did not start")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
