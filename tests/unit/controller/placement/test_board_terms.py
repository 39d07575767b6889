"""The board in the term of a leader: before its first round, and while there is no further one."""

import asyncio

import pytest

from kube.resources import ObjectKey
from tests.support import virtual_time
from tests.support.waiting_units import running_unit, waiting_unit
from tests.unit.controller.placement.test_board import NOW, Told, full, standings


def test_new_leader_begins_with_an_empty_board() -> None:
    async def main() -> None:
        told = Told()
        told.update(full(), [waiting_unit("chat")])
        told.board.restart()
        assert told.board.find_standing(ObjectKey("team", "chat")) is None
        told.update(full(), [waiting_unit("chat")])
        await asyncio.sleep(2)
        assert told.take() == ["chat", "chat"]
        told.board.restart()
        told.update(full(), [running_unit(waiting_unit("chat"), "node/n1")])
        assert told.starts == [], "it may have started while another replica led"

    virtual_time.run(main())


def test_new_leader_keeps_to_the_last_places_until_its_first_round() -> None:
    last = standings(full(), [waiting_unit("chat"), waiting_unit("gone")])

    async def main() -> None:
        told = Told()
        for name in ("chat", "gone"):
            assert told.board.find_standing(ObjectKey("team", name), last[name]) is last[name]
        told.update(full(), [waiting_unit("chat")])
        assert sorted(told.take()) == ["chat", "gone"]
        assert told.board.find_standing(ObjectKey("team", "gone"), last["gone"]) is None

    virtual_time.run(main())


def test_standings_are_set_anew_without_a_round_as_time_passes() -> None:
    async def main() -> None:
        told = Told()
        running = asyncio.create_task(told.board.run(None))
        await asyncio.sleep(1)
        told.update(full(), [waiting_unit("chat")])
        await asyncio.sleep(95)
        assert told.board._now == pytest.approx(NOW + 89)
        running.cancel()

    virtual_time.run(main())


def test_rounds_of_one_second_are_shown_together() -> None:
    async def main() -> None:
        told, key = Told(), ObjectKey("team", "chat")
        units = [waiting_unit("first", enqueued_at=1.0), waiting_unit("chat")]

        def place() -> str:
            standing = told.board.find_standing(key)
            return standing.place if standing is not None else ""

        told.update(full(), units)
        assert place() == "2/2"
        told.update(full(), [*units, waiting_unit("next", enqueued_at=2_000.0)])
        told.update(full(), units[1:])
        assert place() == "2/2"
        await asyncio.sleep(1.1)
        assert place() == "1/1"

    virtual_time.run(main())
