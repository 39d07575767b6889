"""The output of `pomona up` where it is no table: a line for each change, as text or as an object of JSON.

A line is printed once and stays, so it has what does not change by itself: a download has a line every ten seconds, and
counts of requests and the memory in use have none.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import IO, Any, Literal

from msgspec import structs

from artifacts.transfer_rate import PROGRESS_SECONDS
from crds.text import escape_controls
from kube.time import micro_time
from standalone.machine import Machine
from standalone.row_text import describe_detail
from standalone.service_rows import DOWNLOAD_PHASES, ServiceRow, ServiceRowReader, render_json
from standalone.view import HANDED_OVER, describe_endpoint

LogFormat = Literal["text", "json"]


class ChangePrinter:
    """Printer of a line for each change of `machine` to `out`."""

    def __init__(self, machine: Machine, out: IO[str], log_format: LogFormat) -> None:
        """Print nothing before `run`."""
        self._machine = machine
        self._reader = ServiceRowReader(machine)
        self._out = out
        self._log_format = log_format
        self._started = time.monotonic()
        self._last_rows: dict[str, ServiceRow] = {}
        """The row that was printed last for each service."""
        self._next_progress_at: dict[str, float] = {}
        """The time from which on a download may have another line, by service."""
        self._last_endpoint_line = ""

    async def run(self) -> None:
        """Print a line for each change until cancelled, and the last change on cancellation."""
        seen_changes = -1
        try:
            while True:
                with contextlib.suppress(TimeoutError):  # the progress of a download is no change
                    async with asyncio.timeout(self._find_pause_seconds()):
                        seen_changes = await self._machine.changes.wait_past(seen_changes)
                self._print_changes()
        finally:
            self._print_changes()
            if self._machine.signals.hand_over.is_set():
                self.print_event("handedOver", HANDED_OVER)

    def _find_pause_seconds(self) -> float | None:
        """Return the time until a download may have another line; None: there is none."""
        downloads = [name for name, row in self._last_rows.items() if row.phase in DOWNLOAD_PHASES]
        next_at = min((self._next_progress_at[name] for name in downloads), default=None)
        return None if next_at is None else max(0.0, next_at - time.monotonic())

    def _print_changes(self) -> None:
        """Print a line for the endpoint and for each service, if it says something new since the last one."""
        # 1. The endpoint, once it is open or cannot be opened.
        machine, now = self._machine, time.monotonic()
        endpoint_line = describe_endpoint(machine)
        if machine.exposure.router and endpoint_line != self._last_endpoint_line:
            self._last_endpoint_line = endpoint_line
            self.print_event("endpoint", endpoint_line, {"url": machine.exposure.url} if machine.exposure.url else {})

        # 2. The services.
        rows = {row.service: row for row in self._reader.read_rows(now)}
        self._last_rows = {name: row for name, row in self._last_rows.items() if name in rows}  # others were removed
        for name, row in rows.items():
            is_due = now >= self._next_progress_at.get(name, 0.0)
            has_news = is_news(self._last_rows.get(name), row, is_due=is_due)
            if has_news or is_due:  # one that is due and stands still is due later
                self._next_progress_at[name] = now + PROGRESS_SECONDS
            if has_news:
                self._last_rows[name] = row
                self._print_row(row)

    def _print_row(self, row: ServiceRow) -> None:
        """Print the line of a service."""
        detail = describe_detail(row)
        if self._log_format == "json":
            # The detail has the message and the note in words.
            members = render_json(structs.replace(row, message="", note=""))
            head = {"service": members.pop("service"), "phase": members.pop("phase")}
            self._print_json("service", {**head, "detail": detail, **members})
        else:
            self._print_text(f"{row.service}: {row.phase}" + (f" - {detail}" if detail else ""))

    def print_event(self, event: str, detail: str, members: Mapping[str, str] = MappingProxyType({})) -> None:
        """Print a line about the machine itself: the detail, and in JSON the members, too."""
        detail = escape_controls(detail)
        if self._log_format == "json":
            self._print_json(event, {"detail": detail, **members})
        else:
            self._print_text(detail)

    def _print_json(self, event: str, members: Mapping[str, Any]) -> None:
        """Print an object after its time and event, without characters that JSON can leave out."""
        print(
            json.dumps({"time": micro_time(datetime.now(UTC)), "event": event, **members}), file=self._out, flush=True
        )

    def _print_text(self, text: str) -> None:
        """Print a line after the time since the start."""
        print(f"[{time.monotonic() - self._started:5.1f} s] {text}", file=self._out, flush=True)


def is_news(last: ServiceRow | None, row: ServiceRow, *, is_due: bool) -> bool:
    """Decide whether a service has a line again. One that is Pending without a reason has none.

    Args:
        last: the row of its last line; None: it had none.
        row: the present one.
        is_due: True if its last line is so old that one about progress alone may follow.
    """
    if row.phase == "Pending" and not row.message:
        return False
    if last is None or _leave_out_progress(last) != _leave_out_progress(row):
        return True
    return is_due and row.phase in DOWNLOAD_PHASES and row != last


def _leave_out_progress(row: ServiceRow) -> ServiceRow:
    """Return the row without the facts that change all the time."""
    return structs.replace(row, bytes=None, total_bytes=None, bytes_per_second=None, seconds_left=None)
