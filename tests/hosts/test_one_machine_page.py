"""The commands of docs/one-machine.md, in their order, with a hub of tiny models."""

import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from artifacts.repositories.address_policy import NETWORKS_VARIABLE
from fitness.catalog_entries import load_catalog
from metal_agent.native.process import kill_strays
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_steps
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.machine_commands import MachineCommands
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import CALL, edit

PAGE = (CHECKOUT / "docs" / "one-machine.md").read_text().partition("## Look after it")[0]
STEPS = [block for language, block in list_steps(PAGE) if language == ""]


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FileServer]:
    """A hub which has the models of the page."""
    for name in set(re.findall(r"^pomona run (\S+)", PAGE, re.MULTILINE)):
        (source,) = [source.source for source in load_catalog()[name].sources if "cpu" in source.accelerators]
        path = tmp_path / "hub" / source.removeprefix("hf://")
        path.parent.mkdir(parents=True, exist_ok=True)
        tiny_gguf.write(path, text=f"{name} speaks.")
    async with FileServer(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv(NETWORKS_VARIABLE, "127.0.0.0/8")
        yield hub


@pytest.mark.usefixtures("hub")
async def test_page_leads_to_two_models_and_an_edited_file(tmp_path: Path, unused_tcp_port: int) -> None:
    first, call, second, restart = STEPS
    pomona, port = MachineCommands(tmp_path / "state"), f"--port={unused_tcp_port}"

    async def run(line: str, *more: str) -> str:
        program, *words = shlex.split(line.replace("models.yaml", str(tmp_path / "models.yaml")))
        assert program == "pomona"
        return await pomona.succeed(*words, *more)

    try:
        # The first model, and a call from another program.
        assert await run(first, port) == "qwen3-8b speaks.\n"
        _, url, _, body = shlex.split(call.replace("\\\n", " "))
        async with (
            aiohttp.ClientSession(
                timeout=CALL, headers={"Content-Type": "application/x-www-form-urlencoded"}
            ) as session,
            session.post(url.replace(":8080/", f":{unused_tcp_port}/"), data=body) as answer,
        ):
            assert (await answer.json())["choices"][0]["message"]["content"] == "qwen3-8b speaks."

        # The second one.
        ask, show = second.splitlines()
        assert await run(ask) == "gemma-4-e4b speaks.\n"
        assert {line.split()[0] for line in (await run(show)).splitlines()} >= {"qwen3-8b", "gemma-4-e4b"}

        # The file, and a mistake in it.
        (models,) = [block for language, block in list_steps(PAGE) if language == "yaml"]
        path = tmp_path / "models.yaml"
        path.write_text(models)
        down, up = restart.splitlines()
        assert await run(down) == "everything is stopped\n"
        await run(up, port)
        listed = {line.split()[0] for line in (await run("pomona list")).splitlines()}
        assert listed == {"NAME", "chat", "gemma-4-e4b"}
        edit(str(path), "16384", "12")
        (mistake,) = [block for language, block in list_steps(PAGE) if language == "text"]
        lines = mistake.replace("models.yaml", str(path)).splitlines()
        output = pomona.state / "up-output.log"
        await eventually(lambda: all(line in output.read_text() for line in lines))
    finally:
        await pomona.run("down", "--now")
        await kill_strays(pomona.state, ())
