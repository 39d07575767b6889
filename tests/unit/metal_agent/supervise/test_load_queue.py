"""The load queue lets one engine load at a time, by priority, with a time limit."""

import asyncio

from metal_agent.supervise.load_queue import SLOT_SECONDS, LoadQueue
from tests.support.eventually import eventually


async def _waiting(loads: LoadQueue, *names: str) -> dict[str, asyncio.Task[None]]:
    """Queue the processes in this order; the digit at the end of a name is its rank."""
    tasks = {name: asyncio.create_task(loads.acquire(name, int(name[-1]))) for name in names}
    await eventually(lambda: len(loads._waiting) == len(names))
    return tasks


async def _has_turn(tasks: dict[str, asyncio.Task[None]], name: str) -> None:
    await tasks.pop(name)
    assert not any(task.done() for task in tasks.values())


async def test_one_engine_loads_at_a_time_by_priority() -> None:
    loads = LoadQueue()
    assert loads.try_acquire("first")
    assert loads.try_acquire("first")
    assert not loads.try_acquire("second")
    tasks = await _waiting(loads, "low4", "high1", "normal2", "other2")
    before = "first"
    for name in ("high1", "normal2", "other2", "low4"):
        loads.release("unknown")
        loads.release(before)
        await _has_turn(tasks, name)
        assert loads.try_acquire(name)
        before = name


async def test_new_process_does_not_overtake_waiting_ones() -> None:
    loads = LoadQueue()
    loads.occupy("adopted")
    loads.occupy("adopted too")
    tasks = await _waiting(loads, "normal2")
    loads.release("adopted")
    assert not tasks["normal2"].done()
    loads.release("adopted too")
    assert not loads.try_acquire("late")
    await _has_turn(tasks, "normal2")


async def test_slot_is_free_again_after_its_time_limit() -> None:
    now = 0.0
    loads = LoadQueue(lambda: now)
    assert loads.try_acquire("stuck")
    now = SLOT_SECONDS
    assert loads.try_acquire("next")
    now = 2 * SLOT_SECONDS
    await asyncio.wait_for(loads.acquire("last2", 2), 60)
    assert not loads.try_acquire("another")


async def test_cancelled_process_leaves_the_queue() -> None:
    loads = LoadQueue()
    assert loads.try_acquire("first")
    tasks = await _waiting(loads, "high1", "normal2")
    tasks["high1"].cancel()
    await eventually(tasks["high1"].done)
    loads.release("first")
    await tasks["normal2"]
    # A process that is cancelled after the grant passes the slot on.
    gone = await _waiting(loads, "high1", "other2")
    loads.release("normal2")
    gone["high1"].cancel()
    await gone["other2"]


async def test_handed_over_engine_keeps_its_slot() -> None:
    loads = LoadQueue()
    loads.occupy("standalone")
    loads.rename("standalone", "cluster1")
    loads.rename("unknown", "other")
    assert not loads.try_acquire("next2")
    loads.release("cluster1")
    assert loads.try_acquire("next2")
