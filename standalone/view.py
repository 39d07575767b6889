"""The output of `pomona up`: a live table on a terminal, and one line for each change elsewhere.

Pure functions compute its content from the machine, the proxy's counts and the measured memory.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from crds.metalprocess import FetchProgress, MetalProcessStatus
from crds.size import size_text
from devices.footprint import footprint_bytes
from gateway.proxy.config import ProxyState, ServiceStats
from metal_agent.lifecycle import LOG_HINT
from standalone.absent_engines import Sleep, find_sleep
from standalone.desired import Decision
from standalone.machine import Machine, UserSignals

REFRESH_SECONDS: Final = 0.5
"""Interval between two readings of the proxy's counts, on a terminal only."""
PROGRESS_SECONDS: Final = 10.0
"""Interval between two lines of progress of the same service."""
_STYLES: Final = {
    "Ready": "green",
    "Failed": "red",
    "Rejected": "red",
    **dict.fromkeys(("Stopped", "Suspended", "Idle"), "dim"),
}
# The phases of a replica, the worst last.
_PHASES: Final = ("Ready", "Stopped", "Stopping", "Starting", "Fetching", "Pending", "Failed", "Rejected")


@dataclass(frozen=True, slots=True)
class Row:
    """The row of one service."""

    service: str
    phase: str
    detail: str = ""
    """Progress, or the problem."""
    memory: str = ""
    tokens_per_second: str = ""
    requests: str = ""


def build_row(
    name: str,
    decision: Decision,
    replicas: Iterable[tuple[MetalProcessStatus, int | None, int | None]],
    stats: ServiceStats | None,
    tokens_per_second: float | None,
    *,
    answers: bool = True,
    sleep: Sleep | None = None,
) -> Row:
    """Return the row of one service.

    Args:
        name: the service.
        decision: the decision for it, whose problem is shown while it has no replica.
        replicas: of each its status, the bytes that are reserved for it, and the bytes that it uses; None: not known.
        stats: the proxy's counts, if it has the service.
        tokens_per_second: rate since the last reading; None if it is not known.
        answers: True if the endpoint forwards to the service.
        sleep: the state of its model while it is loaded on demand, and not loaded.
    """
    # 1. Without a replica: no process was decided yet, or none can be.
    # _PHASES: the phases of a replica, the worst last
    worst_last = sorted(replicas, key=lambda replica: _PHASES.index(replica[0].phase))
    if not worst_last:
        if sleep is not None:
            requests = _describe_requests(stats) if stats else ""
            return Row(service=name, phase=sleep.phase, detail=_describe_sleep(sleep), requests=requests)
        if decision.problem is None:
            return Row(service=name, phase="Pending")
        return Row(service=name, phase=decision.problem.phase, detail=decision.problem.message)

    # 2. The detail is that of the worst replica, after the number of those that are ready.
    worst, reserved_bytes, used_bytes = worst_last[-1]
    ready = sum(status.phase == "Ready" for status, _, _ in worst_last)
    measured = [size for _, _, size in worst_last if size]
    detail = _describe_progress(worst, reserved_bytes, used_bytes)
    if len(worst_last) > 1:
        detail = f"{ready} of {len(worst_last)} replicas are ready" + (f"; {detail}" if detail else "")

    # 3. The phase: all replicas are ready, or some; if none is, it is that of the worst.
    phase = "Ready" if ready == len(worst_last) else "Degraded"
    if ready == 0:
        phase = worst.phase
    if ready and not answers:  # the proxy does not know the loaded engine yet
        phase, detail = "Starting", "loaded; waiting for the endpoint"
    notes = [detail, decision.note if phase == "Ready" else ""]
    if decision.problem is not None:  # of an edit: the replicas are those from before
        notes.append(f"the last edit is not served: {decision.problem.message}")

    return Row(
        service=name,
        phase=phase,
        detail="; ".join(filter(None, notes)),
        memory=size_text(sum(measured)) if measured else "",
        tokens_per_second="" if tokens_per_second is None else f"{tokens_per_second:,.0f}",
        requests=_describe_requests(stats) if stats else "",
    )


def _describe_sleep(sleep: Sleep) -> str:
    """Return the progress of the download, or the problem, of a model that is not loaded."""
    return _describe_fetch(sleep.progress) if sleep.progress else sleep.problem


def _describe_fetch(progress: FetchProgress) -> str:
    """Return how much of the weights has come."""
    fetched_bytes, total = progress.bytes, progress.total_bytes
    share = f" of {size_text(total)}, {100 * fetched_bytes // total} %" if total else ""
    return f"{size_text(fetched_bytes)}{share}"


