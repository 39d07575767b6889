"""One streamed completion with the times of its tokens, or the reason why it cannot be measured.

Tokens are those that the engine counts itself: a chunk may have several, or none. The engine is not trusted: what it
sends is bounded, and only the beginning of an answer that is none is quoted. A prompt is never part of a message.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal, NamedTuple

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong

BenchReason = Literal[
    "Unreachable",
    "Unauthorized",
    "Refused",
    "TimedOut",
    "BrokenOff",
    "BadAnswer",
    "NoTokenCount",
    "NotStreamed",
    "EndedEarly",
]
FIRST_TOKEN_SECONDS: Final = 300.0
_CONNECT_SECONDS: Final = 10.0
_MOST_TOKENS: Final = 10_000_000
_MOST_CHUNKS_FOR_EACH_TOKEN: Final = 8
"""An engine that sends more chunks than that, never ends."""
_QUOTED_CHARACTERS: Final = 300
_RECOGNISED_CHARACTERS: Final = 8
"""Characters by which a prompt or key is recognised in what an engine answers."""
_HEADERS: Final = {"Connection": "close"}
"""llama.cpp closes a connection after a stream, also if the next request is on its way."""
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_UPSTREAM_FAILED: Final = b'"code":"upstream_failed"'
"""Part of the error by which Pomona's proxy ends the stream of an engine that has died."""


