"""The proxy under a changing configuration, and its own start, drain and end."""

import asyncio
import json
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

from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from gateway.proxy.config import Backend, ProxyConfig
from gateway.proxy.control_client import ProxyClient
from tests.support.live_processes import run_beside
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    DONE_EVENT,
    TOKEN,
    GatedEngine,
    ProxyProcess,
    fake_engine,
    make_service,
    post_chat,
    run_proxy,
)


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "private" / "proxy.sock"


@pytest.fixture
def own_proxy(socket_path: Path) -> Iterator[ProxyProcess]:
    """A separate proxy, which a test may end."""
    with run_proxy(socket_path) as process:
        yield process


async def hello(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="hello")


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with post_chat(http, url) as response:
        return response.status, await response.text()


# Configuration


async def test_draining_backend_finishes_its_stream_and_gets_no_new_request(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    old = GatedEngine()
    async with fake_engine(old, "old") as busy, fake_engine(hello, "new") as fresh:
        url = await proxy.serve(busy)
        draining = msgspec.structs.replace(busy, draining=True)
        async with post_chat(http, url) as stream:
            assert await proxy.serve(draining) == url
            assert (await get(http, url))[0] == 503
            assert await proxy.serve(draining, fresh) == url
            assert await get(http, url) == (200, "hello")
            assert not await proxy.client.wait_idle("old", 0.1)
            idle = asyncio.create_task(proxy.client.wait_idle("old", 10))
            old.end()
            assert await stream.read() == DONE_EVENT
            assert await idle


async def test_stream_outlives_the_configuration_of_its_backend_and_service(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    gated = GatedEngine()
    async with fake_engine(gated, "gone") as backend:
        url = await proxy.serve(backend)
        async with post_chat(http, url) as stream:
            await proxy.client.configure(ProxyConfig())
            with pytest.raises(aiohttp.ClientConnectorError):
                await get(http, url)
            assert not await proxy.client.wait_idle("gone", 0)
            gated.end()
            assert await stream.read() == DONE_EVENT
        assert await proxy.client.wait_idle("gone", 5)


async def test_agent_hears_at_once_of_a_request_to_any_backend(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    gated = GatedEngine()
    async with fake_engine(gated, "chat") as backend:
        url = await proxy.serve(backend)
        assert not await proxy.client.wait_busy(0)
        waiting = asyncio.create_task(proxy.client.wait_busy(60))
        async with post_chat(http, url) as stream:
            assert await waiting
            assert await proxy.client.wait_busy(60), "it is still there"
            gated.end()
            assert await stream.read() == DONE_EVENT
        assert await proxy.client.wait_idle("chat", 5)
        assert not await proxy.client.wait_busy(0)


async def test_unchanged_listener_keeps_its_port(proxy: ProxyProcess) -> None:
    async with fake_engine(hello) as backend:
        first = await proxy.client.configure(ProxyConfig((make_service(backend),)))
        more = ProxyConfig((make_service(backend), make_service(name="ns/other")))
        second = await proxy.client.configure(more)
        assert await proxy.client.configure(more) == second == await proxy.client.state()
    ports = {s.name: s.port for s in second.services}
    assert ports["ns/tiny"] == first.services[0].port
    assert set(ports) == {"ns/tiny", "ns/other"}


async def test_new_token_is_checked_from_the_next_request(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    async with fake_engine(hello) as backend:
        url = await proxy.serve(backend)
        changed = msgspec.structs.replace(make_service(backend), token="another")
        await proxy.client.configure(ProxyConfig((changed,)))
        assert (await get(http, url))[0] == 401


async def test_two_services_swap_their_ports_in_one_configuration(
    proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    async with fake_engine(hello) as backend:
        a, b = (await proxy.client.configure(ProxyConfig((make_service(name="a"), make_service(name="b"))))).services
        swapped = (make_service(backend, name="a", port=b.port), make_service(name="b", port=a.port))
        state = await proxy.client.configure(ProxyConfig(swapped))
        assert [(s.name, s.port, s.error) for s in state.services] == [("a", b.port, ""), ("b", a.port, "")]
        assert (await get(http, f"http://127.0.0.1:{b.port}"))[0] == 200
        assert (await get(http, f"http://127.0.0.1:{a.port}"))[0] == 503


async def test_taken_port_is_reported_and_retried_without_effect_on_others(proxy: ProxyProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ProxyConfig((make_service(name="free"), make_service(name="taken", port=port)))
        free, blocked = (await proxy.client.configure(config)).services
        assert free.error == ""
        assert blocked.error == f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        assert (await proxy.client.state()).services[1].error == blocked.error
        assert blocked.port_taken
    again, bound = (await proxy.client.configure(config)).services
    assert (again.port, bound.port, bound.error) == (free.port, port, "")


async def test_foreign_address_is_not_reported_as_a_taken_port(proxy: ProxyProcess) -> None:
    elsewhere = msgspec.structs.replace(make_service(), address="192.0.2.1")
    (blocked,) = (await proxy.client.configure(ProxyConfig((elsewhere,)))).services
    assert "cannot listen on 192.0.2.1" in blocked.error
    assert not blocked.port_taken


async def test_refused_configuration_changes_nothing(proxy: ProxyProcess) -> None:
    before = await proxy.client.configure(ProxyConfig((make_service(),)))
    open_to_all = msgspec.structs.replace(make_service(), token="")
    with pytest.raises(ControlRefusedError, match=r"configuration refused: .* `\$\.services\[0\]\.token`"):
        await proxy.client.configure(ProxyConfig((open_to_all,)))
    assert await proxy.client.state() == before


async def test_absent_proxy_is_reported_as_unreachable(tmp_path: Path) -> None:
    with pytest.raises(ControlUnreachableError, match=r"absent\.sock"):
        await ProxyClient(tmp_path / "absent.sock").state()


async def test_response_of_an_incompatible_version_is_reported_as_such(tmp_path: Path) -> None:
    async def newer(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"version": 9, "pid": "none"})

    runner = web.ServerRunner(web.Server(newer))
    await runner.setup()
    await web.UnixSite(runner, tmp_path / "newer.sock").start()
    with pytest.raises(ControlRefusedError, match="another version"):
        await ProxyClient(tmp_path / "newer.sock").state()
    await runner.cleanup()


# Life


async def test_control_socket_is_private_and_reports_the_pid(proxy: ProxyProcess) -> None:
    path = proxy.client.socket
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert (await proxy.client.state()).pid == proxy.process.pid


async def test_second_proxy_on_the_same_socket_refuses_to_start(proxy: ProxyProcess) -> None:
    code, error = await end_of(proxy.client.socket)
    assert code == 1
    assert f"a proxy already runs on {proxy.client.socket}; stop it with SIGTERM, or use another path" in error
    assert (await proxy.client.state()).pid == proxy.process.pid


@pytest.fixture
def open_directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path


async def test_directory_that_other_users_may_enter_is_refused(open_directory: Path) -> None:
    code, error = await end_of(open_directory / "proxy.sock")
    assert code == 1
    assert f"{open_directory} must belong to uid" in error


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def end_of(path: Path, *arguments: str) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "cli.main", "proxy", "--socket", str(path), *arguments]
    async with run_beside(*command, stderr=subprocess.PIPE) as process:
        _, error = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode, error.decode()


async def test_too_long_socket_path_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 200) / "proxy.sock"
    code, error = await end_of(path)
    assert code == 1
    assert f"cannot listen on {path}: AF_UNIX path too long; use a shorter path" in error


async def test_limit_of_open_files_is_raised(socket_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with run_proxy(socket_path, soft_descriptors=256) as proxy:
        assert resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE) == (min(hard, 10240), hard)


async def test_killed_proxy_can_be_restarted_on_its_socket(socket_path: Path) -> None:
    with run_proxy(socket_path) as first:
        first.process.kill()
        first.process.wait()
        assert mode(socket_path)
        with pytest.raises(ControlUnreachableError):
            await first.client.state()
        with run_proxy(socket_path) as second:
            state = await first.client.state()
            assert (state.pid, state.services) == (second.process.pid, ())


async def test_sigterm_lets_streams_end_and_accepts_no_new_request(
    own_proxy: ProxyProcess, http: aiohttp.ClientSession, socket_path: Path
) -> None:
    gated = GatedEngine()
    async with fake_engine(gated) as backend:
        url = await own_proxy.serve(backend)
        async with post_chat(http, url) as stream:
            own_proxy.process.terminate()
            gated.release(b"data: after\n")
            assert await stream.content.readany() == b"data: after\n"
            gated.end()
            assert await stream.read() == DONE_EVENT
        assert await own_proxy.wait() == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await get(http, url)
    assert names(socket_path.parent) == ["proxy.lock"]


async def test_drain_ends_streams_with_an_error_after_its_timeout(
    socket_path: Path, http: aiohttp.ClientSession
) -> None:
    gated = GatedEngine()
    with run_proxy(socket_path, "--drain-seconds", "0.2") as proxy:
        async with fake_engine(gated) as backend:
            url = await proxy.serve(backend)
            async with post_chat(http, url) as stream:
                proxy.process.terminate()
                *_, last = (line for line in (await stream.read()).splitlines() if line)
                error = json.loads(last.removeprefix(b"data: "))["error"]
                assert (error["code"], "spec.drainSeconds" in error["message"]) == ("replica_stopped", True)
            assert await proxy.wait() == 0
            await asyncio.wait_for(gated.cancelled.wait(), 30)
    assert any("requests_broken_off" in line for line in proxy.log)


async def test_second_sigterm_ends_the_drain(own_proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    gated = GatedEngine()
    async with fake_engine(gated) as backend:
        url = await own_proxy.serve(backend)
        async with post_chat(http, url):
            own_proxy.process.terminate()
            await refused(http, url)
            own_proxy.process.terminate()
            assert await own_proxy.wait() == -signal.SIGTERM


async def refused(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until `url` refuses connections."""
    while True:
        try:
            async with http.get(f"{url}/health"):
                pass
        except aiohttp.ClientConnectorError:
            return
        except aiohttp.ClientError:
            pass  # the kernel accepted the connection while the listener was closing


async def test_tokens_and_prompts_are_not_written_anywhere(
    own_proxy: ProxyProcess, http: aiohttp.ClientSession, socket_path: Path, refused_port: int
) -> None:
    prompt = "a-secret-prompt"
    url = await own_proxy.serve(Backend(uid="dead", url=f"http://127.0.0.1:{refused_port}"))
    path = f"{url}/v1/chat/completions?q={prompt}"
    async with http.post(path, json={"messages": prompt}, headers=AUTHORIZED) as response:
        assert response.status == 503
        answer = await response.text()
    command = " ".join(psutil.Process(own_proxy.process.pid).cmdline())
    state = repr(await own_proxy.client.state())
    own_proxy.process.terminate()
    await own_proxy.wait()
    log = "".join(own_proxy.log)
    assert "backend_not_accepting" in log
    for text in (log, command, state, answer):
        assert TOKEN not in text
        assert prompt not in text
    assert names(socket_path.parent) == ["proxy.lock"]
