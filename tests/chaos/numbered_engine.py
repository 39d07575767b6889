"""An engine whose tokens are numbered, each with the name of its request, so that lost, doubled and foreign ones show.

It appends to a file what it is asked ("asked NAME") and which tokens it makes ("made NAME NUMBER"): that outlives it.
The content of the first message names a request, and `max_tokens` is the number of tokens of its answer.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from aiohttp import web

TOKEN_SECONDS: Final = 0.05


def write_token(name: str, number: int) -> str:
    return f"{name}.{number} "


def count_usage(name: str, tokens: int) -> dict[str, int]:
    """Return the usage of an answer."""
    return {"prompt_tokens": len(name), "completion_tokens": tokens, "total_tokens": len(name) + tokens}


class NumberedEngine:
    """The engine, which reports to a file."""

    def __init__(self, report: Path) -> None:
        self._report = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of /v1/chat/completions."""
        body = await request.json()
        name, tokens = body["messages"][0]["content"], body["max_tokens"]
        self._note(f"asked {name}")
        if body.get("stream"):
            return await self._stream(request, name, tokens, with_usage=bool(body.get("stream_options")))
        text = ""
        for number in range(tokens):
            text += await self._make_token(name, number)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        content = {"object": "chat.completion", "id": name, "choices": [choice], "usage": count_usage(name, tokens)}
        return web.json_response(content)

    async def _stream(self, request: web.Request, name: str, tokens: int, *, with_usage: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(choices: list[Any], **fields: Any) -> None:
            event = {"object": "chat.completion.chunk", "id": name, "choices": choices, **fields}
            await response.write(b"data: %b\n\n" % json.dumps(event).encode())

        try:
            for number in range(tokens):
                await send([{"index": 0, "delta": {"content": await self._make_token(name, number)}}])
            await send([{"index": 0, "delta": {}, "finish_reason": "stop"}])
            if with_usage:
                await send([], usage=count_usage(name, tokens))
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:  # its client is gone
            self._note(f"left {name}")
        return response

    async def _make_token(self, name: str, number: int) -> str:
        await asyncio.sleep(TOKEN_SECONDS)
        self._note(f"made {name} {number}")
        return write_token(name, number)

    def _note(self, line: str) -> None:
        os.write(self._report, f"{line}\n".encode())


def main(address: str, port: str, report: str) -> None:
    """Serve until a signal."""
    engine = web.Application()
    engine.router.add_post("/v1/chat/completions", NumberedEngine(Path(report)).answer)
    web.run_app(engine, host=address, port=int(port), print=None, access_log=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
