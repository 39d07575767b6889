"""What an engine answers: its name for the model replaced by the service's, its tokens counted, the rest as it is.

Streams are handled line by line, and a chunk that needs no change is passed on as it came. A quotation mark inside a
JSON string is always escaped, so the bytes `"model":` occur only where they are a key.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

_LONGEST_LINE_BYTES: Final = 1 << 20
"""A longer line is passed on in parts, as it is."""

_CONTENTS = frozenset({"choices", "data", "results", "output", "content"})

_MODEL = re.compile(rb'("model"\s*:\s*)"(?:[^"\\]|\\.)*"')
# A field with text in it, in each of the forms in which the APIs stream what a model says.
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text|delta|thinking|partial_json|arguments)"\s*:\s*"[^"]')


class Tokens(msgspec.Struct):
    """What an answer says that it read and wrote; None where it does not say."""

    read: int | None = None
    written: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's own, in the last event of every stream."""

    prompt_n: int = 0
    cache_n: int = 0
    predicted_n: int = 0


class _Nested(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    usage: _Usage | None = None
    timings: _Timings | None = None
    response: _Nested | None = None
    """In events of /v1/responses."""
    message: _Nested | None = None
    """In events of /v1/messages."""


_event = msgspec.json.Decoder(_Event)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Stream:
    """One stream of server-sent events on its way to a client who knows the model as `model`."""

    def __init__(self, model: str) -> None:
        self._name = msgspec.json.encode(model)
        self._right = b'"model":' + self._name
        self._carry = b""
        self._tokens = Tokens()
        self.chunks = 0
        """Events with text so far: an engine makes about one for each token."""

    @property
    def tokens(self) -> Tokens:
        """What was said so far, with the events counted where the engine said nothing."""
        return Tokens(self._tokens.read, self.chunks if self._tokens.written is None else self._tokens.written)

    def feed(self, chunk: bytes) -> bytes:
        """Take what the engine sent and return what goes to the client now: whole lines."""
        if self._carry:
            chunk = self._carry + chunk
        end = chunk.rfind(b"\n") + 1
        if end == len(chunk):
            self._carry = b""
        elif len(chunk) - end > _LONGEST_LINE_BYTES:
            self._carry, end = b"", len(chunk)
        else:
            self._carry = chunk[end:]
            chunk = chunk[:end]
        return self._passed(chunk) if chunk else b""

    def rest(self) -> bytes:
        """Return what is left when the stream has ended within a line."""
        rest, self._carry = self._carry, b""
        return self._passed(rest) if rest else b""

    def _passed(self, lines: bytes) -> bytes:
        self.chunks += len(_TEXT.findall(lines))
        if b'"usage"' in lines or b'"timings"' in lines:
            for line in lines.splitlines():
                if line.startswith(b"data:"):
                    _add(self._tokens, line[5:])
        if lines.count(b'"model"') != lines.count(self._right):
            return _MODEL.sub(lambda found: found[1] + self._name, lines)
        return lines


class Whole(NamedTuple):
    """An answer that is one JSON object."""

    body: bytes
    tokens: Tokens
    failed: bool
    """It says that there is no answer, as some engines do under status 200 when they fail late."""


def whole(body: bytes, model: str) -> Whole:
    """Read an answer that came at once, and give it the name `model`; what is no JSON object stays as it is."""
    tokens = Tokens()
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Whole(body, tokens, failed=False)
    _add(tokens, body)
    name = msgspec.json.encode(model)
    if "model" in fields and bytes(fields["model"]) != name:
        fields["model"] = msgspec.Raw(name)
        body = msgspec.json.encode(fields)
    failed = bytes(fields.get("error", b"null")) != b"null" and not fields.keys() & _CONTENTS
    return Whole(body, tokens, failed)


def _add(tokens: Tokens, body: bytes) -> None:
    try:
        event = _event.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    nested = event.response or event.message or _Nested()
    for usage in (event.usage, nested.usage):
        if usage:
            tokens.read = _last(tokens.read, (usage.prompt_tokens, usage.input_tokens))
            tokens.written = _last(tokens.written, (usage.completion_tokens, usage.output_tokens))
    if event.timings and not event.usage:
        tokens.read = event.timings.prompt_n + event.timings.cache_n
        tokens.written = event.timings.predicted_n


def _last(known: int | None, said: Iterable[int | None]) -> int | None:
    for value in said:
        known = known if value is None else value
    return known
