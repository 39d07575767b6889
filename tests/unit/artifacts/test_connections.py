"""The connections of one download: how many are open, and the least speed of all together."""

import asyncio
import contextlib
import time

import pytest

from artifacts.errors import ArtifactError
from artifacts.retry import Connections, Patience


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows the number in the list."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def overload() -> ArtifactError:
    error = ArtifactError("SourceUnreachable", "x", retryable=True)
    error.is_overload = True
    return error


async def hold(connections: Connections, release: asyncio.Event, error: ArtifactError | None = None) -> None:
    """Keep one connection open until the event, and end it by `error`, if there is one."""
    with contextlib.suppress(ArtifactError):
        async with connections.open():
            await release.wait()
            if error:
                raise error


async def count_open(connections: Connections) -> int:
    """Return how many more connections may be open."""
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(connections, release)) for _ in range(20)]
    for _ in range(3):
        await asyncio.sleep(0)
    most = connections._open
    release.set()
    await asyncio.gather(*tasks)
    return most


async def test_eight_connections_are_open_at_most() -> None:
    assert await count_open(Connections(Patience(), "x")) == 8
    assert await count_open(Connections(Patience(connections=3), "x")) == 3


@pytest.mark.parametrize(("overloaded", "left"), [(0, 8), (1, 4), (5, 4), (8, 4)])
async def test_answers_to_requests_of_the_same_time_halve_the_limit_once(overloaded: int, left: int) -> None:
    connections, release = Connections(Patience(), "x"), asyncio.Event()
    errors = [overload() for _ in range(overloaded)] + [None] * (8 - overloaded)
    tasks = [asyncio.create_task(hold(connections, release, error)) for error in errors]
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*tasks)
    assert await count_open(connections) == left


async def test_one_connection_is_always_left() -> None:
    connections = Connections(Patience(), "x")
    for _ in range(9):
        release = asyncio.Event()
        tasks = [asyncio.create_task(hold(connections, release, overload())) for _ in range(2)]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks)
    assert await count_open(connections) == 1


async def test_overload_of_a_single_connection_says_nothing_of_their_number() -> None:
    connections, release = Connections(Patience(), "x"), asyncio.Event()
    release.set()
    await hold(connections, release, overload())
    assert await count_open(connections) == 8


@pytest.mark.parametrize(("bytes_per_second", "is_refused"), [(1 << 10, True), (3 << 10, False)])
async def test_least_speed_is_that_of_all_connections(
    clock: list[float], bytes_per_second: int, is_refused: bool
) -> None:
    connections = Connections(Patience(), "x")

    async def receive() -> None:
        async with connections.open():
            while clock[0] < 1130:
                connections.count_bytes(bytes_per_second)
                await asyncio.sleep(0)

    async def pass_time() -> None:
        while clock[0] < 1130:
            clock[0] += 1
            await asyncio.sleep(0)

    ended = await asyncio.gather(*(receive() for _ in range(8)), pass_time(), return_exceptions=True)
    assert any(isinstance(error, ArtifactError) for error in ended) is is_refused


async def test_time_without_bytes_before_the_first_and_without_a_connection_does_not_count(clock: list[float]) -> None:
    connections = Connections(Patience(), "x")
    clock[0] += 100
    async with connections.open():
        clock[0] += 100  # until the first response
        connections.count_bytes(1)
        clock[0] += 59
        connections.count_bytes(1)
    for _ in range(3):
        clock[0] += 100
        async with connections.open():
            connections.count_bytes(1)


async def test_least_speed_counts_over_one_answer_after_another(clock: list[float]) -> None:
    """A server that ends each answer after a byte would hold a download for ever."""
    connections = Connections(Patience(), "x")

    async def answer() -> None:
        async with connections.open():
            clock[0] += 20
            connections.count_bytes(1)

    for _ in range(3):
        await answer()
    with pytest.raises(ArtifactError, match="less than"):
        await answer()


async def test_file_that_is_refused_waits_for_the_connections_of_others() -> None:
    connections = Connections(Patience(), "x")
    assert not await connections.wait_for_others()
    async with connections.open():
        waiting = asyncio.create_task(connections.wait_for_others())
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting
