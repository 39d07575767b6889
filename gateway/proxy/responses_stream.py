"""The stream of /v1/responses: each event completed with the fields that clients' libraries need, and its end known.

llama.cpp's events lack the place of an item in the output, that of a part in its item, and their own number. Clients
such as OpenAI's library put the text together by these places.
"""

from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, UnsetType

from gateway.proxy.errors import RequestError
from gateway.proxy.response_body import TokenStream
from gateway.proxy.response_end import ResponseEnd, StreamEnd, judge_error_in_body, read_stream_end

_LAST_EVENTS: Final = frozenset({"response.completed", "response.failed", "response.incomplete"})
_EVENTS_OF_A_PART: Final = tuple(
    f"response.{kind}." for kind in ("content_part", "output_text", "reasoning_text", "refusal")
)
_EVENTS_OF_TEXT: Final = frozenset({"response.output_text.delta", "response.output_text.done"})
_MOST_ITEMS: Final = 1000
"""The items whose place is remembered; no answer has so many."""


class _Item(msgspec.Struct):
    id: str | None = None
    call_id: str | None = None


class _Response(msgspec.Struct):
    id: str = ""
    error: msgspec.Raw = msgspec.Raw(b"null")


_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Python refuses to write a number of thousands of digits, which an engine may send."""


class _Event(msgspec.Struct):
    type: str = ""
    sequence_number: _Number | UnsetType = UNSET
    output_index: msgspec.Raw | UnsetType = UNSET
    content_index: msgspec.Raw | UnsetType = UNSET
    logprobs: msgspec.Raw | UnsetType = UNSET
    item_id: str | None = None
    item: _Item | None = None
    response: _Response | None = None


_event = msgspec.json.Decoder(_Event)


class ResponsesStream(TokenStream):
    """A stream of events of /v1/responses, rewritten for a client whose name for the model is `model`."""

    def __init__(self, model: str, engine_model: str | None = None) -> None:
        super().__init__(model, engine_model, "responses")
        self._response_id = ""
        self._is_finished = False
        """Nothing more comes, so that a line without an end is half a line."""
        self._is_within_line = False
        """A line that is too long to be held back has been passed on in part: what comes next is more of it."""
        self._next_number = 0
        """The `sequence_number` of the next event."""
        self._lacks_numbers = False
        """The engine does not number its events, so they are numbered here."""
        self._item_places: dict[str, int] = {}
        """The place in the output of each item that was added, by its id."""
        self._event_name = b""
        """The name of the event whose data comes next."""
        self._last_type = ""
        """The type of the last event, if it ends the response."""
        self._response_error = b"null"
        """The error of an answer that failed."""

    def finish(self) -> bytes:
        """Return what `TokenStream.finish` returns; a line without an end is no first piece of a long one now."""
        self._is_finished = True
        return super().finish()

    def _rewrite(self, lines: bytes) -> bytes:
        return b"".join(map(self._complete_line, super()._rewrite(lines).splitlines(keepends=True)))

    def _complete_line(self, line: bytes) -> bytes:
        """Return a line; add the fields that are missing if it is the data of an event.

        A line `event:` has the name of the event whose data comes next, so it is kept. The later pieces of a long line
        are returned as they are.
        """
        is_later_piece = self._is_within_line
        has_ended = line.endswith((b"\n", b"\r"))
        self._is_within_line = not has_ended and (is_later_piece or not self._is_finished)
        if is_later_piece:
            return line

        name, _, data = line.partition(b":")
        if name == b"event":
            self._event_name = data.strip()
        if name != b"data":
            return line

        try:
            event = _event.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if not self._is_within_line:
                return line
            # The first piece of an event that is too long to be held back: only its name is known, by an earlier line.
            # UNSET as its number makes `_complete_event` add one; else it is taken to have the next one.
            number = UNSET if self._lacks_numbers else self._next_number
            event = _Event(type=self._event_name.decode(errors="replace"), sequence_number=number)
        return self._complete_event(event, line) if event.type.startswith("response.") else line

    def _complete_event(self, event: _Event, line: bytes) -> bytes:
        """Return the line of an event, with the missing fields behind its opening brace; the rest stays as it is.

        Kept for later are the next number, the response's id and error, and the type of an event that ends it.
        """
        # 1. The number: its own, or the next one. UNSET: the event lacks the field
        missing = b""  # fields as JSON text, each with a comma behind it
        if event.sequence_number is UNSET:
            missing = b'"sequence_number":%d,' % self._next_number
            self._next_number += 1
            self._lacks_numbers = True
        else:
            self._next_number = event.sequence_number + 1

        # 2. The response, of events that have it, and the last event.
        if event.response:
            self._response_id = event.response.id or self._response_id
            self._response_error = bytes(event.response.error)
        if event.type in _LAST_EVENTS:
            self._last_type = event.type
        elif event.item or event.item_id:  # an event of an item of the output
            missing += self._place_event(event)

        begin, brace, rest = line.partition(b"{")
        return begin + brace + missing + rest if missing else line

    def _place_event(self, event: _Event) -> bytes:
        """Return the missing fields of an event of an item, such as a message or a call of a tool, as JSON text.

        They are the place of the item in the output, the place of the part in the item, and the list that libraries
        expect in events of text. A new item gets the next place, which is remembered by its id.
        """
        # 1. Find the place of the item. An event with a new item adds it; one that only names an unknown item belongs
        #    to the last one.
        item_id = ((event.item.id or event.item.call_id) if event.item else event.item_id) or ""
        place = self._item_places.get(item_id)
        if place is None:
            place = len(self._item_places) if event.item else max(0, len(self._item_places) - 1)
            if event.item and place < _MOST_ITEMS:
                self._item_places[item_id] = place

        # 2. Write the fields that the event lacks (UNSET).
        missing = b'"output_index":%d,' % place if event.output_index is UNSET else b""
        if event.content_index is UNSET and event.type.startswith(_EVENTS_OF_A_PART):
            missing += b'"content_index":0,'  # an engine that numbers no parts gives each item one
        if event.logprobs is UNSET and event.type in _EVENTS_OF_TEXT:
            missing += b'"logprobs":[],'
        return missing

    def _read_end(self, end: bytes) -> StreamEnd:
        """Return how the stream has ended: by its last event, by an error, or cut off."""
        if self._is_within_line:  # its event is not complete, whatever its first piece says
            return StreamEnd(ResponseEnd.CUT_OFF)
        if self._last_type == "response.failed":
            return StreamEnd(judge_error_in_body(self._response_error))
        if self._last_type:
            return StreamEnd(ResponseEnd.COMPLETE)
        stream_end = read_stream_end(end, "responses")
        if stream_end.end is ResponseEnd.COMPLETE:  # it has no error, but its last event did not come
            return StreamEnd(ResponseEnd.CUT_OFF)
        return stream_end

    def _render_error(self, error: RequestError) -> bytes:
        """Return an event at which libraries raise, then the one that ends a response that failed."""
        code = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
        details = {"code": code, "message": str(error)}
        response = {"id": self._response_id, "object": "response", "status": "failed", "output": [], "error": details}
        error_fields: dict[str, object] = {"error": {"type": code, **details, "param": None}}
        error_event = _render_event("error", self._next_number, error_fields)
        return error_event + _render_event("response.failed", self._next_number + 1, {"response": response})


def _render_event(kind: str, number: int, fields: dict[str, object]) -> bytes:
    event = {"type": kind, "sequence_number": number, **fields}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(event))


def open_stream(route: str, model: str, engine_model: str | None = None, *, hides_usage: bool = False) -> TokenStream:
    """Return a stream of the path named `route`, rewritten for a client whose name for the model is `model`.

    With `hides_usage`, the client has not asked for the event with the counts of tokens, and does not get it.
    """
    stream = ResponsesStream(model, engine_model) if route == "responses" else TokenStream(model, engine_model, route)
    stream.hides_usage = hides_usage
    return stream
