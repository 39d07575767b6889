"""An event loop whose clock jumps to the next timer instead of waiting, so that hours of back-off pass in milliseconds.

It works for code that uses only the loop's clock and does no I/O. If every task waits and no timer is set, the loop
raises RuntimeError instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
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
        # Slightly more than the sum of waits: after rounding, a timer could otherwise stay due an instant later.
        return self._jump.now * (1 + 1e-12)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override] # with the types that are used
        """Call it at once: the clock would not wait for a thread."""
        del executor
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            done.set_exception(error)
        return done


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` as asyncio.run does, in virtual time, starting at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
