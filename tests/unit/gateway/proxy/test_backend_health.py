"""The health of a backend as its traffic shows it: the decision, and what the running proxy reports."""

import asyncio
import contextlib
import functools

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from gateway.http.control_client import ControlRefusedError
from gateway.proxy.backend_health import AnswerProgress, BackendPast
from gateway.proxy.config import Backend, BackendHealth, ProxyConfig
from gateway.proxy.health_monitor import HealthMonitor
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.health_reports import ask, next_report
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    GatedEngine,
    ProxyProcess,
    fake_engine,
    make_service,
    post_chat,
    raw_engine,
)


class Traffic:
    """Requests to one backend, at times that the test gives."""

    def __init__(self) -> None:
        self.past = BackendPast("u", lambda _: None)

    def send(self, now: float, digest: int = 0, size_bytes: int = 100) -> AnswerProgress:
        progress = AnswerProgress(digest, size_bytes, now)
        self.past.under_way.add(progress)
        return progress

    def fail(self, *digests: int, outcome: str = "500", now: float = 0) -> None:
        for digest in digests:
            self.past.note_failure(self.send(now, digest), outcome, now)

    def stream(self, *times: float, size_bytes: int = 100) -> AnswerProgress:
        """Send a request at the first time, answer it at the second, and send data at the others."""
        sent, begun, *data = times
        progress = self.send(sent, size_bytes=size_bytes)
        self.past.note_begin(progress, begun)
        for now in data:
            self.past.note_data(progress, now)
        return progress

    def reason(self, now: float = 0) -> str:
        self.past.check_pauses(now)
        assert self.past.health.suspect == bool(self.past.health.reason)
        return self.past.health.reason


def test_backend_that_fails_three_requests_in_a_row_is_suspect_until_it_succeeds() -> None:
    traffic = Traffic()
    traffic.fail(1, 2)
    assert traffic.reason() == ""
    traffic.fail(3, outcome="it accepts no connection")
    assert traffic.past.health == BackendHealth(
        "u", suspect=True, reason="Failing", message="the last 3 requests failed: 500, 500, it accepts no connection"
    )
    traffic.past.note_success(traffic.send(0))
    assert traffic.past.health == BackendHealth("u")


def test_success_between_failures_starts_the_count_anew() -> None:
    traffic = Traffic()
    traffic.fail(*[1] * 7)
    traffic.past.note_success(traffic.send(0))
    traffic.fail(2, 3)
    assert traffic.reason() == ""
    traffic.fail(*[3] * 5)
    assert traffic.reason() == ""
    traffic.fail(3)
    assert traffic.past.health.message.startswith("the last 8 requests failed")


def test_one_request_that_a_client_repeats_makes_no_backend_suspect() -> None:
    traffic = Traffic()
    traffic.fail(*[1] * 7)
    assert traffic.reason() == ""
    traffic.fail(1)
    assert traffic.reason() == "Failing", "nothing but failures, however alike they are"


def test_backend_that_streams_to_others_is_not_suspect_for_the_requests_of_one() -> None:
    traffic = Traffic()
    stream = traffic.stream(0, 1, 2)
    for second in range(3, 100):
        traffic.fail(second, now=second)
        traffic.past.note_data(stream, second + 0.5)
    assert traffic.reason(100) == ""
    traffic.past.stop_observing(stream)
    traffic.fail(1, now=101)
    assert traffic.reason(101) == "Failing", "it works for nobody any more"


def test_stream_that_has_stood_still_since_the_first_failure_shows_no_work() -> None:
    traffic = Traffic()
    stream = traffic.stream(0, 1, 2)
    traffic.fail(1, 2, 3, now=3)
    assert traffic.reason(4) == "Failing"
    traffic.past.note_data(stream, 5)
    assert traffic.reason(5) == "Failing", "data may be old; a whole answer is none"
    traffic.past.note_success(stream)
    assert traffic.reason(5) == ""


def test_backend_that_says_it_can_serve_no_request_is_suspect_at_once() -> None:
    traffic = Traffic()
    traffic.past.note_fatal_failure(traffic.send(0), "404")
    assert traffic.past.health == BackendHealth(
        "u", suspect=True, reason="Failing", message="its last answer, 404, shows that it cannot serve any request"
    )
    assert not traffic.past.under_way


