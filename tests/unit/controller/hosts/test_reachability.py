"""The controller's question to agents, with the agents' own listener and with programs that answer otherwise."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controller.hosts import reachability
from controller.hosts.reachability import (
    LEAST_PAUSE_SECONDS,
    AgentPlace,
    AskAgent,
    ReachabilityAnswer,
    ReachabilityProber,
    build_reachable_condition,
)
from controller.reconcile.plan import Leading
from kube.client import Client
from kube.resources import ObjectKey
from kube.store import Store
from metal_agent.cluster.reachability import ReachabilityListener
from tests.support import virtual_time
from tests.support.api_objects import as_host, condition, host
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.free_ports import find_free_ports

HOST = "studio-1"
KEY = ObjectKey("", HOST)
LOOPBACK = "127.0.0.1"


@asynccontextmanager
async def listening(host: str = HOST) -> AsyncIterator[ReachabilityListener]:
    port = next(find_free_ports())
    listener = ReachabilityListener(host, LOOPBACK, lambda: [port], lambda: None)
    async with running(listener.run()):
        await eventually(lambda: listener.port)
        yield listener


@asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[AgentPlace]:
    """Yield the place of a program that answers each connection with `answer`; at the end, all have been closed."""
    connections: list[asyncio.Task[None] | None] = []

    async def handle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            await answer(writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, LOOPBACK, 0)
    async with server:
        yield AgentPlace(LOOPBACK, server.sockets[0].getsockname()[1], "boot-1")
        await asyncio.gather(*(connection for connection in connections if connection))


async def test_agent_that_listens_is_reached() -> None:
    async with listening() as listener:
        assert listener.port
        answer = await reachability.ask_agent(HOST, AgentPlace(LOOPBACK, listener.port, "boot-1"))
    assert (answer.reached, answer.reason) == (True, "AgentAnswered")


async def test_other_host_at_the_address_is_not_taken_for_this_one() -> None:
    async with listening("studio-2") as listener:
        assert listener.port
        answer = await reachability.ask_agent(HOST, AgentPlace(LOOPBACK, listener.port, "boot-1"))
    assert (answer.reached, answer.reason) == (False, "AnotherAnswer")
    assert "studio-2" not in answer.message


@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"secret", b"HTTP/1.1 500 no\r\n\r\nstudio-1\n", b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 9999),
        b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\nstudio-1\n",
        b"x" * (64 << 20),
    ],
    ids=["nothing", "no HTTP", "an error", "too long", "elsewhere", "giant"],
)
async def test_foreign_answer_is_not_shown(said: bytes) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()

    async with answering(write) as place:
        answer = await reachability.ask_agent(HOST, place)
    assert not answer.reached
    assert answer.reason in {"AnotherAnswer", "NotConnected"}  # a kernel may reset a connection with unread bytes
    assert "secret" not in answer.message


async def test_silent_program_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "ASK_SECONDS", 0.05)
    ended = asyncio.Event()

    async def wait(_writer: asyncio.StreamWriter) -> None:
        await ended.wait()

    async with answering(wait) as place:
        answer = await reachability.ask_agent(HOST, place)
        ended.set()
    assert (answer.reached, answer.reason) == (False, "NoAnswer")
    assert "firewall" in answer.message


async def test_slow_program_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "ASK_SECONDS", 0.3)
    ended = asyncio.Event()

    async def trickle(writer: asyncio.StreamWriter) -> None:
        while not ended.is_set():
            writer.write(b"x")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.05)

    async with answering(trickle) as place:
        answer = await reachability.ask_agent(HOST, place)
        ended.set()
    assert (answer.reached, answer.reason) == (False, "NoAnswer")


async def test_closed_port_is_not_connected(unused_tcp_port: int) -> None:
    answer = await reachability.ask_agent(HOST, AgentPlace(LOOPBACK, unused_tcp_port, "boot-1"))
    assert (answer.reached, answer.reason) == (False, "NotConnected")


async def test_new_answer_enqueues_the_host_and_another_place_is_another_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reachability, "LEAST_PAUSE_SECONDS", 0.1)
    enqueued: list[ObjectKey] = []
    recorder: Any = None
    prober = ReachabilityProber()
    leading = Leading(Client.__new__(Client), Store(), recorder, lambda _resource, key: enqueued.append(key))
    async with listening() as listener, running(prober.run(leading)):
        assert listener.port
        place = AgentPlace(LOOPBACK, listener.port, "boot-1")
        await asyncio.sleep(0)  # the prober has begun, and forgotten what an earlier leader asked
        assert ask(prober, place) is None
        await eventually(lambda: enqueued == [ObjectKey("", HOST)])
        answer = ask(prober, place)
        assert answer is not None
        assert answer.reached
        assert ask(prober, place._replace(boot_id="boot-2")) is None
        await eventually(lambda: len(enqueued) == 2)
        prober.perform(KEY, AskAgent(None))
        assert ask(prober, place) is None, "a host that was forgotten is asked anew"
        await eventually(lambda: len(enqueued) == 3)


def ask(prober: ReachabilityProber, place: AgentPlace) -> ReachabilityAnswer | None:
    """Ask as a decision about the host does, and return the answer if there is one already."""
    prober.perform(KEY, AskAgent(place))
    return prober.find_answer(HOST, place)


class Asking:
    """A prober in virtual time, whose hosts fail after `seconds`; `asked` has host, port and time of each question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self._seconds = seconds
        self.prober = ReachabilityProber()
        self.asked: list[tuple[str, int, float]] = []
        monkeypatch.setattr(reachability, "ask_agent", self._ask)

    async def _ask(self, host: str, place: AgentPlace) -> ReachabilityAnswer:
        self.asked.append((host, place.port, asyncio.get_running_loop().time()))
        await asyncio.sleep(self._seconds)
        return ReachabilityAnswer(reached=False, reason="NoAnswer", message="")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        recorder: Any = None
        leading = Leading(Client.__new__(Client), Store(), recorder, lambda _resource, _key: None)
        async with running(self.prober.run(leading)):
            await asyncio.sleep(0)
            yield


