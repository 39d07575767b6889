"""Decide from the end of a response under status 200 who was at fault, if anybody was.

An engine that fails when its status is sent already can only say so in the body: as an object with an error, as the
last event of a stream, or by a stream that ends before its last event. The last is what mlx-lm and Ollama do: the one
closes the connection, which ends a body without a length, and the other leaves out `[DONE]`.

Clients' libraries take a stream that ends in an orderly way for a complete answer, whatever is missing. So each stream
ends with the mark of its API or with an error event in the form of its API.
"""

import re
from enum import Enum
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec

from gateway.proxy.errors import RequestError
from runtimes.engine_errors import judge_status

STREAM_END_BYTES: Final = 4 << 10
"""So much of the end of a stream has its last events: finish, usage and `[DONE]`, or an error."""

_REQUEST_ERRORS: Final = frozenset(
    {
        *("invalid_request_error", "exceed_context_size_error", "BadRequestError", "not_supported_error"),
        *("not_found_error", "NotFoundError", "authentication_error", "permission_error", "rate_limit_error"),
    }
)
"""Types of errors for which a sound engine refuses a request, where no status is said."""


class _EndMark(NamedTuple):
    """The end of every whole stream of one API."""

    pattern: re.Pattern[bytes]
    reasons: re.Pattern[bytes]
    """The field that says why the model has stopped; null as long as it goes on."""
    event: bytes
    """The mark, for a stream whose text is whole and whose engine left it out."""


_DONE: Final = _EndMark(
    re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\]"),
    re.compile(rb'"finish_reason"\s*:\s*("|null)'),
    b"data: [DONE]\n\n",
)
_END_MARKS: Final = {
    "chat": _DONE,
    "completions": _DONE,
    "messages": _EndMark(
        re.compile(rb'"type"\s*:\s*"message_stop"'),
        re.compile(rb'"stop_reason"\s*:\s*("|null)'),
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ),
}
"""By the name of the path; the last event of `responses` has no bound, and `responses_stream` looks for it."""
_MARK_BYTES: Final = 64
"""So much of the end is looked at first: mostly it has the mark, and a search through all of the end takes longer."""


class ResponseEnd(Enum):
    """The end of a response; of what is no error and no stream, the end of the body is enough."""

    COMPLETE = "complete"
    REFUSED = "an error for which the request is to blame"
    FAILED = "an error under status 200"
    CUT_OFF = "a stream without its last event, or an object of which nothing came"


class StreamEnd(NamedTuple):
    """The end of a stream, and what its client lacks."""

    end: ResponseEnd
    missing_mark: bytes = b""
    """The end mark, if only that is missing."""
    unreadable_error: bytes = b""
    """The engine's error, if it is not in the form that clients of this API read."""


class _Error(msgspec.Struct):
    code: msgspec.Raw = msgspec.Raw()
    type: msgspec.Raw = msgspec.Raw()


class _ErrorEvent(msgspec.Struct):
    """The last event of a stream that failed, in one of its forms."""

    error: msgspec.Raw = msgspec.Raw(b"null")
    type: msgspec.Raw = msgspec.Raw()


_error = msgspec.json.Decoder(_Error)
_error_event = msgspec.json.Decoder(_ErrorEvent)


def judge_error_in_body(error: bytes) -> ResponseEnd:
    """Return REFUSED if the request is to blame for an engine's error, else FAILED.

    An object is judged by its `code`, if that is the status of an error, else by its `type`; any other error is FAILED.
    """
    try:
        decoded = _error.decode(error)
        code, kind = (msgspec.json.decode(value) if bytes(value) else None for value in (decoded.code, decoded.type))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ResponseEnd.FAILED
    if isinstance(code, int) and code >= HTTPStatus.BAD_REQUEST:
        is_refusal = judge_status(code).lesson == "nothing"  # the status shows nothing bad of the engine
    else:
        is_refusal = isinstance(kind, str) and kind in _REQUEST_ERRORS
    return ResponseEnd.REFUSED if is_refusal else ResponseEnd.FAILED


def read_stream_end(tail: bytes, route: str) -> StreamEnd:
    """Return how the stream that ends with `tail` has ended; `route` is the name of the path that was asked.

    1. An error in one of the last events: the request or the engine is to blame.
    2. The end mark of the API, such as `[DONE]`, or an API without one: the stream is complete.
    3. The model's reason for its stop: the text is complete, and only the mark is missing.
    4. None of these: the stream was cut off.

    Quotation marks and ends of lines are escaped in generated text, so no text looks like an event.
    """
    # 1. An error
    if b"error" in tail and (failed_end := _read_failed_end(tail, route)) is not None:
        return failed_end

    # 2. The end mark, looked for in the last bytes first, which mostly is enough. None: the API has no mark
    mark = _END_MARKS.get(route)
    if mark is None or mark.pattern.search(tail, len(tail) - _MARK_BYTES) or mark.pattern.search(tail):
        return StreamEnd(ResponseEnd.COMPLETE)

    # 3. and 4. The reason, such as `"finish_reason": "stop"`; it is null as long as the model goes on.
    reasons = mark.reasons.findall(tail)
    if reasons and reasons[-1] == b'"':
        return StreamEnd(ResponseEnd.COMPLETE, missing_mark=mark.event)
    return StreamEnd(ResponseEnd.CUT_OFF)


def _read_failed_end(tail: bytes, route: str) -> StreamEnd | None:
    """Return how a stream has ended that has an error in one of its last events; None: it has none.

    `unreadable_error` is set if the error is not in the form that clients of the API read.
    """
    lines = tail.splitlines()
    if len(tail) >= STREAM_END_BYTES:
        del lines[0]  # it was cut, and may begin in a text of the client

    event_name = b""  # a line `event:` names the event whose `data:` follows
    for line in lines:
        name, _, value = line.partition(b":")
        value = value.strip()
        if name == b"event":
            event_name = value
        elif name == b"error":  # a line of its own, which no client reads
            return StreamEnd(judge_error_in_body(value), unreadable_error=value)
        elif name == b"data" and (error := _find_error(value, is_error_event=event_name == b"error")):
            # Anthropic's clients look for an event of this name, and OpenAI's for an `error` within the data.
            is_within_data = error != value
            is_readable = event_name == b"error" if route == "messages" else is_within_data
            return StreamEnd(judge_error_in_body(error), unreadable_error=b"" if is_readable else error)
    return None


def render_error_event(error: RequestError, route: str) -> bytes:
    """Return the event by which clients of an API learn that their stream has failed.

    After this event no end mark may follow: a client that does not know the event would take the stream for whole.
    """
    data = b"data: %b\n\n" % error.encode_body(route)
    return b"event: error\n" + data if route == "messages" else data


def _find_error(data: bytes, *, is_error_event: bool) -> bytes:
    """Return the error that the data of an event has, or b"" if the event is no error.

    Engines put it into a field `error`; or the whole data is the error, if the event's name (`is_error_event`) or the
    `type` in the data is `error`.
    """
    if not is_error_event and b'"error"' not in data:
        return b""
    try:
        event = _error_event.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data if is_error_event else b""
    if bytes(event.error) != b"null":
        return bytes(event.error)
    return data if is_error_event or bytes(event.type) == b'"error"' else b""
