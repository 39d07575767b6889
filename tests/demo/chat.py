"""One streamed chat completion, shown as it arrives and timed."""

import time
from collections.abc import AsyncIterator, Callable

import aiohttp
import msgspec

CONNECT_SECONDS = 5
SILENCE_SECONDS = 300  # a large model on few cores takes minutes for its first token


class ChatAnswer(msgspec.Struct, frozen=True):
    """The text of a completion, and its speed.

    `first_token_seconds` is measured by the client. `tokens_per_second` is reported by the engine: with tiny weights
    several tokens arrive together, so that a client cannot time them.
    """

    text: str
    first_token_seconds: float
    tokens_per_second: float


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Timings(msgspec.Struct):
    predicted_per_second: float


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    timings: _Timings | None = None

    @property
    def text(self) -> str:
        return "".join(choice.delta.content or "" for choice in self.choices)


async def stream_chat(url: str, *, model: str, token: str, question: str, show: Callable[[str], None]) -> ChatAnswer:
    """Send `question` to the endpoint at `url` and show each part of the answer as it arrives.

    Raises:
        aiohttp.ClientError: the endpoint refused or the stream broke.
        ValueError: the stream ended without `[DONE]`.
    """
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": question}]}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
    started = time.monotonic()
    first, speed, text = 0.0, 0.0, ""
    async with (
        aiohttp.ClientSession(timeout=timeout, headers={"Authorization": f"Bearer {token}"}) as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        async for chunk in _chunks(response.content):
            if chunk.text:
                first = first or time.monotonic() - started
                text += chunk.text
                show(chunk.text)
            if chunk.timings:
                speed = chunk.timings.predicted_per_second
    return ChatAnswer(text, first, speed)


async def _chunks(lines: aiohttp.StreamReader) -> AsyncIterator[_Chunk]:
    async for line in lines:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            return
        yield msgspec.json.decode(data, type=_Chunk)
    raise ValueError("the stream ended before [DONE]: the server or its connection died")
