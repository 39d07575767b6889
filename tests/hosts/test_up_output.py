"""The output of `pomona up`: a table on a terminal, and lines of text or JSON elsewhere."""

import asyncio
import json
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kube.resources import MODELS
from metal_agent.native.process import kill_strays
from standalone.view import REFRESH_SECONDS
from tests.controlplane.process import CHECKOUT
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.on_demand_up import room_for, write_models
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import CALL, Start, Up, ask, manifest, service

COLUMNS = 80
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][;m]")


class Terminal:
    """A terminal of 80 columns on which a `pomona up` runs."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._ours, self._theirs = os.openpty()
        self.drawn = ""

    async def run(self, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
        argv = [sys.executable, "-m", "cli.main", "up", *arguments, f"--state-dir={self.state}", "--port=0"]
        size = {"COLUMNS": str(COLUMNS), "LINES": "24", "TERM": "xterm-256color"}
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            cwd=CHECKOUT,
            env={**os.environ, **size, **environment},
        )
        os.close(self._theirs)
        return process

    def find(self, pattern: str) -> re.Match[str] | None:
        """Return a match in what was drawn so far, without its control sequences."""
        while select.select([self._ours], [], [], 0)[0]:
            try:
                self.drawn += os.read(self._ours, 1 << 16).decode()
            except OSError:  # the other end is closed
                break
        return re.search(pattern, CONTROL_SEQUENCE.sub("", self.drawn))

    async def shows(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str]:
            match = self.find(pattern)
            assert match, self.drawn[-2000:]
            return match

        return await eventually(found)

    def close(self) -> None:
        os.close(self._ours)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path / "state")
    yield opened
    opened.close()


@pytest.mark.parametrize("no_colour", ["", "1"])
async def test_table_on_a_terminal_shows_the_state(tmp_path: Path, terminal: Terminal, no_colour: str) -> None:
    models = write_models(tmp_path, "one", "a-model-whose-name-is-folded-in-a-table")
    up = await terminal.run(models, NO_COLOR=no_colour)
    try:
        await terminal.shows(r"one +Idle")
        url = (await terminal.shows(r"curl (http://127.0.0.1:\d+)/v1/chat/completions"))[1]
        assert await ask(url, "one") == (200, "one speaks.")
        await terminal.shows(r"one +Ready[^\n]*\n  unloads in [45]:\d\d")
        up.send_signal(signal.SIGINT)
        await terminal.shows(r"everything is stopped\s")
        assert await asyncio.wait_for(up.wait(), 90) == 0
    finally:
        if up.returncode is None:
            up.kill()
        await kill_strays(terminal.state, ())
    assert "endpoint" not in terminal.drawn.rpartition("everything is stopped")[2]
    assert bool(COLOUR.search(terminal.drawn)) != bool(no_colour)
    tables = [line for line in CONTROL_SEQUENCE.sub("", terminal.drawn).splitlines() if "curl" not in line]
    assert max(map(len, tables)) <= COLUMNS
    assert "folded-in-a-table" in tables, "names are folded after a hyphen"


async def test_state_that_stays_the_same_is_not_drawn_again(tmp_path: Path, terminal: Terminal) -> None:
    """Else the table would flicker, and a selection of text be lost."""
    up = await terminal.run(write_models(tmp_path, "one"))
    try:
        await terminal.shows(r"curl[\s\S]*one +Idle")
        await eventually(
            lambda: terminal.find("") and not select.select([terminal._ours], [], [], 4 * REFRESH_SECONDS)[0]
        )
    finally:
        up.kill()
        await up.wait()
        await kill_strays(terminal.state, ())


def read_events(up: Up) -> list[dict[str, Any]]:
    return [json.loads(line) for line in up.process.log.read_text().splitlines(keepends=True) if line.endswith("\n")]


async def test_changes_are_lines_of_json_and_downloads_have_their_rate(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "one.gguf", text="one speaks.")
    size_bytes = (root / "one.gguf").stat().st_size
    async with FileServer(root) as files:
        files.pause_seconds = 12.0 * 65536 / size_bytes  # the next line of a download comes after ten seconds
        source = make_manifest(MODELS, name="one", source=f"{files.url}/one.gguf")
        served = service("one", "one", scaling={"minReplicas": 0})
        up = start(manifest(tmp_path / "models.yaml", source, served), "--log-format=json")
        url = await up.url()

        def downloads() -> list[dict[str, Any]]:
            return [event for event in read_events(up) if event.get("phase") == "Downloading"]

        await eventually(lambda: len(downloads()) >= 2)
        files.pause_seconds = 0.0
        await eventually(lambda: read_events(up)[-1].get("phase") == "Idle")
    first, second = downloads()[:2]
    assert first["bytes"] < second["bytes"] < second["totalBytes"] == size_bytes
    assert 0 < second["bytesPerSecond"] < size_bytes / 10
    assert 0 < second["secondsLeft"] < 60
    assert re.fullmatch(r".* KiB of .* KiB, \d+ %, .* KiB/s, \d+ s left", second["detail"])

    assert await ask(url, "one") == (200, "one speaks.")
    assert await up.process.stop() == 0
    events = read_events(up)
    assert [list(event)[:3] for event in events if event["event"] == "service"] == [["time", "event", "service"]] * (
        len(events) - 1
    )
    endpoint = next(event for event in events if event["event"] == "endpoint")
    assert endpoint == {"time": endpoint["time"], "event": "endpoint", "detail": endpoint["detail"], "url": url}
    assert next(event for event in events if event.get("phase") == "Starting")["secondsLeft"] >= 0


async def test_lines_have_no_control_characters_even_if_colours_are_asked_for(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    up = start(write_models(tmp_path, "one"))
    assert (await ask(await up.url(), "one"))[0] == 200
    await up.says("one: Ready")
    assert await up.process.stop() == 0
    assert not set(up.process.log.read_text()) & {chr(code) for code in range(32) if code != 10}


async def test_model_that_waits_for_memory_says_so(start: Start, tmp_path: Path) -> None:
    models = write_models(tmp_path, "one", "two", contextLength=32768)
    tiny_gguf.write(tmp_path / "one.gguf", loop=True)
    up = start(models, room_for(1))
    url = await up.url()
    endless = {"model": "one", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30000, "stream": True}
    async with aiohttp.ClientSession(timeout=CALL) as session:
        async with session.post(f"{url}/v1/chat/completions", json=endless) as answer:
            await answer.content.readline()
            waiting = asyncio.create_task(ask(url, "two"))
            await up.says("two: Waiting - waiting for memory that other models use")
            answer.close()
        assert await waiting == (200, "two speaks.")
    await up.says("two: Ready")
