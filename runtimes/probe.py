"""Readiness by a generated token, whatever a server says about itself.

Servers answer 200 on /health while they load, or for ever with a broken model. A service is ready when a completion
came back, so that is what is asked; the same question serves the agent (child) and the controller (endpoint).
"""

import asyncio
from http import HTTPStatus

import aiohttp
import msgspec

_QUOTED_CHARACTERS = 300
_READ_BYTES = 64 * 1024
"""Of an answer; one token takes less, and who answers may not be trusted."""
_REASONS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "Unauthorized",
    HTTPStatus.FORBIDDEN: "Unauthorized",
    HTTPStatus.NOT_FOUND: "NotFound",
    HTTPStatus.SERVICE_UNAVAILABLE: "Loading",
}


class Probe(msgspec.Struct, frozen=True):
    """What one probe found.

    `reason` fits a condition: Generated if ok, else Unreachable, TimedOut, Unauthorized, NotFound, Loading, BadAnswer.
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

    def has_token(self) -> bool:
        # A first token may decode to nothing (half a character), so the count is as good as the text.
        counted = self.usage is not None and self.usage.completion_tokens >= 1
        return bool(self.choices) and (counted or any(choice.message.content for choice in self.choices))


class _ServerError(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ServerError


async def generate_token(
    session: aiohttp.ClientSession, base_url: str, *, model: str, token: str | None, timeout_seconds: float
) -> Probe:
    """Ask the server at `base_url` for one token of a chat completion.

    Args:
        session: the session whose connections to use.
        base_url: scheme, host and port, without a path.
        model: the served model's name.
        token: the bearer token, where the server asks for one.
        timeout_seconds: for the whole exchange; a server that is still silent then is `TimedOut`.

    Never raises for what the server does or fails to do. A redirect is not followed: it would have us ask, and quote,
    whatever the server names.
    """
    question = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    body = msgspec.json.encode(question)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            session.post(
                f"{base_url}/v1/chat/completions", data=body, headers=headers, allow_redirects=False
            ) as response,
        ):
            answer = await _read(response)
    except TimeoutError:
        return Probe(ok=False, reason="TimedOut", message=f"{base_url} generated no token within {timeout_seconds:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Probe(ok=False, reason="Unreachable", message=f"{base_url}: {error}")
    return _judge(base_url, response.status, answer)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readexactly(_READ_BYTES)
    except asyncio.IncompleteReadError as whole:
        return whole.partial


def _judge(base_url: str, status: int, answer: bytes) -> Probe:
    if status != HTTPStatus.OK:
        reason = _REASONS.get(status, "BadAnswer")
        return Probe(ok=False, reason=reason, message=f"{base_url} answered {status}: {_quote(answer)}")
    try:
        generated = msgspec.json.decode(answer, type=_Completion).has_token()
    except msgspec.DecodeError:
        generated = False
    if not generated:
        return Probe(ok=False, reason="BadAnswer", message=f"{base_url} answered without a token: {_quote(answer)}")
    return Probe(ok=True, reason="Generated", message=f"{base_url} generated a token")


def _quote(answer: bytes) -> str:
    try:
        text = msgspec.json.decode(answer, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        text = answer.decode(errors="replace")
    return text.strip()[:_QUOTED_CHARACTERS] or "an empty body"
