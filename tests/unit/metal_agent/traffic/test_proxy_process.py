"""The agent starts the host's proxy, finds it again by its socket, and ends it when it is stuck."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from gateway.http import control_client
from gateway.http.control_client import ControlUnreachableError
from gateway.proxy.config import ProxyConfig, ServiceListener
from metal_agent.native.process import NativeProcess, _signal_group, identify_process, kill_strays, spawn_process
from metal_agent.traffic import proxy_process as proxies
from metal_agent.traffic.proxy_process import Proxy
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import DONE_EVENT, GatedEngine, fake_engine, make_service, post_chat


@asynccontextmanager
async def agent(folder: Path) -> AsyncIterator[Proxy]:
    """Keep a proxy running as one agent does; the proxy continues after the context."""
    proxy = Proxy(folder, lambda: None)
    proxy.adopt()
    task = asyncio.create_task(proxy.run())
    try:
        yield proxy
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    yield tmp_path
    await kill_strays(tmp_path, ())


async def pid(proxy: Proxy) -> int:
    """Wait until the proxy answers; return its pid."""
    await eventually(lambda: proxy.answers)
    assert proxy.process
    return proxy.process.pid


async def test_proxy_outlives_its_agent_and_is_found_by_its_socket(folder: Path) -> None:
    async with agent(folder) as first:
        started = await pid(first)
    async with agent(folder) as second:
        assert second.process
        assert await pid(second) == started


async def test_file_of_the_working_directory_is_no_part_of_the_proxy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    planted = tmp_path_factory.mktemp("downloads")
    for name in ("cli.py", "gateway.py", "aiohttp.py"):
        (planted / name).write_text("raise SystemExit('planted')\n")
    monkeypatch.chdir(planted)
    async with agent(folder) as first:
        await pid(first)


async def test_proxy_gets_no_credential_of_agents_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "a-secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    async with agent(folder) as first:
        assert "a-secret" not in psutil.Process(await pid(first)).environ().values()


async def test_proxy_that_does_not_listen_yet_is_ended_too(folder: Path) -> None:
    async with agent(folder) as first:
        await eventually(lambda: first.process)
        assert first.process
        started = first.process.pid
    await first.end()
    assert identify_process(started) is None


async def test_busy_proxy_is_waited_for_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "_TIMEOUT_SECONDS", 0.2)
    async with agent(folder) as first:
        started = await pid(first)
        _signal_group(started, signal.SIGSTOP)
    async with agent(folder) as second:
        assert second.process
        assert second.process.pid == started
        with pytest.raises(ControlUnreachableError):
            await second.client.state()
        assert not second.answers
        _signal_group(started, signal.SIGCONT)
        assert await pid(second) == started


async def test_proxy_of_another_version_is_replaced_by_hand_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent(folder) as first:
        older = await pid(first)
        monkeypatch.setattr(proxies, "BUILD", "9.9.9")
    async with agent(folder) as second:
        await eventually(lambda: second.process and second.process.pid != older)
        newer = await pid(second)
        state = await second.client.state()
        assert state.pid == newer
        await eventually(lambda: identify_process(older) is None)
        assert second.pids() == {newer}


async def test_agent_outlives_newer_proxy_that_cannot_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent(folder) as first:
        older = await pid(first)
    refused = asyncio.Event()

    def spawn(argv: list[str], *others: Any) -> NativeProcess:
        if "--take-over" in argv:
            refused.set()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # as at the limit of processes
        return spawn_process(argv, *others)

    monkeypatch.setattr(proxies, "BUILD", "9.9.9")
    monkeypatch.setattr(proxies, "spawn_process", spawn)
    monkeypatch.setattr(proxies, "_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(proxies, "_CHECK_SECONDS", 0.05)
    async with agent(folder) as second:
        await eventually(refused.is_set)
        await eventually(lambda: second.process and second.process.pid != older and second.answers)


async def test_another_proxy_is_started_if_the_newer_one_ends_right_after_it_took_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_as, crashed = Proxy._read_state_of, list[int]()

    async def answers_until_it_took_over(self: Proxy, pid: int) -> bool:
        if pid == older or crashed:
            return await answers_as(self, pid)
        if await answers_as(self, pid):
            crashed.append(pid)
            os.kill(pid, signal.SIGKILL)
        return False

    gated = GatedEngine()
    async with fake_engine(gated) as backend, aiohttp.ClientSession() as http:
        async with agent(folder) as first:
            older = await pid(first)
            state = await first.client.configure(ProxyConfig((make_service(backend),)))
        async with post_chat(http, f"http://127.0.0.1:{state.services[0].port}") as stream:
            monkeypatch.setattr(proxies, "BUILD", "9.9.9")
            monkeypatch.setattr(Proxy, "_read_state_of", answers_until_it_took_over)
            async with agent(folder) as second:
                await eventually(lambda: crashed and second.process and second.process.pid not in {older, *crashed})
                newest = await pid(second)
                assert second.pids() == {older, newest}
                gated.end()
                assert await stream.read() == DONE_EVENT


@pytest.mark.parametrize("crashes", [False, True])
async def test_hand_over_of_an_agent_that_was_ended_goes_on(folder: Path, crashes: bool) -> None:
    """The next agent ends neither proxy; if the newer one does not serve, another does, and the older one ends."""
    gated = GatedEngine()
    async with fake_engine(gated) as backend, aiohttp.ClientSession() as http:
        async with agent(folder) as first:
            older = await pid(first)
            state = await first.client.configure(ProxyConfig((make_service(backend),)))
        async with post_chat(http, f"http://127.0.0.1:{state.services[0].port}") as stream:
            second = Proxy(folder, lambda: None)
            second.adopt()
            assert second.pids() == {older}
            newer = Proxy(folder, lambda: None)._spawn("--take-over")
            await eventually(lambda: second.pids() == {older, newer.pid})
            assert await kill_strays(folder, second.pids()) == []

            async def has_taken_over() -> bool:
                with contextlib.suppress(ControlUnreachableError):  # between the two, neither has the socket
                    return (await second.client.state()).pid == newer.pid
                return False

            await eventually(has_taken_over)
            if crashes:
                os.kill(newer.pid, signal.SIGKILL)
                await newer.wait()
            running = asyncio.create_task(second.run())
            await eventually(lambda: second.answers and second.process and second.process.pid != older)
            assert second.process
            assert (second.process.pid == newer.pid) == (not crashes)
            assert second.pids() == {older, second.process.pid}
            gated.end()
            assert await stream.read() == DONE_EVENT
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def test_proxy_that_cannot_hand_over_is_replaced_when_idle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent(folder) as first:
        older = await pid(first)
    monkeypatch.setattr(proxies, "BUILD", "9.9.9")
    monkeypatch.setattr(proxies, "_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(proxies, "_CHECK_SECONDS", 0.05)
    (folder / "proxy" / "handover.sock").unlink()
    monkeypatch.setattr(proxies, "PATIENCE_SECONDS", 3)
    async with agent(folder) as second:
        await eventually(lambda: second.process and second.process.pid != older and second.answers)
        assert identify_process(older) is None


async def test_proxy_whose_control_socket_is_silent_is_left_alone_while_it_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "_CHECK_SECONDS", 0.05)
    async with agent(folder) as proxy:
        serving = await pid(proxy)
        service = ServiceListener(name="ns/tiny", address="127.0.0.1", port=0, token="t")
        proxy.state = await proxy.client.configure(ProxyConfig((service,)))
        port = proxy.state.services[0].port
        checks = []
        answers_as = proxy._has_live_listener

        async def serves() -> bool:
            checks.append(await answers_as())
            return checks[-1]

        monkeypatch.setattr(proxy, "_has_live_listener", serves)
        monkeypatch.setattr(proxies, "PATIENCE_SECONDS", 0.2)
        (folder / "proxy" / "control.sock").unlink()
        await eventually(lambda: len(checks) > 3)
        assert all(checks)
        assert identify_process(serving)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()


async def test_stuck_proxy_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(proxies, "GRACE_SECONDS", 0.1)
    async with agent(folder) as proxy:
        stuck = await pid(proxy)
        with monkeypatch.context() as impatient:
            impatient.setattr(control_client, "_TIMEOUT_SECONDS", 0.2)
            impatient.setattr(proxies, "PATIENCE_SECONDS", 0.3)
            _signal_group(stuck, signal.SIGSTOP)
            await eventually(lambda: not proxy.answers)
        assert await pid(proxy) != stuck