@pytest.mark.parametrize(("period", "away"), [(1, 0), (3, 1), (8, 6), (9, 8)])
def test_thief_that_states_place_after_place_has_one_looked_at_in_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, period: int, away: int
) -> None:
    """Also if it states an address that is not granted for some seconds of each period, and is forgotten."""
    asking = Asking(monkeypatch, 0.0)

    async def main() -> None:
        async with asking.running():
            for second in range(300):
                place = AgentPlace(LOOPBACK, 2000 + second, "boot-1")
                asking.prober.perform(KEY, AskAgent(place if second % period >= away else None))
                await asyncio.sleep(1)

    virtual_time.run(main())
    pauses = [later[2] - earlier[2] for earlier, later in itertools.pairwise(asking.asked)]
    assert len(pauses) > 10, "it is asked again and again"
    assert min(pauses) >= LEAST_PAUSE_SECONDS - 0.01


def test_host_that_is_forgotten_while_it_is_asked_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has expired or is gone, and its address may be another's by then."""
    asking = Asking(monkeypatch, reachability.ASK_SECONDS)

    async def main() -> None:
        async with asking.running():
            asking.prober.perform(KEY, AskAgent(AgentPlace(LOOPBACK, 2000, "boot-1")))
            await asyncio.sleep(reachability.ASK_SECONDS / 2)
            asking.prober.perform(KEY, AskAgent(None))
            await asyncio.sleep(3600)

    virtual_time.run(main())
    assert len(asking.asked) == 1


def test_thousand_silent_hosts_keep_no_other_from_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Asking(monkeypatch, reachability.ASK_SECONDS)

    async def main() -> None:
        async with asking.running():
            for number in range(1000):
                asking.prober.perform(ObjectKey("", f"silent-{number}"), AskAgent(AgentPlace(LOOPBACK, 2000, "boot-1")))
            await asyncio.sleep(600)
            asking.prober.perform(KEY, AskAgent(AgentPlace(LOOPBACK, 2000, "boot-1")))
            await asyncio.sleep(60)

    virtual_time.run(main())
    (at,) = [at for host, _, at in asking.asked if host == HOST][:1]
    assert at < 630


BEFORE = condition("Reachable", "True", "AgentAnswered")


def test_condition_of_an_earlier_leader_stays_until_the_host_is_asked() -> None:
    asked = build_reachable_condition(as_host(host(HOST, reachabilityPort=18999, conditions=[BEFORE])), None)
    assert (asked["status"], asked["reason"]) == ("True", "AgentAnswered")
    assert build_reachable_condition(as_host(host(HOST, reachabilityPort=18999)), None)["status"] == "Unknown"


def test_agent_without_the_listener_is_not_asked() -> None:
    asked = build_reachable_condition(as_host(host(HOST, conditions=[BEFORE])), None)
    assert (asked["status"], asked["reason"]) == ("Unknown", "NotAsked")
    assert "--port-range has no spare port" in asked["message"]
