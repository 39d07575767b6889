"""`--ask` reports an answer that is incomplete or refused in one sentence."""

import asyncio
from typing import NoReturn

import pytest
from aiohttp import web

from standalone.ask import AskError, ChatAnswer, ChatMessage, ask, continue_chat, open_session
from tests.support.stub_server import serve_stub


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n', "can't decode byte"),
        (b'data: {"choices": 3}\n\n', "Expected `array`, got `int`"),
        (b"data: " + b"a" * 10_000_000, "a line of the answer is too long"),
        (b'data: {"choices": [{"delta": {"content": "Hal"}}]}\n\n', r"ended before \[DONE\]"),
    ],
    ids=["no text", "no answer", "line without end", "half an answer"],
)
async def test_incomplete_answer_is_reported(lines: bytes, problem: str) -> None:
    async def answer(_request: web.BaseRequest) -> web.Response:
        return web.Response(body=lines, content_type="text/event-stream")

    async with serve_stub(answer) as url:
        with pytest.raises(AskError, match=problem):
            await ask(url, "tiny", "Who?", lambda _text: None)


@pytest.mark.parametrize("status", [302, 307, 308])
async def test_redirect_leads_no_question_elsewhere(status: int) -> None:
    """A host could have this machine ask any address of its network, and pass the conversation on."""
    asked: list[str] = []

    async def hear(request: web.BaseRequest) -> web.Response:
        asked.append(await request.text())
        return web.Response()

    async with serve_stub(hear) as elsewhere:

        async def redirect(_request: web.BaseRequest) -> web.Response:
            return web.Response(status=status, headers={"Location": f"{elsewhere}/v1/chat/completions"})

        async with serve_stub(redirect) as url:
            with pytest.raises(AskError, match=f"^tiny answered {status}: "):
                await ask(url, "tiny", "Who?", lambda _text: None)
    assert asked == []


async def test_error_without_end_is_quoted_in_part() -> None:
    async def go_on(request: web.BaseRequest) -> NoReturn:
        response = web.StreamResponse(status=500)
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"no\xff")
        while True:
            await response.write(b"!" * 10_000)

    async with serve_stub(go_on) as url, asyncio.timeout(60):
        with pytest.raises(AskError, match=r"^tiny answered 500: no\ufffd!{297}$"):
            await ask(url, "tiny", "Who?", lambda _text: None)


@pytest.mark.parametrize("error", ['{"message": "Compute error."}', '"Compute error."'])
async def test_error_within_an_answer_is_quoted_below_what_was_shown(error: str) -> None:
    async def fail(_request: web.BaseRequest) -> web.Response:
        half = 'data: {"choices": [{"delta": {"content": "Hal"}}]}\n\n'
        return web.Response(text=f'{half}data: {{"error": {error}}}\n\n')

    shown: list[str] = []
    async with serve_stub(fail) as url:
        with pytest.raises(AskError, match=r"the answer failed: Compute error\.$"):
            await ask(url, "tiny", "Who?", shown.append)
    assert shown == ["Hal", "\n"]


async def test_answer_that_breaks_off_is_reported_below_what_was_shown() -> None:
    async def break_off(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"content": "Hal"}}]}\n\n')
        assert request.transport is not None
        request.transport.close()
        return response

    shown = list[str]()
    async with serve_stub(break_off) as url:
        with pytest.raises(AskError, match=r"^tiny at http.*: the answer ended before \[DONE\]: the engine or"):
            await ask(url, "tiny", "Who?", shown.append)
    assert shown == ["Hal", "\n"]


async def test_chat_sends_the_conversation_and_the_token_and_counts_tokens() -> None:
    asked: list[tuple[str | None, object]] = []
    chunks = (
        b'data: {"choices": [{"delta": {"reasoning_content": "Hm. "}}]}\n\n',
        b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n',
        b'data: {"choices": [{"delta": {"content": "lo"}}]}\n\n',
        b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n',
        b"data: [DONE]\n\n",
    )

    async def answer(request: web.BaseRequest) -> web.Response:
        asked.append((request.headers.get("Authorization"), (await request.json())["messages"]))
        return web.Response(body=b"".join(chunks), content_type="text/event-stream")

    shown, thought = list[str](), list[str]()
    messages = [ChatMessage("user", "Who?"), ChatMessage("assistant", "I."), ChatMessage("user", "Why?")]
    async with serve_stub(answer) as url, open_session(token="secret") as session:
        got = await continue_chat(session, url, "tiny", messages, show=shown.append, show_thoughts=thought.append)
    assert (got.text, got.tokens, shown, thought) == ("Hello", 7, ["Hel", "lo"], ["Hm. "])
    assert asked[0][0] == "Bearer secret"
    assert asked[0][1] == [{"role": message.role, "content": message.content} for message in messages]


def test_rate_of_an_answer_begins_with_its_first_token() -> None:
    assert ChatAnswer("a", tokens=11, first_seconds=1.0, seconds=3.0).tokens_per_second == 5
    assert ChatAnswer("a", tokens=1, first_seconds=1.0, seconds=1.0).tokens_per_second is None
