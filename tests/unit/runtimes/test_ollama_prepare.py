"""The preparation of the Ollama in a pod, against the stand-in."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web

from runtimes import ollama_prepare
from runtimes.daemon import SILENT, DaemonError
from runtimes.ollama_prepare import PodModel, is_permanent, prepare_model
from tests.support.daemons.ollama import Handler, OllamaStandIn
from tests.support.tiny_models import tiny_split

NAME = "pomona/chat:0123456789-9876543210"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_START_SECONDS", "_FIRST_PAUSE_SECONDS", "_LONGEST_PAUSE_SECONDS"):
        monkeypatch.setattr(ollama_prepare, name, 0.01)


class Preparation:
    """The preparation of one model, with its progress and its failures."""

    def __init__(self, port: int, source: str) -> None:
        self.model = PodModel(port, NAME, source, 2048)
        self.progress: list[tuple[int, int | None]] = []
        self.failures: list[str] = []

    async def run(self) -> None:
        await prepare_model(
            self.model,
            lambda done, total: self.progress.append((done, total)),
            lambda error: self.failures.append(error.reason),
        )


async def test_model_of_the_library_is_pulled_and_loaded_for_ever(unused_tcp_port: int) -> None:
    async with OllamaStandIn(unused_tcp_port) as daemon:
        daemon.registry["tiny:1b"] = b"weights"
        preparation = Preparation(daemon.port, "ollama://tiny:1b")
        await preparation.run()
        (loaded,) = daemon.running.values()
        assert (loaded.name, loaded.context_length, loaded.stays) == (NAME, 2048, True)
        assert preparation.progress[-1] == (7, 7)


async def test_model_is_created_from_the_file_on_the_volume(tmp_path: Path, unused_tcp_port: int) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF weights")
    async with OllamaStandIn(unused_tcp_port) as daemon:
        await Preparation(daemon.port, str(tmp_path / "tiny.gguf")).run()
        assert daemon.names() == {NAME}
        assert list(daemon.blobs.values()) == [b"GGUF weights"]


async def test_split_model_reaches_no_ollama(tmp_path: Path, unused_tcp_port: int) -> None:
    """Patterns may choose one that nobody inspected before a host fetched it."""
    first = tiny_split.write(tmp_path)[0]
    async with OllamaStandIn(unused_tcp_port) as daemon:
        with pytest.raises(DaemonError, match=r"set runtime to llama\.cpp") as caught:
            await Preparation(daemon.port, str(first)).run()
        assert is_permanent(caught.value)
        assert not daemon.blobs


async def test_restarted_daemon_loads_what_it_has_and_pulls_nothing(unused_tcp_port: int) -> None:
    daemon = OllamaStandIn(unused_tcp_port)
    daemon.registry["tiny:1b"] = b"weights"
    async with daemon:
        await Preparation(daemon.port, "ollama://tiny:1b").run()
    assert not daemon.running
    daemon.asked.clear()
    async with daemon:
        await Preparation(daemon.port, "ollama://tiny:1b").run()
        assert daemon.names() == {NAME}
    assert daemon.changes() == [("POST", "/api/generate")]


async def test_daemon_that_starts_late_is_waited_for(unused_tcp_port: int) -> None:
    daemon = OllamaStandIn(unused_tcp_port)
    daemon.registry["tiny:1b"] = b"weights"
    preparation = Preparation(daemon.port, "ollama://tiny:1b")
    waiting = asyncio.create_task(preparation.run())
    with suppress(TimeoutError):  # it finds no daemon, and goes on
        await asyncio.wait_for(asyncio.shield(waiting), 0.1)
    assert not waiting.done()
    async with daemon:
        await waiting
        assert daemon.names() == {NAME}
    assert preparation.failures == []


async def test_model_that_the_library_lacks_is_asked_for_once(unused_tcp_port: int) -> None:
    async with OllamaStandIn(unused_tcp_port) as daemon:
        preparation = Preparation(daemon.port, "ollama://missing:1b")
        with pytest.raises(DaemonError, match="file does not exist"):
            await preparation.run()
        assert (preparation.failures, daemon.changes()) == ([], [("POST", "/api/pull")])


async def test_pull_that_fails_is_tried_again_and_then_ends(unused_tcp_port: int) -> None:
    async with OllamaStandIn(unused_tcp_port) as daemon:
        daemon.pull_error = "dial tcp: lookup registry.ollama.ai: no such host"
        preparation = Preparation(daemon.port, "ollama://tiny:1b")
        with pytest.raises(DaemonError, match="no such host"):
            await preparation.run()
        assert len(preparation.failures) == 4


async def test_answer_of_another_server_is_not_repeated(unused_tcp_port: int) -> None:
    async with OllamaStandIn(unused_tcp_port) as daemon:
        daemon.pull_error = 'pull model manifest: 403: {"message": "secret of a server inside"}\nmore of it'
        with pytest.raises(DaemonError, match=r"pull model manifest: HTTP 403$") as caught:
            await Preparation(daemon.port, "ollama://registry.example/acme/tiny:1b").run()
        assert "secret" not in str(caught.value)


async def test_pull_goes_on_after_a_failure(unused_tcp_port: int) -> None:
    async with OllamaStandIn(unused_tcp_port) as daemon:
        daemon.registry["tiny:1b"] = b"weights"
        daemon.pull_error = "max retries exceeded: EOF"
        failures = []

        def mend(error: DaemonError) -> None:
            failures.append(error)
            daemon.pull_error = ""

        await prepare_model(Preparation(daemon.port, "ollama://tiny:1b").model, lambda *_: None, mend)
        assert (len(failures), daemon.names()) == (1, {NAME})


class FatalCall(OllamaStandIn):
    """An Ollama at one of whose calls the client dies; the daemon works on."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__(port)
        self.registry["tiny:1b"] = b"weights"
        self.number = number
        self.client: asyncio.Task[None] | None = None

    def application(self) -> web.Application:
        application = super().application()
        application.middlewares.append(self._kill)
        return application

    @web.middleware
    async def _kill(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if len(self.asked) == self.number and self.client is not None:
            self.client.cancel()
        return await handler(request)


@pytest.mark.parametrize("of_library", [True, False], ids=["library", "volume"])
async def test_preparation_that_dies_at_any_call_is_ended_by_the_next(
    of_library: bool, tmp_path: Path, unused_tcp_port: int
) -> None:
    """The proxy's container dies, and the next proxy finds what is there."""
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF weights")
    source = "ollama://tiny:1b" if of_library else str(tmp_path / "tiny.gguf")
    number, died = 0, True
    while died:
        number += 1
        async with FatalCall(unused_tcp_port, number) as daemon:
            daemon.client = asyncio.create_task(Preparation(daemon.port, source).run())
            await asyncio.wait({daemon.client})
            died = daemon.client.cancelled()
            await Preparation(daemon.port, source).run()
            (loaded,) = daemon.running.values()
            assert (loaded.name, loaded.context_length, loaded.stays) == (NAME, 2048, True), number
            assert len(daemon.blobs) == 1, number
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
