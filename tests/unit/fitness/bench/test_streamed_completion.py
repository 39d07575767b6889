"""An engine is measured by the tokens that it counts, and one that cannot be measured is a named error."""

import asyncio
import re
from collections.abc import Callable
from typing import Any, get_args

import aiohttp
import msgspec
import pytest
from aiohttp import web

from fitness.bench.streamed_completion import (
    BenchError,
    BenchReason,
    CompletionRequest,
    CompletionTiming,
    stream_completion,
)
from gateway.proxy.errors import response_broken_off
from tests.controlplane.process import CHECKOUT
from tests.support.stub_server import serve_stub

PROMPT = "a prompt that nobody quotes"
REQUEST = CompletionRequest("chat", PROMPT, tokens=8)


class StepClock:
    """A clock that is a second later at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def text(piece: str) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"text": piece}]}) + b"\n\n"


def usage(generated: int, prompt: int = 20, **further: Any) -> bytes:
    counted = {"prompt_tokens": prompt, "completion_tokens": generated, **further}
    return b"data: " + msgspec.json.encode({"choices": [], "usage": counted}) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def time_answer(*parts: bytes, status: int = 200, ends: bool = True) -> CompletionTiming:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if not ends and request.transport is not None:
            request.transport.close()
        return response

    async with serve_stub(answer) as url, aiohttp.ClientSession() as session:
        return await stream_completion(session, url, REQUEST, StepClock())


async def refuse_answer(*parts: bytes, status: int = 200, ends: bool = True) -> BenchError:
    with pytest.raises(BenchError) as raised:
        await time_answer(*parts, status=status, ends=ends)
    assert PROMPT not in raised.value.message
    return raised.value


async def test_rate_is_that_of_the_tokens_which_the_engine_counts() -> None:
    # Three pieces in three seconds have eight tokens.
    timing = await time_answer(text("a"), text("b c"), text("d e f"), usage(8), DONE)
    assert (timing.first_seconds, timing.last - timing.first) == (1.0, 2.0)
    assert timing.tokens_per_second == 3.5
    assert timing.seconds_each == pytest.approx(2 / 7)
    assert timing.prompt_tokens_per_second == 20.0


async def test_pieces_without_text_are_no_first_token() -> None:
    timing = await time_answer(text(""), text("a"), text("b"), text(""), usage(8), DONE)
    assert (timing.first_seconds, timing.last - timing.first) == (2.0, 1.0)


async def test_cached_part_of_a_prompt_was_not_computed() -> None:
    timing = await time_answer(text("a"), text("b"), usage(8, prompt_tokens_details={"cached_tokens": 15}), DONE)
    assert timing.prompt_tokens_per_second == 5.0
    whole = await time_answer(text("a"), text("b"), usage(8, prompt_tokens_details={"cached_tokens": 99}), DONE)
    assert whole.prompt_tokens_per_second is None


@pytest.mark.parametrize(
    ("parts", "reason", "words"),
    [
        pytest.param([b"data: <html>no</html>\n\n"], "BadAnswer", "<html>no", id="garbage"),
        pytest.param([b"data: [1]\n\n"], "BadAnswer", "[1]", id="another form"),
        pytest.param([b"data: " + b"[" * 9000 + b"\n\n"], "BadAnswer", "cannot be read", id="nested"),
        pytest.param([b": ping\n\n"] * 3000 + [DONE], "BadAnswer", "no events", id="comments without end"),
        pytest.param([text("")] * 3000 + [DONE], "BadAnswer", "lines for 8 tokens", id="pieces without end"),
        pytest.param([b"data: " + b"x" * 1_000_000], "BrokenOff", "LineTooLong", id="line without end"),
        pytest.param([text("a"), text("b")], "BrokenOff", "before [DONE]", id="ended"),
        pytest.param(
            [text("a"), b"data: " + response_broken_off("ns/chat").body + b"\n\n"],
            *("BrokenOff", "its engine broke off"),
            id="ended by the proxy",
        ),
        pytest.param([text("a"), text("b"), DONE], "NoTokenCount", "include_usage", id="no count"),
        pytest.param([text("a"), text("b"), usage(8, prompt=0), DONE], "NoTokenCount", "include_usage", id="no prompt"),
        pytest.param([text("a"), text("b"), usage(1), DONE], "EndedEarly", "1 of 8", id="ended early"),
        pytest.param([text("a"), text("b"), usage(800), DONE], "BadAnswer", "generated 800", id="lies about tokens"),
        pytest.param([text("a b c"), usage(8), DONE], "NotStreamed", "one piece", id="one piece"),
        pytest.param([usage(8), DONE], "NotStreamed", "one piece", id="nothing but a count"),
        pytest.param(
            [text("a"), b'data: {"error": {"message": "out of memory"}}\n\n'], "Refused", "out of memory", id="error"
        ),
    ],
)
async def test_answer_that_cannot_be_measured_is_named(parts: list[bytes], reason: str, words: str) -> None:
    error = await refuse_answer(*parts)
    assert error.reason == reason
    assert words in error.message
    assert len(error.message) < 1000


@pytest.mark.parametrize(("status", "reason"), [(401, "Unauthorized"), (404, "Refused"), (500, "Refused")])
async def test_refusal_is_quoted(status: int, reason: str) -> None:
    error = await refuse_answer(b"the model is not here" * 100_000, status=status)
    assert error.reason == reason
    assert f"answered {status}: 'the model is not here" in error.message
    assert len(error.message) < 1000


@pytest.mark.parametrize("status", [200, 422])
async def test_engine_that_repeats_the_request_is_quoted_up_to_prompt_and_key(status: int) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        asked, login = await request.json(), request.headers["Authorization"]
        text = f"bad input: {asked['prompt']}" if status == 422 else f"data: login {login} of {asked['prompt']}\n\n"
        return web.Response(status=status, text=text)

    headers = {"Authorization": "Bearer key-of-the-engine"}
    async with serve_stub(answer) as url, aiohttp.ClientSession(headers=headers) as session:
        with pytest.raises(BenchError) as raised:
            await stream_completion(session, url, REQUEST, StepClock())
    message = raised.value.message
    assert message.endswith(("bad input: ...", "login Bearer ..."))
    assert not any(phrase in message for phrase in ("prompt that", "key-of"))


async def test_engine_that_dies_is_named_with_what_had_come() -> None:
    error = await refuse_answer(text("a"), text("b"), ends=False)
    assert error.reason == "BrokenOff"
    assert "2 pieces" in error.message


async def test_redirect_is_not_followed() -> None:
    assert (await refuse_answer(b"elsewhere", status=307)).reason == "Refused"


async def test_engine_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitness.bench.streamed_completion.FIRST_TOKEN_SECONDS", 0.2)
    over = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(text("a"))
        await over.wait()
        return response

    async with serve_stub(answer) as url, aiohttp.ClientSession() as session:
        with pytest.raises(BenchError, match=r"sent nothing for .* after 1 pieces") as raised:
            await stream_completion(session, url, REQUEST, StepClock())
        over.set()
    assert raised.value.reason == "TimedOut"


async def test_address_without_an_engine_is_named(unused_tcp_port_factory: Callable[[], int]) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port_factory()}"
    async with aiohttp.ClientSession() as session:
        with pytest.raises(BenchError, match=url) as raised:
            await stream_completion(session, url, REQUEST)
    assert raised.value.reason == "Unreachable"


def test_document_has_each_reason() -> None:
    table = (CHECKOUT / "docs" / "benchmarks.md").read_text().partition("| reason |")[2].partition("\n\n")[0]
    listed = [
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    ]
    assert sorted(listed) == sorted(get_args(BenchReason))
