"""Stopping a host by its control socket: requests end, the API is told, and the next agent serves again."""

import aiohttp

from kube.resources import METAL_HOSTS
from metal_agent.control.agent_client import AgentClient
from tests.cluster.metal_agent.bound_process import LONG, BoundProcess, answers, bound_process, engines, http
from tests.support.eventually import eventually

__all__ = ["bound_process", "http"]


async def test_stopped_host_withdraws_drains_and_reports_and_serves_after_its_next_start(
    bound_process: BoundProcess, http: aiohttp.ClientSession
) -> None:
    await bound_process.bind(contextLength=4096)
    url = await bound_process.ready()
    async with http.post(f"{url}/v1/chat/completions", json=LONG | {"max_tokens": 3000}) as stream:
        await stream.content.readline()
        await AgentClient(bound_process.host.state_folder).stop()

        async def draining() -> bool:
            conditions = (await bound_process.slice())["endpoints"][0]["conditions"]
            return bool(conditions == {"ready": False, "serving": True, "terminating": True})

        await eventually(draining)
        assert (await stream.content.read()).rstrip().endswith(b"data: [DONE]"), "it was let to its end"
    assert await bound_process.host.agent.wait() == 0
    assert engines(bound_process) == []
    assert (await bound_process.status()).phase == "Stopped"
    assert await bound_process.gone()

    async def free_bytes() -> int:
        found: int = (await bound_process.client.get(METAL_HOSTS, bound_process.host.name))["status"]["availableBytes"]
        return found

    assert await free_bytes() == 0, "nothing new is bound to a host that stops"
    bound_process.host.agent.start()
    assert await bound_process.ready() == url
    assert await answers(http, url)
    await eventually(free_bytes)
