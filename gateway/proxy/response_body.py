"""Rewrite an engine's response: replace the engine's model name by the service's, count tokens, keep the rest.

Streams are handled line by line, and a chunk that needs no change is passed on as it came. A quotation mark inside a
JSON string is always escaped, so the bytes `"model":` occur only where they are a key.
"""

import functools
import re
from typing import Final, NamedTuple, Protocol

import msgspec

from gateway.proxy.errors import RequestError
from gateway.proxy.response_end import (
    STREAM_END_BYTES,
    ResponseEnd,
    StreamEnd,
    judge_error_in_body,
    read_stream_end,
    render_error_event,
)
from gateway.proxy.token_counts import NO_TOKENS, TokenCount, take_over_counts

LONGEST_LINE_BYTES: Final = 1 << 20
"""A longer line is passed on in pieces."""
_LONGEST_FIELD_BYTES: Final = 8 << 10
"""The longest field of a model that is held back where a piece ends within it; no engine's name is longer."""
_LONGEST_USAGE_BYTES: Final = 1 << 10
_LARGEST_ERROR_BYTES: Final = 64 << 10
SHORT_JSON_BYTES: Final = 256 << 10
"""A longer response, such as thousands of embeddings, is passed on in pieces: decoding it would block all others."""

_TRUNCATED: Final = "Input data was truncated"
"""The error of msgspec for the begin of a JSON text."""
_NOTHING: Final = msgspec.Raw(b"")
_NOT_GIVEN: Final = frozenset({b"", b"null"})
"""The values of a field that is not there, or that says nothing."""

