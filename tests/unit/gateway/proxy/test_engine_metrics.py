"""GET /metrics of a pod's proxy: its own series and those of a real HTTP server as engine, well-behaved and hostile."""

import asyncio
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy import engine_metrics
from gateway.proxy.config import Backend, ProxyConfig
from gateway.proxy.engine_metrics import (
    MOST_ANSWERS,
    MOST_BYTES,
    REUSE_SECONDS,
    EngineScraper,
    EngineSeries,
)
from gateway.proxy.listeners import Listeners
from gateway.proxy.paths import METRICS, METRICS_OF_PROXY
from runtimes.pod import EngineMetrics
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.running_proxy import AUTHORIZED, fake_engine, make_service, post_chat, raw_engine

SERIES = "# HELP vllm:num_requests_waiting Waiting.\n# TYPE vllm:num_requests_waiting gauge\n"
SERIES += 'vllm:num_requests_waiting{model_name="tiny"} 3.0\n'
UP = 'pomona_proxy_engine_metrics_up{namespace="ns",service="tiny"}'


@asynccontextmanager
async def pod_proxy(
    backend: Backend,
    path: str | None = "/metrics",
    prefixes: tuple[str, ...] = ("",),
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[str]:
    """Run the proxy of a pod in this process, which passes on all names by default; yield its URL."""
    async with UpstreamPool() as pool, asyncio.TaskGroup() as tasks:
        metrics = EngineMetrics("", None, None, None, prefixes, path=path or "/")
        scraper = EngineScraper(pool, "ns/tiny", backend.url, metrics, clock) if path else None
        listeners = Listeners(pool, tasks, engine_hangs=lambda: False, engine_scraper=scraper)
        await listeners.configure(ProxyConfig((make_service(backend),)))
        (state,) = listeners.service_states()
        yield f"http://127.0.0.1:{state.port}"
        await listeners.drain(1)


async def scrape(http: aiohttp.ClientSession, url: str, path: str = METRICS) -> str:
    """Return the answer to a scrape, which Prometheus can read."""
    async with http.get(url + path, headers=AUTHORIZED) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    assert list(text_string_to_metric_families(text))
    assert "pomona_proxy_queued{" in text
    return text


def engine(body: bytes | str, content_type: str = "text/plain", **more: Any) -> Any:
    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        content = body if isinstance(body, bytes) else body.encode()
        return web.Response(body=content, headers={"Content-Type": content_type} | more.get("headers", {}))

    return fake_engine(answer)


async def test_series_of_the_engine_come_after_those_of_the_proxy(http: aiohttp.ClientSession) -> None:
    asked: list[web.BaseRequest] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(request)
        return web.Response(text=SERIES)

    async with fake_engine(answer) as backend, pod_proxy(backend, "/own/metrics") as url:
        text = await scrape(http, url)
    assert text.endswith(SERIES)
    assert f"{UP} 1.0\n" in text
    (request,) = asked
    assert (request.method, request.path) == ("GET", "/own/metrics")
    assert request.headers["Accept"] == "text/plain;version=0.0.4"
    assert request.headers["Accept-Encoding"] == "identity"
    assert "Authorization" not in request.headers, "the service's token is not for the engine"


async def test_engine_is_asked_for_a_valid_token_only(http: aiohttp.ClientSession) -> None:
    asked = 0

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.Response(text=SERIES)

    async with fake_engine(answer) as backend, pod_proxy(backend) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            async with http.get(url + METRICS, headers=headers) as response:
                assert response.status == 401
        async with http.post(url + METRICS, headers=AUTHORIZED) as response:
            assert response.status == 404
        assert SERIES not in await scrape(http, url, METRICS_OF_PROXY)
        assert asked == 0


async def test_engine_without_metrics_is_not_asked(http: aiohttp.ClientSession) -> None:
    async with engine(SERIES) as backend, pod_proxy(backend, None) as url:
        text = await scrape(http, url)
    assert SERIES not in text
    assert "engine_metrics_up" not in text


async def test_series_of_the_proxy_alone_say_nothing_of_the_engine(http: aiohttp.ClientSession) -> None:
    async with engine(SERIES) as backend, pod_proxy(backend) as url:
        assert "engine_metrics_up" not in await scrape(http, url, METRICS_OF_PROXY)


async def test_engine_that_does_not_listen_hides_no_series_of_the_proxy(http: aiohttp.ClientSession) -> None:
    async with pod_proxy(Backend("a", "http://127.0.0.1:9")) as url:
        assert f"{UP} 0.0\n" in await scrape(http, url)


@pytest.mark.parametrize(
    ("body", "content_type", "more"),
    [
        (gzip.compress(SERIES.encode()), "text/plain", {"headers": {"Content-Encoding": "gzip"}}),
        (SERIES, "text/html", {}),
        (SERIES, "application/openmetrics-text; version=1.0.0; charset=utf-8", {}),
        (SERIES, "text/plain; version=1.0.0; escaping=allow-utf-8", {}),
        (b"<html><body>vllm 1</body></html>\n", "text/plain", {}),
        (b"", "text/plain", {}),
        (gzip.compress(SERIES.encode()), "text/plain", {}),
    ],
    ids=["gzip", "HTML", "OpenMetrics", "version 1", "HTML as text", "empty", "gzip as text"],
)
async def test_answer_of_another_form_is_no_metrics(
    http: aiohttp.ClientSession, body: bytes | str, content_type: str, more: Any
) -> None:
    async with engine(body, content_type, **more) as backend, pod_proxy(backend) as url:
        text = await scrape(http, url)
    assert f"{UP} 0.0\n" in text
    assert "vllm" not in text


@pytest.mark.parametrize("content_type", ["text/plain; version=0.0.4; charset=utf-8", "TEXT/PLAIN;charset=utf-8"])
async def test_forms_of_the_content_type_that_engines_send(http: aiohttp.ClientSession, content_type: str) -> None:
    async with engine(SERIES, content_type) as backend, pod_proxy(backend) as url:
        assert f"{UP} 1.0\n" in await scrape(http, url)


@pytest.mark.parametrize("status", [204, 302, 401, 404, 500])
async def test_answer_of_another_status_is_no_metrics(http: aiohttp.ClientSession, status: int) -> None:
    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, text=None if status == 204 else SERIES, headers={"Location": "/elsewhere"})

    async with fake_engine(answer) as backend, pod_proxy(backend) as url:
        text = await scrape(http, url)
    assert f"{UP} 0.0\n" in text
    assert "vllm" not in text


