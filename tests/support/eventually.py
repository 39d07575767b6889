"""Waiting for a condition in a running system: with a time limit, never a sleep of a guessed length."""

# ruff: noqa: ASYNC109 - the message needs the last value, which asyncio.timeout around the call would lose

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

import aiohttp

from kube.errors import NotFound, Unreachable

LIMIT_SECONDS = 90.0
"""Only a condition that never becomes true takes longer, even on a busy machine: it is no claim about speed."""
SHORTEST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
NOT_YET = (AssertionError, LookupError, NotFound, FileNotFoundError, Unreachable, aiohttp.ClientError, TimeoutError)
"""Errors of a condition that is not true so far."""

T = TypeVar("T")


@overload
async def eventually(condition: Callable[[], Awaitable[T]], timeout: float = ...) -> T: ...
@overload
async def eventually(condition: Callable[[], T], timeout: float = ...) -> T: ...
async def eventually(condition: Callable[[], T | Awaitable[T]], timeout: float = LIMIT_SECONDS) -> T:
    """Call a condition until it returns a true value, and return that value.

    An AssertionError, LookupError, NotFound or FileNotFoundError from the condition counts as "not yet", so that a
    test may look into objects and files that do not exist so far; so do Unreachable, ClientError and TimeoutError, from
    a server that starts, ends, or is kept by a busy machine from answering in time; any other error is raised. The
    pause between two calls grows with the time that was waited, so that tests with long waits leave the API server and
    the processors to others.

    Args:
        condition: plain or async function without arguments.
        timeout: seconds.

    Raises:
        AssertionError: the condition was not true in time; the message has the last value or error.
    """
    start = time.monotonic()
    while True:
        try:
            value = condition()
            result = await value if inspect.isawaitable(value) else value
            if result:
                return result
            seen = repr(result)
        except NOT_YET as error:
            seen = f"{type(error).__name__}: {error}"
        waited = time.monotonic() - start
        if waited >= timeout:
            raise AssertionError(
                f"{getattr(condition, '__qualname__', condition)} not true within {timeout} s; last: {seen}"
            )
        await asyncio.sleep(min(max(waited / 5, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS))
