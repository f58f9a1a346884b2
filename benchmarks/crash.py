"""kill -9 at random moments under load: ``python -m benchmarks.crash [KILLS] [SEED]``.

A client posts plan jobs with idempotency keys, many times each, while the service is killed and started again. At the end every
accepted job must have succeeded once, every key must name one job, and no process of a killed service may be left.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from api.client import Client
from api.store import FINAL, Store
from specs.errors import MeshwrightError
from tests.api_fake import CONFIG, WORKLOAD

REQUEST = {"model": CONFIG, "cluster": "local", "workload": WORKLOAD}
READY_LIMIT_S, END_LIMIT_S = 120.0, 600.0


class Load:
    """Posts jobs until it is stopped; a request that fails is sent again with its key, as clients do."""

    def __init__(self, base_url: str) -> None:
        self.accepted: dict[str, set[str]] = {}
        self.requests = self.failed = 0
        self._client = Client(base_url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            key = f"key-{number // 2}"  # every key twice
            try:
                self.requests += 1
                found = self._client.post("/v1/plans", {**REQUEST, "options": {"seed": number // 2}}, idempotency_key=key)
                self.accepted.setdefault(key, set()).add(found["id"])
                number += 1
            except (httpx.TransportError, MeshwrightError):
                self.failed += 1
            self._stop.wait(0.1)

    def stop(self) -> None:
        """Post no more."""
        self._stop.set()
        self._thread.join(60)


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """A service process that answers."""
    command = [sys.executable, "-m", "tests.api_fake", f"sqlite:///{folder / 'service.sqlite'}", str(port)]
    environment = {**os.environ, "MESHWRIGHT_MAX_ATTEMPTS": "1000", "MESHWRIGHT_MAX_QUEUED_JOBS": "100000"}
    with (folder / "service.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    client, deadline = Client(f"http://127.0.0.1:{port}"), time.monotonic() + READY_LIMIT_S
    while not client.is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((folder / "service.log").read_text()[-3000:])
        time.sleep(0.05)
    return process


def kill(process: subprocess.Popen[bytes]) -> int:
    """kill -9; the number of its children that are still there half a minute later, each named on stderr."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    alive = psutil.wait_procs(children, timeout=30)[1]
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            sys.stderr.write(f"left: {child.status()} {' '.join(child.cmdline())[:200]}\n")
    return len(alive)


def settled(store: Store, ids: set[str]) -> dict[str, Any]:
    """The jobs once all are final."""
    deadline = time.monotonic() + END_LIMIT_S
    while time.monotonic() < deadline:
        jobs = {identifier: store.job(identifier) for identifier in ids}
        if all(job is not None and job.status in FINAL for job in jobs.values()):
            break
        time.sleep(0.5)
    return jobs


def main(arguments: list[str]) -> int:
    """Kill, check, report; 1 when anything was lost, run twice or left over."""
    kills = int(arguments[0]) if arguments else 50
    chance = random.Random(int(arguments[1]) if len(arguments) > 1 else 1)
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        folder = Path(name)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        process = start(folder, port)
        load, orphans = Load(f"http://127.0.0.1:{port}"), 0
        for _ in range(kills):
            time.sleep(chance.uniform(0.05, 3.0))
            orphans += kill(process)
            process = start(folder, port)
        load.stop()
        store = Store(f"sqlite:///{folder / 'service.sqlite'}")
        ids = set().union(*load.accepted.values())
        jobs = settled(store, ids)
        ends = {
            identifier: sum(event.type == "status" and event.data["status"] in FINAL for event in store.events(identifier))
            for identifier in ids
        }
        process.terminate()
        process.wait(30)
        store.close()
    lost = [identifier for identifier, job in jobs.items() if job is None or job.status != "succeeded"]
    twice = [key for key, found in load.accepted.items() if len(found) != 1]
    ended_twice = [identifier for identifier, count in ends.items() if count != 1]
    restarted = sum(job.attempts > 1 for job in jobs.values() if job is not None)
    print(
        f"{kills} kills under load: {load.requests} requests ({load.failed} met a dead service and were repeated), {len(ids)} jobs "
        f"accepted, {restarted} interrupted and resumed; lost {len(lost)}, keys with two jobs {len(twice)}, jobs that ended twice "
        f"{len(ended_twice)}, processes left {orphans}"
    )
    return 1 if lost or twice or ended_twice or orphans else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
