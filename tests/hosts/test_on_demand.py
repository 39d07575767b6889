"""Models on demand with real engines behind `pomona up`: loaded by requests, swapped, and unloaded when idle."""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import ollama
import psutil
import pytest

from kube.resources import MODELS
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.on_demand_up import MODEL_BYTES, find_engines, find_pid, find_proxy, room_for, write_models
from tests.support.refused_manifests import make_manifest
from tests.support.swap_crashes import SwapCrashes
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import Start, Up, ask, manifest, service


def loaded(up: Up) -> list[str]:
    """Return the models whose engines run."""
    return sorted(find_engines(up.state).values())


def is_connected(port: int) -> bool:
    """Return whether a client has a connection to a port."""
    return any(
        connection.status == psutil.CONN_ESTABLISHED and connection.raddr[1] == port
        for connection in psutil.Process().net_connections()
    )


async def test_models_are_loaded_by_requests_and_make_room_for_each_other(start: Start, tmp_path: Path) -> None:
    up = start(write_models(tmp_path, "one", "two", "three"), room_for(2))
    url = await up.url()
    await up.says("three: Idle")
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["one", "three", "two"]
        async with session.get(f"{url}/health") as response:
            assert response.status == 200
    assert loaded(up) == [], "lists and health load nothing"

    assert await ask(url, "one") == (200, "one speaks.")
    assert await ask(url, "two") == (200, "two speaks.")
    assert loaded(up) == ["one", "two"], "what fits beside the others stays loaded"
    assert await ask(url, "three") == (200, "three speaks.")
    assert "three" in loaded(up)
    assert len(loaded(up)) == 2

    answers = await asyncio.gather(*(ask(url, name) for name in ("one", "two", "three") * 5))
    assert answers == [(200, f"{name} speaks.") for name in ("one", "two", "three") * 5]
    assert await up.process.stop() == 0
    assert loaded(up) == []


async def test_model_that_nobody_asks_for_is_unloaded_and_wakes_again(start: Start, tmp_path: Path) -> None:
    up = start(write_models(tmp_path, "one", scaling={"minReplicas": 0, "idleSeconds": 1}))
    url = await up.url()
    for _ in range(2):
        assert await ask(url, "one") == (200, "one speaks.")
        assert loaded(up) == ["one"]
        await eventually(lambda: loaded(up) == [])
    await eventually(lambda: up.said.count("one: Idle") == 3)


async def test_model_that_never_fits_is_refused_with_the_reason_and_unloads_nothing(
    start: Start, tmp_path: Path
) -> None:
    large = make_manifest(MODELS, name="large", source=(tmp_path / "one.gguf").as_uri(), memoryBytes=9 * MODEL_BYTES)
    more = (large, service("large", "large", scaling={"minReplicas": 0}))
    up = start(write_models(tmp_path, "one", more=more), room_for(2))
    url = await up.url()
    await up.says("large: Idle - it needs")
    assert await ask(url, "one") == (200, "one speaks.")
    status, said = await ask(url, "large")
    assert status == 503
    assert "it needs 2.2 GiB, and no more than 640.0 MiB of the memory for models can be made free" in said
    assert loaded(up) == ["one"]


async def test_model_that_is_always_loaded_and_protected_ones_make_room_for_none(start: Start, tmp_path: Path) -> None:
    always = (
        make_manifest(MODELS, name="always", source=(tmp_path / "one.gguf").as_uri(), memoryBytes=MODEL_BYTES),
        service("always", "always"),
    )
    names = write_models(tmp_path, "one", "two", more=always)
    up = start(names, room_for(2))
    url = await up.url()
    await up.says("always: Ready")
    assert [await ask(url, name) for name in ("one", "two")] == [(200, "one speaks."), (200, "two speaks.")]
    assert loaded(up) == ["always", "two"]


async def test_memory_of_a_draft_model_counts(start: Start, tmp_path: Path) -> None:
    more = (
        make_manifest(MODELS, name="draft", source=(tmp_path / "two.gguf").as_uri(), memoryBytes=MODEL_BYTES),
        service("pair", "two", scaling={"minReplicas": 0}, speculative={"draftModelRef": "draft"}),
    )
    up = start(write_models(tmp_path, "one", "two", more=more), room_for(2))
    url = await up.url()
    assert [await ask(url, name) for name in ("one", "two")] == [(200, "one speaks."), (200, "two speaks.")]
    assert await ask(url, "pair") == (200, "two speaks.")
    assert loaded(up) == ["pair"], "both of the others made room"


