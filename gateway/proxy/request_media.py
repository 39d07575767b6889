"""Media in a request: images, sounds and files, which must be in the request itself.

An engine fetches a URL with its host's access to networks: llama-server with a projector loads `image_url` from any
address that the host reaches. So only `data:` URLs pass. A URL in a text, in the arguments of a tool or in a schema is
none of these: only the places count where the chat, responses, messages and rerank APIs have media.
"""

import re
from contextlib import suppress
from typing import Final

import msgspec

from gateway.proxy import errors
from gateway.proxy.json_scanner import JsonScanner, PausingWork

_LEVELS_LIMIT: Final = 16
"""The most levels of contents within contents; the result of a tool within a message has two."""
FIELDS_WITH_PARTS: Final = frozenset({"messages", "input", "system", "prompt", "query", "documents"})
_INNER_PARTS: Final = frozenset({"content", "output"})
_SOURCE: Final = "source"
"""Media of the messages API: an object with `url`, or with `data`, which may be a text with URLs."""
_KINDS: Final = ("image", "audio", "video", "file")
_MEDIA: Final = frozenset({_SOURCE, *(name for kind in _KINDS for name in (kind, f"{kind}_url", f"input_{kind}"))})
_MARKS: Final = (b'_url"', b'source"', b'image"', b'audio"', b'video"', b'file"')
"""Bytes of which at least one is in every request with media, if none of their letters is escaped."""
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
_ANY: Final = msgspec.Raw()
_PLAIN_OBJECTS: Final = 4096
"""The objects that are decoded at once, in less than a millisecond."""
_UNCOUNTED_BYTES: Final = 40 << 10
"""Objects are counted in longer texts only: so much may have 14,000, which take two milliseconds, and to count those of
an agent takes half as long as to decode them."""

