"""The first call is made at once, and a burst ends with one more: none is lost; time is virtual."""

import asyncio

from controller.reconcile.paced_call import PacedCall
from tests.support import virtual_time


def test_burst_is_two_calls_and_the_last_change_is_seen() -> None:
    async def main() -> None:
        calls, changed = list[tuple[float, int]](), 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        paced = PacedCall(lambda: calls.append((loop.time() - began, changed)), 10)
        for changed in range(1, 6):  # noqa: B007 - the calls read it
            paced.ask()
            await asyncio.sleep(1)
        await asyncio.sleep(100)
        assert [(round(at), seen) for at, seen in calls] == [(0, 1), (10, 5)]
        paced.ask()
        assert [round(at) for at, _ in calls] == [0, 10, 105]

    virtual_time.run(main())


def test_changes_that_never_end_are_called_at_the_pace() -> None:
    async def main() -> None:
        calls = list[int]()
        paced = PacedCall(lambda: calls.append(1), 10)
        for _ in range(100):
            paced.ask()
            await asyncio.sleep(1)
        assert len(calls) in (10, 11)

    virtual_time.run(main())