def test_client_that_hangs_up_shows_nothing() -> None:
    traffic = Traffic()
    traffic.fail(1, 2)
    for digest in range(10):
        traffic.past.stop_observing(traffic.send(0, digest))
    assert traffic.reason(1e6) == ""
    traffic.fail(3)
    assert traffic.reason() == "Failing"


def test_silence_within_a_stream_is_held_against_the_pauses_before() -> None:
    traffic = Traffic()
    progress = traffic.stream(0, 1, 2, 5)
    assert traffic.reason(14) == "", "not yet 10 s"
    assert traffic.reason(19.9) == "", "its longest pause was 3 s, so 15 s are no reason"
    assert traffic.reason(20.1) == "Silent"
    assert traffic.past.health.message == "no data for 15 s within a stream; the longest pause before was 3.0 s"
    traffic.past.note_data(progress, 21)
    assert traffic.reason(22) == ""


def test_pauses_of_earlier_streams_count() -> None:
    traffic = Traffic()
    traffic.past.note_success(traffic.stream(0, 1, 9))
    traffic.stream(10, 11, 12)
    assert traffic.reason(51) == ""
    assert traffic.reason(53) == "Silent"


def test_pause_for_a_client_that_does_not_read_is_not_the_engines() -> None:
    traffic = Traffic()
    progress = traffic.stream(0, 1, 2)
    progress.waits_for_client = True
    assert traffic.reason(1000) == ""
    traffic.past.note_data(progress, 1000)
    assert progress.longest_pause == 1
    assert traffic.reason(1011) == "Silent"


def test_first_answer_of_a_backend_may_take_long_but_not_for_ever() -> None:
    traffic = Traffic()
    late = traffic.send(0, size_bytes=1_000_000)
    assert traffic.reason(119) == ""
    assert traffic.reason(121) == "Slow"
    assert traffic.past.health.message == "no answer for 121 s, and none before"
    traffic.past.note_begin(late, 130)
    traffic.past.note_data(late, 130)
    assert traffic.reason(131) == ""


def test_wait_for_an_answer_is_held_against_the_waits_before() -> None:
    traffic = Traffic()
    traffic.past.note_success(traffic.stream(0, 14, 15))
    late = traffic.send(20)
    assert traffic.reason(20 + 69) == ""
    assert traffic.reason(20 + 71) == "Slow"
    assert traffic.past.health.message == "no answer for 71 s; expected within 14.0 s by earlier answers"
    traffic.past.note_success(late)
    assert traffic.reason(1000) == ""


def test_larger_request_may_wait_longer_in_proportion() -> None:
    traffic = Traffic()
    traffic.past.note_success(traffic.stream(0, 2, 3, size_bytes=1000))
    traffic.send(0, size_bytes=1_000_000)
    assert traffic.reason(9_999) == ""
    assert traffic.reason(10_001) == "Slow"


# The running proxy


class FailingEngine:
    """An engine that answers 500 while it is poisoned."""

    def __init__(self) -> None:
        self.poisoned = True

    async def __call__(self, _request: web.BaseRequest) -> web.StreamResponse:
        if self.poisoned:
            return web.json_response({"error": {"message": "Compute error: a-secret-prompt"}}, status=500)
        return web.json_response({"choices": []})


async def test_poisoned_engine_is_reported_at_once_and_again_when_it_recovers(
    proxy: ProxyProcess, http: aiohttp.ClientSession, reports: "asyncio.Queue[BackendHealth]"
) -> None:
    engine = FailingEngine()
    async with fake_engine(engine, "sick") as backend:
        url = await proxy.serve(backend)
        await ask(http, url, "1", "2", "3")
        suspect = await next_report(reports)
        assert (suspect.uid, suspect.suspect, suspect.reason) == ("sick", True, "Failing")
        assert suspect.message == "the last 3 requests failed: 500, 500, 500"
        first = await anext(proxy.client.watch_health())
        assert first == suspect, "a new watcher gets the suspects first"
        engine.poisoned = False
        await ask(http, url, "4")
        assert await next_report(reports) == BackendHealth("sick")


