"""A newer proxy takes the listeners over from an older one, and no request fails."""

import asyncio
import contextlib
import json
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.http.control_client import ControlUnreachableError
from gateway.http.named_socket import NamedSocket
from gateway.proxy.config import ProxyConfig
from gateway.proxy.control_socket import HAND_OVER_SOCKET, LAST_SOCKET, claim_socket, send_inheritance
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    DONE_EVENT,
    GatedEngine,
    ProxyProcess,
    fake_engine,
    make_service,
    post_chat,
    run_proxy,
)
from tests.unit.gateway.proxy.test_lifecycle import end_of


@pytest.fixture
def old(tmp_path: Path) -> Iterator[ProxyProcess]:
    with run_proxy(tmp_path / "private" / "control.sock") as process:
        yield process


@asynccontextmanager
async def asked_all_the_time(url: str, *, keep: bool) -> AsyncIterator[list[int]]:
    """Send one request after the other within the context, each of which must be answered."""
    statuses: list[int] = []
    stop = asyncio.Event()

    async def ask() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=not keep)) as http:
            while not stop.is_set():
                async with post_chat(http, url) as response:
                    await response.read()
                    statuses.append(response.status)

    asking = [asyncio.create_task(ask()) for _ in range(4)]
    yield statuses
    stop.set()
    await asyncio.gather(*asking)


async def hello(_: web.BaseRequest) -> web.StreamResponse:
    return web.json_response({"choices": []})


@pytest.mark.parametrize("keep", [False, True])
async def test_no_request_fails_while_a_newer_proxy_takes_over(old: ProxyProcess, keep: bool) -> None:
    with contextlib.ExitStack() as newer:
        async with fake_engine(hello) as backend:
            url = await old.serve(backend)
            async with asked_all_the_time(url, keep=keep) as statuses:
                await eventually(lambda: len(statuses) > 20)
                new = newer.enter_context(run_proxy(old.client.socket, "--take-over"))
                state = await new.client.state()
                assert state.pid == new.process.pid
                assert url.endswith(f":{state.services[0].port}")
                before = len(statuses)
                await eventually(lambda: len(statuses) > before + 100)
                assert await new.serve(backend) == url, "the same configuration keeps the socket"
                assert await asyncio.to_thread(old.process.wait, 120 if keep else 60) == 0
            assert set(statuses) == {200}


