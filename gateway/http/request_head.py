"""The head of a request, parsed strictly: whatever two servers could read in two ways is refused.

llhttp, which httptools wraps, refuses most of it: both Content-Length and Transfer-Encoding, a repeated or odd
Content-Length, folded lines, bare line ends, NUL and blanks around names. Refused here is what it lets pass: other
protocols and versions, doubled blanks, transfer codings beside `chunked`, and a missing or repeated Host.
"""

import functools
import re
from typing import Final
from urllib.parse import unquote

import httptools

from gateway.http.headers import Field, Headers
from gateway.http.limits import HEAD_BYTES, HEADER_COUNT

_REQUEST_LINE = re.compile(rb"(?P<method>[A-Z-]{1,20}) [\x21-\x7e]+ HTTP/1\.(?P<minor_version>[01])\r\n")
_HOST = re.compile(rb"[\w.~!$&'()*+;=%:\[\]-]*", re.ASCII)
_ABSOLUTE_FORM = re.compile(rb"https?://[^/?]*", re.IGNORECASE)
_FRAMING_BYTES_PER_CHUNK: Final = 32
_LONGEST_CACHED_BYTES: Final = 2 << 10
_LENGTH_NAME_BYTES: Final = len(b"\r\nContent-Length: ")
_MOST_DIGITS: Final = 9


class InvalidRequestError(Exception):
    """The bytes are no request that is served; the message names the rule and quotes nothing of them."""


class RequestHead:
    """The method, target and header fields of a request; equal ones of several requests may be one object.

    So the length of the body is not in here, and the field Content-Length of such a head is not to be read.
    """

    def __init__(self, method: str, path: str, query: str, headers: Headers, *, is_http_1_0: bool) -> None:
        self.method = method
        self.path = path
        """Decoded, without the query."""
        self.query = query
        self.headers = headers
        self.is_http_1_0 = is_http_1_0
        self.keep_alive = not is_http_1_0 and b"close" not in headers.connection_options()

    @property
    def expects_continue(self) -> bool:
        """True if the client waits for `100 Continue` before it sends the body."""
        return not self.is_http_1_0 and (self.headers.value(b"expect") or b"").lower() == b"100-continue"


def read_cached_head(head: bytes) -> tuple[RequestHead, int] | None:
    """Parse a head with a Content-Length, or take it from a cache; return it with the length.

    A client sends the same head again and again, and only the digits of the Content-Length change. So the head is
    cached by its bytes before and after these digits.

    Return None, for the caller to parse it without a cache, if there is no Content-Length in its usual spelling with at
    most 9 digits, or if the head is too long for the cache. Raises InvalidRequestError.
    """
    # 1. Find the field, in one of its two usual spellings.
    field_start = head.find(b"\r\nContent-Length: ")
    if field_start < 0:
        field_start = head.find(b"\r\ncontent-length: ")
    if field_start < 0 or len(head) > _LONGEST_CACHED_BYTES:
        return None

    # 2. Find its digits, which reach to the end of the line.
    digits_start = field_start + _LENGTH_NAME_BYTES
    digits_end = head.find(b"\r", digits_start)
    digits = head[digits_start:digits_end]
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        return None

    # 3. The function has the cache: the two halves of the head are its key.
    return _parse_without_length(head[:digits_start], head[digits_end:]), int(digits)


@functools.lru_cache(maxsize=256)
def _parse_without_length(before_length: bytes, after_length: bytes) -> RequestHead:
    """Parse the head that these bytes make with a Content-Length of 0 between them. Raises InvalidRequestError."""
    head, _ = RequestParser().parse_head(b"%b0%b" % (before_length, after_length))
    return head