async def test_names_that_collide_are_the_proxys(http: aiohttp.ClientSession) -> None:
    lie = f'{UP} 1\npomona_proxy_queued{{namespace="ns",service="tiny"}} 77\n# TYPE pomona_proxy_queued counter\n'
    async with engine(lie + SERIES + "# EOF\n" + lie) as backend, pod_proxy(backend) as url:
        text = await scrape(http, url)
    assert text.endswith(SERIES)
    assert " 77" not in text
    lines = text.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert len(comments) == len(set(comments))
    assert len([line for line in lines if line.startswith(UP)]) == 1
    assert "# EOF" not in text


async def test_10_mb_are_cut(http: aiohttp.ClientSession) -> None:
    line = b'big{of="' + b"x" * 200 + b'",number="%d"} 1\n'
    body = SERIES.encode() + b"".join(b"# TYPE f%d gauge\nf%d 1\n" % (n, n) for n in range(100))
    body += b"".join(line % number for number in range(50_000))
    assert len(body) > 10_000_000

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with suppress(ConnectionError):
            await writer.drain()

    async with raw_engine(talk) as backend, pod_proxy(backend) as url:
        text = await scrape(http, url)
    assert SERIES in text
    assert "f99 1\n" in text
    assert "big" not in text, "half a family could be taken for a whole one"
    assert f"{UP} 0.0\n" in text


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


