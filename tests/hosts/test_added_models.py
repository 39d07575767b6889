"""Models that are added to a running `pomona up`: by `pomona run`, and by clients of Ollama's API that pull them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import ollama
import pytest

from artifacts.repositories.address_policy import NETWORKS_VARIABLE
from metal_agent.native.process import kill_strays
from standalone.added_models import MOST_ADDED
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.machine_commands import MachineCommands
from tests.support.ollama.command import run_command
from tests.support.on_demand_up import find_engines, room_for, write_models
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import CALL, Start, Up, ask, edit

REPO = "acme/Talk-GGUF"
PULLED = f"hf.co/{REPO}:Q4_K_M"
NAME = "talk-q4-k-m"


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FileServer]:
    """A hub with one repository, which `pomona up` may ask."""
    folder = tmp_path / "hub" / "acme" / "Talk-GGUF"
    folder.mkdir(parents=True)
    for quantization in ("Q4_K_M", "Q8_0"):
        tiny_gguf.write(folder / f"Talk-{quantization}.gguf", text="the hub speaks.")
    async with FileServer(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv(NETWORKS_VARIABLE, "127.0.0.0/8")
        yield hub


@pytest.fixture
async def pomona(tmp_path: Path) -> AsyncIterator[MachineCommands]:
    """The commands; what they start in the background ends with the test."""
    commands = MachineCommands(tmp_path / "state")
    yield commands
    await commands.run("down", "--now")
    await kill_strays(commands.state, ())


async def send(url: str, method: str, path: str, body: Any) -> tuple[int, list[dict[str, Any]]]:
    """Send a request; return the status, and the lines of the answer."""
    async with (
        aiohttp.ClientSession(timeout=CALL) as session,
        session.request(method, f"{url}{path}", json=body) as response,
    ):
        return response.status, [json.loads(line) for line in (await response.read()).splitlines()]


async def list_names(url: str) -> list[str]:
    async with aiohttp.ClientSession(timeout=CALL) as session, session.get(f"{url}/v1/models") as response:
        return [model["id"] for model in (await response.json())["data"]]


@pytest.mark.usefixtures("hub")
async def test_clients_of_ollama_pull_ask_and_delete(start: Start, tmp_path: Path) -> None:
    up = start(write_models(tmp_path, "one"))
    url = await up.url()
    async with ollama.AsyncClient(host=url) as client:
        steps = [step async for step in await client.pull(PULLED, stream=True)]
        assert steps[0].status == "pulling manifest"
        assert [step.status for step in steps[-3:]] == ["verifying sha256 digest", "writing manifest", "success"]
        assert {model.model for model in (await client.list()).models} == {"one:latest", f"{NAME}:latest"}
        for name in (PULLED, NAME):
            answer = await client.chat(name, [{"role": "user", "content": "Hi"}])
            assert answer.message.content == "the hub speaks."
        assert (await client.pull(PULLED)).status == "success"

        with pytest.raises(ollama.ResponseError, match="one was not added by a command"):
            await client.delete("one")
        await client.delete(PULLED)
        await eventually(lambda: NAME not in find_engines(up.state).values())
        assert await list_names(url) == ["one"]
        with pytest.raises(ollama.ResponseError, match=f"no service {NAME} here|not found"):
            await client.delete(PULLED)


@pytest.mark.long
@pytest.mark.usefixtures("hub")
async def test_ollamas_own_command_runs_a_model_that_is_not_there(start: Start, tmp_path: Path) -> None:
    url = await start(write_models(tmp_path, "one")).url()
    for words, says in ((("run", PULLED, "Hi"), "the hub speaks."), (("list",), f"{NAME}:latest"), (("rm", NAME), "")):
        code, said = await run_command(url, tmp_path, *words)
        assert (code, says in said) == (0, True), said
    assert await list_names(url) == ["one"]


@pytest.mark.usefixtures("hub")
async def test_added_models_are_there_again_after_a_kill(
    start: Start, pomona: MachineCommands, unused_tcp_port: int
) -> None:
    up = start(port=unused_tcp_port)
    url = await up.url()
    assert "no model is served yet: `pomona run MODEL` adds one" in up.said
    first = await pomona.run("run", f"{REPO}:Q4_K_M", "Hi")
    assert (first.code, first.output) == (0, "the hub speaks.\n"), first
    await up.process.kill()
    up.process.log.write_text("")
    up.process.start()
    await up.says(f"{NAME}: Ready")
    assert await ask(url, NAME) == (200, "the hub speaks.")
    assert "is served no more" in await pomona.succeed("delete", NAME)
    await eventually(lambda: not find_engines(up.state))
    assert await list_names(url) == []


async def test_model_that_cannot_be_served_is_not_added(start: Start, tmp_path: Path, pomona: MachineCommands) -> None:
    url = await start(write_models(tmp_path, "one")).url()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    ended = await pomona.run("run", str(tmp_path / "broken.gguf"), "Hi")
    assert (ended.code, "broken: Model broken: file:///" in ended.errors) == (1, True), ended
    assert await list_names(url) == ["one"]
    assert "broken" not in await pomona.succeed("list")


@pytest.mark.usefixtures("hub")
async def test_file_that_takes_the_name_of_an_added_model_wins(start: Start, tmp_path: Path) -> None:
    models = write_models(tmp_path, "one")
    up = start(models)
    url = await up.url()
    assert (await send(url, "POST", "/api/pull", {"model": PULLED}))[1][-1] == {"status": "success"}
    edit(models, ": one\n", f": {NAME}\n", every=True)
    await up.says("removed one")
    assert await ask(url, NAME) == (200, "one speaks.")


async def test_pull_that_fails_or_is_left_adds_nothing(start: Start, tmp_path: Path, hub: FileServer) -> None:
    up = start(write_models(tmp_path, "one"), room_for(1))
    url = await up.url()
    (tmp_path / "hub" / "acme" / "Broken-GGUF").mkdir()
    (tmp_path / "hub" / "acme" / "Broken-GGUF" / "Broken-Q4_K_M.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    status, lines = await send(url, "POST", "/api/pull", {"model": "acme/Broken-GGUF:Q4_K_M"})
    assert (status, "error" in lines[-1]) == (200, True), lines

    hub.sending.clear()
    async with aiohttp.ClientSession(timeout=CALL) as session:
        response = await session.post(f"{url}/api/pull", json={"model": PULLED})
        await up.says(f"added {NAME}")
        response.close()
        await up.says(f"removed {NAME}")
    hub.sending.set()
    assert await list_names(url) == ["one"]


async def refusals_of(url: str, *names: str) -> list[str]:
    answers = [await send(url, "POST", "/api/pull", {"model": name, "stream": False}) for name in names]
    assert {status for status, _ in answers} == {400}, answers
    return [lines[0]["error"] for _, lines in answers]


async def test_client_reaches_no_file_and_no_other_server(start: Start, tmp_path: Path, hub: FileServer) -> None:
    up: Up = start(write_models(tmp_path, "one"))
    url = await up.url()
    names = (
        str(tmp_path / "one.gguf"),
        (tmp_path / "one.gguf").as_uri(),
        f"{hub.url}/acme/Talk-GGUF/Talk-Q4_K_M.gguf",
        "../one.gguf",
        "~/one.gguf",
        "s3://bucket/one.gguf",
        "pvc://claim/one.gguf",
        "ollama://gemma3:4b",
        "hf://acme/../../one.gguf",
    )
    before = len(hub.requests)
    for name, said in zip(names, await refusals_of(url, *names), strict=True):
        assert said.startswith(f"{name}: a client can add a name of `pomona catalog`"), said
    assert "longer than 4096 bytes" in (await refusals_of(url, "a" * 5000))[0]
    assert len(hub.requests) == before
    assert await list_names(url) == ["one"]


@pytest.mark.usefixtures("hub")
async def test_number_of_added_models_is_bounded(start: Start, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    record = [
        [f"m{number}", f"file://{tmp_path}/none.gguf", None, None, "chat", False, ""] for number in range(MOST_ADDED)
    ]
    (state / "added-models.json").write_text(json.dumps(record))
    url = await start(write_models(tmp_path, "one")).url()
    assert f"{MOST_ADDED} models are added already" in (await refusals_of(url, PULLED))[0]
