"""Send one question to a service and show the answer as it arrives, as any client of the OpenAI API would."""

from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

import aiohttp
import msgspec

_CONNECT_SECONDS = 5
_SILENCE_SECONDS = 300
"""A large model on few cores needs minutes for its first token."""


class AskError(Exception):
    """There is no complete answer; the message says why."""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


async def ask(url: str, model: str, question: str, show: Callable[[str], None]) -> None:
    """Send `question` to `model` at the base URL `url`, and show each piece of the answer.

    Raises:
        AskError: there is no answer, or it is incomplete.
    """
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": question}]}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status != HTTPStatus.OK:
                raise AskError(f"{model} answered {response.status}: {(await response.text())[:300]}")
            async for text in _read_pieces(response.content):
                show(text)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AskError(f"{model} at {url}: {str(error) or type(error).__name__}") from error


async def _read_pieces(lines: aiohttp.StreamReader) -> AsyncIterator[str]:
    async for line in lines:
        data = line.removeprefix(b"data: ").strip()
        if not line.startswith(b"data: "):
            continue
        if data == b"[DONE]":
            return
        for choice in msgspec.json.decode(data, type=_Chunk).choices:
            if choice.delta.content:
                yield choice.delta.content
    raise AskError("the answer ended before [DONE]: the engine or its connection died")
