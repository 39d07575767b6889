"""The pace of the rounds: those that decide nothing rest, and what may let a unit in waits less."""

import asyncio
import random
import time

import pytest

from controller.placement.round_pacer import (
    CREDIT_SECONDS,
    IDLE_SHARE,
    LONGEST_PAUSE_SECONDS,
    MOST_OWED_SECONDS,
    ROUND_SECONDS,
    ProcessorMeter,
    RoundCause,
    RoundPacer,
    RoundTrigger,
)
from controller.placement.units import Cell
from tests.support import virtual_time
from tests.support.queue_units import gpus, node, pod

END, UNIT, ROOM = RoundCause
HOURS_SECONDS = 4_000.0


def note_idle(pacer: RoundPacer, cause: RoundCause, began_at: float, spent_seconds: float) -> float:
    """Play a round without a decision that does nothing but compute; return its end."""
    ended_at = began_at + spent_seconds
    pacer.note_round(cause, began_at, ended_at, spent_seconds=spent_seconds, has_decided=False)
    return ended_at


def test_first_round_begins_at_once() -> None:
    assert RoundPacer().find_begin(END) < 0


@pytest.mark.parametrize("cause", RoundCause)
def test_rounds_that_decide_follow_each_other(cause: RoundCause) -> None:
    pacer = RoundPacer()
    for number in range(100):
        pacer.note_round(cause, number * 1.0, number + 0.9, spent_seconds=0.9, has_decided=True)
    assert pacer.find_begin(cause) == 99 + ROUND_SECONDS


def test_after_a_round_without_a_decision_only_what_may_let_a_unit_in_is_planned_at_once() -> None:
    pacer = RoundPacer()
    note_idle(pacer, END, 10.0, 0.03125)
    begins = [pacer.find_begin(cause) for cause in RoundCause]
    assert begins == [10.03125 + 0.03125 * IDLE_SHARE, 10 + ROUND_SECONDS, 10 + ROUND_SECONDS]


def test_time_in_which_a_round_waited_needs_no_rest() -> None:
    pacer = RoundPacer()
    pacer.note_round(UNIT, 10.0, 13.0, spent_seconds=0.01, has_decided=False)
    assert pacer.find_begin(END) == 13 + 0.01 * IDLE_SHARE


def test_meter_counts_what_a_step_computes() -> None:
    meter = ProcessorMeter()
    with meter.running():
        started = time.thread_time()
        while time.thread_time() < started + 0.02:
            pass
    with meter.running():
        time.sleep(0.2)
    assert 0.02 <= meter.seconds < 0.2


@pytest.mark.parametrize("cause", [END, UNIT])
def test_room_waits_for_no_rest_that_others_owe(cause: RoundCause) -> None:
    pacer, now = RoundPacer(), 0.0
    for _ in range(1000):
        began_at = max(now, pacer.find_begin(cause))
        now = note_idle(pacer, cause, began_at, 0.7)
        assert pacer.find_begin(ROOM) == began_at + ROUND_SECONDS
    assert pacer.find_begin(cause) > now + ROUND_SECONDS


def test_units_wait_for_the_rest_that_room_owes() -> None:
    pacer = RoundPacer()
    now = note_idle(pacer, ROOM, 0.0, 0.0625)
    assert pacer.find_begin(UNIT) == now + 0.0625 * IDLE_SHARE - CREDIT_SECONDS[UNIT]


@pytest.mark.parametrize(
    "causes", [(END,), (UNIT,), (ROOM,), (END, UNIT), (END, ROOM), (UNIT, ROOM), tuple(RoundCause)]
)
@pytest.mark.parametrize("spent_seconds", [0.001, 0.02, 0.04, 0.08])
def test_rounds_that_decide_nothing_take_a_hundredth_of_the_time(
    causes: tuple[RoundCause, ...], spent_seconds: float
) -> None:
    pacer, now, rounds = RoundPacer(), 0.0, 0
    while now < HOURS_SECONDS:
        begin, cause = min((max(now, pacer.find_begin(reason)), reason) for reason in causes)
        now, rounds = note_idle(pacer, cause, begin, spent_seconds), rounds + 1
    assert rounds * spent_seconds < 1.02 * HOURS_SECONDS / IDLE_SHARE