class RequestParser:
    """Parse one request: first its whole head, then its body if that is chunked."""

    is_body_complete = False
    """The chunked body has ended."""
    has_excess = False
    """Data came in one piece with the end of the chunked body; it is not parsed."""
    _head_ended = False
    """The head is parsed: what httptools reports from now on is of the chunked body."""
    _framing_bytes_left = HEAD_BYTES
    """The bytes beside its content that the chunked body may still have; each chunk adds some."""
    _url = b""
    _parser: httptools.HttpRequestParser | None = None
    """Parses the chunked body; None: there is none, or it has ended."""

    def __init__(self) -> None:
        self._fields: list[Field] = []
        self._body_pieces: list[bytes] = []

    def parse_head(self, head: bytes) -> tuple[RequestHead, int | None]:
        """Parse a head, which ends with an empty line; return it with the size of its body, None if that is chunked.

        httptools calls the methods `on_...` below, which collect the target in `_url` and the header fields in
        `_fields`. Raises InvalidRequestError.
        """
        line = _REQUEST_LINE.match(head)
        if line is None:
            raise InvalidRequestError("its first line is no request line of HTTP/1.0 or HTTP/1.1")

        # 1. Parse. An upgrade is raised when the head of a request that offers another protocol has been parsed. None
        #    is made: the request is answered as if it did not offer one.
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            if any(name.lower() == b"transfer-encoding" for name, _ in self._fields):
                raise InvalidRequestError("it offers an upgrade and has a chunked body") from None
        except httptools.HttpParserError as error:
            raise InvalidRequestError(f"llhttp: {error}") from None
        self._head_ended = True  # fields that come from now on are trailers of a chunked body

        # 2. Check what llhttp lets pass.
        headers = Headers(self._fields)
        is_http_1_0 = line["minor_version"] == b"0"
        _check_fields(headers, is_http_1_0=is_http_1_0)

        # 3. Find the size of the body. Only a chunked one needs the parser, until its end: parser and this object refer
        #    to each other, so that both would have to wait for the garbage collector.
        length: int | None = None
        if headers.value(b"transfer-encoding") is None:
            length = int(headers.value(b"content-length") or 0)
        else:
            self._parser = parser

        method = line["method"].decode()
        path, query = _parse_target(method, self._url)
        return RequestHead(method, path, query, headers, is_http_1_0=is_http_1_0), length

    def parse_chunks(self, data: bytes) -> bytes:
        """Return the content of the chunks in `data`, without their framing (sizes, line ends and trailers).

        At the end of the body `is_body_complete` is set. Data behind it is dropped, and `has_excess` is set. Raises
        InvalidRequestError, also if the framing is too long beside the content.
        """
        if self._parser is None:
            raise InvalidRequestError("its chunked body has ended")

        # 1. Parse: the parser calls `on_body` and `on_message_complete` below, which set `_body_pieces` and
        #    `is_body_complete`.
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.is_body_complete:
                raise InvalidRequestError(f"llhttp: {error}") from None
            self.has_excess = True  # the parser did not take the data behind the end of the body for a request
        content = b"".join(self._body_pieces)
        self._body_pieces.clear()

        # 2. Bound the framing by a budget: HEAD_BYTES at the beginning, and `on_chunk_header` adds some for each chunk.
        self._framing_bytes_left -= len(data) - len(content)
        if self._framing_bytes_left < 0:
            raise InvalidRequestError("the framing or the trailers of its chunked body are too long")

        if self.is_body_complete:
            self._parser = None
        return content

    # Called by httptools.

    def on_message_begin(self) -> None:
        """Note data behind the end of the body, which the parser takes for another request."""
        self.has_excess = self.is_body_complete

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        if not self.is_body_complete:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header field; a trailer is dropped, because no engine needs one."""
        if not self._head_ended:
            self._fields.append((name, value.rstrip(b" \t")))

    def on_chunk_header(self) -> None:
        """Grant one more chunk its framing."""
        self._framing_bytes_left += _FRAMING_BYTES_PER_CHUNK

    def on_body(self, piece: bytes) -> None:
        """Take a piece of the body."""
        if not self.is_body_complete:
            self._body_pieces.append(piece)

    def on_message_complete(self) -> None:
        """Note the end of a chunked body. At the end of a head without a body this is called, too: nothing is noted."""
        if self._head_ended:
            self.is_body_complete = True


def _check_fields(headers: Headers, *, is_http_1_0: bool) -> None:
    """Refuse too many fields, other transfer codings than `chunked`, and a missing or repeated Host."""
    if len(headers.fields) > HEADER_COUNT:
        raise InvalidRequestError(f"it has more than {HEADER_COUNT} header fields")
    codings = headers.values(b"transfer-encoding")
    if codings and (is_http_1_0 or [coding.strip().lower() for coding in codings] != [b"chunked"]):
        raise InvalidRequestError("its Transfer-Encoding is not `chunked` alone, in HTTP/1.1")
    hosts = headers.values(b"host")
    has_valid_host = _HOST.fullmatch(hosts[0]) if hosts else is_http_1_0  # HTTP/1.0 may lack it
    if len(hosts) > 1 or not has_valid_host:
        raise InvalidRequestError("it does not have exactly one valid Host")


@functools.lru_cache(maxsize=64)
def _parse_target(method: str, target: bytes) -> tuple[str, str]:
    """Return the path and the query of a target: a path with its query, or a whole http URL as proxies get it.

    OPTIONS may have `*` instead. Raises InvalidRequestError for any other target.
    """
    if not target.startswith(b"/"):
        if method == "OPTIONS" and target == b"*":
            return "*", ""

        # Take scheme and host off a URL.
        authority = _ABSOLUTE_FORM.match(target)
        if authority is None or method == "CONNECT":
            raise InvalidRequestError("its target is neither a path nor an http URL")
        target = target[authority.end() :] or b"/"

    if b"#" in target:
        raise InvalidRequestError("its target has a fragment")
    path, _, query = target.decode().partition("?")
    return unquote(path, errors="replace") if "%" in path else path, query
