"""The worked examples of docs/queue.md about estimates and gangs: they show what it says, in simulated time."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import pytest
import yaml

from cli.queue.command import describe_start
from controller.placement.actions import Admit
from controller.placement.board import Board
from controller.placement.planner import PlanRules, plan
from controller.placement.standing import ServiceStanding
from controller.placement.start_history import UnitStart
from controller.placement.units import Cell, Unit
from controller.services.queue_report import build_queue_status
from kube.client import Obj
from kube.resources import ObjectKey
from tests.controlplane.process import CHECKOUT
from tests.support import virtual_time
from tests.support.documents import list_blocks
from tests.support.waiting_units import GPU, gpu_cell, running_unit, waiting_unit

GUIDE: Final = (CHECKOUT / "docs" / "queue.md").read_text()
CHAT: Final = ObjectKey("team", "chat")
NODES: Final = 4
DEVICES: Final = 8
AHEAD: Final = 19
COMES_AT: Final = datetime(2026, 11, 26, 4, tzinfo=UTC).timestamp()
MINUTES: Final = 180
"""Minutes of the simulation before `chat` comes."""
RULES: Final = PlanRules()


def read_section(title: str) -> str:
    return GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


class BusyPool:
    """A full pool: each minute its oldest replica ends, one service comes, and the first that waits starts."""

    def __init__(self) -> None:
        self.starts: list[UnitStart] = []
        self.board = Board(lambda _service: None, self.starts.append)
        self.now = COMES_AT - 60 * MINUTES
        # One of those that wait starts in the minute in which `chat` comes.
        first = NODES * DEVICES + AHEAD + 1
        self._units = [waiting_unit(f"run-{n}", enqueued_at=self.now) for n in range(first)]
        self._units += [waiting_unit(f"low-{n}", priority="low", enqueued_at=self.now) for n in range(5)]

    def pass_minute(self, service: str) -> None:
        """End the oldest replica, queue one of a service, and plan."""
        running = [unit for unit in self._units if unit.state == "running"]
        if len(running) == NODES * DEVICES:
            self._units.remove(min(running, key=lambda unit: unit.evictable_since or 0.0))
            self._units.append(waiting_unit(service, enqueued_at=self.now))
        cells = self._list_cells()
        decided = plan(cells, self._units, RULES, self.now)
        self.board.update(decided, cells, self.now, units=self._units)
        admitted = {action.unit.uid: action.cells for action in decided.actions if isinstance(action, Admit)}
        self._units = [
            running_unit(unit, *admitted[unit.uid], since=self.now) if unit.uid in admitted else unit
            for unit in self._units
        ]

    def _list_cells(self) -> Sequence[Cell]:
        cells = [unit.cells for unit in self._units if unit.state == "running"]
        names = [f"gpu-{number}" for number in range(1, NODES + 1)]
        return [gpu_cell(name, DEVICES, free=DEVICES - cells.count((f"node/{name}",))) for name in names]


class ChatWait:
    """The wait of `chat` in such a pool."""

    def __init__(self) -> None:
        self.statuses: list[Obj] = []
        """`status.queue` in each minute."""
        self.start: UnitStart | None = None

    async def run(self) -> None:
        pool = BusyPool()
        for minute in range(MINUTES + 2 * AHEAD):
            pool.pass_minute("chat" if minute == MINUTES else f"new-{minute}")
            standing = pool.board.find_standing(CHAT)
            if standing is not None:
                self.statuses.append(build_queue_status(standing))
            pool.now += 60
            await asyncio.sleep(60)
        (self.start,) = (start for start in pool.starts if start.unit.service == CHAT)


@pytest.fixture(scope="module")
def wait() -> ChatWait:
    chat_wait = ChatWait()
    virtual_time.run(chat_wait.run())
    return chat_wait


def test_status_of_a_busy_pool_is_that_of_the_guide(wait: ChatWait) -> None:
    (block,) = list_blocks(read_section("What a service shows"), "yaml")
    expected = yaml.load(block, yaml.BaseLoader)["queue"]  # noqa: S506 - all values as text
    status = yaml.load(yaml.safe_dump(wait.statuses[0]), yaml.BaseLoader)  # noqa: S506 - same
    assert status == expected


def test_estimated_start_of_a_busy_pool_is_that_of_the_guide(wait: ChatWait) -> None:
    text = read_section("The estimated start")
    assert list_blocks(text, "text") == [f"{describe_start(wait.statuses[0], datetime.fromtimestamp(COMES_AT, UTC))}\n"]
    assert "Five minutes before its start, `noEstimate` is `TooFewAhead`" in text
    assert [status.get("noEstimate", "") for status in wait.statuses[-6:]] == ["", *["TooFewAhead"] * 5]
    assert wait.start is not None
    assert wait.start.outcome == "in_range"


LARGE: Final = waiting_unit("large", parts=({GPU: 8}, {GPU: 8}))
HALF_USED: Final = running_unit(waiting_unit("chat", 4), "node/gpu-2")
FIRST: Final = gpu_cell("gpu-1")
SECOND: Final = gpu_cell("gpu-2", free=4)


def describe(cells: Sequence[Cell], units: Sequence[Unit]) -> str:
    """Return what `large` shows after a round."""

    async def read() -> ServiceStanding | None:
        board = Board(lambda _service: None)
        board.update(plan(cells, units, RULES, COMES_AT), cells, COMES_AT, units=units)
        return board.find_standing(LARGE.service)

    standing = virtual_time.run(read())
    assert standing is not None
    return f"large {standing.place or 'none'} {standing.reason}: {standing.message}\n"


def test_gang_shows_what_the_guide_says() -> None:
    important = waiting_unit("large", parts=LARGE.parts, priority="high")
    shown = [
        describe([FIRST, SECOND], [HALF_USED, LARGE]),
        describe([FIRST, SECOND], [HALF_USED, important]),
        describe([FIRST], [LARGE]),
    ]
    assert list_blocks(read_section("Gangs"), "text") == shown
