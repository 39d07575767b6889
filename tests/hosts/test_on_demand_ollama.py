"""Models on demand in the owner's own Ollama: loaded by requests, unloaded, and never pulled again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kube.resources import MODELS
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.ollama.library import Library, serve_library
from tests.support.ollama.server import OllamaServer
from tests.support.on_demand_up import room_for, write_models
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import Start, ask, manifest, service


@pytest.fixture
async def library(tmp_path: Path) -> AsyncIterator[Library]:
    async with serve_library(tmp_path / "library") as library:
        yield library


@pytest.fixture
async def ollama(
    tmp_path: Path, unused_tcp_port: int, library: Library, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OllamaServer]:
    """The owner's Ollama, which `pomona up` finds."""
    async with OllamaServer(tmp_path / "ollama", unused_tcp_port, library.proxy) as server:
        monkeypatch.setenv("OLLAMA_HOST", server.url)
        yield server


def loaded(server: OllamaServer) -> list[str]:
    """Return the Models of ours that Ollama has in memory."""
    return sorted(name.partition("/")[2].partition(":")[0] for name in server.names())


async def test_models_of_ollama_are_loaded_by_requests_and_make_room_for_each_other(
    start: Start, tmp_path: Path, ollama: OllamaServer
) -> None:
    names = ("one", "two", "three")
    up = start(write_models(tmp_path, *names, runtime="ollama", extraArgs=[]), room_for(2))
    url = await up.url()
    await up.says("three: Idle")
    assert loaded(ollama) == []
    for name in names:
        assert await ask(url, name) == (200, f"{name} speaks.")
        assert name in loaded(ollama)
    assert len(loaded(ollama)) == 2, "what fits beside the others stays loaded"
    answers = await asyncio.gather(*(ask(url, name) for name in names * 3))
    assert answers == [(200, f"{name} speaks.") for name in names * 3]
    assert await up.process.stop() == 0
    assert loaded(ollama) == []


async def test_model_of_ollama_that_nobody_asks_for_is_unloaded_and_wakes_again(
    start: Start, tmp_path: Path, ollama: OllamaServer
) -> None:
    scaling = {"minReplicas": 0, "idleSeconds": 1}
    url = await start(write_models(tmp_path, "one", runtime="ollama", extraArgs=[], scaling=scaling)).url()
    for _ in range(2):
        assert await ask(url, "one") == (200, "one speaks.")
        await eventually(lambda: loaded(ollama) == [])


async def test_models_that_ollama_pulls_are_pulled_once(
    start: Start, tmp_path: Path, ollama: OllamaServer, library: Library
) -> None:
    objects = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.gguf"
        tiny_gguf.write(path, text=f"{name} speaks.")
        library.add(f"{name}:1b", path.read_bytes())
        objects += [
            make_manifest(MODELS, name=name, source=f"ollama://{name}:1b", memoryBytes=GIB // 2),
            service(
                name,
                name,
                runtime="ollama",
                extraArgs=[],
                contextLength=1024,
                hardware={"accelerator": "metal"},
                scaling={"minReplicas": 0},
            ),
        ]
    up = start(manifest(tmp_path / "all.yaml", *objects), f"--memory-budget={GIB * 3 // 4}")
    url = await up.url()
    for name in ("one", "two", "one"):
        status, said = await ask(url, name)
        assert status == 200, f"{name}: {said}\n{up.said}"
    assert ollama.changes().count(("POST", "/api/pull")) == 2, ollama.changes()
