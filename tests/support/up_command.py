"""One `pomona up` that a test starts, and what it prints."""

import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from kube.client import Obj
from kube.resources import INFERENCE_SERVICES
from metal_agent.native.process import kill_strays
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.refused_manifests import make_manifest

CALL = aiohttp.ClientTimeout(total=120)


def manifest(path: Path, *objects: Obj) -> str:
    path.write_text(yaml.safe_dump_all(objects, allow_unicode=True))
    return str(path)


def service(name: str, model: str, **spec: Any) -> Obj:
    defaults: dict[str, Any] = {"extraArgs": ["-t", "1"], "contextLength": 512}
    return make_manifest(INFERENCE_SERVICES, name=name, modelRef=model, **defaults | spec)


def edit(path: str, old: str, new: str, *, every: bool = False) -> None:
    """Replace a text in a file: the first one, or every one."""
    content = Path(path).read_text()
    assert old in content
    Path(path).write_text(content.replace(old, new, -1 if every else 1))


async def ask(url: str, model: str, **body: object) -> tuple[int, str]:
    question = {"model": model, "messages": [{"role": "user", "content": "Hi"}], **body}
    async with (
        aiohttp.ClientSession(timeout=CALL) as session,
        session.post(f"{url}/v1/chat/completions", json=question) as response,
    ):
        said = await response.json()
        return response.status, said["choices"][0]["message"]["content"] if response.status == 200 else json.dumps(said)


class Up:
    """One `pomona up`, its output and its state folder."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.state = folder / "state"
        argv = [sys.executable, "-m", "cli.main", "up", *arguments, f"--state-dir={self.state}"]
        self.process = Process("up", argv, folder / "up.log")

    @property
    def said(self) -> str:
        return self.process.tail(200)

    async def url(self) -> str:
        """Start the process, and wait for the endpoint."""
        self.process.start()

        def found() -> str:
            assert self.process.running, self.said
            match = re.search(r"OpenAI endpoint: (http://127\.0\.0\.1:\d+)/v1", self.said)
            return match[1] if match else ""

        return await eventually(found)

    async def says(self, text: str) -> None:
        await eventually(lambda: text in self.said)

    async def ends(self) -> int:
        return await self.process.wait()


Start = Callable[..., Up]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Make a `pomona up` with these arguments; it, its proxy and its engines end with the test."""
    made_here: list[Up] = []

    def make(*arguments: str, port: int = 0) -> Up:
        up = Up(tmp_path, *arguments, f"--port={port}")
        made_here.append(up)
        return up

    yield make
    for up in made_here:
        if up.process.running:
            await up.process.kill()
    await kill_strays(tmp_path / "state", ())
