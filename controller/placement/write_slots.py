"""Slots for concurrent writes of the queue, and how long one slow write may hold up others.

A webhook that hangs answers after up to half a minute, and often for one namespace only. Its writes go on, but give up
their slots, and no further one of the namespace begins meanwhile: others are admitted, and have connections left.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

from kube.errors import Unreachable

HANG_SECONDS: Final = 2.0
"""Time after which a write hangs."""


class NamespaceHangs(Unreachable):
    """Other writes in the namespace hang, so that this one was not sent."""


class WriteSlots:
    """A number of slots.

    Args:
        number: writes at once.
    """

    def __init__(self, number: int) -> None:
        self._slots = asyncio.Semaphore(number)
        self._hanging = Counter[str]()
        """Number of the writes that hang by namespace."""

    @contextlib.asynccontextmanager
    async def hold(self, namespace: str) -> AsyncIterator[None]:
        """Hold a slot during a write, which loses it after HANG_SECONDS. Raises NamespaceHangs if another one hangs."""
        await self._slots.acquire()
        if self._hanging[namespace]:
            self._slots.release()
            raise NamespaceHangs(f"other writes in namespace {namespace} are not answered, as by a webhook that hangs")
        is_hanging = False

        def release_early() -> None:
            nonlocal is_hanging
            is_hanging = True
            self._hanging[namespace] += 1
            self._slots.release()

        timer = asyncio.get_running_loop().call_later(HANG_SECONDS, release_early)
        try:
            yield
        finally:
            timer.cancel()
            if is_hanging:
                self._hanging[namespace] -= 1
            else:
                self._slots.release()
