"""Agents with real engines and processes on one machine, without an API server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from metal_agent.native.process import kill_strays
from tests.support.local_host import assignment, machine, model
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import Start, Up

__all__ = ["assignment", "machine", "model"]


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


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_gguf.write(path)
    return path
