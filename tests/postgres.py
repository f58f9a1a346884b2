"""A PostgreSQL of our own for tests: Debian's server in a temporary folder, trusted on a free loopback port."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin")) if Path("/usr/lib/postgresql").exists() else []


def _server() -> str | None:
    return next((str(folder / "pg_ctl") for folder in reversed(_BINARIES)), None) or shutil.which("pg_ctl")


@contextmanager
def postgres() -> Iterator[str]:
    """URL of an empty database ``meshwright``; the test is skipped where there is no server or no user to run it as."""
    control = _server()
    if control is None:
        pytest.skip("no PostgreSQL server here")
    as_root = os.geteuid() == 0  # the server refuses to run as root
    if as_root and subprocess.run(["id", "postgres"], capture_output=True, check=False).returncode:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    prefix = ["runuser", "-u", "postgres", "--"] if as_root else []
    folder = Path(tempfile.mkdtemp(prefix="meshwright-pg-"))
    if as_root:
        shutil.chown(folder, "postgres")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"

    def run(*command: str) -> None:
        done = subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=60, check=False, cwd=folder)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)

    run(str(Path(control).with_name("initdb")), "-D", str(data), "-A", "trust", "-U", "postgres", "--no-sync")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    run(control, "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        with psycopg.connect(f"postgresql://postgres@127.0.0.1:{port}/postgres", autocommit=True) as connection:
            connection.execute("create database meshwright")
        yield f"postgresql://postgres@127.0.0.1:{port}/meshwright"
    finally:
        run(control, "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder, ignore_errors=True)
