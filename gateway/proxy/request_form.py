"""The form of a request with a file, such as a sound to transcribe: the model that it names, and what an engine gets.

Engines read a doubtful form in different ways: two names of one part, an escaped name, or a line that is almost the
boundary. If one of them saw another model than the proxy, it would load other weights. So a form is read strictly, in
the one way in which clients' libraries write it, and anything else is refused. Only its framing is read, in short
pieces of work: a file in it is neither decoded nor copied.
"""

import re
from collections.abc import Generator, Mapping
from typing import Final

import msgspec

from gateway.http.headers import Headers
from gateway.proxy import errors
from gateway.proxy.errors import RequestError
from gateway.proxy.request_body import (
    FIELDS_THAT_LOAD_WEIGHTS,
    LONGEST_MODEL_BYTES,
    MODEL,
    NO_FIELDS,
    Pieces,
    RequestBody,
)
from gateway.proxy.request_schemas import SCHEMA_FIELDS

PARTS_LIMIT: Final = 100
"""The most parts of a form; the API for audio has about a dozen."""
SCHEMA_NAMES: Final = SCHEMA_FIELDS - {"response_format"}
"""Parts that would hold an answer to a schema or a grammar, which only engines with chats behind the path read. The
format of a transcription is a word."""

_PIECE_BYTES: Final = 128 << 10
"""The work between two pauses, in bytes that are searched: a fraction of a millisecond."""
_LONGEST_HEAD_BYTES: Final = 4096
_LINE_END: Final = b"\r\n"

_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED: Final = rb'"(?:[^"\\\x00-\x1f\x7f]|\\[^\x00-\x1f\x7f])*"'
_CONTENT_TYPE = re.compile(rb"multipart/form-data[ \t]*+((?:;[ \t]*+%b=[^;]*+)++)" % _TOKEN, re.IGNORECASE)
# Some libraries write a boundary without quotation marks that would need them.
_BOUNDARY = re.compile(
    rb"""(?P<quote>"?)(?P<boundary>[0-9A-Za-z'()+_,./:=?-](?:[0-9A-Za-z'()+_,./:=? -]{0,68}"""
    rb"""[0-9A-Za-z'()+_,./:=?-])?)(?P=quote)[ \t]*"""
)
_FIELD = re.compile(rb"(%b):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)" % _TOKEN)
_DISPOSITION = re.compile(
    rb"form-data((?:[ \t]*+;[ \t]*+%b=(?:%b|%b))++)[ \t]*+" % (_TOKEN, _TOKEN, _QUOTED), re.IGNORECASE
)
_PARAMETER = re.compile(rb";[ \t]*(%b)=(%b|%b)" % (_TOKEN, _TOKEN, _QUOTED))


class FormBody(RequestBody):
    """A form as the client sent it; `other_parts` are pieces of its text, without the model."""

    def __init__(
        self,
        content: bytes | bytearray,
        model: str | None,
        other_parts: Pieces,
        boundary: bytes,
        *,
        loads_weights: bool,
    ) -> None:
        super().__init__(content, model, other_parts, loads_weights=loads_weights)
        self.media_count, self.media_bytes = 1, len(content)
        self._other_parts = other_parts  # each with its boundary, and the end of its last line
        self._delimiter = b"--" + boundary

    def render_for_engine(self, model: str | None, added: Mapping[str, msgspec.Raw] = NO_FIELDS) -> Pieces:
        """Return the form for an engine, in pieces, with `model` as its only model; None: the client's name stays.

        Nothing is added to it, for engines look for those fields in JSON only.
        """
        del added
        if model is None and not self._is_changed:
            return [self.content]
        name = self.model if model is None else model
        head = b'%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n'
        first = [] if name is None else [head % (self._delimiter, name.encode())]
        return [*first, *self._other_parts, self._delimiter + b"--\r\n"]


def read_boundary(headers: Headers) -> bytes:
    """Return the boundary of a form, by the Content-Type of its request. Raises RequestError: it is no form."""
    values = headers.values(b"content-type")
    match = _CONTENT_TYPE.fullmatch(values[0].strip()) if len(values) == 1 else None
    parameters = [part.strip().partition(b"=") for part in match[1].split(b";")] if match else []
    boundaries = [value for name, _, value in parameters if name.lower() == b"boundary"]
    boundary = _BOUNDARY.fullmatch(boundaries[0]) if len(boundaries) == 1 else None
    if boundary is None:
        raise errors.bad_request(
            "this path takes multipart/form-data with a boundary of 1 to 70 letters, digits and '()+_,-./:=?"
        )
    return boundary["boundary"]


