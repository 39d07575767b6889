import asyncio

from metal_agent.loads import TURN_SECONDS, Loads
from tests.eventually import eventually


async def _waiting(loads: Loads, *names: str) -> dict[str, asyncio.Task[None]]:
    """Have them wait in this order; the digit at the end of a name is its rank."""
    tasks = {name: asyncio.create_task(loads.turn(name, int(name[-1]))) for name in names}
    await eventually(lambda: len(loads._waiting) == len(names))
    return tasks


async def _has_turn(tasks: dict[str, asyncio.Task[None]], name: str) -> None:
    await tasks.pop(name)
    assert not any(task.done() for task in tasks.values())


async def test_one_loads_at_a_time_the_most_important_first() -> None:
    loads = Loads()
    assert loads.take("first")
    assert loads.take("first")
    assert not loads.take("second")
    tasks = await _waiting(loads, "low4", "high1", "normal2", "other2")
    before = "first"
    for name in ("high1", "normal2", "other2", "low4"):
        loads.leave("unknown")
        loads.leave(before)
        await _has_turn(tasks, name)
        assert loads.take(name)
        before = name


async def test_nobody_comes_before_who_waits() -> None:
    loads = Loads()
    loads.occupy("adopted")
    loads.occupy("adopted too")
    tasks = await _waiting(loads, "normal2")
    loads.leave("adopted")
    assert not tasks["normal2"].done()
    loads.leave("adopted too")
    assert not loads.take("late")
    await _has_turn(tasks, "normal2")


async def test_one_that_takes_too_long_passes_the_turn_on() -> None:
    now = 0.0
    loads = Loads(lambda: now)
    assert loads.take("stuck")
    now = TURN_SECONDS
    assert loads.take("next")
    now = 2 * TURN_SECONDS
    await asyncio.wait_for(loads.turn("last2", 2), 5)
    assert not loads.take("another")


async def test_one_that_is_not_wanted_any_more_leaves_the_queue() -> None:
    loads = Loads()
    assert loads.take("first")
    tasks = await _waiting(loads, "high1", "normal2")
    tasks["high1"].cancel()
    await eventually(tasks["high1"].done)
    loads.leave("first")
    await tasks["normal2"]
    # One that is cancelled with the turn in its hands passes it on.
    gone = await _waiting(loads, "high1", "other2")
    loads.leave("normal2")
    gone["high1"].cancel()
    await gone["other2"]


async def test_an_engine_that_is_handed_over_takes_its_turn_with_it() -> None:
    loads = Loads()
    loads.occupy("standalone")
    loads.rename("standalone", "cluster1")
    loads.rename("unknown", "other")
    assert not loads.take("next2")
    loads.leave("cluster1")
    assert loads.take("next2")
