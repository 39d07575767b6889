"""Media in a request: images, sounds and files, which must be in the request itself.

An engine fetches a URL with its host's access to networks: llama-server with a projector loads `image_url` from any
address that the host reaches. So only `data:` URLs pass. A URL in a text, in the arguments of a tool or in a schema is
none of these: only the places count where the chat, responses, messages and rerank APIs have media.
"""

import re
from typing import Final

from gateway.proxy import errors
from gateway.proxy.json_scanner import JsonScanner, Pauses

_LEVELS_LIMIT: Final = 16
"""The most levels of contents within contents; the result of a tool within a message has two."""
_FIELDS_WITH_PARTS: Final = frozenset({"messages", "input", "system", "prompt", "query", "documents"})
_INNER_PARTS: Final = frozenset({"content", "output"})
_SOURCE: Final = "source"
"""Media of the messages API: an object with `url`, or with `data`, which may be a text with URLs."""
_KINDS: Final = ("image", "audio", "video", "file")
_MEDIA: Final = frozenset({_SOURCE, *(name for kind in _KINDS for name in (kind, f"{kind}_url", f"input_{kind}"))})
_MARKS: Final = (b'_url"', b'source"', b'image"', b'audio"', b'video"', b'file"')
"""Bytes of which at least one is in every request with media, if none of their letters is escaped."""
_ESCAPED_LETTER = re.compile(rb"\\u00[5-7]")

_START_BYTES: Final = 256
_ESCAPE = re.compile(rb"\\(?:u00(?P<code>[0-7][0-9a-fA-F])|(?P<letter>.))", re.DOTALL)
_OTHER_URL = re.compile(rb"[\x00-\x20]*(?!data:)[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def may_have_media(content: bytes | bytearray) -> bool:
    """Decide quickly whether a request may have media."""
    find = content.find
    for mark in _MARKS:
        if find(mark) >= 0:
            return True
    return find(rb"\u00") >= 0 and _ESCAPED_LETTER.search(content) is not None


class MediaReader:
    """Reads the fields of a request, and raises RequestError where media would have to be fetched."""

    def __init__(self, scanner: JsonScanner) -> None:
        self._scanner = scanner
        self._levels = 0

    def read_field(self, name: str) -> Pauses:
        """Read the value of the request's field `name`, in lower case."""
        if name in _FIELDS_WITH_PARTS:
            yield from self._read_parts()
        else:
            yield from self._scanner.skip_value()

    def _read_parts(self) -> Pauses:
        """Read a value that may be a part, or an array of parts."""
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

    def _read_part(self) -> Pauses:
        """Read a message or a part of one."""
        yield from self._scanner.read_object(self._read_member)

    def _read_member(self, key: str, start: int) -> Pauses:
        """Read a member of a message or of a part: inner parts and media are looked into, all else is skipped."""
        del start
        name = key.lower()
        if name in _INNER_PARTS:
            yield from self._read_parts()
        elif name not in _MEDIA:
            yield from self._scanner.skip_value()
        elif self._scanner.peek() == ord("{"):
            yield from self._scanner.read_object(lambda inner, _: self._read_media(name, inner.lower()))
        else:
            yield from self._read_media(name, name)

    def _read_media(self, medium: str, name: str) -> Pauses:
        """Read the value of the member `name` of a medium, or of the medium itself; refuse a URL that is not `data:`.

        Only the `data` of a `source` may be a text that begins with a URL.
        """
        scanner = self._scanner
        start = scanner.at + 1
        if scanner.peek() != ord('"'):
            yield from scanner.skip_value()
            return
        yield from scanner.skip_string()
        begin_end = min(start + _START_BYTES, scanner.at - 1)
        begin = _ESCAPE.sub(_unescape, bytes(scanner.text[start:begin_end]))
        if name.endswith(("url", "uri")):
            is_remote = not begin.lower().startswith(b"data:")
        else:
            is_remote = medium != _SOURCE and _OTHER_URL.match(begin) is not None
        if is_remote:
            raise errors.remote_media(medium)


def _unescape(match: re.Match[bytes]) -> bytes:
    return bytes((int(match["code"], 16),)) if match["code"] else match["letter"]
