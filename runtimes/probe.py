"""Probe a server with a real request for a token, an embedding or a ranking, depending on its mode.

Servers answer 200 on /health while they load, or for ever with a broken model. A service is ready when it has answered
such a request. The agent probes its child processes in this way, and the controller the endpoints.
"""

import asyncio
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol

import aiohttp
import msgspec

from crds.serving import Mode
from runtimes.engine_errors import judge_error, read_error
from runtimes.registry import find_runtime

_QUOTED_CHARACTERS = 300
_READ_BYTES = 1 << 20
"""Most bytes that are read of an answer: an embedding takes less, and the server is not trusted."""
TIMED_OUT: Final = "TimedOut"
"""Reason of a probe without an answer in time: the server may be busy."""
_REASONS: dict[int, str] = {
    # The request is well-formed, so 400 and 501 mean that the engine's model or options cannot answer it.
    HTTPStatus.BAD_REQUEST: "Broken",
    HTTPStatus.NOT_IMPLEMENTED: "Broken",
    HTTPStatus.UNAUTHORIZED: "Unauthorized",
    HTTPStatus.FORBIDDEN: "Unauthorized",
    HTTPStatus.NOT_FOUND: "NotFound",
    HTTPStatus.SERVICE_UNAVAILABLE: "Loading",
}


class ProbeResult(msgspec.Struct, frozen=True):
    """Result of one probe.

    `reason` fits a condition: Generated, Embedded or Ranked if ok, else Unreachable, TimedOut, Unauthorized, NotFound,
    Untrusted (by its certificate), Loading, Broken (this engine will never answer), BadAnswer.
    """

    ok: bool
    reason: str
    message: str


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message = msgspec.field(default_factory=_Message)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None

    def is_answer(self) -> bool:
        # A first token may decode to nothing (half a character), so a count of tokens is proof without text.
        counted = self.usage is not None and self.usage.completion_tokens >= 1
        return bool(self.choices) and (counted or any(choice.message.content for choice in self.choices))


class _Embedding(msgspec.Struct):
    embedding: list[float]


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]

    def is_answer(self) -> bool:
        return bool(self.data) and any(self.data[0].embedding)


class _Rank(msgspec.Struct):
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Rank]

    def is_answer(self) -> bool:
        return bool(self.results)


class _Answer(Protocol):
    def is_answer(self) -> bool:
        """Return whether the model generated this answer."""


class _Question(NamedTuple):
    """The request of one mode."""

    path: str
    body: Mapping[str, Any]
    answer: type[_Answer]
    reason: str
    done: str
    """Action of the server, for a message."""
    missing: str
    """Part that an unusable answer lacks, for a message."""


_QUESTIONS: Final[Mapping[Mode, _Question]] = {
    "chat": _Question(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
        _Completion,
        "Generated",
        "generated a token",
        "a token",
    ),
    "embeddings": _Question(
        "/v1/embeddings", {"input": "Hi"}, _Embeddings, "Embedded", "embedded a text", "an embedding"
    ),
    "rerank": _Question(
        "/v1/rerank", {"query": "Hi", "documents": ["Hi"]}, _Ranking, "Ranked", "ranked a text", "a ranking"
    ),
}


async def generate_token(
    session: aiohttp.ClientSession,
    base_url: str,
    *,
    model: str,
    token: str | None,
    timeout_seconds: float,
    mode: Mode = "chat",
    engine: str | None = None,
) -> ProbeResult:
    """Request one token of a chat completion, or the equivalent of another mode, from the server at `base_url`.

    Args:
        session: the session to use.
        base_url: scheme, host and port, without a path.
        model: the served model's name.
        token: the bearer token, if the server requires one.
        timeout_seconds: limit for the whole exchange; a server without an answer by then is `TimedOut`.
        mode: mode of the server, which decides the request.
        engine: the runtime that the server is, by which its errors are understood; None: unknown, or behind a proxy.

    Never raises because of the server's behaviour. A redirect is not followed: it could make us request any address
    that the server names, and quote the answer.
    """
    # Path and body of the mode's request; `missing` names the answer in messages.
    question = _QUESTIONS[mode]
    body = msgspec.json.encode({"model": model, **question.body})
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"

    try:
        async with (
            asyncio.timeout(timeout_seconds),
            session.post(f"{base_url}{question.path}", data=body, headers=headers, allow_redirects=False) as response,
        ):
            answer = await _read_body(response)
    except TimeoutError:
        message = f"no answer with {question.missing} from {base_url} within {timeout_seconds:g} s"
        return ProbeResult(ok=False, reason=TIMED_OUT, message=message)
    except aiohttp.ClientConnectorCertificateError as error:
        cause = error.certificate_error
        problem = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else str(cause)
        return ProbeResult(ok=False, reason="Untrusted", message=f"{base_url}: {problem}")
    except aiohttp.ClientPayloadError:
        return ProbeResult(ok=False, reason="BadAnswer", message=f"{base_url} broke off its answer")
    except (aiohttp.ClientError, OSError) as error:
        return ProbeResult(ok=False, reason="Unreachable", message=f"{base_url}: {error}")

    if response.status != HTTPStatus.OK:
        return _judge_error(base_url, engine, response.status, answer)
    return _judge_answer(base_url, mode, answer)


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer, at most 1 MiB of it."""
    try:
        return await response.content.readexactly(_READ_BYTES)
    # A shorter body has come completely.
    except asyncio.IncompleteReadError as ended:
        return ended.partial


def _judge_error(base_url: str, engine: str | None, status: int, answer: bytes) -> ProbeResult:
    """Return the result of a probe that was answered with an error: Broken if the engine can never answer."""
    text = read_error(answer).text
    # The engine's table of errors calls it sick if it can answer no further request.
    is_sick = judge_error(find_runtime(engine).errors, status, text).lesson == "sick"
    # By status (_REASONS), 400 and 501 are Broken as well, since the request is well-formed.
    reason = "Broken" if is_sick else _REASONS.get(status, "BadAnswer")
    return ProbeResult(ok=False, reason=reason, message=f"{base_url} answered {status}: {_quote(text)}")


def _judge_answer(base_url: str, mode: Mode, answer: bytes) -> ProbeResult:
    """Return the result of a probe that was answered with 200: BadAnswer if the model generated nothing."""
    question = _QUESTIONS[mode]
    try:
        is_answer = msgspec.json.decode(answer, type=question.answer).is_answer()
    except (msgspec.DecodeError, UnicodeDecodeError):
        is_answer = False
    if not is_answer:
        message = f"{base_url} answered without {question.missing}: {_quote(answer.decode(errors='replace'))}"
        return ProbeResult(ok=False, reason="BadAnswer", message=message)
    return build_success(base_url, mode)


def build_success(server: str, mode: Mode) -> ProbeResult:
    """Return the result of a probe that `server` has answered; the message begins with `server` and a blank."""
    question = _QUESTIONS[mode]
    return ProbeResult(ok=True, reason=question.reason, message=f"{server} {question.done}")


def _quote(text: str) -> str:
    """Return the beginning of an answer, for a message."""
    return text.strip()[:_QUOTED_CHARACTERS] or "an empty body"
