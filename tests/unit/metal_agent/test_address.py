"""Which address a host has when its network changes, with a network that is told by the test."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from devices import network
from metal_agent import address
from metal_agent.address import follow
from metal_agent.start import Options, StartError
from tests.background import running
from tests.eventually import eventually


class Network:
    """What the kernel would tell, and the route that would be found."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.found: str | None = "10.0.0.1"
        self.looked = 0

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        yield self.changed

    def find_route(self, _options: Options, _server: str) -> str:
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
    monkeypatch.setattr(network, "watch", told.watch)
    monkeypatch.setattr(address, "find_route", told.find_route)
    monkeypatch.setattr(address, "_SETTLE_SECONDS", 0)
    return told


async def test_each_new_address_is_told_once_and_no_address_is_none(net: Network, tmp_path: Path) -> None:
    moves: list[str] = []

    async def moved(found: str) -> None:
        moves.append(found)

    async with running(follow(Options("studio-1", tmp_path), "https://api", "10.0.0.1", moved)):
        for found in ("10.0.0.1", None, "10.0.0.1", "10.0.0.2", None, "10.0.0.2", "10.0.0.1"):
            await net.change(found)
        await eventually(lambda: len(moves) >= 2)
    assert moves == ["10.0.0.2", "10.0.0.1"]


async def test_a_network_that_tells_nothing_is_looked_at_now_and_then(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "_CHECK_SECONDS", 0.01)
    found: asyncio.Queue[str] = asyncio.Queue()
    net.found = "10.0.0.2"
    async with running(follow(Options("studio-1", tmp_path), "https://api", "10.0.0.1", found.put)):
        assert await found.get() == "10.0.0.2"


async def test_an_address_that_the_owner_gave_is_not_followed(net: Network, tmp_path: Path) -> None:
    async def moved(found: str) -> None:
        raise AssertionError(found)

    net.found = "10.0.0.2"
    net.changed.set()
    await asyncio.wait_for(follow(Options("studio-1", tmp_path, address="10.0.0.1"), "", "10.0.0.1", moved), 5)


async def test_the_kernel_grants_an_ordinary_user_to_hear_of_changes() -> None:
    with network.watch() as changed:
        assert not changed.is_set()
