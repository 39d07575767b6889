"""The stand-ins of daemons answer in the shape that was recorded, and Ollama's own client reads their answers."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import ollama
import pytest

from tests.support import daemons
from tests.support.daemons.ollama import OllamaStandIn
from tests.support.daemons.omlx import OmlxStandIn

RECORDED = Path(daemons.__file__).parent / "recorded"
OLLAMA: dict[str, Any] = json.loads((RECORDED / "ollama.json").read_text())
OMLX: dict[str, Any] = json.loads((RECORDED / "omlx.json").read_text())
MESSAGES = [{"role": "user", "content": "Hi"}]
HEADERS = {"Authorization": "Bearer sk-owner"}


def shape(value: Any) -> Any:
    """Return the names and types in an answer: for a list those of its first item, for any number `number`."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def ollamas(unused_tcp_port: int) -> AsyncIterator[OllamaStandIn]:
    async with OllamaStandIn(unused_tcp_port) as daemon:
        daemon.own("qwen3:8b", size=1 << 30)
        daemon.registry["tiny:latest"] = b"weights"
        yield daemon


@pytest.fixture
async def omlxs(unused_tcp_port: int, tmp_path: Path) -> AsyncIterator[OmlxStandIn]:
    async with OmlxStandIn(unused_tcp_port, tmp_path / "omlx") as daemon:
        daemon.own("Qwen3-8B-4bit", size=1 << 20)
        yield daemon


@pytest.mark.parametrize(
    ("recorded", "body"),
    [
        ("GET /api/version", None),
        ("GET /api/tags", None),
        ("GET /api/ps", None),
        ("POST /v1/chat/completions", {"model": "qwen3:8b", "messages": MESSAGES}),
    ],
)
async def test_ollama_answers_as_recorded(
    ollamas: OllamaStandIn, session: aiohttp.ClientSession, recorded: str, body: object
) -> None:
    method, path = recorded.split()
    async with session.request(method, ollamas.url + path, json=body) as response:
        assert shape(await response.json()) == shape(OLLAMA[recorded])


@pytest.mark.parametrize(("keep_alive", "recorded"), [(-1, "load"), (0, "unload")])
async def test_ollama_loads_and_unloads_as_recorded(
    ollamas: OllamaStandIn, session: aiohttp.ClientSession, keep_alive: int, recorded: str
) -> None:
    asked = {"model": "qwen3:8b", "keep_alive": keep_alive}
    async with session.post(f"{ollamas.url}/api/generate", json=asked) as response:
        answer = await response.json()
    expected = OLLAMA[f"POST /api/generate {recorded}"]
    assert shape(answer) == shape(expected)
    assert answer["done_reason"] == expected["done_reason"]


@pytest.mark.parametrize(
    ("recorded", "body"),
    [
        ("POST /api/pull", {"model": "tiny"}),
        ("POST /api/create", {"model": "mine", "from": "qwen3:8b"}),
    ],
)
async def test_ollama_reports_steps_as_recorded(
    ollamas: OllamaStandIn, session: aiohttp.ClientSession, recorded: str, body: object
) -> None:
    async with session.post(ollamas.url + recorded.split()[1], json=body) as response:
        assert response.headers["Content-Type"] == "application/x-ndjson"
        lines = [json.loads(line) async for line in response.content]
    shapes = {json.dumps(shape(line)) for line in lines}
    assert shapes == {json.dumps(shape(line)) for line in OLLAMA[recorded]}
    assert lines[-1] == OLLAMA[recorded][-1] == {"status": "success"}


async def test_ollama_refuses_an_unknown_model_as_recorded(
    ollamas: OllamaStandIn, session: aiohttp.ClientSession
) -> None:
    async with session.post(f"{ollamas.url}/api/generate", json={"model": "nope"}) as response:
        assert (response.status, await response.json()) == (404, OLLAMA["error 404"])


async def test_ollamas_own_client_reads_answers_of_the_stand_in(ollamas: OllamaStandIn) -> None:
    client = ollama.AsyncClient(host=ollamas.url, trust_env=False)
    (loaded,) = (await client.ps()).models
    assert (loaded.name, loaded.size, loaded.context_length) == ("qwen3:8b", 1 << 30, 4096)
    steps = [step async for step in await client.pull("tiny", stream=True)]
    assert [(step.completed, step.total) for step in steps if step.digest] == [(3, 7), (7, 7)]
    assert {model.model for model in (await client.list()).models} == {"qwen3:8b", "tiny:latest"}
    await client.delete("tiny")
    with pytest.raises(ollama.ResponseError) as refused:
        await client.generate("tiny", keep_alive=-1)
    assert refused.value.status_code == 404
    await client.close()  # type: ignore[no-untyped-call]  # so it is in the library


@pytest.mark.parametrize(
    ("recorded", "path", "body"),
    [
        ("GET /health", "/health", None),
        ("GET /v1/models/status", "/v1/models/status", None),
        ("GET /api/status", "/api/status", None),
        ("POST /v1/models/{id}/load", "/v1/models/Qwen3-8B-4bit/load", None),
        ("POST /v1/models/{id}/unload", "/v1/models/Qwen3-8B-4bit/unload", None),
        ("POST /admin/api/login", "/admin/api/login", {"api_key": "sk-owner"}),
        ("POST /v1/chat/completions", "/v1/chat/completions", {"model": "Qwen3-8B-4bit", "messages": MESSAGES}),
    ],
)
async def test_omlx_answers_as_recorded(
    omlxs: OmlxStandIn, session: aiohttp.ClientSession, recorded: str, path: str, body: object
) -> None:
    async with session.request(recorded.split(maxsplit=1)[0], omlxs.url + path, json=body, headers=HEADERS) as response:
        assert response.status == 200
        assert shape(await response.json()) == shape(OMLX[recorded])


@pytest.mark.parametrize(
    ("recorded", "path", "status", "headers"),
    [
        ("error 401", "/v1/models/Qwen3-8B-4bit/load", 401, {}),
        ("error 401 of /admin", "/admin/api/reload", 401, HEADERS),
        ("error 507", "/v1/models/Qwen3-8B-4bit/load", 507, HEADERS),
    ],
)
async def test_omlx_refuses_as_recorded(
    omlxs: OmlxStandIn,
    session: aiohttp.ClientSession,
    *,
    recorded: str,
    path: str,
    status: int,
    headers: dict[str, str],
) -> None:
    omlxs.evict("Qwen3-8B-4bit")
    omlxs.ceiling = 1
    async with session.post(omlxs.url + path, headers=headers) as response:
        assert response.status == status
        assert shape(await response.json()) == shape(OMLX[recorded])


async def test_omlx_reloads_for_its_administrator_as_recorded(
    omlxs: OmlxStandIn, session: aiohttp.ClientSession
) -> None:
    async with session.post(f"{omlxs.url}/admin/api/login", json={"api_key": "sk-owner"}) as response:
        cookie = response.cookies["omlx_admin_session"].value
    headers = {"Cookie": f"omlx_admin_session={cookie}"}
    async with session.post(f"{omlxs.url}/admin/api/reload", headers=headers) as response:
        assert shape(await response.json()) == shape(OMLX["POST /admin/api/reload"])
    assert omlxs.names() == set(), "a reload unloads everything"
