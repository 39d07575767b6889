"""The precedence of admissions: while units are admitted, one object at a time is reconciled."""

import asyncio

from controller.reconcile.precedence import LONGEST_WAIT_SECONDS, AdmissionPrecedence
from tests.support import virtual_time

RECONCILE_SECONDS = 0.5
WORKERS = 4


class Workers:
    """Workers that reconcile for ever, and how many do so at each moment."""

    def __init__(self, precedence: AdmissionPrecedence) -> None:
        self._precedence = precedence
        self.at_once = 0
        self.most = 0
        self.ended = 0

    async def work(self) -> None:
        while True:
            async with self._precedence.reconciling():
                self.at_once += 1
                self.most = max(self.most, self.at_once)
                await asyncio.sleep(RECONCILE_SECONDS)
                self.at_once -= 1
                self.ended += 1


def test_one_object_at_a_time_is_reconciled_while_units_are_admitted() -> None:
    async def main() -> None:
        precedence = AdmissionPrecedence()
        workers = Workers(precedence)
        tasks = [asyncio.create_task(workers.work()) for _ in range(WORKERS)]
        await asyncio.sleep(10)
        assert workers.at_once == WORKERS
        with precedence.admitting():
            await asyncio.sleep(RECONCILE_SECONDS)
            workers.most = workers.ended = 0
            await asyncio.sleep(LONGEST_WAIT_SECONDS - 1)
            assert workers.most == 1
            assert workers.ended >= (LONGEST_WAIT_SECONDS - 1) / RECONCILE_SECONDS - 1
        await asyncio.sleep(RECONCILE_SECONDS)
        assert workers.most == WORKERS
        for task in tasks:
            task.cancel()

    virtual_time.run(main())


def test_admissions_that_last_hold_an_object_up_for_a_limited_time() -> None:
    async def main() -> None:
        precedence = AdmissionPrecedence()
        loop = asyncio.get_running_loop()
        with precedence.admitting():
            async with precedence.reconciling():
                began = loop.time()
                async with precedence.reconciling():
                    assert LONGEST_WAIT_SECONDS <= loop.time() - began < LONGEST_WAIT_SECONDS + 1

    virtual_time.run(main())
