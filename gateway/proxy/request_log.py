"""The log line of each request. Lines are written together, once for all requests that end in one pass of the loop.

They do not go by way of structlog, which takes several times as long for a line as the rest of what is recorded.
"""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

import msgspec

_STANDARD_ERROR: Final = 2

_encode_lines = msgspec.json.Encoder().encode_lines


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event", tag="request_finished"):
    """The values of the line; it has nothing of the request's content."""

    service: str
    route: str
    status: int
    seconds: float
    queued_seconds: float
    first_token_seconds: float | None
    tokens_in: int | None
    tokens_out: int | None
    request_id: str
    timestamp: str
    level: Literal["info"]
    error: str = ""


def _write_standard_error(lines: bytes) -> None:
    with suppress(OSError):  # a full disk must end no process that serves
        os.write(_STANDARD_ERROR, lines)


class RequestLog:
    """The lines that are not written yet, and `write`, which writes them."""

    def __init__(self, write: Callable[[bytes], None] = _write_standard_error) -> None:
        self._write = write
        self._records: list[RequestRecord] = []
        self._second = 0
        self._date = ""

    def add(self, record: RequestRecord) -> None:
        """Log a request that has ended."""
        if not self._records:
            asyncio.get_running_loop().call_soon(self._flush)
        self._records.append(record)

    def timestamp(self) -> str:
        """Return the current time in the form of all log lines."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._date}.{int((now - second) * 1e6):06}Z"

    def _flush(self) -> None:
        records, self._records = self._records, []
        self._write(_encode_lines(records))
