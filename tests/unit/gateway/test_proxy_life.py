"""The proxy under a changing configuration, and its own beginning and end."""

import asyncio
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from aiohttp import web

from gateway.proxy.client import ProxyClient, ProxyRefusedError, ProxyUnreachableError
from gateway.proxy.config import Backend, ProxyConfig
from tests.unit.gateway.proxy_process import AUTHORIZED, LAST, TOKEN, Gated, ProxyProcess, asks, run, service, upstream


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "private" / "proxy.sock"


@pytest.fixture
def mortal(socket_path: Path) -> Iterator[ProxyProcess]:
    """A proxy of the test's own, to be ended."""
    with run(socket_path) as process:
        yield process


async def hello(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="hello")


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with asks(http, url) as response:
        return response.status, await response.text()


# Configuration


async def test_a_drained_backend_finishes_its_stream_and_gets_nothing_new(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    old = Gated()
    async with upstream(old, "old") as busy, upstream(hello, "new") as fresh:
        url = await proxy.serve(busy)
        draining = msgspec.structs.replace(busy, draining=True)
        async with asks(http, url) as stream:
            assert await proxy.serve(draining) == url
            assert (await get(http, url))[0] == 503
            assert await proxy.serve(draining, fresh) == url
            assert await get(http, url) == (200, "hello")
            assert not await proxy.client.wait_idle("old", 0.1)
            idle = asyncio.create_task(proxy.client.wait_idle("old", 10))
            old.end()
            assert await stream.read() == LAST
            assert await idle


async def test_a_stream_outlives_its_backends_and_its_services_configuration(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    gated = Gated()
    async with upstream(gated, "gone") as backend:
        url = await proxy.serve(backend)
        async with asks(http, url) as stream:
            await proxy.client.configure(ProxyConfig())
            with pytest.raises(aiohttp.ClientConnectorError):
                await get(http, url)
            assert not await proxy.client.wait_idle("gone", 0)
            gated.end()
            assert await stream.read() == LAST
        assert await proxy.client.wait_idle("gone", 5)


async def test_a_listener_that_stays_is_not_touched(proxy: ProxyProcess) -> None:
    async with upstream(hello) as backend:
        first = await proxy.client.configure(ProxyConfig((service(backend),)))
        more = ProxyConfig((service(backend), service(name="ns/other")))
        second = await proxy.client.configure(more)
        assert await proxy.client.configure(more) == second == await proxy.client.state()
    ports = {s.name: s.port for s in second.services}
    assert ports["ns/tiny"] == first.services[0].port
    assert set(ports) == {"ns/tiny", "ns/other"}


async def test_a_new_token_holds_from_the_next_request(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    async with upstream(hello) as backend:
        url = await proxy.serve(backend)
        changed = msgspec.structs.replace(service(backend), token="another")
        await proxy.client.configure(ProxyConfig((changed,)))
        assert (await get(http, url))[0] == 401


async def test_two_services_exchange_their_ports_in_one_step(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    async with upstream(hello) as backend:
        a, b = (await proxy.client.configure(ProxyConfig((service(name="a"), service(name="b"))))).services
        swapped = (service(backend, name="a", port=b.port), service(name="b", port=a.port))
        state = await proxy.client.configure(ProxyConfig(swapped))
        assert [(s.name, s.port, s.error) for s in state.services] == [("a", b.port, ""), ("b", a.port, "")]
        assert (await get(http, f"http://127.0.0.1:{b.port}"))[0] == 200
        assert (await get(http, f"http://127.0.0.1:{a.port}"))[0] == 503


async def test_a_taken_port_is_reported_harms_no_other_and_is_tried_again(proxy: ProxyProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ProxyConfig((service(name="free"), service(name="taken", port=port)))
        free, blocked = (await proxy.client.configure(config)).services
        assert free.error == ""
        assert blocked.error == f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        assert (await proxy.client.state()).services[1].error == blocked.error
        assert blocked.taken
    again, bound = (await proxy.client.configure(config)).services
    assert (again.port, bound.port, bound.error) == (free.port, port, "")


async def test_an_address_that_is_not_here_is_no_matter_of_ports(proxy: ProxyProcess) -> None:
    elsewhere = msgspec.structs.replace(service(), address="192.0.2.1")
    (blocked,) = (await proxy.client.configure(ProxyConfig((elsewhere,)))).services
    assert "cannot listen on 192.0.2.1" in blocked.error
    assert not blocked.taken


async def test_a_configuration_that_is_refused_changes_nothing(proxy: ProxyProcess) -> None:
    before = await proxy.client.configure(ProxyConfig((service(),)))
    open_to_all = msgspec.structs.replace(service(), token="")
    with pytest.raises(ProxyRefusedError, match=r"configuration refused: .* `\$\.services\[0\]\.token`"):
        await proxy.client.configure(ProxyConfig((open_to_all,)))
    assert await proxy.client.state() == before


async def test_an_absent_proxy_is_told_from_one_that_refuses(tmp_path: Path) -> None:
    with pytest.raises(ProxyUnreachableError, match=r"nobody\.sock"):
        await ProxyClient(tmp_path / "nobody.sock").state()


async def test_a_proxy_of_another_version_is_told_as_such(tmp_path: Path) -> None:
    async def newer(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"version": 9, "pid": "none"})

    runner = web.ServerRunner(web.Server(newer))
    await runner.setup()
    await web.UnixSite(runner, tmp_path / "newer.sock").start()
    with pytest.raises(ProxyRefusedError, match="another version"):
        await ProxyClient(tmp_path / "newer.sock").state()
    await runner.cleanup()


# Life


async def test_the_control_socket_is_private_and_says_who_serves(proxy: ProxyProcess) -> None:
    path = proxy.client.socket
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert (await proxy.client.state()).pid == proxy.process.pid


async def test_a_second_proxy_leaves_the_first_alone(proxy: ProxyProcess) -> None:
    code, error = await end_of(proxy.client.socket)
    assert code == 1
    assert f"a proxy already runs on {proxy.client.socket}; stop it with SIGTERM, or use another path" in error
    assert (await proxy.client.state()).pid == proxy.process.pid


@pytest.fixture
def open_directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path


async def test_a_directory_that_others_may_enter_is_refused(open_directory: Path) -> None:
    code, error = await end_of(open_directory / "proxy.sock")
    assert code == 1
    assert f"{open_directory} must belong to uid" in error


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def end_of(path: Path) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "cli.main", "proxy", "--socket", str(path)]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, error = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode, error.decode()


async def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 200) / "proxy.sock"
    code, error = await end_of(path)
    assert code == 1
    assert f"cannot listen on {path}: AF_UNIX path too long; use a shorter path" in error


async def test_the_descriptor_limit_that_a_service_starts_with_is_raised(socket_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with run(socket_path, soft_descriptors=256) as proxy:
        assert resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE) == (min(hard, 10240), hard)


async def test_a_killed_proxy_can_be_started_again_on_its_socket(socket_path: Path) -> None:
    with run(socket_path) as first:
        first.process.kill()
        first.process.wait()
        assert mode(socket_path)
        with pytest.raises(ProxyUnreachableError):
            await first.client.state()
        with run(socket_path) as second:
            state = await first.client.state()
            assert (state.pid, state.services) == (second.process.pid, ())


async def test_sigterm_lets_streams_end_and_takes_no_new_request(
    mortal: ProxyProcess, http: aiohttp.ClientSession, socket_path: Path
) -> None:
    gated = Gated()
    async with upstream(gated) as backend:
        url = await mortal.serve(backend)
        async with asks(http, url) as stream:
            mortal.process.terminate()
            gated.release(b"data: after\n")
            assert await stream.content.readany() == b"data: after\n"
            gated.end()
            assert await stream.read() == LAST
        assert await asyncio.to_thread(mortal.process.wait, 10) == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await get(http, url)
    assert names(socket_path.parent) == ["proxy.lock"]


async def test_a_drain_ends_when_its_time_is_up(socket_path: Path, http: aiohttp.ClientSession) -> None:
    gated = Gated()
    with run(socket_path, "--drain-seconds", "0.2") as proxy:
        async with upstream(gated) as backend:
            url = await proxy.serve(backend)
            async with asks(http, url) as stream:
                proxy.process.terminate()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await stream.read()
            assert await asyncio.to_thread(proxy.process.wait, 10) == 0
            await asyncio.wait_for(gated.cancelled.wait(), 2)
    assert any("requests broken off" in line for line in proxy.log)


async def test_a_second_sigterm_does_not_wait(mortal: ProxyProcess, http: aiohttp.ClientSession) -> None:
    gated = Gated()
    async with upstream(gated) as backend:
        url = await mortal.serve(backend)
        async with asks(http, url):
            mortal.process.terminate()
            await refused(http, url)
            mortal.process.terminate()
            assert await asyncio.to_thread(mortal.process.wait, 10) == -signal.SIGTERM


async def refused(http: aiohttp.ClientSession, url: str) -> None:
    """Return when nobody listens at `url` any more."""
    while True:
        try:
            async with http.get(f"{url}/health"):
                pass
        except aiohttp.ClientConnectorError:
            return
        except aiohttp.ClientError:
            pass  # the kernel took the connection in the moment in which the listener closed


async def test_no_token_and_no_prompt_is_written_anywhere(
    mortal: ProxyProcess, http: aiohttp.ClientSession, socket_path: Path, unused_tcp_port: int
) -> None:
    prompt = "a-prompt-that-nobody-may-read"
    url = await mortal.serve(Backend(uid="dead", url=f"http://127.0.0.1:{unused_tcp_port}"))
    path = f"{url}/v1/chat/completions?q={prompt}"
    async with http.post(path, json={"messages": prompt}, headers=AUTHORIZED) as response:
        assert response.status == 503
        answer = await response.text()
    command = " ".join(psutil.Process(mortal.process.pid).cmdline())
    state = repr(await mortal.client.state())
    mortal.process.terminate()
    await asyncio.to_thread(mortal.process.wait, 10)
    log = "".join(mortal.log)
    assert "does not accept" in log
    for text in (log, command, state, answer):
        assert TOKEN not in text
        assert prompt not in text
    assert names(socket_path.parent) == ["proxy.lock"]
