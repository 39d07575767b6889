"""The live table of `pomona up` on a terminal; `change_lines` has the output elsewhere.

The table is drawn again only when it has changed, so that nothing flickers.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from crds.size import size_text
from crds.text import escape_controls
from standalone.machine import Machine, UserSignals
from standalone.service_rows import ServiceRowReader
from standalone.service_table import draw_table

REFRESH_SECONDS: Final = 0.5
"""Interval between two readings of the proxy's counts, on a terminal only."""
HANDED_OVER: Final = "handed over to `pomona agent`, which keeps everything running"


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
    url, key = machine.exposure.url, next(iter(machine.manifests.services), None)
    if not url or key is None or machine.signals.stop.is_set():
        return ""
    name = key.name
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
    reader = ServiceRowReader(machine)
    shown = False  # the example command was printed
    drawn = None  # the table on the terminal, and the size of that
    with Live(console=console, auto_refresh=False) as screen:
        try:
            while True:
                if not shown and (command := build_example_command(machine)):
                    shown = True
                    print_command(console, command)
                rows = await reader.read_measured_rows(time.monotonic())
                table, size = draw_table(console, describe_host(machine), rows, hint(machine.signals)), console.size
                if (table, size) != drawn:
                    drawn = table, size
                    screen.update(table, refresh=True)
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            if machine.signals.hand_over.is_set():
                screen.update(Text(HANDED_OVER), refresh=True)
            elif machine.signals.stop.is_set():
                screen.update(Text("everything is stopped"), refresh=True)


def print_line(console: Console, line: str) -> None:
    """Print a line above the table. It may quote files, so it is printed as text, without characters that move it."""
    console.print(Text(escape_controls(line)), soft_wrap=True)


def print_command(console: Console, command: str) -> None:
    """Print a command to be copied, above the table: in the table a narrow terminal would break or cut it."""
    console.print(Text(command, style="cyan"), soft_wrap=True)
    console.print()
