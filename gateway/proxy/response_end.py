"""Decide from the end of a response under status 200 who was at fault, if anybody was.

An engine that fails when its status is sent already can only say so in the body: as an object with an error, as the
last event of a stream, or by a stream that ends before its last event. The last is what mlx-lm and Ollama do: the one
closes the connection, which ends a body without a length, and the other leaves out `[DONE]`.
"""

from enum import Enum
from http import HTTPStatus
from typing import Final

import msgspec

from gateway.proxy.backend_health import is_failure

STREAM_END_BYTES: Final = 4 << 10
"""So much of the end of a stream has its last events: finish, usage and `[DONE]`, or an error."""

_REQUEST_ERRORS: Final = frozenset(
    {
        *("invalid_request_error", "exceed_context_size_error", "BadRequestError", "not_supported_error"),
        *("not_found_error", "NotFoundError", "authentication_error", "permission_error", "rate_limit_error"),
    }
)
"""Types of errors for which a sound engine refuses a request, where no status is said."""
_LAST_EVENTS: Final = {
    "chat": (b"data: [DONE]", b"data:[DONE]", b'"finish_reason":"', b'"finish_reason": "'),
    "completions": (b"data: [DONE]", b"data:[DONE]", b'"finish_reason":"', b'"finish_reason": "'),
    "messages": (b"message_stop", b'"stop_reason":"', b'"stop_reason": "'),
}
"""One of these is in the end of every whole stream; the last event of `responses` has no bound, so it is not sought."""


class ResponseEnd(Enum):
    """The end of a response; of what is no error and no stream, the end of the body is enough."""

    COMPLETE = "complete"
    REFUSED = "an error for which the request is to blame"
    FAILED = "an error under status 200"
    CUT_OFF = "a stream without its last event"


class _Error(msgspec.Struct):
    code: msgspec.Raw = msgspec.Raw()
    type: msgspec.Raw = msgspec.Raw()


class _ErrorEvent(msgspec.Struct):
    """The last event of a stream that failed, in one of its forms."""

    error: msgspec.Raw = msgspec.Raw(b"null")
    type: msgspec.Raw = msgspec.Raw()


_error = msgspec.json.Decoder(_Error)
_error_event = msgspec.json.Decoder(_ErrorEvent)


def judge_error(error: bytes) -> ResponseEnd:
    """Return who is to blame for an engine's error: an object with a code or a type, or only a text."""
    try:
        found = _error.decode(error)
        code, kind = (msgspec.json.decode(value) if bytes(value) else None for value in (found.code, found.type))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ResponseEnd.FAILED
    if isinstance(code, int) and code >= HTTPStatus.BAD_REQUEST:
        return ResponseEnd.FAILED if is_failure(code) else ResponseEnd.REFUSED
    is_refusal = isinstance(kind, str) and kind in _REQUEST_ERRORS
    return ResponseEnd.REFUSED if is_refusal else ResponseEnd.FAILED


def read_stream_end(end: bytes, route: str) -> ResponseEnd:
    """Return how the stream with these last bytes has ended; `route` is the name of the path that was asked.

    Quotation marks and ends of lines are escaped in generated text, so no text looks like an event.
    """
    if b"error" in end:
        event = b""
        for line in end.splitlines():
            name, _, value = line.partition(b":")
            value = value.strip()
            if name == b"event":
                event = value
            elif name == b"error":
                return judge_error(value)
            elif name == b"data" and (error := _find_error(value, is_error=event == b"error")):
                return judge_error(error)
    last_events = _LAST_EVENTS.get(route)
    if last_events and not any(last in end for last in last_events):
        return ResponseEnd.CUT_OFF
    return ResponseEnd.COMPLETE


def _find_error(data: bytes, *, is_error: bool) -> bytes:
    """Return the error that the data of an event has, empty if none; `is_error` if the event is named so."""
    if not is_error and b'"error"' not in data:
        return b""
    try:
        event = _error_event.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data if is_error else b""
    if bytes(event.error) != b"null":
        return bytes(event.error)
    return data if is_error or bytes(event.type) == b'"error"' else b""
