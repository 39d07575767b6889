"""The work queue has client-go's semantics: one worker per key, coalesced keys, back-off after failures."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kube.errors import Unreachable
from kube.queue import WorkQueue, run_workers
from tests.support import virtual_time


def run_for(seconds: float, queue: WorkQueue[str], reconcile: Callable[[str], Awaitable[float | None]]) -> None:
    """Run three workers with a time-out of ten seconds in virtual time, for `seconds`."""

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await run_workers(queue, reconcile, workers=3, timeout_seconds=10)

    virtual_time.run(main())


KEYS = st.sampled_from("abc")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), KEYS, st.just(0.0)),
        st.tuples(st.just("add_after"), KEYS, st.floats(0, 30)),
        st.tuples(st.just("wait"), KEYS, st.floats(0, 5)),
    ),
    max_size=40,
)


@given(STEPS, st.lists(st.floats(0, 8), min_size=1), st.integers(0, 6))
def test_no_key_runs_twice_at_once_and_none_is_lost(
    steps: list[tuple[str, str, float]], durations: list[float], failures: int
) -> None:
    duration = cycle(durations)
    failures_left = failures
    running: Counter[str] = Counter()
    started: dict[str, list[float]] = {key: [] for key in "abc"}
    wished: dict[str, list[float]] = {key: [] for key in "abc"}
    last: dict[str, str] = {}

    async def reconcile(key: str) -> float | None:
        nonlocal failures_left
        running[key] += 1
        assert running[key] == 1
        started[key].append(asyncio.get_running_loop().time())
        await asyncio.sleep(next(duration))
        running[key] -= 1
        last[key] = "failed" if failures_left else "succeeded"
        if failures_left:
            failures_left -= 1
            raise Unreachable("try again")
        return None

    async def main() -> None:
        queue = WorkQueue[str]()
        async with asyncio.TaskGroup() as group:
            workers = group.create_task(run_workers(queue, reconcile, workers=2, timeout_seconds=60))
            now = asyncio.get_running_loop().time
            for step, key, seconds in steps:
                if step == "wait":
                    await asyncio.sleep(seconds)
                    continue
                wished[key].append(now())
                queue.add(key) if step == "add" else queue.add_after(key, seconds)
            await asyncio.sleep(100_000)
            workers.cancel()
        assert len(queue) == 0

    virtual_time.run(main())
    for key, moments in wished.items():
        assert all(any(start >= moment for start in started[key]) for moment in moments)
        assert bool(moments) == bool(started[key])
    assert set(last.values()) <= {"succeeded"}


def test_a_key_added_many_times_is_reconciled_once() -> None:
    runs: list[str] = []

    async def reconcile(key: str) -> None:
        runs.append(key)

    queue = WorkQueue[str]()
    for _ in range(5):
        queue.add("a")
    assert len(queue) == 1
    run_for(1, queue, reconcile)
    assert runs == ["a"]


def test_a_key_added_during_its_reconcile_is_reconciled_again() -> None:
    queue = WorkQueue[str]()
    runs: list[str] = []

    async def reconcile(key: str) -> None:
        runs.append(f"start {key}")
        if len(runs) == 1:
            queue.add(key)
            queue.add(key)
            await asyncio.sleep(1)
        runs.append(f"end {key}")

    queue.add("a")
    run_for(5, queue, reconcile)
    assert runs == ["start a", "end a", "start a", "end a"]


def test_earliest_of_several_delays_counts() -> None:
    queue = WorkQueue[str]()
    moments: list[float] = []

    async def reconcile(_: str) -> None:
        moments.append(asyncio.get_running_loop().time())

    async def main() -> None:
        queue.add_after("a", 50)
        queue.add_after("a", 5)
        queue.add_after("a", 20)
        async with asyncio.timeout(100):
            await run_workers(queue, reconcile, workers=1, timeout_seconds=1)

    with pytest.raises(TimeoutError):
        virtual_time.run(main())
    assert moments == pytest.approx([5])


def test_retries_back_off_to_five_minutes_and_are_reset_by_success() -> None:
    queue = WorkQueue[str]()

    async def main() -> None:
        waits = [queue.retry("a") for _ in range(20)]
        for wait, expected in zip(waits, [0.1 * 2**n for n in range(20)], strict=True):
            assert wait == pytest.approx(min(expected, 300), rel=0.21)
        assert len(set(waits[-5:])) > 1, "jitter"
        queue.forget("a")
        assert queue.retry("a") < 0.13

    virtual_time.run(main())


def test_a_reconcile_that_hangs_or_crashes_is_retried_and_stops_no_other() -> None:
    queue = WorkQueue[str]()
    runs: Counter[str] = Counter()

    async def reconcile(key: str) -> None:
        runs[key] += 1
        if key == "hangs":
            await asyncio.Event().wait()
        if key == "crashes":
            raise ZeroDivisionError

    for key in ("hangs", "crashes", "works"):
        queue.add(key)
    run_for(25, queue, reconcile)
    assert runs["works"] == 1
    assert runs["hangs"] == 3, "10 s each, with a short pause"
    assert runs["crashes"] > 5


def test_reconcile_runs_again_after_the_returned_delay() -> None:
    queue = WorkQueue[str]()
    runs: list[str] = []

    async def reconcile(key: str) -> float:
        runs.append(key)
        return 10

    queue.add("a")
    run_for(35, queue, reconcile)
    assert len(runs) == 4


def test_urgent_keys_go_before_all_others() -> None:
    runs: list[str] = []

    async def reconcile(key: str) -> None:
        runs.append(key)

    async def main() -> None:
        queue = WorkQueue[str]()
        for key in ("old-1", "old-2"):
            queue.add(key)
        for key in ("new-1", "new-2"):
            queue.add(key, urgent=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await run_workers(queue, reconcile, workers=1, timeout_seconds=10)

    virtual_time.run(main())
    assert runs == ["new-1", "new-2", "old-1", "old-2"]


def test_changes_after_a_reconcile_are_seen_together_after_a_pause() -> None:
    started: list[float] = []

    async def reconcile(_key: str) -> None:
        started.append(asyncio.get_running_loop().time())

    async def main() -> None:
        queue = WorkQueue[str](pause_seconds=2)
        async with asyncio.TaskGroup() as group:
            workers = group.create_task(run_workers(queue, reconcile, workers=2, timeout_seconds=10))
            for seconds in (0.5, 0.5, 0.5, 5):
                queue.add("a")
                await asyncio.sleep(seconds)
            queue.add("a")
            await asyncio.sleep(10)
            workers.cancel()

    virtual_time.run(main())
    assert started == pytest.approx([0, 2, 6.5])
