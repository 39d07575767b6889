"""The log of the proxy's process: a line of JSON for each event on standard error, as all commands write it.

structlog, which the others use, takes longer to import than all else that the proxy needs, and a proxy that was killed
has to serve again soon. The lines of requests are written together, once for all that end in one pass of the loop.
"""

import asyncio
import logging
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

import msgspec

Value = str | int | float | bool | None
"""A plain value, so that no line has a secret that an object's own text would leave out."""

_STANDARD_ERROR: Final = 2


def _write_standard_error(lines: bytes) -> None:
    with suppress(OSError):  # a full disk must end no process that serves
        os.write(_STANDARD_ERROR, lines)


class EventRecord(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event"):
    """An event of ordinary operation that is too frequent for a call with names."""

    level: Literal["info"]
    timestamp: str


class EventLog:
    """The events, of which those of requests may wait for the end of the loop's pass; `write` writes lines."""

    def __init__(self, write: Callable[[bytes], None] = _write_standard_error) -> None:
        self._write = write
        self._encode_lines = msgspec.json.Encoder().encode_lines
        self._records: list[EventRecord] = []
        """Records that are written at the end of this pass of the event loop."""
        self._cached_second = 0
        self._cached_date = ""
        """The text of that second, so that it is formatted once a second only."""

    def info(self, event: str, **values: Value) -> None:
        """Log an event of ordinary operation."""
        self._log("info", event, values)

    def warning(self, event: str, **values: Value) -> None:
        """Log an event that an operator may have to act on."""
        self._log("warning", event, values)

    def error(self, event: str, **values: Value) -> None:
        """Log a failure."""
        self._log("error", event, values)

    def exception(self, event: str, **values: Value) -> None:
        """Log a defect with the stack of the exception that is handled."""
        self._log("error", event, values | {"exception": traceback.format_exc()})

    def add(self, record: "EventRecord") -> None:
        """Log a record with the others of this pass of the loop; it gets the time when they are written."""
        if not self._records:
            asyncio.get_running_loop().call_soon(self._write_records)
        self._records.append(record)

    def _timestamp(self) -> str:
        """Return the current time in the form of all log lines, in UTC; only a new second is formatted anew."""
        now = time.time()
        second = int(now)
        if second != self._cached_second:
            self._cached_second = second
            self._cached_date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._cached_date}.{int((now - second) * 1e6):06}Z"

    def _log(self, level: str, event: str, values: dict[str, Value]) -> None:
        """Write one line at once, after the records that still wait."""
        self._write_records()
        line = values | {"event": event, "level": level, "timestamp": self._timestamp()}
        self._write(self._encode_lines([line]))

    def _write_records(self) -> None:
        """Write the waiting records in one call, all with the current time.

        Called by the loop after the pass in which the first of them was added, or before another line is written.
        """
        if records := self._records:
            self._records = []
            timestamp = self._timestamp()
            for record in records:
                record.timestamp = timestamp
            self._write(self._encode_lines(records))


log: Final = EventLog()
"""The log of this process."""


class _LibraryHandler(logging.Handler):
    """Writes what libraries log."""

    def emit(self, record: logging.LogRecord) -> None:
        stack = {"exception": "".join(traceback.format_exception(*record.exc_info))} if record.exc_info else {}
        log.warning("library_warning", message=record.getMessage(), logger=record.name, **stack)


def log_libraries() -> None:
    """Log the warnings of libraries, such as asyncio's, like the proxy's own events."""
    root = logging.getLogger()
    root.handlers[:] = [_LibraryHandler(logging.WARNING)]
