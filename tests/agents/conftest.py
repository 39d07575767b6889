"""A gateway in front of a real llama.cpp, whose context holds the prompts of agents; only the loopback is there."""

from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest

from crds.serving import ServingOptions
from runtimes.serving import Serving
from tests.controlplane import sandbox
from tests.support import llama_server
from tests.support.faulty_relay import FaultyRelay
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import start
from tests.unit.gateway.cluster.running_gateway import RunningGateway, gateway_in_process

__all__ = ["start"]

CONTEXT_LENGTH = 1 << 17


def pytest_configure() -> None:
    """Refuse to start outside of a sandbox: agents ask servers of their vendors."""
    if not sandbox.inside():
        raise pytest.UsageError("tests/agents needs a sandbox: run `make test-agents`")


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One llama.cpp for all tests, with a slot for each agent, whose prompt takes seconds the first time."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_gguf.write(path, n_ctx=CONTEXT_LENGTH)
    options = ServingOptions(context_length=CONTEXT_LENGTH, parallel=2, extra_args=["-t", "1"])
    with llama_server.serve_as(Serving("chat", str(path), options)) as server:
        yield server.url


@pytest.fixture(scope="session")
def small_engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A llama.cpp whose context holds no prompt of an agent."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_gguf.write(path)
    with llama_server.serve(path, service="chat") as server:
        yield server.url


class AgentsGateway(NamedTuple):
    """A gateway with the service `chat`, and the relays that are its endpoints."""

    gateway: RunningGateway
    relay: FaultyRelay
    spare_relay: FaultyRelay
    """A second endpoint, which takes requests once a test serves it."""


@pytest.fixture
async def served(engine_url: str) -> AsyncIterator[AgentsGateway]:
    async with (
        FaultyRelay(engine_url).serve() as relay,
        FaultyRelay(engine_url).serve() as spare,
        gateway_in_process() as gateway,
    ):
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", relay.url)
        yield AgentsGateway(gateway, relay, spare)