@pytest.mark.parametrize("cause", RoundCause)
def test_long_rounds_delay_the_next_one_by_no_more_than_the_longest_pause(cause: RoundCause) -> None:
    pacer, now = RoundPacer(), 0.0
    for _ in range(20):
        begin = max(now, pacer.find_begin(cause))
        assert begin - now <= LONGEST_PAUSE_SECONDS
        now = note_idle(pacer, cause, begin, 3.0)
    pacer.note_round(cause, now, now + 1, spent_seconds=1.0, has_decided=True)
    assert pacer.find_begin(END) <= now + 1 + LONGEST_PAUSE_SECONDS


def test_long_rounds_are_made_up_for_after_a_while() -> None:
    pacer, now = RoundPacer(), 0.0
    for _ in range(20):
        now = note_idle(pacer, UNIT, now, 3.0) + LONGEST_PAUSE_SECONDS
    now = note_idle(pacer, UNIT, now + MOST_OWED_SECONDS, 0.0625)
    assert pacer.find_begin(END) == now + min(0.0625 * IDLE_SHARE, LONGEST_PAUSE_SECONDS)
    assert pacer.find_begin(UNIT) == pytest.approx(now + 0.0625 * IDLE_SHARE - CREDIT_SECONDS[UNIT])


class FullCluster:
    """Cells that are full and units that come and go all the time, on a machine that is slow now and then."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._cells: dict[str, Cell] = {}
        self.set_free("room", 0)
        self.trigger = RoundTrigger(lambda: tuple(self._cells.values()))
        self._freed_at: float | None = None
        self._planned = asyncio.Event()
        self.waits: list[float] = []
        """The time for which free room waited for its round, each time."""
        self.idle_seconds = 0.0
        """Processor time of the rounds that decided nothing."""

    def set_free(self, name: str, devices: int) -> None:
        self._cells[name] = node(name, free=gpus(devices))

    async def lead(self) -> None:
        """Play rounds for ever."""
        loop, chance = asyncio.get_running_loop(), self._chance
        self.trigger.restart()
        while True:
            await self.trigger.wait()
            freed_at, self._freed_at = self._freed_at, None
            spent_seconds = chance.uniform(0.01, 0.05)
            if freed_at is not None:
                self.waits.append(loop.time() - freed_at)
                self.set_free("room", 0)
                self._planned.set()
            else:
                self.idle_seconds += spent_seconds
            # Others have the processor, and the API server answers late.
            await asyncio.sleep(spent_seconds * chance.choice((1, 1, 5)))
            waiting = (pod("waiting"),)
            self.trigger.note_round(waiting, spent_seconds=spent_seconds, has_decided=freed_at is not None)

    async def churn(self, cause: RoundCause) -> None:
        """Make units come and go."""
        while True:
            await asyncio.sleep(self._chance.expovariate(5.0))
            self.trigger.make_due(cause)

    async def free_room(self, count: int) -> None:
        """Free a cell from time to time, and wait for its round."""
        for _ in range(count):
            # What is admitted runs for some seconds at least.
            await asyncio.sleep(2 + self._chance.expovariate(0.05))
            self._freed_at = asyncio.get_running_loop().time()
            self.set_free("room", 1)
            self.trigger.note_cells()
            self._planned.clear()
            await self._planned.wait()


@pytest.mark.parametrize("seed", range(5))
def test_room_is_planned_within_a_second_whatever_comes_and_goes(seed: int) -> None:
    cluster = FullCluster(random.Random(seed))  # noqa: S311 - to be repeated, not to be secret

    async def main() -> float:
        async with asyncio.TaskGroup() as tasks:
            changes = (cluster.lead(), cluster.churn(END), cluster.churn(UNIT))
            endless = [tasks.create_task(change) for change in changes]
            await cluster.free_room(50)
            for task in endless:
                task.cancel()
        return asyncio.get_running_loop().time()

    seconds = virtual_time.run(main())
    assert len(cluster.waits) == 50
    assert max(cluster.waits) < 1.0
    assert cluster.idle_seconds < (seconds + CREDIT_SECONDS[UNIT]) / IDLE_SHARE + 0.1
    assert cluster.idle_seconds > 0.5 * seconds / IDLE_SHARE, "the churn keeps it busy"
