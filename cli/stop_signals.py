"""The end of a command that is asked to stop."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_until_signal(work: Coroutine[Any, Any, T], *numbers: int) -> T:
    """Do the work until its end, or until one of these signals cancels it.

    The kernel ignores SIGTERM for the first process of a container unless the process handles it.
    """
    task = asyncio.ensure_future(work)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


async def serve_until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Do the work until SIGTERM or SIGINT, which are no failure."""
    with contextlib.suppress(asyncio.CancelledError):
        await run_until_signal(work, signal.SIGTERM, signal.SIGINT)
