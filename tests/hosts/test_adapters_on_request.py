"""Adapters that requests choose by `SERVICE:NAME`, with a real engine behind `pomona up`."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kube.client import Obj
from kube.resources import MODELS
from metal_agent.native.process import kill_strays
from tests.support.api_objects import GIB
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_companions, tiny_gguf
from tests.support.up_command import Up, ask, manifest, service

PLAIN, TONE, VOICE = "Hello from a tiny", "It It It It", "tiny tiny tiny tiny"
SAYS = {"styled": PLAIN, "styled:tone": TONE, "styled:voice": VOICE}
ON_REQUEST: list[Obj] = [
    {"modelRef": "weak", "scale": "0.25"},
    {"modelRef": "tone", "onRequest": True},
    {"modelRef": "voice", "onRequest": True},
]
LONG = [{"role": "user", "content": "x" * 100}]
OTHER = [{"role": "user", "content": "y" * 100}]


@pytest.fixture(params=[2])
async def up(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a `pomona up` with the service `styled`, which has so many slots."""
    tiny_gguf.write(tmp_path / "tiny.gguf")
    tiny_companions.write_adapter(tmp_path / "weak.gguf", first=5)
    tiny_companions.write_attention_adapter(tmp_path / "tone.gguf", first=8)
    tiny_companions.write_attention_adapter(tmp_path / "voice.gguf", first=3)
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
