"""An event loop whose clock jumps to the next timer instead of waiting, so that hours of back-off pass in milliseconds.

For code whose only clock is the loop's and which does no I/O. When nothing is left that could ever happen, it says so
instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        self.now += timeout
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        # A hair more than the sum of waits, lest rounding makes a timer wait for a moment that never comes.
        return self._jump.now * (1 + 1e-12)


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run in virtual time, starting at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
