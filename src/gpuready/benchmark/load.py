"""Keeps a number of requests in flight (closed loop), and watches how busy this client itself is.

What decides when a request is sent is this file alone; an open loop would stand beside it, with the same rows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from gpuready.benchmark.client import Request, Sender
from gpuready.benchmark.measures import Row, percentile

LAG_PAUSE_SECONDS = 0.01
BUSY_CPU_SHARE = 0.8
BUSY_LAG_MS = 20.0


@dataclass
class ClientLoad:
    """How busy the client was while it measured: a slow client must not be taken for a slow server."""

    cpu_share: float | None = None
    """CPU seconds of this process per second; the client runs on one core, so 1.0 is all it can have."""
    lags_ms: list[float] = field(default_factory=list)
    """How late the event loop came back from sleeping."""

    def as_dict(self) -> dict[str, Any]:
        """Return the load as the report shows it."""
        lag = percentile(sorted(self.lags_ms), 99)
        busy = (self.cpu_share or 0.0) > BUSY_CPU_SHARE or (lag or 0.0) > BUSY_LAG_MS
        return {
            "cpu_share": None if self.cpu_share is None else round(self.cpu_share, 3),
            "loop_lag_ms_p99": None if lag is None else round(lag, 2),
            "loop_lag_ms_max": round(max(self.lags_ms), 2) if self.lags_ms else None,
            "busy": busy,
        }


@dataclass
class LevelRun:
    """What one level of concurrency came to."""

    concurrency: int
    asked: int
    rows: list[Row] = field(default_factory=list)
    first_idle: float | None = None
    """When the first place found no further request."""
    client: ClientLoad = field(default_factory=ClientLoad)

    @property
    def interrupted(self) -> bool:
        """It was stopped before all its requests ended."""
        return len(self.rows) < self.asked


async def closed_loop(
    concurrency: int,
    requests: list[Request],
    send: Sender,
    stop: asyncio.Event,
    on_row: Callable[[Row], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> LevelRun:
    """Send all requests, `concurrency` at a time: each place sends its next when its last has ended.

    When `stop` is set what is in flight is given up, and what ended before is kept.
    """
    run = LevelRun(concurrency, len(requests))
    waiting = iter(requests)
    watch = asyncio.create_task(_watch_loop(run.client, clock))
    began, cpu = clock(), time.process_time()
    places: list[asyncio.Task[Any]] = [
        asyncio.create_task(_place(run, waiting, send, on_row, clock)) for _ in range(concurrency)
    ]
    stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
    try:
        pending = set(places)
        while pending and not stopping.done():
            done, _ = await asyncio.wait({*pending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for place in pending & done:
                place.result()
            pending -= done
    finally:
        for task in (watch, stopping, *places):
            task.cancel()
        # What is in flight closes its connection before the next level, or the end.
        await asyncio.gather(watch, stopping, *places, return_exceptions=True)
    spent = clock() - began
    run.client.cpu_share = (time.process_time() - cpu) / spent if spent > 0 else None
    run.rows.sort(key=lambda row: row.index)
    return run


async def _place(
    run: LevelRun, waiting: Iterable[Request], send: Sender, on_row: Callable[[Row], None], clock: Callable[[], float]
) -> None:
    for request in waiting:
        row = await send(request)
        run.rows.append(row)
        on_row(row)
    if run.first_idle is None:
        run.first_idle = clock()


async def _watch_loop(load: ClientLoad, clock: Callable[[], float]) -> None:
    while True:
        before = clock()
        await asyncio.sleep(LAG_PAUSE_SECONDS)
        load.lags_ms.append(max(0.0, clock() - before - LAG_PAUSE_SECONDS) * 1000)