def scan_form(content: bytes | bytearray, boundary: bytes) -> Generator[None, None, FormBody]:
    """Read a form in short pieces of work, with a pause after each, and return it. Raises RequestError."""
    delimiter = b"--" + boundary
    if not content.startswith(delimiter):
        raise _not_a_form("it does not begin with its boundary")
    view = memoryview(content)  # its slices share the content's memory
    model: str | None = None
    loads_weights = False
    other_parts: Pieces = []
    other_end = 0  # of the last piece, which the next part extends if it begins there
    part_count, start = 0, 0  # `start`: of a part, at its boundary
    while not _ends_here(content, start + len(delimiter)):
        part_count += 1
        if part_count > PARTS_LIMIT:
            raise _not_a_form(f"it has more than {PARTS_LIMIT} parts")

        # 1. The head of the part, and the end of its value, which is the line of the next boundary.
        name, value_start = _read_head(content, start + len(delimiter) + len(_LINE_END))
        if content.startswith(delimiter, value_start):
            raise _not_a_form("a value begins with the boundary")
        value_end = yield from _find(content, _LINE_END + delimiter, value_start)
        end = value_end + len(_LINE_END)

        # 2. The part: the model, which the proxy writes anew, or one that stays, or one that no engine may get.
        lowered = name.casefold()
        if lowered in SCHEMA_NAMES:
            raise errors.invalid_schema(name, "a form takes no schema or grammar")
        if lowered == MODEL:
            model = _read_model(view[value_start:value_end]) if name == MODEL else model
        elif lowered in FIELDS_THAT_LOAD_WEIGHTS:
            loads_weights = True
        else:
            begin = start
            if other_parts and other_end == start:
                begin -= len(other_parts.pop())
            other_parts.append(view[begin:end])
            other_end = end
        start = end
    return FormBody(content, model, other_parts, boundary, loads_weights=loads_weights)


def _ends_here(content: bytes | bytearray, position: int) -> bool:
    """Return whether a boundary that ends at `position` is the last one; else a part follows in the next line."""
    rest = bytes(content[position : position + 5])
    if rest in {b"--", b"--\r\n"}:
        return True
    if not rest.startswith(_LINE_END):
        raise _not_a_form("the line of a boundary has more than that, or there is more after the last one")
    return False


def _read_head(content: bytes | bytearray, start: int) -> tuple[str, int]:
    """Return the name of the part whose head begins at `start`, and the begin of its value."""
    end = content.find(_LINE_END * 2, start, start + _LONGEST_HEAD_BYTES)
    if end < 0:
        raise _not_a_form(f"the head of a part has no end within {_LONGEST_HEAD_BYTES} bytes")
    lines = [_FIELD.fullmatch(line) for line in bytes(content[start:end]).split(_LINE_END)]
    dispositions = [line[2] for line in lines if line and line[1].lower() == b"content-disposition"]
    match = _DISPOSITION.fullmatch(dispositions[0]) if len(dispositions) == 1 and None not in lines else None
    # A name in another form than `name=`, such as `name*=`, is decoded by some engines and not by others.
    parameters = _PARAMETER.findall(match[1]) if match else []
    names = [(key.lower(), value) for key, value in parameters if key.lower().startswith(b"name")]
    if len(names) != 1 or names[0][0] != b"name" or b"\\" in names[0][1]:
        raise _not_a_form("a part has no Content-Disposition with one plain name")
    try:
        return names[0][1].strip(b'"').decode(), end + 2 * len(_LINE_END)
    except UnicodeDecodeError as error:
        raise _not_a_form("the name of a part is not UTF-8") from error


def _find(content: bytes | bytearray, line: bytes, start: int) -> Generator[None, None, int]:
    """Return the place of the next `line`, and search in pieces with a pause after each."""
    while True:
        found = content.find(line, start, start + _PIECE_BYTES + len(line))
        yield
        if found >= 0:
            return found
        start += _PIECE_BYTES
        if start >= len(content):
            raise _not_a_form("it ends within a part")


def _read_model(value: memoryview) -> str:
    """Return the name of the model. Raises RequestError: it is long, or no text."""
    if len(value) > LONGEST_MODEL_BYTES:
        raise errors.bad_request(f"the name of the model is longer than {LONGEST_MODEL_BYTES} bytes")
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise _not_a_form("the name of the model is not UTF-8") from error


def _not_a_form(reason: str) -> RequestError:
    return errors.bad_request(f"the request body is not the form that this path takes: {reason}")
