"""Requests that only count the tokens of a prompt, which an engine does without its model."""

import aiohttp
import pytest
from aiohttp import web

from gateway.proxy.config import BackendHealth
from tests.unit.gateway.proxy.running_proxy import AUTHORIZED, CHAT, ProxyProcess, fake_engine


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens"])
async def test_engine_that_still_counts_tokens_is_not_taken_for_sound(
    proxy: ProxyProcess, http: aiohttp.ClientSession, path: str
) -> None:
    async def count_only(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == path:
            return web.json_response({"input_tokens": 6})
        return web.json_response({"error": {"message": "Compute error."}}, status=500)

    async with fake_engine(count_only, "sick") as backend:
        url = await proxy.serve(backend)
        for prompt in ("1", "2", "3", "4"):
            for asked in (f"{url}{path}", f"{url}/v1/completions"):
                async with http.post(asked, json=CHAT | {"prompt": prompt}, headers=AUTHORIZED) as response:
                    assert response.status == (200 if asked.endswith(path) else 500)
        health = await anext(proxy.client.watch_health())
        assert health == BackendHealth("sick", suspect=True, reason="Failing", message=health.message)
