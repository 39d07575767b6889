"""The objects of Ollama's answers: lines of a stream, and its last one with counts and times in nanoseconds."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from gateway.dialects.ollama.engine_answer import EngineTimings
from gateway.proxy.token_counts import TokenCount

NDJSON_FIELDS: Final = b"Content-Type: application/x-ndjson\r\n"
JSON_FIELDS: Final = b"Content-Type: application/json; charset=utf-8\r\n"

_NANOSECONDS: Final = 1_000_000_000
_NANOSECONDS_OF_MS: Final = 1_000_000
_EMPTY_TEXT: Final = b'""'


class AnswerTimes:
    """The times of one answer, by the monotonic clock."""

    def __init__(self, arrived: float, waited_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep when the request came and how long it waited for its engine, which counts as the time of loading."""
        self._arrived = arrived
        self._waited_seconds = waited_seconds
        self._clock = clock
        self._first_at: float | None = None

    def note_text(self) -> None:
        """Note that a piece of the answer has come."""
        if self._first_at is None:
            self._first_at = self._clock()

    def render_load(self) -> bytes:
        """Return the fields of the whole time and of the time until an engine had the request."""
        total = _count(self._clock() - self._arrived)
        return b'"total_duration":%d,"load_duration":%d' % (total, _count(self._waited_seconds))

    def render(self, tokens: TokenCount, timings: EngineTimings | None) -> bytes:
        """Return all fields of counts and times: the engine's own where it has measured them."""
        now = self._clock()
        first_at = now if self._first_at is None else self._first_at
        prompt_ns = _count(first_at - self._arrived - self._waited_seconds)
        answer_ns = _count(now - first_at)
        if timings:
            prompt_ns = prompt_ns if timings.prompt_ms is None else max(1, int(timings.prompt_ms * _NANOSECONDS_OF_MS))
            predicted_ms = timings.predicted_ms
            answer_ns = answer_ns if predicted_ms is None else max(1, int(predicted_ms * _NANOSECONDS_OF_MS))
        return b'%b,"prompt_eval_count":%d,"prompt_eval_duration":%d,"eval_count":%d,"eval_duration":%d' % (
            self.render_load(),
            tokens.prompt or 0,
            prompt_ns,
            tokens.generated or 0,
            answer_ns,
        )


class AnswerLines:
    """The lines of answers of one path, for a client whose name for the model is `model`."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = msgspec.json.encode(model)
        self._is_chat = is_chat

    def render(
        self, text: bytes = b"", thinking: bytes = b"", calls: bytes = b"", logprobs: bytes = b"", end: bytes = b""
    ) -> bytes:
        """Return an object, of JSON texts, each of which may be empty; `end` has the last fields of an answer."""
        fields = b'"content":%b' if self._is_chat else b'"response":%b'
        fields %= text or _EMPTY_TEXT
        if thinking:
            fields += b',"thinking":%b' % thinking
        if self._is_chat:
            if calls:
                fields += b',"tool_calls":%b' % calls
            fields = b'"message":{"role":"assistant",%b}' % fields
        elif calls:
            fields += b',"tool_calls":%b' % calls
        if logprobs:
            fields += b',"logprobs":%b' % logprobs
        end = end or b'"done":false'
        return b'{"model":%b,"created_at":"%b",%b,%b}' % (self._model, _now(), fields, end)


def render_end(reason: str, fields: bytes = b"") -> bytes:
    """Return the last fields of an answer: the reason of its end, and `fields`, which are JSON text."""
    known = reason if reason in {"length", "load", "unload"} else "stop"
    return b'"done":true,"done_reason":"%b"%b' % (known.encode(), b"," + fields if fields else b"")


def render_error(message: str) -> bytes:
    """Return an error, as an object or as a line of a stream."""
    return msgspec.json.encode({"error": message})


def _now() -> bytes:
    """Return the present time in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z").encode()


def _count(seconds: float) -> int:
    """Return a time in nanoseconds, at least one: clients divide by it."""
    return max(1, int(seconds * _NANOSECONDS))
