"""Attempts to do what no policy or role allows, which share their objects, since none of them has an effect."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from kube.errors import ApiError, Forbidden

ThiefT = TypeVar("ThiefT")


async def find_unrefused(
    attempts: Mapping[str, tuple[str, Callable[[ThiefT], Awaitable[object]]]], thief: ThiefT
) -> dict[str, str]:
    """Return each attempt that was accepted, or refused in other words than its own."""
    unrefused = {}
    for name, (words, attempt) in attempts.items():
        try:
            await attempt(thief)
        except ApiError as error:
            if not isinstance(error, Forbidden) or not re.search(words, error.message):
                unrefused[name] = error.message
        else:
            unrefused[name] = "accepted"
    return unrefused
