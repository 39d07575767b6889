"""Requests that share the cells of llama.cpp's cache do not end each other: the real proxy before the real server.

The engine has four slots, and cells for one context and a half. Its model never ends an answer.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import pytest
from msgspec import structs

from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.config import Backend
from gateway.proxy.paths import INFERENCE
from gateway.proxy.request_body import SHORT_BODY_BYTES, read_short_body
from gateway.proxy.upstream_request import count_prompt
from tests.support import llama_server
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_gguf
from tests.unit.gateway.proxy.running_proxy import AUTHORIZED, ProxyProcess, run_proxy

CONTEXT = 1024
SHARED = 512
PATHS = {route: path for path, route in INFERENCE.items()}
GENERATING = ["chat", "completions", "messages", "responses"]
KEY = "key-of-the-engine"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    folder = tmp_path_factory.mktemp("engine")
    model, key = folder / "endless.gguf", folder / "key"
    tiny_gguf.write(model, loop=True)
    key.write_text(KEY)
    cells = ["-c", str(CONTEXT + SHARED), "-np", "4", "-kvu", "--kv-unified-per-slot", str(CONTEXT)]
    with llama_server.serve(model, *cells, "--cache-ram", "64", "--api-key-file", str(key)) as server:
        plain = Backend("a", server.url, engine="llama.cpp", api_key=KEY)
        yield structs.replace(plain, concurrency=4, context_length=CONTEXT, shared_tokens=SHARED)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with run_proxy(tmp_path_factory.mktemp("proxy") / "private" / "proxy.sock") as process:
        yield process


class Outcome(NamedTuple):
    status: int
    text: str


class Client:
    """Sends requests to the service of the proxy."""

    def __init__(self, proxy: ProxyProcess, url: str, http: aiohttp.ClientSession) -> None:
        self._proxy = proxy
        self._url = url
        self._http = http

    def post(self, route: str, **body: Any) -> Any:
        return self._http.post(f"{self._url}{PATHS[route]}", json={"model": "tiny", **body}, headers=AUTHORIZED)

    async def ask(self, route: str, **body: Any) -> Outcome:
        async with self.post(route, **body) as response:
            return Outcome(response.status, await response.text())

    async def chat(self, content: str = "Hi", **body: Any) -> Outcome:
        return await self.ask("chat", messages=[{"role": "user", "content": content}], **body)

    async def is_busy(self) -> bool:
        (service,) = (await self._proxy.client.state()).services
        return service.backends[0].in_flight == 1


@asynccontextmanager
async def serve(proxy: ProxyProcess, backend: Backend) -> AsyncIterator[Client]:
    url = await proxy.serve(backend)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        yield Client(proxy, url, http)


def make_body(route: str, text: str, limit: int | None = None) -> dict[str, Any]:
    """Return a request with this text as its prompt."""
    limits = {} if limit is None else {"max_output_tokens" if route == "responses" else "max_tokens": limit}
    match route:
        case "responses":
            return {"input": text, **limits}
        case "completions":
            return {"prompt": text, **limits}
        case _:
            return {"messages": [{"role": "user", "content": text}], **limits}


async def test_without_lanes_long_requests_end_each_other(proxy: ProxyProcess, backend: Backend) -> None:
    """The fault of the engine for which lanes are there."""
    async with serve(proxy, structs.replace(backend, uid="b", shared_tokens=None)) as client:
        outcomes = await asyncio.gather(*(client.chat() for _ in range(2)))
    assert [outcome.status for outcome in outcomes] == [500, 500]
    assert "Context size has been exceeded" in outcomes[0].text


@pytest.mark.parametrize("route", GENERATING)
async def test_tokens_are_counted_as_the_engine_uses_them(proxy: ProxyProcess, backend: Backend, route: str) -> None:
    body = make_body(route, "Hällo <s> wörld \n" * 9, limit=3)
    short = read_short_body(json.dumps(body).encode())
    assert short
    counted = await count_prompt(UpstreamPool(), backend, route, short)
    async with serve(proxy, backend) as client:
        usage = json.loads((await client.ask(route, **body)).text)["usage"]
    used = usage.get("prompt_tokens", usage.get("input_tokens")) + usage.get("cache_read_input_tokens", 0)
    assert counted == used > 50


@pytest.mark.parametrize("ignored", ["", "x" * SHORT_BODY_BYTES])
async def test_short_request_starts_at_once_beside_a_long_answer_and_a_long_one_waits(
    proxy: ProxyProcess, backend: Backend, ignored: str
) -> None:
    async with serve(proxy, backend) as client:
        async with client.post("chat", **make_body("chat", "Hi"), stream=True) as long:
            await long.content.readline()
            waiting = asyncio.create_task(client.chat(max_tokens=SHARED))  # with its prompt it is too long
            assert (await client.chat(max_tokens=20, ignored=ignored)).status == 200
            assert not waiting.done()
            assert await client.is_busy()
            assert b"[DONE]" in await long.read()
        assert (await waiting).status == 200


async def test_cancelled_request_keeps_its_cells_until_the_engine_has_freed_them(
    proxy: ProxyProcess, backend: Backend
) -> None:
    prompt = "x" * (CONTEXT // 2)
    async with serve(proxy, backend) as client:
        for stream in (False, True, False):
            cancelled = asyncio.create_task(client.chat(prompt, stream=stream))
            await eventually(client.is_busy)
            cancelled.cancel()
            outcomes = await asyncio.gather(client.chat(prompt), client.chat(prompt), client.chat(max_tokens=400))
            assert [outcome.status for outcome in outcomes] == [200, 200, 200]


@pytest.mark.parametrize("seed", range(2))
async def test_none_of_a_random_mix_is_ended_by_another(proxy: ProxyProcess, backend: Backend, seed: int) -> None:
    """Also not by those that their clients cancel, nor by several answers to one prompt, which may end themselves."""
    draw = random.Random(seed)  # noqa: S311 - a mix that comes again
    outcomes: list[Outcome] = []

    async def ask_some(client: Client) -> None:
        for _ in range(10):
            route, stream = draw.choice(GENERATING), draw.random() < 0.5
            text, limit = "x" * draw.choice([1, 20, 100, 300, 800]), draw.choice([None, 1, 20, 100, 300, 2000])
            several = {"n": 2} if route in {"chat", "completions"} and draw.random() < 0.1 else {}
            asking = asyncio.create_task(client.ask(route, **make_body(route, text, limit), stream=stream, **several))
            patience = draw.random() / 3 if draw.random() < 0.25 else None
            await asyncio.wait({asking}, timeout=patience)
            if not asking.done():
                asking.cancel()
            elif not several:
                outcomes.append(await asking)

    async with serve(proxy, backend) as client:
        await asyncio.gather(*(ask_some(client) for _ in range(8)))
    assert len(outcomes) > 40
    assert {outcome.status for outcome in outcomes} == {200}
    assert not [outcome.text for outcome in outcomes if '"error":{' in outcome.text]
