"""Send a question to a service and show the answer as it arrives, as any client of the OpenAI API would."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong

CONNECT_SECONDS: Final = 5
_SILENCE_SECONDS: Final = 300
"""A large model on few cores needs minutes for its first token."""
_QUOTED_CHARACTERS: Final = 300
_MEASURABLE_SECONDS: Final = 0.1
_BROKEN_OFF: Final = "the answer ended before [DONE]: the engine or its connection died"

Show = Callable[[str], None]


class AskError(Exception):
    """There is no complete answer; the message says why."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A complete answer."""

    text: str
    tokens: int
    """Tokens of the answer, as the engine counts them; the number of its pieces if it does not."""
    first_seconds: float
    """Time to the first token."""
    seconds: float
    """Time to the last token."""

    @property
    def tokens_per_second(self) -> float | None:
        """Rate after the first token; None if the answer was too quick to have one: its pieces arrived together."""
        spent_seconds = self.seconds - self.first_seconds
        return (self.tokens - 1) / spent_seconds if self.tokens > 1 and spent_seconds >= _MEASURABLE_SECONDS else None

    def describe(self) -> str:
        """Return how much was generated, and how fast."""
        rate = self.tokens_per_second
        speed = f", then {rate:,.1f} tokens/s" if rate is not None else ""
        return f"{self.tokens} tokens in {self.seconds:.2f} s: the first after {self.first_seconds:.2f} s{speed}"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The name that some engines have for reasoning_content."""


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _StreamError(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _StreamError | str | None = None
    """Only in the last one, of an answer that failed; some engines send a plain text."""


async def ask(url: str, model: str, question: str, show: Show, token: str = "") -> None:
    """Send `question` to `model` at the base URL `url`, and show each piece of the answer; `token` is the API key.

    Raises:
        AskError: there is no answer, or it is incomplete.
    """
    async with open_session(token=token) as session:
        await continue_chat(session, url, model, [ChatMessage("user", question)], show=show)


def open_session(connector: aiohttp.BaseConnector | None = None, token: str = "") -> aiohttp.ClientSession:
    """Return a session for chats, which the caller closes; `token` is the bearer token of the service."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, trust_env=False)


async def continue_chat(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    messages: Sequence[ChatMessage],
    *,
    show: Show,
    show_thoughts: Show | None = None,
) -> ChatAnswer:
    """Stream the answer of `model` to a conversation: show each piece as it arrives, then return all, with its speed.

    `show` gets each piece of the answer, and `show_thoughts` each piece of the thoughts that some models write before
    it. After an answer that breaks off, `show` gets a line end, so that the error begins a line of its own.

    Raises:
        AskError: there is no answer, or it is incomplete.
    """
    body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [msgspec.to_builtins(message) for message in messages],
    }
    # first_at: the time of the first piece, 0.0 until then; pieces: those of the answer; piece_count: thoughts, too
    started, first_at, pieces, piece_count = time.monotonic(), 0.0, list[str](), 0
    usage: _Usage | None = None  # the engine's own count of tokens, if it states one

    try:
        # A redirect could make this machine ask any address, and take the conversation there.
        async with session.post(f"{url}/v1/chat/completions", json=body, allow_redirects=False) as response:
            if response.status != HTTPStatus.OK:
                raise AskError(f"{model} answered {response.status}: {await _quote_error(response.content)}")
            async for chunk in _read_chunks(response.content):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    # A piece is of the thoughts or of the answer.
                    thought, text = choice.delta.reasoning_content or choice.delta.reasoning, choice.delta.content
                    piece_count += len([piece for piece in (thought, text) if piece])
                    if piece_count and not first_at:
                        first_at = time.monotonic()

                    if thought and show_thoughts:
                        show_thoughts(thought)
                    if text:
                        pieces.append(text)
                        show(text)
    except (aiohttp.ClientError, LineTooLong, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
        if piece_count:
            show("\n")  # what is reported begins a line of its own
        raise AskError(f"{model} at {url}: {_describe_failure(error)}") from error

    ended = time.monotonic()
    return ChatAnswer(
        text="".join(pieces),
        tokens=usage.completion_tokens if usage else piece_count,  # a piece is about one token
        first_seconds=(first_at or ended) - started,
        seconds=ended - started,
    )


def _describe_failure(error: Exception) -> str:
    """Return why there is no complete answer, by what was raised while it was read."""
    match error:
        case aiohttp.ClientPayloadError():
            return _BROKEN_OFF
        case LineTooLong():
            return "a line of the answer is too long"  # which the error quotes
        case _:
            return str(error) or type(error).__name__


async def _quote_error(body: aiohttp.StreamReader) -> str:
    """Return the beginning of a body as text; the rest, which may have no end, is not read."""
    try:
        read = await body.readexactly(_QUOTED_CHARACTERS)
    except asyncio.IncompleteReadError as error:
        read = error.partial
    return read.decode(errors="replace")


async def _read_chunks(lines: aiohttp.StreamReader) -> AsyncIterator[_Chunk]:
    """Yield the chunks of an answer, one JSON object in each line `data: {...}`, until the line `data: [DONE]`.

    Raises aiohttp.ClientError if a chunk reports that the answer failed, or the stream ends before that line.
    """
    async for line in lines:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return

        chunk = msgspec.json.decode(data, type=_Chunk)
        if chunk.error is not None:
            message = chunk.error if isinstance(chunk.error, str) else chunk.error.message
            raise aiohttp.ClientError(f"the answer failed: {message[:_QUOTED_CHARACTERS]}")
        yield chunk

    # The stream ended without [DONE].
    raise aiohttp.ClientPayloadError(_BROKEN_OFF)