def _describe_progress(status: MetalProcessStatus, reserved: int | None, used: int | None) -> str:
    """Return the progress or the problem of a process."""
    if status.phase == "Fetching" and status.progress:
        return _describe_fetch(status.progress)
    if status.phase == "Starting" and not status.message:
        return f"loading, {size_text(used)} of about {size_text(reserved)}" if used and reserved else "loading"
    return status.message.replace(LOG_HINT, "")


def _describe_requests(stats: ServiceStats) -> str:
    """Return the number of requests, and how many run, wait and have failed."""
    waiting = f", {stats.queued} waiting" if stats.queued else ""
    failed = f", {stats.errors} failed" if stats.errors else ""
    return f"{stats.requests} ({stats.in_flight} running{waiting}{failed})"


class RowBuilder:
    """Builder of the rows of a machine; it keeps the last counts to compute rates."""

    def __init__(self, machine: Machine) -> None:
        """Begin without rates, which need two readings."""
        self._machine = machine
        # Time and tokens of the last reading, by service.
        self._last_counts: Mapping[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}  # tokens per second, by service

    async def build_rows(self, state: ProxyState | None, now: float) -> list[Row]:
        """Return a row for each service, with the memory that its processes use now, and its rates.

        Args:
            state: the proxy's state, which has the counts of requests and tokens; None: it does not answer.
            now: the seconds of a monotonic clock.
        """
        # stats: the proxy's counts of each service, by its name; without the proxy the last rates stay
        machine = self._machine
        stats = {service.name: service.stats for service in state.services} if state else {}
        self._update_rates(stats, now)

        rows = []
        for key, decision in machine.decisions.items():
            # A replica is its status, the bytes that are reserved for it, and those that it uses; None: not known.
            replicas = []
            for runner in machine.list_replicas(key):
                status = runner.build_status(port=None)
                used = await asyncio.to_thread(footprint_bytes, status.pid) if status.pid else None
                replicas.append((status, runner.assignment.spec.memory_bytes, used))

            name = "/".join(key)
            answers = key in machine.exposure.forwarded_services
            rate = self._rates.get(name)
            sleep = find_sleep(machine, key)
            rows.append(build_row(key.name, decision, replicas, stats.get(name), rate, answers=answers, sleep=sleep))
        return rows

    def _update_rates(self, stats: Mapping[str, ServiceStats], now: float) -> None:
        """Update the rate of each service by the tokens since the last counts, and keep the new counts."""
        for name, stat in stats.items():
            if name in self._last_counts:
                last_at, last_tokens = self._last_counts[name]  # of the last reading
                self._rates[name] = max(0, stat.tokens_out - last_tokens) / max(now - last_at, 1e-6)
        self._last_counts = {name: (now, stat.tokens_out) for name, stat in stats.items()}


def describe_host(machine: Machine) -> str:
    """Return a line with the endpoint and a line with the free memory."""
    ledger = machine.ledger
    free = f"{size_text(ledger.available_bytes)} of {size_text(ledger.budget_bytes)} of the memory for models are free"
    return f"{describe_endpoint(machine)}\n{free}"


def describe_endpoint(machine: Machine) -> str:
    """Return a line with the URL of the endpoint, or the reason why there is none."""
    router = machine.exposure.router
    if router is None:
        return "OpenAI endpoint: starting"
    if machine.exposure.problem:
        return machine.exposure.problem
    return f"OpenAI endpoint: {machine.exposure.access.describe(router.port)}"


def build_example_command(machine: Machine) -> str:
    """Return a command that sends a request to the first service; empty while there is no endpoint."""
    url, name = machine.exposure.url, next(iter(machine.manifests.services)).name
    if not url or machine.signals.stop.is_set():
        return ""
    body = '{"model": "%s", "messages": [{"role": "user", "content": "Hello"}]}' % name  # noqa: UP031 - JSON has braces
    call = f"{url}/v1/chat/completions -d '{body}'"
    if machine.exposure.access.keys:  # not as an argument, which every user can see
        return f"printf 'Authorization: Bearer %s' \"$POMONA_API_KEY\" | curl -H @- {call}"
    return f"curl {call}"


