"""What the agent does again and again beside serving, where no event tells when."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger()


async def again_and_again(work: Callable[[], Awaitable[None]], pause_seconds: float, *, failed: str) -> None:
    """Do `work` until cancelled, with a pause after each time; `failed` is what the log says when it raises."""
    while True:
        try:
            await work()
        except Exception:  # a defect here must not end what the host serves
            log.exception(failed)
        await asyncio.sleep(pause_seconds)
