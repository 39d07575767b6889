"""`--ask` reports an answer that is incomplete or refused in one sentence."""

import pytest
from aiohttp import web

from standalone.ask import AskError, ask
from tests.support.stub_server import serve_stub


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n', "can't decode byte"),
        (b'data: {"choices": 3}\n\n', "Expected `array`, got `int`"),
        (b'data: {"choices": [{"delta": {"content": "Hal"}}]}\n\n', r"ended before \[DONE\]"),
    ],
    ids=["no text", "no answer", "half an answer"],
)
async def test_incomplete_answer_is_reported(lines: bytes, problem: str) -> None:
    async def answer(_request: web.BaseRequest) -> web.Response:
        return web.Response(body=lines, content_type="text/event-stream")

    async with serve_stub(answer) as url:
        with pytest.raises(AskError, match=problem):
            await ask(url, "tiny", "Who?", lambda _text: None)
