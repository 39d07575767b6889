"""A call that many changes ask for, and that is made at a pace: the first one at once, those of a burst as one."""

import asyncio
from collections.abc import Callable


class PacedCall:
    """The call; it is asked for within the event loop.

    Args:
        call: what is called.
        least_seconds: least time between two calls.
    """

    def __init__(self, call: Callable[[], None], least_seconds: float) -> None:
        self._call = call
        self._least_seconds = least_seconds
        self._called_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """Call now, or as soon as `least_seconds` have passed since the last call."""
        if self._timer is not None:  # a call is due already, which serves this request, too
            return
        loop = asyncio.get_running_loop()
        wait_seconds = self._called_at + self._least_seconds - loop.time()
        if wait_seconds > 0:
            self._timer = loop.call_later(wait_seconds, self._make_call)
        else:
            self._make_call()

    def _make_call(self) -> None:
        self._timer, self._called_at = None, asyncio.get_running_loop().time()
        self._call()
