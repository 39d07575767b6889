"""The agent follows the address of its host while the network changes; the test simulates the network."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from devices import network
from metal_agent.cluster import address
from metal_agent.cluster.address import follow_address
from metal_agent.options import AgentOptions, StartError
from tests.support.background import running
from tests.support.eventually import eventually


class Network:
    """The changes that the kernel would report, and the route that it would find."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.found: str | None = "10.0.0.1"
        self.looked = 0

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        yield self.changed

    def find_current_address(self, _options: AgentOptions, _server: str) -> str:
        self.looked += 1
        if self.found is None:
            raise StartError("no route")
        return self.found

    async def change(self, found: str | None) -> None:
        self.found, before = found, self.looked
        self.changed.set()
        await eventually(lambda: self.looked > before)


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Network:
    told = Network()
    monkeypatch.setattr(network, "watch_network", told.watch)
    monkeypatch.setattr(address, "find_current_address", told.find_current_address)
    monkeypatch.setattr(address, "_SETTLE_SECONDS", 0)
    return told


async def test_new_address_is_reported_once_and_a_missing_route_is_not(net: Network, tmp_path: Path) -> None:
    moves: list[str] = []

    async def moved(found: str) -> None:
        moves.append(found)

    async with running(follow_address(AgentOptions("studio-1", tmp_path), "https://api", "10.0.0.1", moved)):
        for reading in ("10.0.0.1", None, "10.0.0.1", "10.0.0.2", None, "10.0.0.2", "10.0.0.1"):
            await net.change(reading)
        await eventually(lambda: len(moves) >= 2)
    assert moves == ["10.0.0.2", "10.0.0.1"]


async def test_address_is_checked_at_intervals_without_network_events(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "_CHECK_SECONDS", 0.01)
    queue: asyncio.Queue[str] = asyncio.Queue()
    net.found = "10.0.0.2"
    async with running(follow_address(AgentOptions("studio-1", tmp_path), "https://api", "10.0.0.1", queue.put)):
        assert await queue.get() == "10.0.0.2"


async def test_an_address_that_the_owner_gave_is_not_followed(net: Network, tmp_path: Path) -> None:
    async def moved(found: str) -> None:
        raise AssertionError(found)

    net.found = "10.0.0.2"
    net.changed.set()
    await asyncio.wait_for(
        follow_address(AgentOptions("studio-1", tmp_path, address="10.0.0.1"), "", "10.0.0.1", moved), 5
    )


async def test_ordinary_user_can_watch_network_changes() -> None:
    with network.watch_network() as changed:
        assert not changed.is_set()