async def test_backend_that_breaks_off_and_accepts_no_connection_is_suspect(
    proxy: ProxyProcess, http: aiohttp.ClientSession, reports: "asyncio.Queue[BackendHealth]"
) -> None:
    async def break_off(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport
        request.transport.abort()
        return web.Response()

    async with fake_engine(break_off, "dying") as backend:
        url = await proxy.serve(backend)
        assert await ask(http, url, "1", "2") == 502
    assert await ask(http, url, "3") == 503
    message = (await next_report(reports)).message
    assert message == "the last 3 requests failed: broken off, broken off, it accepts no connection"


async def test_stream_that_is_broken_off_is_a_failure_and_a_client_that_hangs_up_is_none(
    proxy: ProxyProcess, http: aiohttp.ClientSession, reports: "asyncio.Queue[BackendHealth]"
) -> None:
    gated = GatedEngine()
    async with fake_engine(gated, "cut") as backend:
        url = await proxy.serve(backend)
        for _ in range(10):
            async with post_chat(http, url) as stream:
                stream.close()
        assert await proxy.client.wait_idle("cut", 10)
        for number in range(3):
            body = CHAT | {"prompt": str(number)}
            gated.release(b"CUT")
            with contextlib.suppress(aiohttp.ClientError):
                async with http.post(f"{url}/v1/completions", json=body, headers=AUTHORIZED) as response:
                    await response.read()
        assert (await next_report(reports)).message == "the last 3 requests failed: broken off, broken off, broken off"


async def ask_for_chat(http: aiohttp.ClientSession, url: str, path: str = "/v1/chat/completions") -> tuple[int, str]:
    """Return the status and the type of the error."""
    async with http.post(f"{url}{path}", json=CHAT, headers=AUTHORIZED) as response:
        return response.status, (await response.json())["error"]["type"]


async def test_engine_that_tells_its_end_as_404_is_suspect_at_once(
    proxy: ProxyProcess, http: aiohttp.ClientSession, reports: "asyncio.Queue[BackendHealth]"
) -> None:
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.json_response({"error": "generation thread died"}, status=404)

    async with fake_engine(answer, "dead") as backend:
        url = await proxy.serve(structs.replace(backend, engine="mlx-lm"))
        assert await ask_for_chat(http, url) == (503, "server_error")
        suspect = await next_report(reports)
        assert (suspect.reason, suspect.message) == (
            "Failing",
            "its last answer, 404, shows that it cannot serve any request",
        )
        assert (await proxy.stats()).errors == 1
        url = await proxy.serve(structs.replace(backend, engine="unheard-of"))
        assert await ask_for_chat(http, url) == (404, "invalid_request_error")
        assert await next_report(reports) == BackendHealth("dead")


async def test_mistakes_of_a_client_show_nothing_whatever_status_the_engine_gives_them(
    proxy: ProxyProcess, http: aiohttp.ClientSession, reports: "asyncio.Queue[BackendHealth]"
) -> None:
    async def answer(_: web.BaseRequest) -> web.Response:
        error = {"code": 500, "message": "image input is not supported - hint: x", "type": "server_error"}
        return web.json_response({"error": error}, status=500)

    async with fake_engine(answer, "blind") as backend:
        url = await proxy.serve(structs.replace(backend, engine="llama.cpp"))
        for path in ("/v1/chat/completions", "/v1/messages"):
            for _ in range(10):
                assert await ask_for_chat(http, url, path) == (400, "invalid_request_error")
        assert (await proxy.stats()).errors == 0
        assert reports.empty()


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b'data: {"error":{"code":500,"message":"Compute error.","type":"server_error"}}\n\n', "status 200"),
        (b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n', "broken off"),
    ],
)
async def test_engine_that_fails_within_its_streams_is_reported(
    proxy: ProxyProcess,
    http: aiohttp.ClientSession,
    reports: "asyncio.Queue[BackendHealth]",
    answer: bytes,
    outcome: str,
) -> None:
    """The first is llama.cpp; the second mlx-lm, whose body has no length: it ends as a whole one does."""
    async with raw_engine(functools.partial(_answer_as_mlx_lm, answer)) as backend:
        url = await proxy.serve(backend)
        for number in range(3):
            body = CHAT | {"stream": True, "seed": number}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
                assert response.status == 200
                got = await response.read()
                assert got.startswith(answer)
                assert (got == answer) is (outcome == "status 200"), "a cut stream does not look like a whole one"
                assert got.count(b'"error"') == 1
        suspect = await next_report(reports)
        assert (suspect.reason, suspect.message.count(outcome)) == ("Failing", 3)
        assert "Compute" not in suspect.message
        stats = await proxy.stats()
        assert stats.errors == stats.requests


