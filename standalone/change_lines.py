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
from typing import IO, Any, Final, Literal

from msgspec import structs

from artifacts.transfer_rate import PROGRESS_SECONDS
from kube.time import micro_time
from standalone.machine import Machine
from standalone.row_text import describe_detail
from standalone.service_rows import DOWNLOAD_PHASES, ServiceRow, ServiceRowReader, render_json
from standalone.view import describe_endpoint

LogFormat = Literal["text", "json"]

HANDED_OVER: Final = "handed over to `pomona agent`, which keeps everything running"


async def print_changes(machine: Machine, out: IO[str], log_format: LogFormat) -> None:
    """Print a line for each change until cancelled, and the last change on cancellation."""
    printer = ChangePrinter(machine, out, log_format)
    seen_changes = -1
    try:
        while True:
            with contextlib.suppress(TimeoutError):  # the progress of a download is no change
                async with asyncio.timeout(printer.find_pause_seconds(time.monotonic())):
                    seen_changes = await machine.changes.wait_past(seen_changes)
            printer.print_changes()
    finally:
        printer.print_changes()
        if machine.signals.hand_over.is_set():
            printer.print_hand_over()


class ChangePrinter:
    """Printer of a line for each change of `machine` to `out`."""

    def __init__(self, machine: Machine, out: IO[str], log_format: LogFormat) -> None:
        """Print nothing before `print_changes`."""
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

    def find_pause_seconds(self, now: float) -> float | None:
        """Return the time until a download may have another line; None: there is none."""
        downloads = [name for name, row in self._last_rows.items() if row.phase in DOWNLOAD_PHASES]
        return min((max(0.0, self._next_progress_at[name] - now) for name in downloads), default=None)

    def print_changes(self) -> None:
        """Print a line for the endpoint and for each service, if it says something new since the last one."""
        # 1. The endpoint, once it is open or cannot be opened.
        machine, now = self._machine, time.monotonic()
        endpoint_line = describe_endpoint(machine)
        if machine.exposure.router and endpoint_line != self._last_endpoint_line:
            self._last_endpoint_line = endpoint_line
            self._print("endpoint", endpoint_line, {"detail": endpoint_line})

        # 2. The services.
        for row in self._reader.read_rows(now):
            is_due = now >= self._next_progress_at.get(row.service, 0.0)
            if is_news(self._last_rows.get(row.service), row, is_due=is_due):
                self._last_rows[row.service] = row
                self._next_progress_at[row.service] = now + PROGRESS_SECONDS
                self._print_row(row)

    def _print_row(self, row: ServiceRow) -> None:
        """Print the line of a service."""
        members, detail = render_json(row), describe_detail(row)
        head = {"service": members.pop("service"), "phase": members.pop("phase"), "detail": detail}
        members.pop("message", None)  # the detail has it
        text = f"{row.service}: {row.phase}" + (f" - {detail}" if detail else "")
        self._print("service", text, {**head, **members})

    def print_hand_over(self) -> None:
        """Print that an agent has taken over."""
        self._print("handedOver", HANDED_OVER, {"detail": HANDED_OVER})

    def _print(self, event: str, text: str, members: Mapping[str, Any]) -> None:
        """Print a line: the text after the time since the start, or the event and the members as JSON."""
        line = f"[{time.monotonic() - self._started:5.1f} s] {text}"
        if self._log_format == "json":
            line = json.dumps({"time": micro_time(datetime.now(UTC)), "event": event, **members})
        print(line, file=self._out, flush=True)


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