_MODEL = re.compile(rb'("model"\s*:\s*)"(?:[^"\\]|\\.)*"')
_USAGE = re.compile(rb'"usage"\s*+:\s*+(\{(?:[^{}]|\{[^{}]*\})*+\})')
# Such a field, whose last quotation mark begins no other, or the begin of one at the end of a piece.
_MODEL_OR_BEGIN = re.compile(
    rb'"model"\s*+:\s*+"(?:[^"\\]|\\.)*+"|("(?:m(?:o(?:d(?:e(?:l(?:"(?:\s*+(?::\s*+(?:"(?:[^"\\]|\\.)*+\\?)?)?)?)?)?)?)?)?)?\Z)',
    re.DOTALL,
)
# The event with the counts of tokens at the end of a stream of chunks, which has no choice.
_USAGE_EVENT = re.compile(
    rb'^data: ?\{(?=[^\r\n]*"choices" ?: ?\[\])(?=[^\r\n]*"usage" ?: ?\{)[^\r\n]*\}\r?\n(?:\r?\n)?', re.MULTILINE
)
# A field with generated text, in each form in which the APIs stream it.
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text|delta|thinking|partial_json|arguments)"\s*:\s*"[^"]')


class _ShortResponse(msgspec.Struct):
    """The fields that matter of a response that is no stream; an empty one is not there."""

    model: msgspec.Raw = _NOTHING
    error: msgspec.Raw = _NOTHING
    choices: msgspec.Raw = _NOTHING
    data: msgspec.Raw = _NOTHING
    results: msgspec.Raw = _NOTHING
    output: msgspec.Raw = _NOTHING
    content: msgspec.Raw = _NOTHING
    usage: msgspec.Raw = _NOTHING
    timings: msgspec.Raw = _NOTHING


_response = msgspec.json.Decoder(_ShortResponse)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ResponseBody:
    """The body of an engine's response on its way to the client; this one cannot be rewritten, and is passed on."""

    failed = False
    """True if the body is an error: what `finish` returns is it, and no response to the client."""
    end = ResponseEnd.COMPLETE
    """The end of the body, once it is finished."""
    unreadable_error = b""
    """An error in the body that the client cannot read there, once it is finished; empty if there is none."""
    starts_at_once = True
    """True if the client gets the head before any of the body has come."""
    is_stream = False
    """True if the body is a stream of events."""
    _tokens: TokenCount = NO_TOKENS

    @property
    def text_events(self) -> int:
        """Events with text so far; an engine sends about one for each token."""
        return 0

    @property
    def tokens(self) -> TokenCount:
        """The engine's report so far."""
        return self._tokens

    def feed(self, piece: bytes) -> bytes:
        """Take a piece from the engine and return what goes to the client now."""
        return piece

    def finish(self) -> bytes:
        """Return what is held back at the end of the response."""
        return b""

    def break_off(self, error: RequestError) -> bytes:
        """Return what tells the client of an error; empty if the form has no way: half of it shows by itself."""
        del error
        return b""


class TimedRequest(Protocol):
    """The times of a request."""

    @property
    def arrived(self) -> float:
        """When it came, by the monotonic clock."""

    @property
    def queued_seconds(self) -> float:
        """The time that it has waited for a backend."""


class ResponseTranslator(Protocol):
    """The translation of responses into another API."""

    def translate(self, response: ResponseBody, request: TimedRequest) -> tuple[ResponseBody, bytes]:
        """Return the body for the client, which stands behind `response`, and the lines of its header fields."""


class TokenStream(ResponseBody):
    """A stream of server-sent events, rewritten for a client whose name for the model is `model`.

    Args:
        model: the client's name.
        engine_model: the engine's name if that is known.
        route: the name of the path that was asked.
    """

    is_stream = True
    hides_usage = False
    """True if the client has not asked for the event with the counts of tokens, so that it does not get it."""

    def __init__(self, model: str, engine_model: str | None = None, route: str = "") -> None:
        self._route = route
        self._model = model
        # The field `model` with its value: as the client gets it, and as the engine most likely sends it, which is
        # empty if that is not known. `_rewrite` replaces the second by the first.
        self._client_field, self._engine_field = _model_fields(model, engine_model)
        self._held_back = bytearray()
        """The incomplete line; the beginning of a long one has been passed on."""

        # The count, which `_count_tokens` brings up to date when it is asked for: the client gets the lines first.
        self._uncounted: list[bytes] = []  # lines that are not looked through yet
        self._reported = TokenCount()  # the engine's own count
        self._text_events = 0  # the events with generated text, which count the tokens where the engine does not
        # The last lines that were looked through; in them an engine says that it has failed, or that all has come.
        self._last_events = b""

    @property
    def text_events(self) -> int:
        """Events with text so far; an engine sends about one for each token."""
        self._count_tokens()
        return self._text_events

    @property
    def tokens(self) -> TokenCount:
        """The engine's report so far; without one, the generated tokens are the events with text."""
        self._count_tokens()
        generated = self._text_events if self._reported.generated is None else self._reported.generated
        return TokenCount(self._reported.prompt, generated)

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk from the engine and return what goes to the client now: the complete lines.

        The incomplete line at the end is held back, as it may have to be rewritten. One that is longer than the limit
        is passed on in pieces.
        """
        # 1. No line is complete: hold all of it back, unless that is too much.
        end = chunk.rfind(b"\n") + 1  # of the complete lines; 0: there are none
        if not end and len(self._held_back) + len(chunk) <= LONGEST_LINE_BYTES:
            self._held_back += chunk
            return b""

        # 2. Put what was held back before the chunk.
        if self._held_back:
            if end:
                end += len(self._held_back)
            chunk = self._take_held() + chunk

        # 3. Cut the chunk where the last complete line ends, or later if the rest is too much to be held back.
        if len(chunk) - end > LONGEST_LINE_BYTES:
            end = _find_complete_end(chunk)
        if end < len(chunk):
            self._held_back += chunk[end:]
            chunk = chunk[:end]
        return self._rewrite(chunk)

    def finish(self) -> bytes:
        """Return the incomplete line with which the stream has ended, and the end mark if it lacks only that.

        Set `end`, and `unreadable_error` if the client cannot read the engine's error. If the stream was cut off,
        return nothing: half a line is no event.
        """
        # 1. Take the line that is left, and look at the end of the stream with it. `_count_tokens` appends all lines
        #    that came since its last call to `_last_events`.
        self._count_tokens()
        complete_events = self._last_events
        last_line = self._rewrite(self._take_held()) if self._held_back else b""
        self._count_tokens()
        end = self._read_end(self._last_events)
        self.end, self.unreadable_error = end.end, end.unreadable_error

        # 2. Of a stream that was cut off, that line may be half a line: forget it.
        if end.end is ResponseEnd.CUT_OFF:
            self._last_events = complete_events
            return b""
        if end.missing_mark:
            return last_line + _separate_event(self._last_events) + end.missing_mark
        return last_line

    def break_off(self, error: RequestError) -> bytes:
        """Return the event that tells the client of an error, after which nothing comes."""
        self._take_held()
        self._count_tokens()
        return _separate_event(self._last_events) + self._render_error(error)

    def _read_end(self, end: bytes) -> StreamEnd:
        return read_stream_end(end, self._route)

    def _render_error(self, error: RequestError) -> bytes:
        return render_error_event(error, self._route)

    def _take_held(self) -> bytes:
        """Return the incomplete line, and hold it back no more."""
        held = bytes(self._held_back)
        self._held_back.clear()
        return held

    def _count_tokens(self) -> None:
        """Count the events with text, and read the engine's reports, in the lines since the last count."""
        uncounted = self._uncounted
        while uncounted:
            lines = uncounted.pop(0)
            self._last_events = (self._last_events + lines)[-STREAM_END_BYTES:]
            self._text_events += len(_TEXT.findall(lines))
            if b'"usage"' in lines or b'"timings"' in lines:
                for line in lines.splitlines():
                    if line.startswith(b"data:"):
                        take_over_counts(self._reported, line[5:])

    def _rewrite(self, lines: bytes) -> bytes:
        """Return the lines that the client gets, with its name for the model, and keep all to be counted later."""
        self._uncounted.append(lines)
        if self.hides_usage and b'"usage"' in lines:
            lines = _USAGE_EVENT.sub(b"", lines)
        return self._rename(lines)

    def _rename(self, lines: bytes) -> bytes:
        """Return lines with the client's name for the model.

        A plain replacement of the known field is tried first. If a field `model` is left that is not the client's, the
        fields are found by an expression; the first one found is remembered, so that later lines need no search.
        """
        if self._engine_field:
            lines = lines.replace(self._engine_field, self._client_field)
        if lines.count(b'"model"') == lines.count(self._client_field):  # each field `model` is the client's
            return lines
        name = msgspec.json.encode(self._model)
        if match := _MODEL.search(lines):
            self._engine_field, self._client_field = match[0], match[1] + name
        return _rename_model(lines, name)


def _separate_event(passed_on: bytes) -> bytes:
    """Return the bytes that separate another event from the last bytes that were passed on."""
    line = passed_on[passed_on.rfind(b"\n", 0, -1) + 1 :]
    # The name of an event whose data did not come is replaced by that of the next one.
    return b"" if not line.strip() or line.startswith(b"event:") else b"\n\n"


@functools.lru_cache(maxsize=256)
def _model_fields(model: str, engine_model: str | None) -> tuple[bytes, bytes]:
    """Return the field `model` as most engines write it: with the client's name, and with the engine's, else b""."""
    client_field = b'"model":' + msgspec.json.encode(model)
    engine_field = b'"model":' + msgspec.json.encode(engine_model) if engine_model else b""
    return client_field, engine_field


class LongJsonResponse:
    """A long response that is one JSON object, rewritten piece by piece for a client whose name for it is `model`."""

    def __init__(self, model: str) -> None:
        self._name = msgspec.json.encode(model)  # with its quotation marks
        self._held_back = b""
        """A field `model` that is not complete yet."""
        self._seen_end = b""
        """The end of what has come: a report of tokens may lie in two pieces."""
        self.tokens = TokenCount()

    def feed(self, piece: bytes) -> bytes:
        """Take a piece from the engine and return what goes to the client now: all but an incomplete field `model`.

        A report of tokens may be found twice, here and with the next piece; it replaces the count, so nothing is added.
        """
        seen = self._seen_end + piece  # also what was passed on already: a report may lie in two pieces
        if b'"usage"' in seen:
            for usage in _USAGE.finditer(seen):
                take_over_counts(self.tokens, b'{"usage":%b}' % usage[1])
        self._seen_end = seen[-_LONGEST_USAGE_BYTES:]
        piece = self._held_back + piece  # the begin of a field `model` that the piece before cut
        end = _find_complete_end(piece)
        self._held_back = piece[end:]
        return _rename_model(piece[:end], self._name)

    @property
    def end(self) -> ResponseEnd:
        """The end of the body, by its last bytes."""
        is_whole = self._seen_end.rstrip().endswith((b"}", b"]"))
        return ResponseEnd.COMPLETE if is_whole else ResponseEnd.CUT_OFF

    def finish(self) -> bytes:
        """Return what is held back at the end of the response."""
        return _rename_model(self._held_back, self._name)


def _find_complete_end(piece: bytes) -> int:
    """Return the end of what can be passed on of a piece: the begin of a field `model` that the piece cuts, or its end.

    Only the last 8 KiB are searched, because no such field is longer.
    """
    for match in _MODEL_OR_BEGIN.finditer(piece, max(0, len(piece) - _LONGEST_FIELD_BYTES)):
        if match[1]:  # only an incomplete field has this group
            return match.start()
    return len(piece)


def _rename_model(data: bytes, name: bytes) -> bytes:
    return _MODEL.sub(lambda match: match[1] + name, data)


class JsonResponse(ResponseBody):
    """A response that is one JSON object, rewritten for a client whose name for the model is `model`.

    Blanks that an engine sends while it works go ahead. A short object is held back until it is complete.
    """

    starts_at_once = False

    def __init__(self, model: str) -> None:
        self._model = model
        self._held_back = bytearray()
        self._long_response: LongJsonResponse | None = None

    def feed(self, piece: bytes) -> bytes:
        """Take a piece from the engine and return what goes to the client now."""
        if self._long_response:
            return self._long_response.feed(piece)
        if not self._held_back and piece.isspace():  # blanks before the object are passed on at once
            return piece
        self._held_back += piece
        if len(self._held_back) <= SHORT_JSON_BYTES:
            return b""
        self._long_response = LongJsonResponse(self._model)
        self._tokens = self._long_response.tokens
        return self._long_response.feed(bytes(self._held_back))

    def finish(self) -> bytes:
        """Return what is held back at the end of the response; of a short one, set its tokens and its end."""
        if self._long_response:
            self.end = self._long_response.end
            return self._long_response.finish()
        if not self._held_back:  # nothing but blanks has come: no client can use it
            self.end = ResponseEnd.CUT_OFF
            return b""
        rewritten = rewrite_json(bytes(self._held_back), self._model)
        self._tokens, self.end = rewritten.tokens, rewritten.end
        # Some engines send an error with status 200 when they fail late.
        self.failed = self.end in {ResponseEnd.FAILED, ResponseEnd.REFUSED}
        return rewritten.body


class ErrorResponse(ResponseBody):
    """An error, of which the begin is kept; `retry_after` is the engine's header field. The status says who failed."""

    starts_at_once = False

    def __init__(self, retry_after: str) -> None:
        self.retry_after = retry_after
        self._body = b""

    def feed(self, piece: bytes) -> bytes:
        """Keep the piece."""
        self._body += piece
        self.failed = len(self._body) >= _LARGEST_ERROR_BYTES  # enough of the error has come
        return b""

    def finish(self) -> bytes:
        """Return the error."""
        self.failed = True
        return self._body[:_LARGEST_ERROR_BYTES]


class RewrittenJson(NamedTuple):
    """A short response that is one JSON object."""

    body: bytes
    tokens: TokenCount
    end: ResponseEnd


def rewrite_json(body: bytes, model: str) -> RewrittenJson:
    """Return a response that is one JSON object, with `model` as its model, its counts of tokens, and its end.

    Half an object, of an engine that died within a response without a length, is cut off, and nothing of it is
    returned. Any other text is returned unchanged, as a complete response. An object with an error and no contents was
    refused, or has failed; an `error` beside contents is no failure, since the client gets an answer.
    """
    try:
        response = _response.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if str(error) == _TRUNCATED:
            return RewrittenJson(b"", NO_TOKENS, ResponseEnd.CUT_OFF)
        return RewrittenJson(body, NO_TOKENS, ResponseEnd.COMPLETE)

    # 1. The counts: decoded apart from the rest, so that another field of an odd type hides none. The fields of
    #    `response` are JSON texts, empty if they are not there. _NOT_GIVEN: empty, or null
    tokens = TokenCount()
    if bytes(response.usage) not in _NOT_GIVEN:
        take_over_counts(tokens, b'{"usage":%b}' % response.usage)
    elif response.timings:
        take_over_counts(tokens, b'{"timings":%b}' % response.timings)

    # 2. The model: the client's name in place of the engine's.
    if response.model:
        body = _replace_model(body, bytes(response.model), msgspec.json.encode(model))

    # 3. The end. Each API has its answer in one of these fields.
    contents = (response.choices, response.data, response.results, response.output, response.content)
    is_error = bytes(response.error) not in _NOT_GIVEN and not any(contents)
    end = judge_error_in_body(response.error) if is_error else ResponseEnd.COMPLETE
    return RewrittenJson(body, tokens, end)


def _replace_model(body: bytes, old: bytes, new: bytes) -> bytes:
    """Return a JSON object with `new` as its model, whose value was `old`; both are JSON texts.

    The field is replaced where it stands, if it is the only one of this name and in the usual form; otherwise the whole
    object is written anew.
    """
    if old == new:
        return body
    field = b'"model":' + old
    if body.count(b'"model"') == 1 and field in body:
        return body.replace(field, b'"model":' + new)
    fields = _fields.decode(body)
    fields["model"] = msgspec.Raw(new)
    return msgspec.json.encode(fields)