class EndlessEngine:
    """An engine whose metrics have no end."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        self._head, self._piece = head, piece
        self.sent_bytes = 0
        self.broken_off = asyncio.Event()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await read_head(reader)
            writer.write(self._head)
            while True:
                writer.write(self._piece)
                await writer.drain()
                self.sent_bytes += len(self._piece)
        except ConnectionError:
            self.broken_off.set()


PIECE = b"x 1\n" * 4096


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (HEAD + b"\r\n", PIECE),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n" % (len(PIECE), PIECE)),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n", PIECE),
        (HEAD + b"\r\n", b"x" * (1 << 16)),
        (HEAD, b"X-More: y\r\n" * 1000),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n", PIECE),
    ],
    ids=["until it closes", "chunked", "with a length", "one line", "head", "gzip"],
)
async def test_endless_answer_is_broken_off(http: aiohttp.ClientSession, head: bytes, piece: bytes) -> None:
    endless = EndlessEngine(head, piece)
    async with raw_engine(endless.talk) as backend, pod_proxy(backend) as url:
        text = await scrape(http, url)
        await asyncio.wait_for(endless.broken_off.wait(), 60)
    assert f"{UP} 0.0\n" in text
    # The rest is in the buffers of the system.
    assert endless.sent_bytes < MOST_BYTES + (16 << 20)


async def test_answer_that_is_broken_off_is_no_metrics(http: aiohttp.ClientSession) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(HEAD + b"Content-Length: 9999\r\n\r\n" + SERIES.encode())
        await writer.drain()
        writer.close()

    async with raw_engine(talk) as backend, pod_proxy(backend) as url:
        text = await scrape(http, url)
    assert f"{UP} 0.0\n" in text
    assert "vllm" not in text


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", HEAD + b"\r\n", HEAD + b"\r\n" + SERIES.encode()])
async def test_engine_that_hangs_costs_a_short_time(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession, begin: bytes
) -> None:
    monkeypatch.setattr(engine_metrics, "SCRAPE_SECONDS", 0.1)
    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # On a busy machine the time may be over before the request has been sent.
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await read_head(reader)
            writer.write(begin)
            await reader.read()
        ended.set()

    async with raw_engine(talk) as backend, pod_proxy(backend) as url:
        text = await scrape(http, url)
        await asyncio.wait_for(ended.wait(), 60)
    assert f"{UP} 0.0\n" in text
    assert "vllm" not in text


class GatedMetrics:
    """An engine whose metrics wait for `gate`; a chat is answered at once."""

    def __init__(self, text: str = SERIES) -> None:
        self.asked = 0
        self.gate = asyncio.Event()
        self._text = text

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != METRICS:
            return web.json_response({"choices": [], "model": json.loads(await request.read())["model"]})
        self.asked += 1
        await self.gate.wait()
        return web.Response(text=self._text)


async def test_requests_are_answered_while_the_engine_owes_its_metrics(http: aiohttp.ClientSession) -> None:
    gated = GatedMetrics()
    async with fake_engine(gated) as backend, pod_proxy(backend) as url, asyncio.TaskGroup() as tasks:
        pending = tasks.create_task(scrape(http, url))
        await eventually(lambda: gated.asked)
        async with post_chat(http, url) as response:
            assert response.status == 200
        assert SERIES not in await scrape(http, url, METRICS_OF_PROXY)
        assert not pending.done()
        gated.gate.set()
        assert SERIES in await pending


async def test_scrapes_at_the_same_time_ask_the_engine_once(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession
) -> None:
    scrapes = 0
    read = EngineScraper.scrape

    async def counted(scraper: EngineScraper) -> EngineSeries:
        nonlocal scrapes
        scrapes += 1
        return await read(scraper)

    monkeypatch.setattr(EngineScraper, "scrape", counted)
    gated = GatedMetrics()
    async with fake_engine(gated) as backend, pod_proxy(backend) as url, asyncio.TaskGroup() as tasks:
        pending = [tasks.create_task(scrape(http, url)) for _ in range(MOST_ANSWERS)]
        await eventually(lambda: gated.asked)
        await eventually(lambda: scrapes == MOST_ANSWERS)
        assert f"{UP} 0.0\n" in await scrape(http, url), "one more than the most gets the proxy's own series at once"
        pending[0].cancel()
        gated.gate.set()
        for task in pending[1:]:
            assert SERIES in await task
        assert gated.asked == 1


class CountingEngine:
    """An engine that counts how often it renders its metrics, of which the first ones have `status`."""

    def __init__(self, *status: int) -> None:
        self.asked = 0
        self._status = [*status]

    async def __call__(self, _request: web.BaseRequest) -> web.StreamResponse:
        self.asked += 1
        return web.Response(text=SERIES, status=self._status.pop(0) if self._status else 200)


@pytest.mark.parametrize("status", [200, 500])
async def test_scrapes_in_a_row_share_a_reading_for_a_short_time(http: aiohttp.ClientSession, status: int) -> None:
    now = 100.0
    counting = CountingEngine(status)
    async with fake_engine(counting) as backend, pod_proxy(backend, clock=lambda: now) as url:
        first = [SERIES in await scrape(http, url) for _ in range(3)]
        assert first == [status == 200] * 3
        now += REUSE_SECONDS - 0.01
        assert (SERIES in await scrape(http, url)) is (status == 200)
        assert counting.asked == 1
        now += 0.02
        assert SERIES in await scrape(http, url)
        assert counting.asked == 2


async def test_reading_is_as_old_as_its_end(http: aiohttp.ClientSession) -> None:
    now = 100.0
    gated = GatedMetrics()
    async with (
        fake_engine(gated) as backend,
        pod_proxy(backend, clock=lambda: now) as url,
        asyncio.TaskGroup() as tasks,
    ):
        pending = tasks.create_task(scrape(http, url))
        await eventually(lambda: gated.asked)
        now += 2 * REUSE_SECONDS
        gated.gate.set()
        assert SERIES in await pending
        assert SERIES in await scrape(http, url)
        assert gated.asked == 1


async def test_names_of_other_programs_are_not_passed_on(http: aiohttp.ClientSession) -> None:
    lie = "# TYPE ALERTS gauge\nALERTS 1\nkube_node_status_condition 1\n"
    async with engine(lie + SERIES + lie) as backend, pod_proxy(backend, prefixes=("vllm:", "http_")) as url:
        text = await scrape(http, url)
    assert text.endswith(SERIES)
    assert "ALERTS" not in text
    assert "kube" not in text
    assert f"{UP} 1.0\n" in text


async def test_client_that_does_not_read_is_broken_off(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_metrics, "SEND_SECONDS", 0.2)
    text = "".join(f'big{{of="{"x" * 1000}",number="{number}"}} 1\n' for number in range(1000))
    request = f"GET {METRICS} HTTP/1.1\r\nHost: x\r\nAuthorization: {AUTHORIZED['Authorization']}\r\n\r\n".encode()

    async def is_free() -> bool:
        # A busy machine may break this client off, too.
        with suppress(aiohttp.ClientPayloadError):
            async with http.get(url + METRICS, headers=AUTHORIZED) as response:
                return f"{UP} 1.0\n{text}" in await response.text()
        return False

    async with engine(text) as backend, pod_proxy(backend) as url:
        await eventually(is_free)
        with ExitStack() as held:
            for _ in range(2 * MOST_ANSWERS):
                client = held.enter_context(socket.socket())
                # The system would buffer the whole answer in large segments.
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", urlsplit(url).port))
                await asyncio.get_running_loop().sock_sendall(client, request)
            await eventually(lambda: "metrics_not_read" in capfd.readouterr().err)
            await eventually(is_free)


async def test_problem_is_logged_when_it_begins_and_when_it_ends(
    http: aiohttp.ClientSession, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = [SERIES, "", "", SERIES, SERIES]
    now = 100.0

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=texts.pop())

    async with fake_engine(answer) as backend, pod_proxy(backend, clock=lambda: now) as url:
        while texts:
            await scrape(http, url)
            now += REUSE_SECONDS
    log = [line for line in capfd.readouterr().err.splitlines() if "engine_metrics" in line]
    assert [json.loads(line)["event"] for line in log] == ["engine_metrics_failed", "engine_metrics_regained"]
