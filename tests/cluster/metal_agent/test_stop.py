"""Stopping a host by its control socket or by a shutdown of its machine: the API is told, the next agent serves."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import aiohttp

from gateway.http.control_client import ControlUnreachableError
from kube.resources import METAL_HOSTS
from metal_agent.control.agent_client import AgentClient
from tests.cluster.metal_agent.bound_process import LONG, BoundProcess, answers, bound_process, engines, http
from tests.support.agent_process import shutdown_path
from tests.support.eventually import eventually

__all__ = ["bound_process", "http"]


async def test_stopped_host_withdraws_drains_and_reports_and_serves_after_its_next_start(
    bound_process: BoundProcess, http: aiohttp.ClientSession
) -> None:
    await bound_process.bind(contextLength=4096)
    url = await bound_process.ready()
    async with http.post(f"{url}/v1/chat/completions", json=LONG | {"max_tokens": 600}) as stream:
        await stream.content.readline()
        pid = await bound_process.pid()
        os.kill(pid, signal.SIGSTOP)  # the request lasts until the slice is read, however long that takes
        await AgentClient(bound_process.host.state_folder).stop()
        await eventually(bound_process.draining)
        os.kill(pid, signal.SIGCONT)
        assert (await stream.content.read()).rstrip().endswith(b"data: [DONE]"), "it was let to its end"
    assert await bound_process.host.agent.wait() == 0
    assert engines(bound_process) == []
    assert (await bound_process.status()).phase == "Stopped"
    assert await bound_process.gone()

    async def free_bytes() -> int:
        available: int = (await bound_process.client.get(METAL_HOSTS, bound_process.host.name))["status"][
            "availableBytes"
        ]
        return available

    assert await free_bytes() == 0, "nothing new is bound to a host that stops"
    bound_process.host.agent.start()
    assert await bound_process.ready() == url
    assert await answers(http, url)
    await eventually(free_bytes)


@contextlib.asynccontextmanager
async def ask_while_ready(
    bound_process: BoundProcess, http: aiohttp.ClientSession, url: str
) -> AsyncIterator[list[bool]]:
    """Send one request after the other as long as the endpoint is ready, as kube-proxy would; yield the answers."""
    outcomes: list[bool] = []

    async def ask() -> None:
        while (await bound_process.slice())["endpoints"][0]["conditions"]["ready"]:
            outcomes.append(await answers(http, url))

    asking = asyncio.create_task(ask())
    try:
        await eventually(lambda: outcomes)
        yield outcomes
        await asking
    finally:
        asking.cancel()


async def test_machine_that_shuts_down_withdraws_its_endpoints_before_the_agent_ends(
    bound_process: BoundProcess, http: aiohttp.ClientSession
) -> None:
    await bound_process.bind()
    url = await bound_process.ready()
    host, pid = bound_process.host, await bound_process.pid()
    await host.agent.stop()
    assert (await bound_process.slice())["endpoints"][0]["conditions"]["ready"], "an update of the agent costs nothing"
    host.agent.start()
    assert await bound_process.pid() == pid
    control = AgentClient(host.state_folder)

    async def runs_again() -> bool:
        try:
            return (await control.status()).ready
        except ControlUnreachableError:
            return False

    await eventually(runs_again)
    shutdown_path(host.level).touch()
    async with ask_while_ready(bound_process, http, url) as outcomes:
        assert await host.agent.stop() == 0
    assert all(outcomes)
    assert "machine_shuts_down" in host.agent.tail(20)
    conditions = (await bound_process.slice())["endpoints"][0]["conditions"]
    assert conditions == {"ready": False, "serving": False, "terminating": False}

    shutdown_path(host.level).unlink()
    host.agent.start()
    assert await bound_process.ready() == url
    assert await answers(http, url)
