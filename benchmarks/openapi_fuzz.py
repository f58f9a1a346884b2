"""Schemathesis over every operation of the OpenAPI document: ``python -m benchmarks.openapi_fuzz [EXAMPLES]``.

Starts a service on a free port and lets the ``schemathesis`` command send it what the document allows and what it forbids.
Needs ``pip install schemathesis``.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection",
)  # fmt: skip
START_LIMIT_S = 120.0


@contextlib.contextmanager
def service(folder: Path) -> Iterator[str]:
    """The address of a service that lasts as long as the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    database = f"sqlite:///{folder / 'service.sqlite'}"
    command = [sys.executable, "-m", "api.cli.main", "serve", "--port", str(port), "--database-url", database]
    with (folder / "service.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        base = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{base}/readyz").status_code == 200:
                        break
                time.sleep(0.2)
            yield base
        finally:
            process.terminate()
            process.wait(30)


def main(arguments: list[str]) -> int:
    """Run it; the exit status of schemathesis."""
    examples = arguments[0] if arguments else "50"
    binary = Path(sys.executable).with_name("schemathesis")
    found = str(binary) if binary.exists() else shutil.which("schemathesis")
    if found is None:
        sys.stderr.write("needs the command schemathesis: pip install schemathesis\n")
        return 2
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as base:
        # Streams stay open until their job ends; a job made by one example must not fill the queue for the others.
        command = [
            found, "run", f"{base}/openapi.json", "--exclude-path-regex", "/events$", "--max-examples", examples, "--seed", "1",
            "--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--no-color", "--continue-on-failure",
            "--request-timeout", "180",
        ]  # fmt: skip
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
