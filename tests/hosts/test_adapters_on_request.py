"""Adapters that requests choose by `SERVICE:NAME`, with a real engine: through `pomona up`, a proxy and the gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.proxy.config import Backend, list_choice
from kube.client import Obj
from kube.resources import MODELS
from metal_agent.native.process import kill_strays
from tests.support.api_objects import GIB
from tests.support.engine_process import start_engine
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_companions, tiny_gguf
from tests.support.up_command import Up, ask, manifest, service
from tests.unit.gateway.cluster.running_gateway import AUTHORIZED, gateway_in_process
from tests.unit.gateway.proxy.running_proxy import TOKEN, proxy_in_process

PLAIN, TONE, VOICE = "Hello from a tiny", "It It It It", "tiny tiny tiny tiny"
SAYS = {"styled": PLAIN, "styled:tone": TONE, "styled:voice": VOICE}
ON_REQUEST: list[Obj] = [
    {"modelRef": "weak", "scale": "0.25"},
    {"modelRef": "tone", "onRequest": True},
    {"modelRef": "voice", "onRequest": True},
]
LONG = [{"role": "user", "content": "x" * 100}]
OTHER = [{"role": "user", "content": "y" * 100}]


def write_weights(folder: Path) -> None:
    tiny_gguf.write(folder / "tiny.gguf")
    tiny_companions.write_adapter(folder / "weak.gguf", first=5)
    tiny_companions.write_attention_adapter(folder / "tone.gguf", first=8)
    tiny_companions.write_attention_adapter(folder / "voice.gguf", first=3)


@pytest.fixture(params=[2])
async def up(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a `pomona up` with the service `styled`, which has so many slots."""
    write_weights(tmp_path)
    models = [
        make_manifest(MODELS, name=name, source=f"file://{tmp_path}/{name}.gguf", memoryBytes=GIB)
        for name in ("tiny", "weak", "tone", "voice")
    ]
    styled = service("styled", "tiny", adapters=ON_REQUEST, parallel=request.param)
    command = Up(tmp_path, manifest(tmp_path / "styled.yaml", *models, styled), "--port=0")
    try:
        url = await command.url()
        await command.says("styled: Ready")
        yield url
    finally:
        if command.process.running:
            await command.process.kill()
        await kill_strays(tmp_path / "state", ())


async def says(url: str, model: str, **body: Any) -> str:
    status, text = await ask(url, model, **{"max_tokens": 4, "temperature": 0, "messages": LONG} | body)
    assert status == 200, text
    return text.strip()


async def test_requests_choose_adapters_and_no_client_chooses_otherwise(up: str) -> None:
    for _ in range(2):
        assert {model: await says(up, model) for model in SAYS} == SAYS

    # At once, on two slots: each has its own.
    models = list(SAYS) * 8
    assert await asyncio.gather(*(says(up, model) for model in models)) == [SAYS[model] for model in models]

    # The field of a client counts for nothing.
    chosen = [{"id": number, "scale": 1} for number in range(3)]
    for model, text in SAYS.items():
        assert await says(up, model, lora=chosen) == text
        assert await says(up, model, lora=[], Lora=chosen) == text

    status, text = await ask(up, "styled:weak")
    assert status == 404
    assert "set `model` to styled or styled:tone or styled:voice" in text
    async with aiohttp.ClientSession() as session, session.get(f"{up}/v1/models") as response:
        listed = [(model["id"], model.get("parent")) for model in (await response.json())["data"]]
    assert listed == [("styled", None), ("styled:tone", "styled"), ("styled:voice", "styled")]


@pytest.mark.parametrize("up", [1], indirect=True)
async def test_what_one_adapter_has_computed_is_used_for_no_other(up: str) -> None:
    async def message(model: str) -> tuple[int, str]:
        body = {"model": model, "messages": LONG, "max_tokens": 4, "temperature": 0}
        async with aiohttp.ClientSession() as session, session.post(f"{up}/v1/messages", json=body) as response:
            return response.status, await response.text()

    # A conversation that llama.cpp had put aside would come back with whatever adapters it was computed.
    for messages, model in ((LONG, "styled"), (OTHER, "styled:tone"), (LONG, "styled:tone")):
        assert await says(up, model, messages=messages) == SAYS[model]

    # llama.cpp reads no adapters here, and would go on from what the last request has computed with one.
    for model, said in SAYS.items():
        await says(up, model)
        status, text = await message("styled")
        assert status == 200
        assert PLAIN in text
        assert '"cache_read_input_tokens":0' in text
        assert await says(up, model) == said
    status, text = await message("styled:tone")
    assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")
    assert "/v1/messages does not take the adapter" in text


async def test_adapter_is_found_through_the_gateway_and_the_proxy_of_the_service(tmp_path: Path) -> None:
    write_weights(tmp_path)
    adapters = [tmp_path / f"{adapter['modelRef']}.gguf" for adapter in ON_REQUEST]
    artifact = {"source": "file:///of-the-test.gguf"}
    further = [
        {"role": "adapter", "artifact": artifact, "scale": "0.25"},
        *({"role": "adapter", "artifact": artifact, "requestName": name} for name in ("tone", "voice")),
    ]
    async with start_engine(tmp_path, tmp_path / "tiny.gguf", adapters, furtherArtifacts=further) as engine:
        await engine.ready()
        choice = list_choice([("0.25", None), ("1", "tone"), ("1", "voice")])
        backend = Backend("a", engine.url, api_key=engine.token, engine="llama.cpp", mode="chat", adapters=choice)
        async with proxy_in_process(backend) as (_, url), gateway_in_process() as gateway:
            gateway.cluster.put_key()
            gateway.cluster.serve("team-a", "tiny", url, token=TOKEN, adapters=ON_REQUEST)
            async with aiohttp.ClientSession(headers=AUTHORIZED) as session:
                for model, text in (("tiny", PLAIN), ("tiny:tone", TONE), ("team-a/tiny:voice", VOICE)):
                    body = {"model": model, "messages": LONG, "max_tokens": 4, "temperature": 0}
                    async with session.post(f"{gateway.url}/v1/chat/completions", json=body) as response:
                        answer = await response.json()
                    assert answer["choices"][0]["message"]["content"].strip() == text
                    assert answer["model"] == model.removeprefix("team-a/")
