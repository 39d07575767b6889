"""A counter of changes, with which several tasks can each wait for the next change."""

import asyncio


class ChangeCounter:
    """Counts changes; `count` grows with each."""

    def __init__(self) -> None:
        self.count = 0
        self._happened = asyncio.Event()

    def note(self) -> None:
        """Count a change, and wake all tasks that wait."""
        self.count += 1
        self._happened.set()
        self._happened = asyncio.Event()

    async def wait_past(self, seen_count: int) -> int:
        """Wait until the count is no longer `seen_count`, and return the new one."""
        while self.count == seen_count:
            await self._happened.wait()
        return self.count
