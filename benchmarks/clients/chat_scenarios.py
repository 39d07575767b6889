"""Chat clients that measure how a server works for several users: rates, prompts that are remembered, first tokens.

All send what any client sends to an OpenAI-compatible server, so that Pomona and an engine started by hand are measured
alike. One character of a prompt is about one token of the tiny models.
"""

import asyncio
import itertools
import random
import string
import time
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple, Self

import aiohttp
import msgspec

_WORDS: Final = string.ascii_lowercase
_ROUNDS: Final = itertools.count()
"""Seeds, so that no round is remembered from an earlier one."""
_NO_LIMIT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10)


class ChatServer(NamedTuple):
    """A server with an OpenAI-compatible API."""

    url: str
    """URL without /v1."""
    model: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The authorization."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class Completion(NamedTuple):
    """One answer of a server."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finish_reason: str
    text: str


class ChatError(Exception):
    """The server refused a request, or ended it with an error."""


def write_prompt(dice: random.Random, characters: int) -> str:
    """Return a random text of this length."""
    return "".join(dice.choice(_WORDS) for _ in range(characters))


class ChatClient:
    """Clients of one server, which share a pool of connections."""

    def __init__(self, server: ChatServer) -> None:
        self.server = server
        self._session = aiohttp.ClientSession(
            timeout=_NO_LIMIT, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, messages: list[dict[str, str]], **options: Any) -> Completion:
        """Return the whole answer. Raises ChatError."""
        async with self._post(messages, options) as response:
            answer = msgspec.json.decode(await response.read())
        usage, choice = answer["usage"], answer["choices"][0]
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            generated_tokens=usage["completion_tokens"],
            finish_reason=choice["finish_reason"],
            text=choice["message"]["content"] or "",
        )

    async def stream(self, messages: list[dict[str, str]], **options: Any) -> AsyncIterator[float]:
        """Yield the time of each event with a part of the answer. Raises ChatError."""
        async with self._post(messages, {**options, "stream": True}) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    raise ChatError(str(event["error"]))
                if event.get("choices") and event["choices"][0]["delta"].get("content"):
                    yield time.perf_counter()

    def _post(self, messages: list[dict[str, str]], options: dict[str, Any]) -> "_CheckedResponse":
        body = {"model": self.server.model, "messages": messages, "temperature": 0, **options}
        return _CheckedResponse(self._session, f"{self.server.url}/v1/chat/completions", self.server.headers, body)


class _CheckedResponse:
    """A response with status 200."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: dict[str, str], body: object) -> None:
        self._request = session.post(url, json=body, headers=headers)

    async def __aenter__(self) -> aiohttp.ClientResponse:
        response = await self._request.__aenter__()
        if response.status != 200:  # noqa: PLR2004 - OK
            raise ChatError(f"HTTP {response.status}: {(await response.text())[:300]}")
        return response

    async def __aexit__(self, *error: object) -> None:
        await self._request.__aexit__(*error)  # type: ignore[arg-type] # what a context manager gets


def _ask_for(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def measure_rate(client: ChatClient, requests: int, *, rounds: int = 2, tokens: int = 96) -> float:
    """Return the tokens per second of so many requests at once, each with a prompt of its own of 200 characters."""
    dice = random.Random(requests)  # noqa: S311 - prompts, no secret

    async def work() -> int:
        generated = 0
        for _ in range(rounds):
            answer = await client.ask(_ask_for(write_prompt(dice, 200)), max_tokens=tokens)
            generated += answer.generated_tokens
        return generated

    began = time.perf_counter()
    generated = sum(await asyncio.gather(*(work() for _ in range(requests))))
    return generated / (time.perf_counter() - began)


async def count_computed(client: ChatClient, conversations: int, *, turns: int = 5, characters: int = 1400) -> int:
    """Return the prompt tokens that are computed, not remembered, in conversations that take turns.

    Each turn has the whole conversation so far, a new question, and a short answer.
    """
    dice = random.Random(next(_ROUNDS))  # noqa: S311 - prompts, no secret
    histories = [_ask_for(write_prompt(dice, characters)) for _ in range(conversations)]
    computed = 0
    for _ in range(turns):
        for history in histories:
            answer = await client.ask(history, max_tokens=16)
            computed += answer.prompt_tokens - answer.cached_tokens
            history += [{"role": "assistant", "content": answer.text}, *_ask_for(write_prompt(dice, 60))]
    return computed


async def measure_first_beside(client: ChatClient, *, long_tokens: int = 2000, short_tokens: int = 50) -> float:
    """Return the seconds to the first token of a short request beside a long answer that has begun."""
    dice = random.Random(0)  # noqa: S311 - prompts, no secret
    long_began, short_ended = asyncio.Event(), asyncio.Event()

    async def read_long() -> None:
        async for _ in client.stream(_ask_for(write_prompt(dice, 300)), max_tokens=long_tokens):
            long_began.set()
            if short_ended.is_set():
                return

    async with asyncio.TaskGroup() as group:
        group.create_task(read_long())
        await long_began.wait()
        began = time.perf_counter()
        first = 0.0
        async for at in client.stream(_ask_for(write_prompt(dice, 100)), max_tokens=short_tokens):
            first = first or at - began
        short_ended.set()
    return first


async def measure_first_of_unlimited(client: ChatClient, requests: int = 4) -> float:
    """Return the seconds until each of so many requests without max_tokens has its first token."""
    dice = random.Random(1)  # noqa: S311 - prompts, no secret

    async def read_first() -> None:
        async for _ in client.stream(_ask_for(write_prompt(dice, 300))):
            return

    streams = [client.stream(_ask_for(write_prompt(dice, 300))) for _ in range(requests)]
    began = time.perf_counter()
    # All stay open until each has begun.
    await asyncio.gather(*(anext(stream) for stream in streams))
    seconds = time.perf_counter() - began
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined] # an asynchronous generator
    return seconds


async def count_ended(client: ChatClient, requests: int, *, longest: int, at_once: int = 8) -> int:
    """Return how many of so many random requests, long and short, ended otherwise than by their own limits."""
    dice = random.Random(2)  # noqa: S311 - prompts, no secret
    pending, ended = iter(range(requests)), 0

    async def work() -> None:
        nonlocal ended
        for _ in pending:
            is_long = dice.random() < 0.3  # noqa: PLR2004 - a third of them
            characters = dice.randrange(1, longest // 2 if is_long else longest // 16)
            options = {} if dice.random() < 0.2 else {"max_tokens": dice.randrange(1, longest // 8)}  # noqa: PLR2004
            try:
                answer = await client.ask(_ask_for(write_prompt(dice, characters)), **options)
            except ChatError:
                ended += 1
            else:
                ended += answer.finish_reason not in {"stop", "length"}

    await asyncio.gather(*(work() for _ in range(at_once)))
    return ended
