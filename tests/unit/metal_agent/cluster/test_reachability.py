"""The listener that answers the controller: ports in use, other addresses, clients that are slow or send too much."""

import asyncio
import itertools
import socket
from pathlib import Path

from metal_agent.cluster.exposure import ServicePorts
from metal_agent.cluster.reachability import ReachabilityListener
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.free_ports import find_free_ports

LOOPBACK, ELSEWHERE = "127.0.0.1", "127.0.0.2"


async def ask(address: str, port: int, request: bytes = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") -> bytes:
    reader, writer = await asyncio.open_connection(address, port)
    writer.write(request)
    response = await reader.read()
    writer.close()
    await writer.wait_closed()
    return response


async def test_taken_port_is_left_for_the_next_one() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        ports = [taken.getsockname()[1], next(find_free_ports())]
        changes: list[int | None] = []
        listener = ReachabilityListener("studio-1", LOOPBACK, lambda: ports, lambda: changes.append(listener.port))
        async with running(listener.run()):
            await eventually(lambda: listener.port == ports[1])
            assert (await ask(LOOPBACK, ports[1])).endswith(b"\r\n\r\nstudio-1\n")
        assert changes == [ports[1], None]


async def test_moved_host_listens_at_its_new_address_only(unused_tcp_port: int) -> None:
    port = unused_tcp_port
    changes: list[int | None] = []
    listener = ReachabilityListener("studio-1", LOOPBACK, lambda: [port], lambda: changes.append(listener.port))
    async with running(listener.run()):
        await eventually(lambda: listener.port)
        listener.move(ELSEWHERE)
        await eventually(lambda: changes == [port, None, port])
        assert b"studio-1" in await ask(ELSEWHERE, port)
        refused = False
        try:
            await ask(LOOPBACK, port)
        except ConnectionRefusedError:
            refused = True
        assert refused


async def test_request_that_is_too_long_is_refused(unused_tcp_port: int) -> None:
    port = unused_tcp_port
    listener = ReachabilityListener("studio-1", LOOPBACK, lambda: [port], lambda: None)
    async with running(listener.run()):
        await eventually(lambda: listener.port)
        assert (await ask(LOOPBACK, port, b"x" * 100_000)).startswith(b"HTTP/1.1 400 ")
        assert b"studio-1" in await ask(LOOPBACK, port)


def test_first_port_of_the_range_is_left_to_services(tmp_path: Path) -> None:
    ports = ServicePorts(tmp_path / "ports.json", 18000, 18003)
    assert ports.list_spare() == [18003, 18002, 18001]
    assert ports.assign("team/chat") == 18000
    assert ports.assign("team/mail") == 18001
    assert ports.list_spare() == [18003, 18002]
    assert ServicePorts(tmp_path / "one.json", 18000, 18000).list_spare() == []


async def test_last_port_of_the_range_is_given_up_for_a_service(tmp_path: Path) -> None:
    last = next(find_free_ports())
    ports = ServicePorts(tmp_path / "ports.json", last - 1, last)
    changes: list[int | None] = []
    listener = ReachabilityListener("studio-1", LOOPBACK, ports.list_spare, lambda: changes.append(listener.port))
    ports.on_assign = listener.give_up
    async with running(listener.run()):
        await eventually(lambda: listener.port == last)
        assert ports.assign("team/chat") == last - 1
        assert listener.port == last, "no service needs it"
        assert ports.assign("team/mail") == last
        with socket.create_server((LOOPBACK, last)):
            assert changes == [last, None]
        listener.move(LOOPBACK)
        ports.keep({"team/chat"})
        await eventually(lambda: listener.port == last)


async def test_port_that_is_given_up_is_replaced_by_another_spare_one() -> None:
    ports = list(itertools.islice(find_free_ports(), 2))
    listener = ReachabilityListener("studio-1", LOOPBACK, lambda: ports, lambda: None)
    async with running(listener.run()):
        await eventually(lambda: listener.port == ports[0])
        given = ports.pop(0)
        listener.give_up(given)
        await eventually(lambda: listener.port == ports[0], 30.0)
