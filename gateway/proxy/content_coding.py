"""Compressed request bodies: the codings that are decoded, and their decoding in short pieces of work.

A few KiB of compressed data may stand for gigabytes. So a body is decoded piece by piece: the memory of each piece is
reserved before the next one is made, and other requests run in between.
"""

import sys
import zlib
from collections.abc import Callable, Generator
from typing import Any, Final

from gateway.http.headers import Headers
from gateway.proxy import errors

PIECE_BYTES: Final = 64 << 10
"""The most that is decoded, or read, between two pauses: that takes a fraction of a millisecond."""
WINDOW_BYTES: Final = 8 << 20
"""The most of its own output that a decoder of zstd keeps to copy from, by RFC 9659; that of gzip keeps 32 KiB."""

_GZIP: Final = "gzip"
_ZSTD: Final = "zstd"
_CODINGS: Final = {"gzip": _GZIP, "x-gzip": _GZIP, "zstd": _ZSTD}


def read_coding(headers: Headers) -> str:
    """Return the coding of a request body, or "" if it has none. Raises RequestError: it is unknown, or several are."""
    stated = b",".join(headers.values(b"content-encoding")).decode(errors="surrogateescape")
    codings = [coding for part in stated.split(",") if (coding := part.strip().lower()) not in ("", "identity")]
    if not codings:
        return ""
    if len(codings) > 1 or codings[0] not in _CODINGS:
        raise errors.unsupported_encoding(stated)
    return _CODINGS[codings[0]]


def decode_body(
    content: bytes | bytearray, coding: str, limit_bytes: int, reserve: Callable[[int], None]
) -> Generator[None, None, bytearray]:
    """Decode a body in short pieces of work, with a pause after each, and return it.

    Args:
        content: the compressed body.
        coding: `gzip` or `zstd`.
        limit_bytes: the most that it may stand for.
        reserve: reserves memory, in bytes, for what is decoded and for the window of the decoder; may raise.

    Raises RequestError: the content is too large, or not of this coding, or goes on behind its end.
    """
    decoder, error_type = _make_decoder(coding)
    decoded = bytearray()
    window_left = WINDOW_BYTES if coding == _ZSTD else 0
    for start in range(0, len(content), PIECE_BYTES):
        data = content[start : start + PIECE_BYTES]
        if decoder.eof:
            raise errors.invalid_encoding(coding, "there is more after its end")
        while True:
            # 1. Decode a piece. zstd keeps data that it has not used yet, zlib returns it.
            try:
                piece = decoder.decompress(data, PIECE_BYTES)
            except error_type as error:
                raise errors.invalid_encoding(coding, str(error)) from error
            data = b"" if coding == _ZSTD else decoder.unconsumed_tail

            # 2. Count it before it is kept.
            if len(decoded) + len(piece) > limit_bytes:
                raise errors.request_too_large(limit_bytes)
            window_part = min(window_left, len(piece))
            window_left -= window_part
            reserve(len(piece) + window_part)
            decoded += piece
            yield
            if len(piece) < PIECE_BYTES or decoder.eof:  # the data is used up
                break

    if not decoder.eof:
        raise errors.invalid_encoding(coding, "it ends early")
    if decoder.unused_data:
        raise errors.invalid_encoding(coding, "there is more after its end")
    return decoded


def _make_decoder(coding: str) -> tuple[Any, type[Exception]]:
    """Return a decoder, and the type of its errors. Both decoders have `decompress`, `eof` and `unused_data`."""
    if coding == _GZIP:
        return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
    if sys.version_info >= (3, 14):
        from compression import zstd  # noqa: PLC0415 - only clients that compress so need it
    else:
        from backports import zstd  # noqa: PLC0415
    window: dict[int, int] = {zstd.DecompressionParameter.window_log_max: WINDOW_BYTES.bit_length() - 1}
    return zstd.ZstdDecompressor(options=window), zstd.ZstdError
