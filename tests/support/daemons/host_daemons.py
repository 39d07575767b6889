"""A host with the stand-in of a daemon of the host's owner, and Pomona's models in that daemon."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from crds.metalprocess import Artifact
from metal_agent import daemons
from metal_agent.assignments import Assignment
from runtimes.ollama import Ollama
from runtimes.omlx import Omlx
from tests.support.api_objects import GIB
from tests.support.daemons.ollama import OllamaStandIn
from tests.support.daemons.omlx import OmlxStandIn
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.local_host import Machine, MakeAssignment
from tests.support.tiny_models import tiny_mlx

KEY = "sk-owner-secret"
OWNERS = "owners-own"


class Served(NamedTuple):
    """A host with a daemon; `make` returns an Assignment that the daemon serves."""

    machine: Machine
    daemon: OllamaStandIn | OmlxStandIn
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
async def ollama(machine: Machine, assignment: MakeAssignment, unused_tcp_port: int) -> AsyncIterator[Served]:
    async with OllamaStandIn(unused_tcp_port) as daemon:
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
    found: Served = request.getfixturevalue(request.param)
    return found


async def restart(machine: Machine) -> None:
    await machine.stop()
    await machine.start()


def remains(served: Served, prefix: str = "pomona-") -> set[str]:
    """Return the models in the daemon's store whose names have this prefix."""
    daemon = served.daemon
    names = set(daemon.stored) if isinstance(daemon, OllamaStandIn) else {path.name for path in daemon.models.iterdir()}
    return {name for name in names if name.startswith(prefix)}


def gguf(machine: Machine, name: str) -> Artifact:
    """Create another model in addition to the tiny one, and return its artifact."""
    path = machine.file_root / name
    path.write_bytes((machine.file_root / "tiny.gguf").read_bytes() + name.encode())
    return Artifact(source=f"file://{path}")


def daemon_name(daemon: OllamaStandIn | OmlxStandIn) -> str:
    return "ollama" if isinstance(daemon, OllamaStandIn) else "omlx"
