"""The controller's question to agents, with the agents' own listener and with programs that answer otherwise."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controller.hosts import reachability
from controller.hosts.reachability import AgentPlace, ReachabilityProber, reachable_condition
from controller.reconcile.plan import Leading
from kube.client import Client
from kube.resources import ObjectKey
from kube.store import Store
from metal_agent.cluster.reachability import ReachabilityListener
from tests.support.api_objects import as_host, condition, host
from tests.support.background import running
from tests.support.eventually import eventually

HOST = "studio-1"
LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        return port


@asynccontextmanager
async def listening(host: str = HOST) -> AsyncIterator[ReachabilityListener]:
    port = free_port()
    listener = ReachabilityListener(host, LOOPBACK, lambda: [port], lambda: None)
    async with running(listener.run()):
        await eventually(lambda: listener.port)
        yield listener


@asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[AgentPlace]:
    """Yield the place of a program that answers each connection with `answer`."""

    async def handle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(writer)
        writer.close()

    server = await asyncio.start_server(handle, LOOPBACK, 0)
    async with server:
        yield AgentPlace(LOOPBACK, server.sockets[0].getsockname()[1], "boot-1")


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
    "said", [b"", b"secret", b"HTTP/1.1 500 no\r\n\r\nstudio-1\n", b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 9999]
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


async def test_closed_port_is_not_connected() -> None:
    answer = await reachability.ask_agent(HOST, AgentPlace(LOOPBACK, free_port(), "boot-1"))
    assert (answer.reached, answer.reason) == (False, "NotConnected")


async def test_new_answer_enqueues_the_host_and_another_place_is_another_question() -> None:
    enqueued: list[ObjectKey] = []
    recorder: Any = None
    prober = ReachabilityProber()
    leading = Leading(Client.__new__(Client), Store(), recorder, lambda _resource, key: enqueued.append(key))
    async with listening() as listener, running(prober.run(leading)):
        assert listener.port
        place = AgentPlace(LOOPBACK, listener.port, "boot-1")
        await asyncio.sleep(0)  # the prober has begun, and forgotten what an earlier leader asked
        assert prober.answer(HOST, place) is None
        await eventually(lambda: enqueued == [ObjectKey("", HOST)])
        known = prober.answer(HOST, place)
        assert known is not None
        assert known.reached
        assert prober.answer(HOST, place._replace(boot_id="boot-2")) is None
        await eventually(lambda: len(enqueued) == 2)
        assert prober.answer(HOST, None) is None
        assert prober.answer(HOST, place) is None, "a host that was forgotten is asked anew"


BEFORE = condition("Reachable", "True", "AgentAnswered")


def test_condition_of_an_earlier_leader_stays_until_the_host_is_asked() -> None:
    asked = reachable_condition(as_host(host(HOST, reachabilityPort=18999, conditions=[BEFORE])), None)
    assert (asked["status"], asked["reason"]) == ("True", "AgentAnswered")
    assert reachable_condition(as_host(host(HOST, reachabilityPort=18999)), None)["status"] == "Unknown"


def test_agent_without_the_listener_is_not_asked() -> None:
    asked = reachable_condition(as_host(host(HOST, conditions=[BEFORE])), None)
    assert (asked["status"], asked["reason"]) == ("Unknown", "NotAsked")
    assert "version is earlier" in asked["message"]
