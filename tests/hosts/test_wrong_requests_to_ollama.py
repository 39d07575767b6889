"""Wrong requests of one client to a real Ollama behind the proxy: other clients lose nothing by them."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from kube.resources import MODELS
from tests.support.api_objects import GIB
from tests.support.ollama.server import OllamaServer
from tests.support.refused_manifests import make_manifest
from tests.support.up_command import CALL, Start, ask, manifest, service
from tests.support.wrong_requests import WRONG_REQUESTS, WrongRequest


async def send(session: aiohttp.ClientSession, url: str, wrong: WrongRequest) -> tuple[int, str]:
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}{wrong.path}", data=wrong.encode_body("chat"), headers=headers) as response:
        return response.status, (await response.read()).decode(errors="replace")


def list_problems(seen: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """Return the answers that blame the engine, and errors that are not in the form of the API."""
    problems = {}
    for name, (status, text) in seen.items():
        is_error = status != 200
        if is_error and not (400 <= status < 500 and json.loads(text)["error"]["type"] and "message" in text):
            problems[name] = (status, text)
    return problems


@pytest.mark.long
async def test_wrong_requests_of_one_client_cost_no_other_one_anything(
    start: Start, tmp_path: Path, weights: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with OllamaServer(tmp_path / "ollama", unused_tcp_port) as daemon:
        monkeypatch.setenv("OLLAMA_HOST", daemon.url)
        model = make_manifest(MODELS, name="one", source=f"file://{weights}", memoryBytes=GIB)
        of_ollama = service("chat", "one", runtime="ollama", extraArgs=[], hardware={"accelerator": "metal"})
        up = start(manifest(tmp_path / "all.yaml", model, of_ollama))
        url = await up.url()
        await up.says("chat: Ready")

        def loads() -> int:
            return daemon.changes().count(("POST", "/api/generate"))

        before, engines = loads(), daemon.engines()
        answers: list[int] = []

        async def ask_on() -> None:
            while True:
                answers.append((await ask(url, "chat", max_tokens=3))[0])

        other = asyncio.create_task(ask_on())
        seen: dict[str, tuple[int, str]] = {}
        async with aiohttp.ClientSession(timeout=CALL) as session:
            for wrong in WRONG_REQUESTS:
                seen[wrong.name] = await send(session, url, wrong)
            other.cancel()
            assert list_problems(seen) == {}
            assert (set(answers), daemon.engines(), loads()) == ({200}, engines, before)
            assert seen["image"][0] == 200, "the model sees no image, and Ollama ignores it"
        assert "chat: Failed" not in up.said
