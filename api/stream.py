"""Server-sent events of a job, resumable: the stored events are the truth, a wake-up only saves waiting."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool

from api.store import FINAL, Store

POLL_S = 1.0


class EventHub:
    """Wakes the streams of a job when a worker thread has written something."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def bind(self) -> None:
        """Remember the running loop."""
        self._loop = asyncio.get_running_loop()

    def notify(self, job_id: str) -> None:
        """Wake the job's streams; callable from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closing
                self._loop.call_soon_threadsafe(self._wake, job_id)

    def _wake(self, job_id: str) -> None:
        for event in self._waiting.get(job_id, ()):
            event.set()

    async def follow(self, store: Store, job_id: str, after: int) -> AsyncIterator[dict[str, str]]:
        """Yield the job's events above number ``after`` until its final status has been sent."""
        wake = asyncio.Event()
        self._waiting[job_id].add(wake)
        try:
            while True:
                wake.clear()
                events = await run_in_threadpool(store.events, job_id, after=after)
                for event in events:
                    after = event.seq
                    data = {**event.data, "at": event.created_at}
                    yield {"id": str(event.seq), "event": event.type, "data": json.dumps(data)}
                    if event.type == "status" and event.data.get("status") in FINAL:
                        return
                if not events:
                    job = await run_in_threadpool(store.job, job_id)
                    if job is None or (not job.is_open and not await run_in_threadpool(store.events, job_id, after=after)):
                        return
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(wake.wait(), POLL_S)
        finally:
            self._waiting[job_id].discard(wake)
            if not self._waiting[job_id]:
                self._waiting.pop(job_id, None)