async def show_table(machine: Machine, console: Console, hint: Callable[[UserSignals], str]) -> None:
    """Keep a table on the terminal up to date, until cancelled.

    Once the endpoint is open, an example command is printed above the table, which is drawn in place. `hint` returns
    the line below it, such as which keys stop everything.
    """
    builder = RowBuilder(machine)

    async def refresh() -> Group:
        """Return the table with the present numbers; called for each drawing of it."""
        rows = await builder.build_rows(await machine.exposure.read_state(), time.monotonic())
        return draw_table(describe_host(machine), rows, hint(machine.signals))

    shown = False  # the example command was printed
    with Live(console=console, auto_refresh=False) as screen:
        try:
            while True:
                if not shown and (command := build_example_command(machine)):
                    shown = True
                    print_command(console, command)
                screen.update(await refresh(), refresh=True)
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            if machine.signals.stop.is_set():
                screen.update(Text("everything is stopped"), refresh=True)


def print_command(console: Console, command: str) -> None:
    """Print a command to be copied, above the table: in the table a narrow terminal would break or cut it."""
    console.print(Text(command, style="cyan"), soft_wrap=True)
    console.print()


async def print_changes(machine: Machine, out: IO[str]) -> None:
    """Print a line for each change until cancelled, and the last change on cancellation."""
    printer = ChangePrinter(machine, out)
    seen_changes = -1
    try:
        while True:
            seen_changes = await machine.changes.wait_past(seen_changes)
            printer.print_changes()
    finally:
        printer.print_changes()


def draw_table(head: str, rows: Iterable[Row], foot: str) -> Group:
    """Draw the rows. Names and messages come from files and engines, so they are drawn as text, never as markup.

    Details are lines below the table: a column of them would be too narrow on a small terminal.
    """
    shown = list(rows)
    drawn = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("SERVICE", "PHASE", "MEMORY", "TOKENS/S", "REQUESTS"):
        drawn.add_column(name, justify="left", overflow="fold")
    for row in shown:
        phase = Text(row.phase, style=_STYLES.get(row.phase, "yellow"))
        cells = (row.memory, row.tokens_per_second, row.requests)
        drawn.add_row(Text(row.service, style="bold"), phase, *map(Text, cells))
    details = [Text(f"{row.service}: {row.detail}") for row in shown if row.detail]
    return Group(Text(head), Text(), drawn, Text(), *details, *([Text()] if details else []), Text(foot, style="dim"))


class ChangePrinter:
    """Printer of a line for each change, for output that is no terminal."""

    def __init__(self, machine: Machine, out: IO[str]) -> None:
        """Print changes of `machine` to `out`."""
        self._machine = machine
        self._out = out
        self._started = time.monotonic()
        self._last_lines: dict[str, str] = {}
        """The line that was printed last for each service."""
        self._next_progress_at: dict[str, float] = {}
        """The time from which on a service may have another line that only reports progress."""
        self._last_endpoint_line = ""

    def print_changes(self) -> None:
        """Print a line for the endpoint and for each service whose line differs from its last one.

        A service that is only Pending has no line yet. A line that differs by progress alone is left out until ten
        seconds after the last one.
        """
        # 1. The endpoint, once it is open or cannot be opened.
        endpoint_line = describe_endpoint(self._machine)
        if self._machine.exposure.router and endpoint_line != self._last_endpoint_line:
            self._last_endpoint_line = endpoint_line
            self._print_line(endpoint_line)

        # 2. The services.
        for key, decision in self._machine.decisions.items():
            # Without the measured and reserved memory, which change with each reading.
            replicas = ((runner.build_status(port=None), None, None) for runner in self._machine.list_replicas(key))
            answers = key in self._machine.exposure.forwarded_services
            sleep = find_sleep(self._machine, key)
            shown = build_row(key.name, decision, replicas, None, None, answers=answers, sleep=sleep)
            text = f"{shown.service}: {shown.phase}" + (f" - {shown.detail}" if shown.detail else "")

            # Is the line worth printing?
            last_text = self._last_lines.get(shown.service, "")
            has_same_phase = last_text.startswith(f"{shown.service}: {shown.phase}")
            is_progress = has_same_phase and shown.phase in {"Fetching", "Starting", "Downloading"}
            # A service that was not started yet, or the same line again.
            says_nothing_new = text in {last_text, f"{shown.service}: Pending"}
            is_too_soon = is_progress and time.monotonic() < self._next_progress_at[shown.service]
            if says_nothing_new or is_too_soon:
                continue

            self._last_lines[shown.service] = text
            self._next_progress_at[shown.service] = time.monotonic() + PROGRESS_SECONDS
            self._print_line(text)

    def _print_line(self, text: str) -> None:
        """Print a line after the time since the start."""
        print(f"[{time.monotonic() - self._started:5.1f} s] {text}", file=self._out, flush=True)
