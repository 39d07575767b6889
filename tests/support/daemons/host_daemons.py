"""A host with a daemon of the host's owner, and Pomona's models in that daemon: a real Ollama, or oMLX's stand-in."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from crds.metalprocess import Artifact
from metal_agent import daemons
from metal_agent.assignments import Assignment
from runtimes.ollama_client import Ollama
from runtimes.omlx_client import Omlx
from tests.support.api_objects import GIB
from tests.support.daemons.omlx import OmlxStandIn
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.local_host import Machine, MakeAssignment
from tests.support.ollama.library import Library, serve_library
from tests.support.ollama.server import OllamaServer
from tests.support.tiny_models import tiny_gguf, tiny_mlx

KEY = "sk-owner-secret"
OWNERS = "owners-own:1b"


class Served(NamedTuple):
    """A host with a daemon; `make` returns an Assignment that the daemon serves."""

    machine: Machine
    daemon: OllamaServer | OmlxStandIn
    make: Callable[..., Assignment]

    async def ready(self, uid: str = "u1") -> str:
        """Wait until the process is Ready, and return the name of its model in the daemon."""
        runner = self.machine.runners[uid]
        await eventually(lambda: runner.state.phase == "Ready")
        assert runner.model
        return runner.model

    def ours(self) -> set[str]:
        """Return the names of Pomona's models in the daemon's memory."""
        return {name for name in self.daemon.names() if name.startswith("pomona-")}


@pytest.fixture(autouse=True)
def watch_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(daemons, "IDLE_SECONDS", 0.1)


@pytest.fixture
async def library(tmp_path: Path) -> AsyncIterator[Library]:
    """Ollama's library, which is empty."""
    async with serve_library(tmp_path / "library") as library:
        yield library


@pytest.fixture
async def ollama(
    machine: Machine, assignment: MakeAssignment, unused_tcp_port: int, tmp_path: Path, library: Library
) -> AsyncIterator[Served]:
    async with OllamaServer(tmp_path / "ollama", unused_tcp_port, library.proxy) as daemon:
        machine.daemons = lambda: [Ollama({"OLLAMA_HOST": daemon.url})]
        await restart(machine)

        def make(uid: str = "u1", **changes: object) -> Assignment:
            return assignment(uid, **({"runtime": "ollama", "extra_args": []} | changes))

        yield Served(machine, daemon, make)
        await machine.stop()


@pytest.fixture
async def omlx(
    machine: Machine,
    assignment: MakeAssignment,
    unused_tcp_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Served]:
    base = tmp_path / "omlx"
    for repo in ("tiny", "other"):
        tiny_mlx.write(tmp_path / "hub" / "pomona" / repo)
    async with OmlxStandIn(unused_tcp_port, base, KEY) as daemon, FileServer(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        machine.daemons = lambda: [Omlx({"OMLX_BASE_PATH": str(base), "OMLX_PORT": str(unused_tcp_port)})]
        await restart(machine)

        def make(uid: str = "u1", repo: str = "tiny", **changes: object) -> Assignment:
            of_mlx = {"runtime": "omlx", "extra_args": [], "artifact": Artifact(source=f"hf://pomona/{repo}")}
            return assignment(uid, **(of_mlx | {"model_name": repo, "memory_bytes": GIB} | changes))

        yield Served(machine, daemon, make)
        await machine.stop()


@pytest.fixture(params=["ollama", "omlx"])
def served(request: pytest.FixtureRequest) -> Served:
    daemon: Served = request.getfixturevalue(request.param)
    return daemon


async def restart(machine: Machine) -> None:
    await machine.stop()
    await machine.start()


def remains(served: Served, prefix: str = "pomona-") -> set[str]:
    """Return the models in the daemon's store whose names have this prefix."""
    daemon = served.daemon
    names = daemon.stored() if isinstance(daemon, OllamaServer) else {path.name for path in daemon.models.iterdir()}
    return {name for name in names if name.startswith(prefix)}


def gguf(machine: Machine, name: str) -> Artifact:
    """Create another model in addition to the tiny one, and return its artifact."""
    path = machine.file_root / name
    tiny_gguf.write(path, name=name)
    return Artifact(source=f"file://{path}")


def endless(machine: Machine) -> Artifact:
    """Create a model that answers to the end of max_tokens, and return its artifact."""
    path = machine.file_root / "endless.gguf"
    tiny_gguf.write(path, loop=True, n_ctx=65536)
    return Artifact(source=f"file://{path}")


@asynccontextmanager
async def long_request(daemon: OllamaServer | OmlxStandIn, model: str) -> AsyncIterator[None]:
    """Ask a model of `endless`, and read nothing after the first token: Ollama waits for the end before it unloads."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with (
        aiohttp.ClientSession(read_bufsize=1 << 10) as session,
        session.post(f"{daemon.url}/v1/chat/completions", json=body) as response,
    ):
        assert b"data:" in await response.content.readline()
        yield


def daemon_name(daemon: OllamaServer | OmlxStandIn) -> str:
    return "ollama" if isinstance(daemon, OllamaServer) else "omlx"
