"""SPDY/3.1 as far as `kubectl port-forward` speaks it: streams with headers over one connection, without flow control.

kubectl tunnels it through a WebSocket to the API server, which speaks it to the kubelet.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator
from typing import NamedTuple

CONTROL, VERSION = 1 << 31, 3
DATA, OPEN, REPLY, RESET, PING = 0, 1, 2, 3, 6
"""Kinds of frames; those with data have no number in the protocol."""
LAST = 1
"""Flag of the last frame of a stream in its direction."""
_WORDS = (  # noqa: SIM905 - a list of literals would take 60 lines
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie "
    "keep-alive origin"
).split()
_TEXT = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 "
    "Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 "
    "Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept "
    "Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,"
    "application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdch"
    "charset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _with_length(text: str) -> bytes:
    return len(text).to_bytes(4, "big") + text.encode()


DICTIONARY = b"".join(_with_length(word.replace("_", " ")) for word in _WORDS) + _TEXT.encode()
"""The bytes that compression of headers begins with, which the protocol defines."""


class Frame(NamedTuple):
    """A frame that has come.

    Attributes:
        kind: one of those above.
        stream: number of the stream; 0 in frames of no stream.
        flags: LAST or 0.
        payload: the rest.
    """

    kind: int
    stream: int
    flags: int
    payload: bytes


class Connection:
    """One end of a connection, which answers frames that need no decision."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # The headers of all streams of one direction are one compressed text.
        self._compressor = zlib.compressobj(zdict=DICTIONARY)
        self._decompressor = zlib.decompressobj(zdict=DICTIONARY)

    async def read(self) -> AsyncIterator[Frame]:
        """Yield what concerns a stream, until the other end closes the connection."""
        try:
            while True:
                first, second = struct.unpack(">II", await self._reader.readexactly(8))
                flags, payload = second >> 24, await self._reader.readexactly(second & 0xFFFFFF)
                if not first & CONTROL:
                    yield Frame(DATA, first, flags, payload)
                elif (kind := first & 0xFFFF) == PING:
                    self._send_control(PING, payload)
                elif kind in {OPEN, RESET}:
                    yield Frame(kind, int.from_bytes(payload[:4], "big"), flags, payload[4:])
        except (asyncio.IncompleteReadError, OSError):
            return

    def accept(self, opened: Frame) -> dict[str, str]:
        """Accept a stream that the other end opens, and return its headers."""
        none = self._compressor.compress(bytes(4)) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        self._send_control(REPLY, opened.stream.to_bytes(4, "big") + none)
        # Before the headers are the stream that this one belongs to, and its priority.
        text, texts, position = self._decompressor.decompress(opened.payload[6:]), [], 4
        while position < len(text):
            end = position + 4 + int.from_bytes(text[position : position + 4], "big")
            texts.append(text[position + 4 : end].decode())
            position = end
        return dict(zip(texts[::2], texts[1::2], strict=True))

    async def send(self, stream: int, data: bytes = b"", *, last: bool = False) -> None:
        """Send data on a stream, and its end if it is the last."""
        self._writer.write(struct.pack(">II", stream, (LAST if last else 0) << 24 | len(data)) + data)
        await self._writer.drain()

    def _send_control(self, kind: int, payload: bytes) -> None:
        self._writer.write(struct.pack(">II", CONTROL | VERSION << 16 | kind, len(payload)) + payload)
