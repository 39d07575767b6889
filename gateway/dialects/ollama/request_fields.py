"""The fields of a request to Ollama's API, whose values stay JSON texts, read in short pieces of work.

A request is translated whole before it is checked as OpenAI's, and may have 64 MiB of images: so a large one is scanned
in pieces, between which other requests go on, and no image is decoded. Names that are not known are ignored, as Ollama
does; a field that is `null` is one that is not there.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from gateway.proxy import errors
from gateway.proxy.errors import RequestError
from gateway.proxy.json_scanner import InvalidJsonError, JsonScanner, PausingWork
from gateway.proxy.request_body import FIELDS_LIMIT, LONGEST_MODEL_BYTES, SHORT_BODY_BYTES

MOST_MESSAGES: Final = 20_000
MOST_SMALL_BYTES: Final = 512 << 10
"""The longest value that is decoded as a whole, such as options or the calls of tools in one message."""

_MESSAGES: Final = "messages"
_NULL: Final = b"null"
_T = TypeVar("_T")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])


class OllamaFields:
    """The fields of one request that are not null; `messages` has the objects of that list."""

    def __init__(self, values: Mapping[str, msgspec.Raw], messages: Sequence[msgspec.Raw]) -> None:
        self._values = values
        self.messages = messages

    def find(self, name: str) -> bytes:
        """Return the JSON text of a field; empty if it is not there or null."""
        value = self._values.get(name)
        if value is None or (len(memoryview(value)) == len(_NULL) and bytes(value) == _NULL):
            return b""
        return bytes(value)

    def read(self, name: str, kind: type[_T], default: _T) -> _T:
        """Return a small field. Raises RequestError: it is of another type."""
        text = self.find(name)
        return decode_small(name, text, kind) if text else default

    def find_text(self, name: str) -> bytes:
        """Return the JSON text of a field that is a string; empty if it is not there, null or "". Raises RequestError.

        It is not decoded, for a prompt may be long.
        """
        text = self.find(name)
        if text and text[:1] != b'"':
            raise wrong_field(name, "it has to be a string")
        return b"" if text == b'""' else text

    @property
    def model(self) -> str:
        """The model, by its field or by the older `name`; empty: none is named. Raises RequestError."""
        for name in ("model", "name"):
            if text := self.find_text(name):
                if len(text) > LONGEST_MODEL_BYTES:
                    raise wrong_field(name, f"it is longer than {LONGEST_MODEL_BYTES} bytes")
                return decode_small(name, text, str)
        return ""


def read_fields(content: bytes | bytearray) -> Generator[None, None, OllamaFields]:
    """Read a request, with a pause after each piece of work. Raises RequestError: it is no JSON object."""
    if len(content) <= SHORT_BODY_BYTES:
        return read_short_fields(content)
    try:
        return (yield from _scan_fields(content))
    except InvalidJsonError as error:
        raise _not_an_object(str(error)) from error


def read_short_fields(content: bytes | bytearray) -> OllamaFields:
    """Read a short request at once. Raises RequestError: it is no JSON object."""
    if not content or content.isspace():
        raise errors.bad_request("missing request body")
    try:
        values = _fields.decode(content)
        messages = _list.decode(values[_MESSAGES]) if bytes(values.get(_MESSAGES, b"null")) != _NULL else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_an_object(str(error)) from error
    if len(values) > FIELDS_LIMIT:
        raise _too_many_fields()
    return OllamaFields(values, messages)


def _scan_fields(content: bytes | bytearray) -> Generator[None, None, OllamaFields]:
    """Find the fields and messages of a large request. Raises InvalidJsonError and RequestError."""
    scanner = JsonScanner(content)
    view = memoryview(content)  # its slices share the content's memory
    values: dict[str, msgspec.Raw] = {}
    messages: list[msgspec.Raw] = []

    def read_message() -> PausingWork:
        start = scanner.position
        if len(messages) == MOST_MESSAGES:
            raise wrong_field(_MESSAGES, f"there are more than {MOST_MESSAGES} messages")
        yield from scanner.skip_value()
        messages.append(msgspec.Raw(view[start : scanner.position]))

    def read_member(key: str, _start: int) -> PausingWork:
        if len(values) == FIELDS_LIMIT:
            raise _too_many_fields()
        start = scanner.position
        if key == _MESSAGES and scanner.peek() == ord("["):
            messages.clear()  # of two fields of this name the last one counts
            yield from scanner.read_objects(read_message)
        else:
            yield from scanner.skip_value()
        values[key] = msgspec.Raw(view[start : scanner.position])

    yield from scanner.skip_blanks()
    yield from scanner.read_object(read_member)
    yield from scanner.expect_end()
    return OllamaFields(values, messages)


def decode_small(name: str, text: bytes, kind: type[_T]) -> _T:
    """Return the value of a field that is short. Raises RequestError: it is long, or of another type."""
    if len(text) > MOST_SMALL_BYTES:
        raise wrong_field(name, f"it is longer than {MOST_SMALL_BYTES >> 10} KiB")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise wrong_field(name, str(error)) from error


def render_object(members: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a JSON object of names, which are plain words, and JSON texts."""
    pieces: list[bytes] = []
    for number, (name, value) in enumerate(members):
        pieces += (b'%b"%b":' % (b"," if number else b"{", name.encode()), value)
    return b"".join([*pieces, b"}"])  # one copy, for a value may be long


def _not_an_object(reason: str) -> RequestError:
    return errors.bad_request(f"the request body is not the JSON object that this path takes: {reason}")


def _too_many_fields() -> RequestError:
    return errors.bad_request(f"the request body has more than {FIELDS_LIMIT} fields")


def wrong_field(name: str, problem: str) -> RequestError:
    """400: a field that the request may not have so."""
    return errors.bad_request(f"{name}: {problem}")
