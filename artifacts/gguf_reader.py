"""Reads the header of a GGUF file in growing ranges, from a server or from this disk: only as much as it takes."""

import asyncio
from pathlib import Path
from typing import Final

from artifacts.errors import ArtifactError
from artifacts.formats.gguf import MAX_HEADER_BYTES, GGUFHeader, HeaderTruncated, parse
from artifacts.repositories.repository import RangeRefused, ReadableFile, SourceResponse

_FIRST_BYTES: Final = 256 << 10
_GROWTH: Final = 4


async def read_header(name: str, opened: ReadableFile) -> tuple[GGUFHeader, SourceResponse]:
    """Return the header of a file and the response that completed it, from growing ranges of the file.

    Reading stops at the end of the header even if the server ignores ranges.

    Raises:
        ArtifactError: with a reason and whether a retry may help; `name` is the file in its message.
    """
    try:
        return await _read_growing(name, opened)
    except RangeRefused:
        raise ArtifactError("HeaderInvalid", "the file is empty or was cut while it was read") from None


def read_stored_header(path: Path) -> GGUFHeader:
    """Read the header of a file on this disk from longer and longer beginnings. Raises ArtifactError and OSError."""
    size, wanted_bytes = path.stat().st_size, _FIRST_BYTES
    with path.open("rb") as file:
        # The last attempts read more than the longest accepted header, and `parse` refuses a longer one. So the loop
        # ends without a result only if the file became shorter meanwhile.
        while wanted_bytes <= MAX_HEADER_BYTES * _GROWTH:
            file.seek(0)
            try:
                return parse(file.read(wanted_bytes), size)
            except HeaderTruncated:
                # The header is longer: read a beginning that is _GROWTH times as long.
                wanted_bytes *= _GROWTH
    raise ArtifactError("HeaderInvalid", "the file was cut while it was read")


async def _read_growing(name: str, opened: ReadableFile) -> tuple[GGUFHeader, SourceResponse]:
    """Request range after range until their bytes contain the header; return it and the response that completed it.

    Each request continues the bytes in `prefix`, and reaches up to `wanted_bytes`, which grows.

    Raises ArtifactError and RangeRefused.
    """
    prefix = bytearray()
    wanted_bytes = _FIRST_BYTES
    validator = ""
    while True:
        async with opened.read(len(prefix), wanted_bytes - 1, validator) as response:
            if response.first == 0:
                prefix.clear()  # the server ignores ranges, or the file changed: all of it comes again
            elif response.validator != validator:
                problem = "changed while its header was read"
                raise ArtifactError("SourceChanged", f"{name}: {problem}", retryable=True)

            # The header is complete, or None as long as bytes of it are missing.
            header = await _parse_growing(response, prefix, wanted_bytes)
            if header:
                return header, response

        # Without progress the loop would not end.
        received_nothing = len(prefix) == response.first
        if received_nothing:
            raise ArtifactError("SourceRefused", f"{name}: the server sends an empty range")

        # The next range must be of the same version of the file.
        validator = response.validator
        wanted_bytes = max(wanted_bytes, len(prefix)) * _GROWTH


async def _parse_growing(response: SourceResponse, prefix: bytearray, wanted_bytes: int) -> GGUFHeader | None:
    """Append the response to `prefix` until that contains the header; return None if the response ends before.

    A server that ignores ranges sends the whole file, so parsing is tried when `prefix` has `wanted_bytes`, and then
    each time it has grown by `_GROWTH`.
    """
    parsed_bytes = -1  # length of `prefix` at the last attempt to parse it
    async for block in response.blocks:
        prefix += block
        if len(prefix) >= wanted_bytes:
            header = await _try_parse(prefix, response.size_bytes)
            if header:
                return header
            parsed_bytes = len(prefix)
            wanted_bytes = parsed_bytes * _GROWTH
    # The response has ended: try once more if bytes have come since the last attempt.
    return await _try_parse(prefix, response.size_bytes) if len(prefix) > parsed_bytes else None


async def _try_parse(prefix: bytearray, size_bytes: int) -> GGUFHeader | None:
    """Return the header; None if `prefix` does not have all of it."""
    try:
        return await asyncio.to_thread(parse, prefix, size_bytes)
    except HeaderTruncated:
        return None