async def test_stream_that_a_client_is_to_blame_for_shows_nothing(
    proxy: ProxyProcess, http: aiohttp.ClientSession, reports: "asyncio.Queue[BackendHealth]"
) -> None:
    too_long = b'data: {"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}\n\n'
    async with raw_engine(functools.partial(_answer_as_mlx_lm, too_long)) as backend:
        url = await proxy.serve(backend)
        for number in range(10):
            body = CHAT | {"stream": True, "seed": number}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
                assert await response.read() == too_long
        assert (await proxy.stats()).errors == 0
        assert reports.empty()


async def _answer_as_mlx_lm(events: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request with a stream that ends with its connection, as Python's server does."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    writer.write(b"HTTP/1.0 200 OK\r\nContent-type: text/event-stream\r\n\r\n" + events)
    writer.close()


async def test_agent_clears_a_suspicion_and_a_changed_backend_begins_anew(
    proxy: ProxyProcess, http: aiohttp.ClientSession, reports: "asyncio.Queue[BackendHealth]"
) -> None:
    async with fake_engine(FailingEngine(), "sick") as backend:
        url = await proxy.serve(backend)
        await ask(http, url, "1", "2", "3")
        assert (await next_report(reports)).suspect
        assert await proxy.client.clear_health("sick") == BackendHealth("sick")
        assert await next_report(reports) == BackendHealth("sick")
        await ask(http, url, "1", "2")
        assert reports.empty()
        await ask(http, url, "3")
        assert (await next_report(reports)).suspect
        await proxy.serve(structs.replace(backend, draining=True))
        assert reports.empty(), "drained by the agent that looks at it: nothing is proved"
        await proxy.serve(backend)
        assert await next_report(reports) == BackendHealth("sick")
        await ask(http, url, "1", "2", "3")
        assert (await next_report(reports)).suspect
        await proxy.client.configure(ProxyConfig((make_service(),)))
        assert await next_report(reports) == BackendHealth("sick")


async def test_requests_that_were_sent_to_a_backend_show_nothing_of_what_it_is_changed_into() -> None:
    monitor = HealthMonitor()
    monitor.configure([Backend("u", "http://127.0.0.1:1")])
    past = monitor.observe_backend("u")
    before = [past.expect_answer(b"%d" % number, 0) for number in range(3)]
    monitor.configure([Backend("u", "http://127.0.0.1:2")])
    for answer in before:
        past.note_failure(answer, "500", 0)
    assert not monitor.suspects()
    past = monitor.observe_backend("u")
    for number in range(3):
        past.note_failure(past.expect_answer(b"%d" % number, 0), "500", 0)
    assert [health.uid for health in monitor.suspects()] == ["u"]


async def test_backend_that_is_not_configured_is_not_observed() -> None:
    monitor = HealthMonitor()
    for number in range(8):
        past = monitor.observe_backend("u")
        past.note_failure(past.expect_answer(b"%d" % number, 0), "500", 0)
    assert not past.health.suspect
    assert not past.under_way


# A running proxy that does not wait for long


async def test_health_of_an_unknown_backend_cannot_be_cleared(proxy: ProxyProcess) -> None:
    with pytest.raises(ControlRefusedError, match="no backend unknown is configured"):
        await proxy.client.clear_health("unknown")


async def test_watcher_that_hangs_up_just_after_a_change_ends() -> None:
    monitor = HealthMonitor()
    monitor.configure([Backend("u", "http://127.0.0.1:1")])

    async def watch() -> None:
        async with contextlib.aclosing(monitor.watch(0.01)) as changes:
            async for _ in changes:
                pass

    watching = asyncio.create_task(watch())
    await eventually(lambda: bool(monitor._watchers))
    past = monitor.observe_backend("u")
    past.note_fatal_failure(past.expect_answer(b"", 0), "404")
    watching.cancel()
    await asyncio.wait({watching}, timeout=1)
    assert watching.cancelled()