async def test_stream_and_queue_of_the_older_proxy_go_on_and_are_counted_by_the_newer(
    old: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    gated = GatedEngine()
    async with fake_engine(gated) as backend:
        one_slot = structs.replace(backend, concurrency=1)
        url = await old.serve(one_slot)
        async with post_chat(http, url) as stream:
            waiting = asyncio.create_task(read_all(http, url))

            async def is_queued() -> bool:
                return (await old.stats()).queued == 1

            await eventually(is_queued)
            with run_proxy(old.client.socket, "--take-over") as new:

                async def is_counted() -> bool:
                    return (await new.client.state()).services[0].backends[0].in_flight == 1

                await eventually(is_counted)
                assert not await new.client.wait_idle(backend.uid, 0)
                gated.end()
                assert await stream.read() == DONE_EVENT
                gated.end()
                assert await waiting == DONE_EVENT
                assert await asyncio.to_thread(old.process.wait, 100) == 0
                assert await new.client.wait_idle(backend.uid, 5)
                assert new.client.socket.exists()


async def test_requests_of_both_proxies_fit_into_the_cells_that_they_share(
    old: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    """The older proxy has a long request, and one that waits; the newer one sends a short one only after that."""
    chats: list[int] = []
    gates = [asyncio.Event() for _ in range(3)]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        chats.append(json.loads(await request.read()).get("max_tokens", 0))
        await gates[len(chats) - 1].wait()
        return web.json_response({"choices": []})

    async with fake_engine(answer) as backend:
        shared = structs.replace(backend, shared_tokens=600)
        url = await old.serve(shared)
        long = [asyncio.create_task(read_all(http, url)) for _ in range(2)]

        async def is_queued() -> bool:
            return (await old.stats()).queued == 1

        await eventually(is_queued)
        with run_proxy(old.client.socket, "--take-over") as new:
            short = asyncio.create_task(read_all(http, url, max_tokens=20))

            async def waits() -> bool:
                return (await new.stats()).queued == 1

            await eventually(waits)
            assert (await new.client.state()).services[0].backends[0].in_flight == 2
            gates[0].set()
            await eventually(lambda: chats == [0, 0, 20])
            for gate in gates:
                gate.set()
            assert [json.loads(text) for text in await asyncio.gather(*long, short)] == [{"choices": []}] * 3
            assert await asyncio.to_thread(old.process.wait, 100) == 0


async def read_all(http: aiohttp.ClientSession, url: str, **fields: int) -> bytes:
    async with http.post(f"{url}/v1/chat/completions", json=CHAT | fields, headers=AUTHORIZED) as response:
        return await response.read()


async def test_proxy_goes_on_if_the_newer_one_dies_while_it_takes_over(
    old: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async with fake_engine(hello) as backend:
        url = await old.serve(backend)
        _, writer = await asyncio.open_unix_connection(old.client.socket.with_name("handover.sock"))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await old.client.configure(ProxyConfig((make_service(backend),)))
        assert json.loads(await read_all(http, url)) == {"choices": []}
        assert (await old.client.state()).pid == old.process.pid


async def test_nothing_is_taken_over_where_no_proxy_runs(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    code, error = await end_of(tmp_path / "private" / "control.sock", "--take-over")
    assert code == 1
    assert "no proxy hands over on" in error


TAKES_OVER_AND_DIES = """
import os, sys
from pathlib import Path
from gateway.proxy.control_socket import claim_socket
with claim_socket(Path(sys.argv[1]), take_over=True):
    {death}
"""


@pytest.mark.parametrize("death", ["os.abort()", "raise SystemExit('certificate cannot be read')"])
async def test_older_proxy_is_configured_after_the_newer_one_died_before_it_accepted(
    old: ProxyProcess, http: aiohttp.ClientSession, death: str
) -> None:
    async with fake_engine(hello) as backend:
        url = await old.serve(backend)
        newer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TAKES_OVER_AND_DIES.format(death=death), str(old.client.socket)
        )
        assert await newer.wait() != 0
        assert json.loads(await read_all(http, url)) == {"choices": []}
        # An engine that starts again has another port.
        await old.client.configure(ProxyConfig((make_service(backend),)))
        assert (await old.client.state()).pid == old.process.pid
        with run_proxy(old.client.socket, "--take-over") as new:
            assert (await new.client.state()).pid == new.process.pid


def test_ending_proxy_removes_no_socket_of_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "private" / "control.sock"
    with claim_socket(path):
        successor = NamedSocket(path)
        successor.take_name()
    with contextlib.closing(successor):
        assert path.exists()
    assert not path.exists()


async def test_proxy_that_would_not_be_found_after_the_hand_over_hands_nothing_over(
    old: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    last = old.client.socket.with_name(LAST_SOCKET.format(pid=old.process.pid)).with_suffix(".new")
    last.mkdir()  # so that no socket can be bound there, as on a full disk
    async with fake_engine(hello) as backend:
        url = await old.serve(backend)
        code, error = await end_of(old.client.socket, "--take-over")
        assert code == 1
        assert "no proxy hands over on" in error
        await old.client.configure(ProxyConfig((make_service(backend),)))
        assert json.loads(await read_all(http, url)) == {"choices": []}
        await http.close()  # the older proxy would wait for another request on this connection
        last.rmdir()
        with run_proxy(old.client.socket, "--take-over") as new:
            assert (await new.client.state()).pid == new.process.pid
            assert await old.wait() == 0


async def test_newer_proxy_whose_acceptance_comes_too_late_ends_and_takes_no_name(tmp_path: Path) -> None:
    path = tmp_path / "private" / "control.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as older, path.with_suffix(".lock").open("wb") as lock:
        older.bind(str(path.with_name(HAND_OVER_SOCKET)))
        older.listen()
        newer = asyncio.create_task(end_of(path, "--take-over"))
        connection, _ = await asyncio.to_thread(older.accept)
        with connection:
            assert await asyncio.to_thread(send_inheritance, connection, ProxyConfig(), [], lock.fileno())
        code, error = await newer
    assert code == 1
    assert f"the proxy on {path} does not hand over: it closed the connection" in error
    assert not path.exists()


async def test_proxy_starts_while_one_before_it_ends_its_last_request(
    old: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    gated = GatedEngine()
    async with fake_engine(gated) as backend:
        url = await old.serve(backend)
        async with post_chat(http, url) as stream:
            with run_proxy(old.client.socket, "--take-over") as crashing:
                await eventually(old.client.socket.with_name(LAST_SOCKET.format(pid=old.process.pid)).exists)
                crashing.process.kill()
                crashing.process.wait()
                with pytest.raises(ControlUnreachableError):
                    await crashing.client.state()
            with run_proxy(old.client.socket) as third:
                await third.serve(backend)
                gated.end()
                assert await stream.read() == DONE_EVENT
                assert await asyncio.to_thread(old.process.wait, 100) == 0
                assert (await third.client.state()).pid == third.process.pid


async def test_lack_of_descriptors_delays_the_hand_over_and_ends_no_proxy(old: ProxyProcess) -> None:
    async with fake_engine(hello) as backend:
        await old.serve(backend)
        before = resource.prlimit(old.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(old.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        with socket.socket(socket.AF_UNIX) as newer:
            newer.connect(str(old.client.socket.with_name(HAND_OVER_SOCKET)))
            await eventually(lambda: any("hand_over_failed" in line for line in old.log))
        resource.prlimit(old.process.pid, resource.RLIMIT_NOFILE, before)
        with run_proxy(old.client.socket, "--take-over") as new:
            assert (await new.client.state()).pid == new.process.pid