async def test_weights_are_fetched_before_they_are_asked_for(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "one.gguf", text="one speaks.")
    async with FileServer(root) as files:
        up = start(
            manifest(
                tmp_path / "models.yaml",
                make_manifest(MODELS, name="one", source=f"{files.url}/one.gguf"),
                service("one", "one", scaling={"minReplicas": 0}),
            )
        )
        url = await up.url()
        await eventually(lambda: list((up.state / "weights").rglob("*.gguf")) != [])
        await up.says("one: Idle")
        assert loaded(up) == []
    assert await ask(url, "one") == (200, "one speaks."), "the source is gone, and is not needed"


async def test_engine_that_cannot_be_loaded_is_reported_to_those_who_ask(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "llama-server"
    broken.write_text(
        '#!/bin/sh\ncase "$*" in *"-a one"*) echo "error: no such device" >&2; exit 3;; esac\n'
        f'exec {sys.executable} -P -m runtimes.llama_launcher "$@"\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("LLAMA_SERVER_BIN", str(broken))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    up = start(write_models(tmp_path, "one", "two"), room_for(1))
    url = await up.url()
    status, said = await ask(url, "one")
    assert status == 503
    assert "the engine exited with exit code 3: error: no such device" in said
    assert (await ask(url, "one"))[0] == 503
    assert await ask(url, "two") == (200, "two speaks."), "it does not keep the memory"
    assert up.process.running, "its next request may succeed"


async def test_clients_of_ollama_load_keep_and_unload_models(start: Start, tmp_path: Path) -> None:
    up = start(write_models(tmp_path, "one", "two", scaling={"minReplicas": 0, "idleSeconds": 1}))
    async with ollama.AsyncClient(host=await up.url()) as client:
        assert (await client.ps()).models == []
        assert {model.model for model in (await client.list()).models} == {"one:latest", "two:latest"}

        loading = await client.generate("one", keep_alive=-1)
        assert (loading.done_reason, loaded(up)) == ("load", ["one"])
        answer = await client.chat("two", [{"role": "user", "content": "Hi"}])
        assert answer.message.content == "two speaks."
        await eventually(lambda: loaded(up) == ["one"])  # it stays, and the other one only for a second
        (kept,) = (await client.ps()).models
        assert kept.model == "one:latest"
        assert kept.expires_at
        assert kept.expires_at.year > 2100
        await client.generate("one", keep_alive="10m")
        (kept,) = (await client.ps()).models
        assert kept.expires_at
        assert timedelta(minutes=9) < kept.expires_at - datetime.now(UTC) <= timedelta(minutes=10)

        unloading = await client.generate("one", keep_alive=0)
        assert unloading.done_reason == "unload"
        await eventually(lambda: loaded(up) == [])


async def test_request_that_waits_while_up_is_restarted_is_answered(
    start: Start, tmp_path: Path, unused_tcp_port: int
) -> None:
    up = start(write_models(tmp_path, "one"), port=unused_tcp_port)
    url = await up.url()
    await up.says("one: Idle")
    await up.process.kill()
    asking = asyncio.create_task(ask(url, "one"))
    await eventually(lambda: is_connected(unused_tcp_port))
    up.process.start()
    assert await asking == (200, "one speaks.")


async def test_model_stays_loaded_when_the_proxy_is_killed(start: Start, tmp_path: Path, unused_tcp_port: int) -> None:
    models = write_models(tmp_path, "one", scaling={"minReplicas": 0, "idleSeconds": 4})
    up = start(models, port=unused_tcp_port)
    url = await up.url()
    assert (await ask(url, "one"))[0] == 200
    before, loaded_at = find_pid(up.state, "one"), time.monotonic()
    while time.monotonic() < loaded_at + 5:
        assert (await ask(url, "one"))[0] == 200
    proxy = find_proxy(up.state)
    os.kill(proxy, signal.SIGKILL)

    async def answers() -> bool:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            return (await ask(url, "one"))[0] == 200
        return False

    await eventually(answers)
    assert find_pid(up.state, "one") == before


@pytest.mark.parametrize("seed", range(3))
async def test_kills_in_the_middle_of_swaps_load_nothing_twice(
    start: Start, tmp_path: Path, unused_tcp_port: int, seed: int
) -> None:
    names = ("one", "two", "three", "four")
    up = start(write_models(tmp_path, *names), room_for(2), port=unused_tcp_port)
    await SwapCrashes(up, names, room=2, chance=random.Random(seed)).run(rounds=4)  # noqa: S311 - for a test
