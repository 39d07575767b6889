"""Run background work of the agent at intervals, as no event triggers it: samples, measurements, log rotation."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger()


async def run_periodically(work: Callable[[], Awaitable[None]], pause_seconds: float, *, name: str) -> None:
    """Call `work` until cancelled, with a pause after each call; an exception is logged with `name`."""
    while True:
        try:
            await work()
        except Exception:  # a defect here must not end the engines of this host
            log.exception("periodic_work_failed", work=name)
        await asyncio.sleep(pause_seconds)
