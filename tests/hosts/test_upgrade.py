"""`pomona up` after an update: it finds the processes of the previous version, and adopts them while they run."""

import contextlib
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.previous_version import PreviousVersion, marked, running_engines, state_files, unpack
from tests.support.tiny_models import tiny_gguf

QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
LEFT_BY_UP = {
    "agent.lock",
    "keys/standalone-ID.ID",
    "logs/default_tiny-ID-0.log",
    "logs/proxy.log",
    "processes/standalone-ID.json",
    "proxy/control.lock",
    "proxy/control.sock",
    "proxy/handover.sock",
    "up.log",
}
WRITTEN_LATER = {"peaks.json", "pressure.json"}


class Ups:
    """The `pomona up` of the previous version and that of this one, for the same model in the same state folder."""

    def __init__(self, folder: Path, previous: PreviousVersion) -> None:
        self.state = folder / "state"
        model = folder / "tiny.gguf"
        tiny_gguf.write(model)
        command = ("up", f"--model={model}", f"--state-dir={self.state}", "--port=0")
        self.old = Process("previous up", previous.command(*command), folder / "previous.log")
        self.new = Process("up", [sys.executable, "-m", "cli.main", *command], folder / "up.log")

    async def endpoint(self, up: Process) -> str:
        """Wait until the model answers; return the endpoint."""
        match = await eventually(lambda: re.search(r"http://127\.0\.0\.1:\d+", up.tail(50)))
        assert match
        await eventually(lambda: answers(match[0]))
        return match[0]


async def answers(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=QUESTION) as answer:
        return answer.status == 200 and tiny_gguf.SENTENCE in await answer.text()


@pytest.fixture
async def ups(tmp_path: Path) -> AsyncIterator[Ups]:
    ups = Ups(tmp_path, unpack())
    yield ups
    for up in (ups.old, ups.new):
        if up.running:
            await up.kill()
    for process in marked(ups.state):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another one
            process.kill()


async def test_up_adopts_engine_and_proxy_of_previous_version(ups: Ups) -> None:
    ups.old.start()
    await ups.endpoint(ups.old)
    engines = running_engines(ups.state)
    assert len(marked(ups.state)) == 2, "an engine and the proxy"
    await ups.old.kill()
    assert LEFT_BY_UP <= state_files(ups.state) <= LEFT_BY_UP | WRITTEN_LATER

    ups.new.start()
    await ups.endpoint(ups.new)
    assert running_engines(ups.state) == engines


async def test_running_up_of_previous_version_owns_its_folder(ups: Ups) -> None:
    ups.old.start()
    url = await ups.endpoint(ups.old)
    ups.new.start()
    assert await ups.new.wait() == 1
    assert f"(process {ups.old.pid})" in ups.new.tail(1)
    assert await answers(url)
