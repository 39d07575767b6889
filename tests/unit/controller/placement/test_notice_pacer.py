"""The order in which services are told that their place in the queue has changed."""

import asyncio

from controller.placement.notice_pacer import BURST, NoticePacer
from kube.resources import ObjectKey
from tests.support import virtual_time


def key(number: int) -> ObjectKey:
    return ObjectKey("team", f"s{number:03}")


def test_moves_are_told_from_the_head_of_the_queue_and_after_what_is_urgent() -> None:
    told: list[str] = []

    def note(service: ObjectKey) -> None:
        told.append(service.name)

    async def main() -> None:
        pacer = NoticePacer(note)
        for number in reversed(range(2 * BURST)):
            pacer.add_move(key(number), number)
        pacer.add(key(999))
        pacer.add_move(key(999), 0)
        pacer.drop_move(key(1))
        pacer.flush()
        await asyncio.sleep(BURST / 2)
        pacer.add_move(key(2 * BURST), 0)
        await asyncio.sleep(3 * BURST)
        # It has become the nearest, while half of the others waited.
        told_early = told.index(key(2 * BURST).name)
        assert BURST < told_early < 1.5 * BURST
        told.pop(told_early)
        assert told == [key(number).name for number in (999, 0, *range(2, 2 * BURST))]

    virtual_time.run(main())
