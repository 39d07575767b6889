"""Runs background work of the agent at intervals, where there is no event: samples, measurements, log rotation."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger()


async def run_periodically(work: Callable[[], Awaitable[None]], pause_seconds: float, *, name: str) -> None:
    """Call `work` until cancelled, with a pause after each call; `name` is what the log calls it when it raises."""
    while True:
        try:
            await work()
        except Exception:  # a defect here must not end the engines of this host
            log.exception("periodic_work_failed", work=name)
        await asyncio.sleep(pause_seconds)