_START_BYTES: Final = 256
_ESCAPE = re.compile(rb"\\(?:u00(?P<code>[0-7][0-9a-fA-F])|(?P<letter>.))", re.DOTALL)
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{64,}=*\\?")  # the last escape may be cut
_OTHER_URL = re.compile(rb"[\x00-\x20]*(?!data:)[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class _PlainPart(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A message, or a part or an item of one, that has only keys which are known to have no media.

    Only `content` and `output` may have parts again; what the others have is looked into by no engine.
    """

    content: "str | list[_PlainPart] | None" = None
    output: "str | list[_PlainPart] | None" = None
    role: msgspec.Raw = _ANY
    type: msgspec.Raw = _ANY
    text: msgspec.Raw = _ANY
    id: msgspec.Raw = _ANY
    name: msgspec.Raw = _ANY
    status: msgspec.Raw = _ANY
    phase: msgspec.Raw = _ANY
    cache_control: msgspec.Raw = _ANY
    tool_calls: msgspec.Raw = _ANY
    tool_call_id: msgspec.Raw = _ANY
    tool_use_id: msgspec.Raw = _ANY
    call_id: msgspec.Raw = _ANY
    arguments: msgspec.Raw = _ANY
    input: msgspec.Raw = _ANY
    is_error: msgspec.Raw = _ANY
    thinking: msgspec.Raw = _ANY
    signature: msgspec.Raw = _ANY
    data: msgspec.Raw = _ANY
    reasoning: msgspec.Raw = _ANY
    reasoning_content: msgspec.Raw = _ANY
    summary: msgspec.Raw = _ANY
    encrypted_content: msgspec.Raw = _ANY
    refusal: msgspec.Raw = _ANY
    annotations: msgspec.Raw = _ANY
    citations: msgspec.Raw = _ANY
    logprobs: msgspec.Raw = _ANY


_decode_plain = msgspec.json.Decoder(str | list[str | _PlainPart] | None).decode


def may_have_media(value: msgspec.Raw) -> bool:
    """Decide quickly whether the value of one of `FIELDS_WITH_PARTS` may have media.

    False is certain, True means that the request has to be scanned. Most values are seen to be plain when they are
    decoded, in a tenth of the time of a search. A key of media could be written with escaped letters, such as an `i` as
    u0069, so these count as well.
    """
    text = bytes(value)
    if len(text) <= _UNCOUNTED_BYTES or text.count(b"{") <= _PLAIN_OBJECTS:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            _decode_plain(text)
            return False
    # One of the marks is in every request with media, unless it is escaped.
    text = text.lower()
    return any(mark in text for mark in _MARKS) or (rb"\u00" in text and _ESCAPED_LETTER.search(text) is not None)


class MediaReader:
    """Reads the fields of a request, and raises RequestError where media would have to be fetched."""

    def __init__(self, scanner: JsonScanner) -> None:
        self.count = 0
        """The media in the request so far: those at `data:` URLs, and texts in base64."""
        self.size_bytes = 0
        """The size of these texts."""
        self._scanner = scanner
        self._levels = 0

    def read_field(self, name: str) -> PausingWork:
        """Read the value of the request's field `name`, in lower case; only some fields can have media.

        A part is an object of a message's content: a text, an image, a sound, a file or a result of a tool.
        """
        if name in FIELDS_WITH_PARTS:
            yield from self._read_parts()
        else:
            yield from self._scanner.skip_value()

    def _read_parts(self) -> PausingWork:
        """Read a value that may be a message or a part of one (an object), or an array of these; skip any other.

        Raises RequestError if such values are within each other on too many levels.
        """
        self._levels += 1
        if self._levels > _LEVELS_LIMIT:
            raise errors.bad_request(f"contents are within each other on more than {_LEVELS_LIMIT} levels")
        byte = self._scanner.peek()
        if byte == ord("{"):
            yield from self._read_part()
        elif byte == ord("["):
            yield from self._scanner.read_objects(self._read_part)
        else:
            yield from self._scanner.skip_value()
        self._levels -= 1

    def _read_part(self) -> PausingWork:
        """Read a message or a part of one."""
        yield from self._scanner.read_object(self._read_member)

    def _read_member(self, key: str, start: int) -> PausingWork:
        """Read a member of a message or of a part: look into inner parts and media, and skip all else.

        A medium, such as `image_url`, is a text, or an object whose members are its texts.
        """
        del start
        name = key.lower()
        if name in _INNER_PARTS:
            yield from self._read_parts()
        elif name not in _MEDIA:
            yield from self._scanner.skip_value()
        elif self._scanner.peek() == ord("{"):  # a medium that is an object, such as `{"url": "data:..."}`
            yield from self._scanner.read_object(lambda inner, _: self._read_media(name, inner.lower()))
        else:  # a medium that is a text
            yield from self._read_media(name, name)

    def _read_media(self, medium: str, name: str) -> PausingWork:
        """Read a text of a medium, and refuse it if it is a URL that the engine would fetch; skip any other value.

        A text whose name ends with `url` or `uri` must be a `data:` URL. Any other one must not begin with another
        URL, except in a `source`, the medium of the messages API: its `data` may be a plain text about a URL.

        Args:
            medium: the name of the medium, such as `image_url`.
            name: the name of its member, such as `url`; that of the medium if it is a text itself.
        """
        # 1. Skip the value; only a text is looked into.
        scanner = self._scanner
        start = scanner.position + 1  # behind the quotation mark
        if scanner.peek() != ord('"'):
            yield from scanner.skip_value()
            return
        yield from scanner.skip_string()

        # 2. Take the first bytes of the text, with escaped letters decoded: enough to see the scheme of a URL.
        begin_end = min(start + _START_BYTES, scanner.position - 1)  # before the closing quotation mark
        begin = _ESCAPE.sub(_unescape, bytes(scanner.text[start:begin_end]))

        # 3. Decide by the name and the beginning.
        if name.endswith(("url", "uri")):
            is_remote = not begin.lower().startswith(b"data:")
        else:
            is_remote = medium != _SOURCE and _OTHER_URL.match(begin) is not None
        if is_remote:
            raise errors.remote_media(medium)
        if begin[:5].lower() == b"data:" or _BASE64.fullmatch(begin):
            self.count += 1
            self.size_bytes += scanner.position - 1 - start


def _unescape(match: re.Match[bytes]) -> bytes:
    return bytes((int(match["code"], 16),)) if match["code"] else match["letter"]
