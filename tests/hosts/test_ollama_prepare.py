"""The preparation of the Ollama in a pod, with the real one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from examples.tiny import build_model
from runtimes import ollama_client
from runtimes.daemon import SILENT, DaemonError
from runtimes.ollama_client import is_permanent, prepare_model
from runtimes.pod import PodModel
from tests.support.eventually import eventually
from tests.support.ollama.library import Library, serve_library
from tests.support.ollama.server import NO_LIBRARY, OllamaServer
from tests.support.stub_server import serve_stub
from tests.support.tiny_models import tiny_split

NAME = "pomona/chat:0123456789-9876543210"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_START_SECONDS", "_FIRST_PAUSE_SECONDS", "_LONGEST_PAUSE_SECONDS"):
        monkeypatch.setattr(ollama_client, name, 0.01)


@pytest.fixture
async def library(tmp_path: Path) -> AsyncIterator[Library]:
    """A library with one model."""
    async with serve_library(tmp_path / "library") as library:
        library.add("tiny:1b", build_model())
        yield library


@pytest.fixture
async def daemon(tmp_path: Path, unused_tcp_port: int, library: Library) -> AsyncIterator[OllamaServer]:
    async with OllamaServer(tmp_path / "ollama", unused_tcp_port, library.proxy) as daemon:
        yield daemon


class Preparation:
    """The preparation of one model, with its progress and its failures."""

    def __init__(self, port: int, source: str) -> None:
        self.model = PodModel(port, NAME, source, 2048, threads=1)
        self.progress: list[tuple[int, int | None]] = []
        self.failures: list[str] = []

    async def run(self) -> None:
        await prepare_model(
            self.model,
            lambda done, total: self.progress.append((done, total)),
            lambda error: self.failures.append(error.reason),
        )


def assert_loaded(daemon: OllamaServer) -> None:
    (loaded,) = daemon.loaded().values()
    assert (loaded["name"], loaded["context_length"]) == (NAME, 2048)


async def test_model_of_the_library_is_pulled_and_loaded(daemon: OllamaServer) -> None:
    preparation = Preparation(daemon.port, "ollama://tiny:1b")
    await preparation.run()
    assert_loaded(daemon)
    size = len(build_model())
    assert preparation.progress[-1] == (size, size)


async def test_model_is_run_with_the_threads_of_the_pod(daemon: OllamaServer, weights: Path) -> None:
    await Preparation(daemon.port, str(weights)).run()
    shown = daemon.ask("POST", "/api/show", {"model": NAME})
    assert "num_thread" in shown["parameters"]


async def test_model_is_created_from_the_file_on_the_volume(daemon: OllamaServer, weights: Path) -> None:
    await Preparation(daemon.port, str(weights)).run()
    assert_loaded(daemon)
    assert daemon.stored() == {NAME}


async def test_split_model_reaches_no_ollama(daemon: OllamaServer, tmp_path: Path) -> None:
    """Patterns may choose one that nobody inspected before a host fetched it."""
    first = tiny_split.write(tmp_path)[0]
    with pytest.raises(DaemonError, match=r"set runtime to llama\.cpp") as caught:
        await Preparation(daemon.port, str(first)).run()
    assert is_permanent(caught.value)
    assert daemon.blobs() == set()


async def test_restarted_daemon_loads_what_it_has_and_pulls_nothing(daemon: OllamaServer) -> None:
    await Preparation(daemon.port, "ollama://tiny:1b").run()
    asked = daemon.changes()
    await daemon.stop()
    await daemon.start()
    assert daemon.names() == set()
    await Preparation(daemon.port, "ollama://tiny:1b").run()
    assert_loaded(daemon)
    await eventually(lambda: daemon.changes() == [*asked, ("POST", "/api/generate")])


async def test_daemon_that_starts_late_is_waited_for(daemon: OllamaServer) -> None:
    await daemon.stop()
    preparation = Preparation(daemon.port, "ollama://tiny:1b")
    waiting = asyncio.create_task(preparation.run())
    with suppress(TimeoutError):  # it finds no daemon, and goes on
        await asyncio.wait_for(asyncio.shield(waiting), 0.1)
    assert not waiting.done()
    await daemon.start()
    await waiting
    assert_loaded(daemon)
    assert preparation.failures == []


async def test_model_that_the_library_lacks_is_asked_for_once(daemon: OllamaServer) -> None:
    preparation = Preparation(daemon.port, "ollama://missing:1b")
    with pytest.raises(DaemonError, match="file does not exist"):
        await preparation.run()
    await eventually(lambda: daemon.changes() == [("POST", "/api/pull")])
    assert preparation.failures == []


async def test_pull_that_fails_is_tried_again_and_then_ends(tmp_path: Path, unused_tcp_port: int) -> None:
    async with OllamaServer(tmp_path / "ollama", unused_tcp_port, NO_LIBRARY) as daemon:
        preparation = Preparation(daemon.port, "ollama://tiny:1b")
        with pytest.raises(DaemonError, match="connection refused"):
            await preparation.run()
        assert len(preparation.failures) == 4


async def test_answer_of_another_server_is_not_repeated(daemon: OllamaServer, library: Library) -> None:
    library.failure = (403, '{"message": "secret of a server inside"}\nmore of it')
    with pytest.raises(DaemonError, match=r"pull model manifest: HTTP 403$") as caught:
        await Preparation(daemon.port, "ollama://registry.ollama.ai/acme/tiny:1b").run()
    assert "secret" not in str(caught.value)


async def test_pull_goes_on_after_a_failure(daemon: OllamaServer, library: Library) -> None:
    library.failure = (503, "later")
    failures = []

    def mend(error: DaemonError) -> None:
        failures.append(error)
        library.failure = None

    await prepare_model(Preparation(daemon.port, "ollama://tiny:1b").model, lambda *_: None, mend)
    assert len(failures) == 1
    assert_loaded(daemon)


class FatalCall:
    """A server before an Ollama at one of whose calls the client dies; the daemon works on."""

    def __init__(self, daemon: OllamaServer, number: int) -> None:
        self.daemon = daemon
        self.number = number
        self.asked = 0
        self.client: asyncio.Task[None] | None = None

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.asked += 1
        if self.asked == self.number and self.client is not None:
            self.client.cancel()
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, f"{self.daemon.url}{request.path}", data=body or None) as answered,
        ):
            kept = {"Content-Type": answered.headers.get("Content-Type", "")}
            return web.Response(status=answered.status, headers=kept, body=await answered.read())


@pytest.mark.long  # a pull takes seconds, since Ollama looks after each file once a second
@pytest.mark.parametrize("of_library", [True, False], ids=["library", "volume"])
async def test_preparation_that_dies_at_any_call_is_ended_by_the_next(
    of_library: bool, daemon: OllamaServer, weights: Path
) -> None:
    """The proxy's container dies, and the next proxy finds what is there."""
    source = "ollama://tiny:1b" if of_library else str(weights)
    number, died = 0, True
    while died:
        number += 1
        front = FatalCall(daemon, number)
        async with serve_stub(front.answer) as url:
            port = int(url.rpartition(":")[2])
            front.client = asyncio.create_task(Preparation(port, source).run())
            await asyncio.wait({front.client})
            died = front.client.cancelled()
            await Preparation(port, source).run()
        assert_loaded(daemon)
        # A pull goes on when its client dies, and nothing tells what it brings from a model of the owner.
        stored = daemon.stored()
        assert stored - {"tiny:1b"} == {NAME}, number
        daemon.evict(NAME)
        for name in stored:
            daemon.delete(name)
        assert daemon.blobs() == set(), number
    assert number > 5, "it died at each call"


@pytest.mark.parametrize(
    ("reason", "text", "expected"),
    [
        ("SourceForbidden", "ollama://10.0.0.1/a/b:c: 10.0.0.1 is in a private network", True),
        ("WeightsMissing", "cannot read the weights for Ollama", True),
        ("DaemonRefused", "write /ollama/models/blobs/x: no space left on device", True),
        ("DaemonRefused", "pull model manifest: 503", False),
        (SILENT, "Ollama did not load x: broken pipe", False),
    ],
)
def test_error_that_no_retry_cures_is_permanent(reason: str, text: str, expected: bool) -> None:
    assert is_permanent(DaemonError(reason, text)) is expected
