"""The proxy of a pod, as the process that its container runs."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from artifacts.compiled_code import FOLDER, find_archive
from gateway.proxy import pod
from gateway.proxy.config import Backend
from gateway.proxy.pod import REPORT_SECONDS, EngineCheck, MountedToken, PodProxyError, ask_health
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import AUTHORIZED, CHAT, TOKEN, fake_engine, post_chat, raw_engine


class Engine:
    """An engine that notes what reaches it, and answers a chat when `answering` is set."""

    def __init__(self) -> None:
        self.health = 200
        self.asked: list[str] = []
        self.models: list[str] = []
        self.answering = asyncio.Event()
        self.answering.set()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(text="vllm:num_requests_waiting 3.0\nALERTS 1\nhttp_requests_total 7.0\n")
        if request.path == "/healthz":
            return web.Response(status=self.health, text="secret detail")
        self.asked.append(request.path)
        self.models.append((await request.json())["model"])
        await self.answering.wait()
        return web.json_response({"choices": []})


class PodProxy(NamedTuple):
    """A running proxy of a pod."""

    process: asyncio.subprocess.Process
    url: str
    token_file: Path
    http: aiohttp.ClientSession

    async def status(self, path: str, **headers: str) -> int:
        """Return the status of a GET, or 0 if nothing listens."""
        try:
            async with self.http.get(self.url + path, headers=headers) as response:
                return response.status
        except aiohttp.ClientConnectionError:
            return 0

    async def answers(self, path: str, status: int, **headers: str) -> bool:
        return await self.status(path, **headers) == status

    async def until_health(self, status: int) -> None:
        await eventually(lambda: self.answers("/health", status))

    async def ask(self) -> int:
        """Return the status of a chat with the token."""
        async with post_chat(self.http, self.url) as response:
            return response.status

    async def post(self, chat: dict[str, Any]) -> int:
        """Return the status of a chat with this body."""
        async with self.http.post(f"{self.url}/v1/chat/completions", json=chat, headers=AUTHORIZED) as response:
            return response.status

    async def queued(self) -> float:
        """Return the number of requests that wait, by the metrics."""
        async with self.http.get(self.url + "/metrics", headers=AUTHORIZED) as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("pomona_proxy_queued{"))


def arguments(token_file: Path, port: int, engine_port: int, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "cli.main", "pod-proxy", "--service=ns/tiny", "--address=127.0.0.1", f"--port={port}"),
        *(f"--token-file={token_file}", f"--engine-port={engine_port}", "--health-path=/healthz", *more),
    ]


Run = Callable[..., Awaitable[PodProxy]]


@pytest.fixture
async def run(tmp_path: Path, http: aiohttp.ClientSession, unused_tcp_port: int) -> AsyncIterator[Run]:
    """Start the proxy in front of an engine; kill it at the end."""
    token_file = tmp_path / "token"
    token_file.write_text(f"{TOKEN}\n")
    started: list[asyncio.subprocess.Process] = []

    async def start(backend: Backend, *more: str) -> PodProxy:
        engine_port = urlsplit(backend.url).port or 0
        command = arguments(token_file, unused_tcp_port, engine_port, *more)
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
        started.append(process)
        return PodProxy(process, f"http://127.0.0.1:{unused_tcp_port}", token_file, http)

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_request_reaches_the_engine_with_the_token_only(run: Run, http: aiohttp.ClientSession) -> None:
    engine = Engine()
    async with fake_engine(engine) as backend:
        proxy = await run(backend, "--engine-model=library/tiny:1b")
        await proxy.until_health(200)
        async with http.post(f"{proxy.url}/v1/chat/completions", json=CHAT) as response:
            assert response.status == 401
        assert await proxy.ask() == 200
        async with http.post(f"{proxy.url}/api/pull", json=CHAT, headers=AUTHORIZED) as response:
            assert response.status == 404
        assert (engine.asked, engine.models) == (["/v1/chat/completions"], ["library/tiny:1b"])
        assert await proxy.status("/metrics") == 401
        assert await proxy.status("/metrics", **AUTHORIZED) == 200


async def test_path_that_the_engine_lacks_is_refused_with_those_of_its_mode(
    run: Run, http: aiohttp.ClientSession
) -> None:
    engine = Engine()
    async with fake_engine(engine) as backend:
        proxy = await run(backend, "--engine=vllm", "--mode=embeddings")
        await proxy.until_health(200)
        async with http.post(f"{proxy.url}/v1/responses/input_tokens", json=CHAT, headers=AUTHORIZED) as response:
            assert response.status == 400
            message = (await response.json())["error"]["message"]
        assert await proxy.status("/v1/responses", Connection="Upgrade", Upgrade="websocket") == 426
    assert message.endswith("its engine does not serve /v1/responses/input_tokens: use /v1/embeddings, /v1/rerank")
    assert engine.asked == []


async def test_requests_share_the_cells_that_the_arguments_state(run: Run, http: aiohttp.ClientSession) -> None:
    engine = Engine()
    async with fake_engine(engine) as backend:
        proxy = await run(backend, "--concurrency=4", "--context-length=2048", "--shared-tokens=512", "--adapter=a:1")
        await proxy.until_health(200)
        async with http.get(f"{proxy.url}/v1/models/tiny:a", headers=AUTHORIZED) as response:
            assert (await response.json())["max_model_len"] == 2048
        engine.answering.clear()
        long = [asyncio.create_task(proxy.ask()) for _ in range(2)]
        await eventually(lambda: bool(engine.asked))
        short = asyncio.create_task(proxy.post(CHAT | {"max_tokens": 20}))
        await eventually(lambda: len(engine.asked) == 2)
        assert await proxy.queued() == 1
        engine.answering.set()
        assert await asyncio.gather(*long, short) == [200, 200, 200]


async def test_metrics_are_those_of_the_proxy_and_of_the_engine(run: Run, http: aiohttp.ClientSession) -> None:
    async with fake_engine(Engine()) as backend:
        proxy = await run(backend, "--engine=vllm")
        await proxy.until_health(200)
        assert await proxy.status("/metrics") == 401
        for query, has_engine in (("", True), ("?engine=true", True), ("?x=y&engine=false", False)):
            async with http.get(f"{proxy.url}/metrics{query}", headers=AUTHORIZED) as response:
                lines = (await response.text()).splitlines()
            assert 'pomona_proxy_queued{namespace="ns",service="tiny"} 0.0' in lines
            assert ("vllm:num_requests_waiting 3.0" in lines) is has_engine
            assert ("http_requests_total 7.0" in lines) is has_engine
            assert "ALERTS 1" not in lines


async def test_health_follows_the_engines_own_and_tells_nothing_else(run: Run, http: aiohttp.ClientSession) -> None:
    engine = Engine()
    engine.health = 500
    async with fake_engine(engine) as backend:
        proxy = await run(backend)
        await proxy.until_health(503)
        assert await proxy.ask() == 503
        engine.health = 204
        await proxy.until_health(200)
        async with http.get(f"{proxy.url}/health") as response:
            assert await response.json() == {"status": "ok"}
        engine.health = 404
        await proxy.until_health(503)


async def test_replaced_token_is_read_from_its_file(run: Run) -> None:
    async with fake_engine(Engine()) as backend:
        proxy = await run(backend)
        await proxy.until_health(200)
        newer = proxy.token_file.with_name("newer")
        newer.write_text("another-token")
        newer.replace(proxy.token_file)  # as the kubelet does it
        await eventually(lambda: proxy.answers("/v1/models", 200, Authorization="Bearer another-token"))
        assert await proxy.status("/v1/models", **AUTHORIZED) == 200, "clients may have the one before for a while"
        assert await proxy.status("/v1/models", Authorization="Bearer third") == 401


async def test_running_and_waiting_requests_are_finished_after_sigterm(run: Run) -> None:
    engine = Engine()
    async with fake_engine(engine) as backend:
        proxy = await run(backend, "--concurrency=1")
        await proxy.until_health(200)
        engine.answering.clear()
        requests = [asyncio.create_task(proxy.ask()) for _ in range(3)]
        await eventually(lambda: has_queued(proxy, 2))
        assert len(engine.asked) == 1
        proxy.process.send_signal(signal.SIGTERM)
        await proxy.until_health(0)
        assert proxy.process.returncode is None
        engine.answering.set()
        assert await asyncio.gather(*requests) == [200, 200, 200]
        assert await proxy.process.wait() == 0


async def test_requests_that_are_not_answered_in_time_get_an_error(run: Run) -> None:
    engine = Engine()
    async with fake_engine(engine) as backend:
        proxy = await run(backend, "--concurrency=1", "--drain-seconds=0.2")
        await proxy.until_health(200)
        engine.answering.clear()
        requests = [asyncio.create_task(proxy.ask()) for _ in range(2)]
        await eventually(lambda: has_queued(proxy, 1))
        proxy.process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*requests) == [503, 503], "also the one that was sent to the engine"
        assert await proxy.process.wait() == 0


async def test_compiled_code_is_kept_once_the_engine_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod, "_PULSE_SECONDS", 0.01)
    home, kept = tmp_path / "home", tmp_path / "volume" / FOLDER / "0123"
    home.mkdir()
    kept.parent.parent.mkdir()
    (home / "graph.so").write_bytes(b"code")
    os.utime(home / "graph.so", (0, 0))
    options = pod.PodProxyOptions("ns/tiny", "", 0, tmp_path, 0, "/health", home=home, kept=kept)
    check = EngineCheck()
    keeping = asyncio.create_task(pod._keep_compiled_code(options, check))
    assert await asyncio.wait({keeping}, timeout=0.1) == (set(), {keeping}), "it may still compile"
    check.record_health(answer=True, now=0.0, progress=0, in_flight=False)
    await keeping
    assert find_archive(kept).exists()


async def test_volume_that_cannot_be_written_costs_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod, "_PULSE_SECONDS", 0.01)
    logged: list[object] = []
    monkeypatch.setattr("gateway.proxy.pod.log.info", lambda _event, **fields: logged.append(fields["outcome"]))
    options = pod.PodProxyOptions(
        "ns/tiny", "", 0, tmp_path, 0, "/health", home=tmp_path, kept=tmp_path / "a" / "b" / "c"
    )
    check = EngineCheck()
    check.record_health(answer=True, now=0.0, progress=0, in_flight=False)
    await pod._keep_compiled_code(options, check)
    assert "No such file or directory" in str(logged)


async def has_queued(proxy: PodProxy, count: int) -> bool:
    return await proxy.queued() == count


def test_engine_is_healthy_from_its_first_answer_to_two_failures_in_a_row() -> None:
    engine = EngineCheck()
    seen = []
    for answer in (False, True, False, True, False, None, True):
        engine.record_health(answer, 0, 0, in_flight=False)
        seen.append(engine.is_healthy)
    assert seen == [False, True, True, True, True, False, True]


def test_engine_that_is_busy_with_a_request_may_answer_late() -> None:
    engine = EngineCheck()
    engine.record_health(True, 0, 0, in_flight=False)
    for _ in range(10):
        engine.record_health(None, 0, 0, in_flight=True)
    assert engine.is_healthy
    for _ in range(2):
        engine.record_health(False, 0, 0, in_flight=True)
    assert not engine.is_healthy, "a request in flight does not excuse an engine that is gone"


class WatchedEngine:
    """An engine that is asked for its health every six seconds of a virtual clock.

    `loading_seconds` is the time that loading may take; by default there is no limit.
    """

    def __init__(self, loading_seconds: float = math.inf, *, has_pulse: bool = False) -> None:
        self.check = EngineCheck(loading_seconds=loading_seconds, has_pulse=has_pulse)
        self._seconds = 60_000.0

    def note_pulse(self) -> None:
        """Answer at the path of the pulse."""
        self.check.note_pulse(self._seconds)

    def may_get_requests(self) -> bool:
        """Return whether requests are sent to it."""
        return self.check.is_healthy

    def hangs_after(
        self, answer: bool | None, seconds: float = 0, progress: int = 0, *, in_flight: bool = True
    ) -> bool:
        """Give this answer for so long, at least once; return whether the engine hangs then."""
        end = self._seconds + seconds
        self.check.record_health(answer, self._seconds, progress, in_flight=in_flight)
        while self._seconds < end:
            self._seconds += 6
            self.check.record_health(answer, self._seconds, progress, in_flight=in_flight)
        return self.check.hangs


def test_engine_hangs_though_its_health_path_answers_if_its_work_does_not() -> None:
    engine = WatchedEngine(has_pulse=True)
    assert not engine.hangs_after(True, 594)
    engine.note_pulse()
    assert not engine.hangs_after(True, 594)
    assert engine.hangs_after(True, 6)
    assert not engine.may_get_requests()
    engine.note_pulse()
    assert not engine.hangs_after(True)
    assert engine.may_get_requests()
    assert not engine.hangs_after(True, 594, progress=1)
    assert not engine.hangs_after(True, 594, progress=2), "tokens are a sign of life"


def test_engine_that_loads_has_no_pulse() -> None:
    engine = WatchedEngine(loading_seconds=3600, has_pulse=True)
    engine.hangs_after(False, 3594)
    engine.note_pulse()
    assert engine.hangs_after(False, 6)
    assert not engine.hangs_after(True, 594)


@pytest.mark.parametrize("in_flight", [True, False])
def test_engine_that_was_healthy_hangs_after_ten_minutes_of_silence(in_flight: bool) -> None:
    engine = WatchedEngine()
    assert not engine.hangs_after(True, 3600, in_flight=in_flight)
    assert not engine.hangs_after(None, 594, in_flight=in_flight)
    assert engine.hangs_after(None, 6, in_flight=in_flight)
    assert not engine.hangs_after(True, in_flight=in_flight), "it answers again"


def test_engine_loads_its_model_for_as_long_as_it_takes_if_there_is_no_limit() -> None:
    engine = WatchedEngine()
    assert not engine.hangs_after(None, 86_400)
    assert not engine.hangs_after(False, 86_400)


@pytest.mark.parametrize("answer", [None, False])
def test_engine_that_loads_for_too_long_hangs_until_it_is_healthy(answer: bool | None) -> None:
    engine = WatchedEngine(loading_seconds=3600)
    assert not engine.hangs_after(answer, 3594, in_flight=False)
    assert engine.hangs_after(answer, 6, in_flight=False)
    assert not engine.hangs_after(True, 3600)


@pytest.mark.parametrize("answer", [None, False])
def test_engine_that_loads_for_too_long_has_all_of_its_time_again_after_its_restart(answer: bool | None) -> None:
    """The proxy sees no restart of an engine that refuses connections before and after it."""
    engine = WatchedEngine(loading_seconds=3600)
    for _ in range(3):
        assert not engine.hangs_after(answer, 3594)
        assert engine.hangs_after(answer, 6)
        assert engine.hangs_after(answer, REPORT_SECONDS - 6), "the kubelet restarts it meanwhile"
        assert not engine.hangs_after(answer, 6)


def test_engine_that_ended_after_it_was_healthy_has_all_of_its_time_to_load_again() -> None:
    engine = WatchedEngine(loading_seconds=3600)
    engine.hangs_after(False, 3000)
    engine.hangs_after(True, 1200)
    assert engine.hangs_after(None, 600)
    assert not engine.hangs_after(False, 3594)
    assert engine.hangs_after(False, 6)


def test_engine_that_answers_requests_does_not_hang_though_its_health_is_late() -> None:
    engine = WatchedEngine(loading_seconds=3600)
    engine.hangs_after(True)
    engine.hangs_after(False)
    for progress in range(1, 10):
        assert not engine.hangs_after(None, 3594, progress)
    assert engine.hangs_after(None, 6, 9)


def test_answers_to_requests_are_a_sign_of_life() -> None:
    engine = WatchedEngine()
    engine.hangs_after(True)
    for progress in range(1, 10):
        assert not engine.hangs_after(None, 594, progress)
    assert engine.hangs_after(None, 600, 9)


def test_answers_before_the_first_health_do_not_begin_the_time_of_silence() -> None:
    engine = WatchedEngine()
    assert not engine.hangs_after(None, progress=1)
    assert not engine.hangs_after(None, 3600, 2)


def test_restarted_engine_is_waited_for_again() -> None:
    engine = WatchedEngine()
    engine.hangs_after(True)
    assert engine.hangs_after(None, 600)
    assert not engine.hangs_after(False), "refused connections"
    assert not engine.hangs_after(None, 3600), "it loads its model"
    engine.hangs_after(True)
    assert engine.hangs_after(None, 600)


async def test_engine_that_loads_for_too_long_hangs_until_its_first_health(run: Run) -> None:
    engine = Engine()
    engine.health = 503
    async with fake_engine(engine) as backend:
        proxy = await run(backend, "--loading-seconds=1")
        await eventually(lambda: proxy.answers("/live/engine", 503))
        engine.health = 200
        await eventually(lambda: proxy.answers("/live/engine", 200))


async def test_liveness_of_the_engine_needs_no_token_and_tells_nothing(run: Run, http: aiohttp.ClientSession) -> None:
    engine = Engine()
    async with fake_engine(engine) as backend:
        proxy = await run(backend)
        await proxy.until_health(200)
        async with http.get(f"{proxy.url}/live/engine") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        engine.health = 500
        await proxy.until_health(503)
        assert await proxy.status("/live/engine") == 200, "it is restarted only if it hangs"
        async with http.post(f"{proxy.url}/live/engine", json={}) as response:
            assert response.status == 401
        assert engine.asked == []


async def test_health_is_true_false_or_unknown() -> None:
    async with fake_engine(Engine()) as backend:
        assert await ask_health(urlsplit(backend.url).port or 0, "/healthz") is True
        assert await ask_health(urlsplit(backend.url).port or 0, "/other-than-health") is False

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del writer
        await reader.read()

    async with raw_engine(silent) as backend:
        assert await ask_health(urlsplit(backend.url).port or 0, "/healthz", 0.05) is None


async def test_endless_line_of_an_engine_is_no_health() -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 200" * 1000)
            await writer.drain()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await flood(reader, writer)

    async with raw_engine(talk) as backend:
        assert await ask_health(urlsplit(backend.url).port or 0, "/healthz") is False


@pytest.mark.parametrize("content", ["", "two words", "\x00"])
def test_token_file_without_a_token_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(PodProxyError, match="has no token"):
        MountedToken(path)


def test_unreadable_token_file_keeps_the_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(PodProxyError, match="No such file"):
        MountedToken(path)
    path.write_text("one")
    tokens = MountedToken(path)
    path.unlink()
    tokens.reload()
    assert (tokens.token, tokens.previous) == ("one", None)


async def test_taken_port_ends_the_proxy_with_a_message(tmp_path: Path) -> None:
    log = tmp_path / "termination"
    async with fake_engine(Engine()) as backend:
        port = urlsplit(backend.url).port or 0
        token = tmp_path / "own-token"
        token.write_text(TOKEN)
        process = await asyncio.create_subprocess_exec(
            *arguments(token, port, port, f"--termination-log={log}"), stderr=subprocess.DEVNULL
        )
        assert await process.wait() == 1
    assert "cannot listen on 127.0.0.1 port" in log.read_text()