class BenchError(Exception):
    """The engine cannot be measured; the message says why, and what it answered."""

    def __init__(self, reason: BenchReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class CompletionRequest(NamedTuple):
    """One request."""

    model: str
    prompt: str
    tokens: int
    """Tokens to generate."""
    ignores_end: bool = True
    """Ask the engine to go on at the end of the text: an extension that most engines have."""


@dataclass(frozen=True, slots=True)
class CompletionTiming:
    """The tokens of one completion and their times, in seconds by the caller's clock."""

    started: float
    first: float
    """The first token."""
    last: float
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the engine had not to compute again."""
    tokens: int
    """Tokens that were generated."""

    @property
    def first_seconds(self) -> float:
        """Time to the first token."""
        return self.first - self.started

    @property
    def seconds_each(self) -> float:
        """Time between two tokens."""
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        """Rate of generation after the first token."""
        return 1 / self.seconds_each

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Rate of the prompt's computation; None if the engine computed none of it, or took no time."""
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.first_seconds if computed > 0 and self.first_seconds > 0 else None


class _Choice(msgspec.Struct):
    text: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


@dataclass(slots=True)
class _Received:
    """The part of an answer that has come so far."""

    first_chunk_at: float | None = None
    """Time of the first chunk of the answer, with text or without."""
    first_text_at: float | None = None
    last_text_at: float = 0.0
    """0: no text has come."""
    pieces: int = 0
    """Chunks with text."""
    usage: _Usage | None = None


async def stream_completion(
    session: aiohttp.ClientSession, url: str, request: CompletionRequest, clock: Callable[[], float] = time.monotonic
) -> CompletionTiming:
    """Send one request to the engine at the base URL, and return the times of its answer.

    Raises:
        BenchError: there is no answer that can be measured.
    """
    body = {
        "model": request.model,
        "prompt": request.prompt,
        "max_tokens": request.tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if request.ignores_end else {}),
    }
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=FIRST_TOKEN_SECONDS)

    # What has come so far, with the times of its pieces.
    started, received = clock(), _Received()
    try:
        # A redirect could make this machine ask any address, with the token.
        async with session.post(
            f"{url}/v1/completions", json=body, headers=_HEADERS, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != HTTPStatus.OK:
                raise _build_refusal(response.status, _quote(await response.content.read(_QUOTED_CHARACTERS)))
            async for chunk in _read_chunks(response.content, request.tokens):
                _add_chunk(chunk, received, clock())
    except BenchError as error:
        # An engine may repeat the prompt or the token in what it answers.
        login = session.headers.get("Authorization", "").removeprefix("Bearer ")
        raise BenchError(error.reason, _cut_before(error.message, (request.prompt, login))) from None
    except TimeoutError as error:
        waited = clock() - (received.last_text_at or started)
        message = f"the engine sent nothing for {waited:.0f} s, after {received.pieces} pieces of the answer"
        raise BenchError("TimedOut", message) from error
    except (aiohttp.ClientPayloadError, LineTooLong, aiohttp.ServerDisconnectedError, ConnectionError) as error:
        cause = f"after {received.pieces} pieces ({type(error).__name__}): the engine or its connection died"
        raise BenchError("BrokenOff", f"the answer broke off {cause}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise BenchError("Unreachable", f"{url}: {str(error) or type(error).__name__}") from error
    return _compute_timing(received, started, request.tokens)


def _build_refusal(status: int, quoted: str) -> BenchError:
    """Return the error of an answer with another status than 200."""
    is_login = status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
    return BenchError("Unauthorized" if is_login else "Refused", f"the engine answered {status}: {quoted or 'nothing'}")


def _add_chunk(chunk: _Chunk, received: _Received, now: float) -> None:
    """Add a chunk of the answer, which came at `now`, to what has come so far.

    The first chunk may have no text; the token count is in a chunk without choices.
    """
    received.usage = chunk.usage or received.usage
    if not chunk.choices:
        return
    received.first_chunk_at = now if received.first_chunk_at is None else received.first_chunk_at
    if any(choice.text for choice in chunk.choices):
        received.first_text_at = now if received.first_text_at is None else received.first_text_at
        received.last_text_at = now
        received.pieces += 1


def _compute_timing(received: _Received, started: float, wanted: int) -> CompletionTiming:
    """Return the times of an answer that has come completely.

    The number of tokens is what the engine itself counts at the end of the stream (`usage`).

    Args:
        received: what has come.
        started: when the request was sent.
        wanted: the number of tokens that were asked.

    Raises:
        BenchError: the engine counts no tokens or impossible ones, has ended early, or has not streamed.
    """
    # The engine must have counted the tokens.
    usage = received.usage
    if usage is None or not 0 < usage.prompt_tokens <= _MOST_TOKENS:
        message = f"the engine counted no tokens of {received.pieces} pieces: it must know stream_options.include_usage"
        raise BenchError("NoTokenCount", message)

    # It must have generated enough tokens, but not more than asked.
    tokens = usage.completion_tokens
    if tokens > wanted:
        raise BenchError("BadAnswer", f"the engine says that it generated {tokens} tokens, of {wanted} that were asked")
    # Two tokens are the fewest with a rate.
    if tokens < max(2, wanted // 4):
        message = f"the engine ended after {tokens} of {wanted} tokens: too few to measure a rate"
        raise BenchError("EndedEarly", message)

    # They must have come in several pieces, so that there is a rate. The first text counts, or the first chunk if no
    # text came.
    first = received.first_text_at if received.first_text_at is not None else received.first_chunk_at
    if first is None or received.last_text_at <= first:
        message = f"the engine sent {tokens} tokens in one piece: without a stream there is no rate to measure"
        raise BenchError("NotStreamed", message)

    # Prompt tokens from the engine's cache: 0 if it states none, and never more than the prompt has.
    details = usage.prompt_tokens_details
    stated_cached = (details.cached_tokens or 0) if details else 0
    cached_tokens = min(max(0, stated_cached), usage.prompt_tokens)
    # Three times, and three numbers of tokens: of the prompt, of these from the cache, and generated ones.
    return CompletionTiming(started, first, received.last_text_at, usage.prompt_tokens, cached_tokens, tokens)


async def _read_chunks(lines: aiohttp.StreamReader, tokens: int) -> AsyncIterator[_Chunk]:
    """Yield the chunks of a stream of server-sent events until the line [DONE].

    Raises BenchError: the stream ends before, has an error or text that is no chunk, or has too many lines for the
    answer. All lines count, since an engine may send blank ones and comments without end.
    """
    # A chunk may take four lines; 100 chunks are allowed beyond those for the tokens.
    lines_read, most_lines = 0, 4 * (100 + tokens * _MOST_CHUNKS_FOR_EACH_TOKEN)
    async for line in lines:
        if not line.startswith(_DATA):
            lines_read += 1
            if lines_read > most_lines:
                raise BenchError("BadAnswer", f"the engine sent {lines_read} lines that are no events")
            continue
        data = line.removeprefix(_DATA).strip()
        if data == _DONE:
            return
        lines_read += 1
        if lines_read > most_lines:
            raise BenchError("BadAnswer", f"the engine sent more than {lines_read} lines for {tokens} tokens")

        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as problem:
            message = f"a piece of the answer cannot be read ({problem}): {_quote(data)}"
            raise BenchError("BadAnswer", message) from problem

        # A chunk may have an error in place of text.
        error = bytes(chunk.error)
        if _UPSTREAM_FAILED in error:
            raise BenchError("BrokenOff", f"the answer broke off after {lines_read} lines: {_quote(error)}")
        if error not in {b"", b"null"}:
            raise BenchError("Refused", f"the engine answered with an error: {_quote(error)}")
        yield chunk
    raise BenchError("BrokenOff", f"the answer ended before [DONE], after {lines_read} lines: the engine died")


def _cut_before(message: str, hidden: Iterable[str]) -> str:
    """Return a message without the part from which on it repeats the beginning of a secret text, or of a prompt."""
    starts = [message.find(text[:_RECOGNISED_CHARACTERS]) for text in hidden if text]
    cut_at = min((start for start in starts if start >= 0), default=None)
    return message if cut_at is None else f"{message[:cut_at]}..."


def _quote(data: bytes) -> str:
    """Return the beginning of what an engine sent, for a message."""
    return repr(data[:_QUOTED_CHARACTERS].decode(errors="replace"))
