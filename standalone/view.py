"""What a person sees of a machine that serves: a table that lives on a terminal, and lines of what changed elsewhere.

What is shown is decided by pure functions over the machine, the proxy's counts and the measured memory.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Final, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from crds.metalprocess import MetalProcessStatus
from crds.size import size_text
from devices.footprint import footprint_bytes
from gateway.proxy.config import ProxyState, Stats
from metal_agent.lifecycle import LAST_LINES
from standalone.desired import Decision
from standalone.machine import Machine, Wishes

REFRESH_SECONDS: Final = 0.5
"""Between two looks at the proxy's counts, on a terminal only."""
PROGRESS_SECONDS: Final = 10.0
"""Between two lines of progress of the same service."""
_STYLES: Final = {"Ready": "green", "Failed": "red", "Rejected": "red", "Stopped": "dim", "Suspended": "dim"}
_WORST: Final = ("Ready", "Stopped", "Stopping", "Starting", "Fetching", "Pending", "Failed", "Rejected")


@dataclass(frozen=True, slots=True)
class Row:
    """One service as it is shown."""

    service: str
    phase: str
    detail: str = ""
    """Progress, or what is wrong."""
    memory: str = ""
    tokens_per_second: str = ""
    requests: str = ""


class Replica(Protocol):
    """What is shown of a process; a runner is one."""

    def status(self, port: int | None) -> MetalProcessStatus:
        """Where it stands."""


def row(
    name: str,
    decision: Decision,
    replicas: Iterable[tuple[MetalProcessStatus, int | None, int | None]],
    stats: Stats | None,
    tokens_per_second: float | None,
    *,
    answers: bool = True,
) -> Row:
    """Describe one service.

    Args:
        name: the service.
        decision: what was decided for it.
        replicas: of each the status, the memory that is reserved, and the memory that it takes, in bytes.
        stats: the proxy's counts, where it has the service.
        tokens_per_second: generated lately; None: not known.
        answers: whether the endpoint leads to it.
    """
    known = sorted(replicas, key=lambda each: _WORST.index(each[0].phase))
    if not known:
        problem = decision.problem
        return Row(name, problem.phase if problem else "Pending", problem.message if problem else "")
    worst, reserved, used = known[-1]
    ready = sum(status.phase == "Ready" for status, _, _ in known)
    in_all = [each for _, _, each in known if each]
    detail = _detail(worst, reserved, used)
    if len(known) > 1:
        detail = f"{ready} of {len(known)} replicas are ready" + (f"; {detail}" if detail else "")
    phase = worst.phase if not ready else "Ready" if ready == len(known) else "Degraded"
    if ready and not answers:
        phase, detail = "Starting", "loaded; the endpoint starts"
    return Row(
        service=name,
        phase=phase,
        detail=detail,
        memory=size_text(sum(in_all)) if in_all else "",
        tokens_per_second="" if tokens_per_second is None else f"{tokens_per_second:,.0f}",
        requests=_requests(stats) if stats else "",
    )


def _detail(status: MetalProcessStatus, reserved: int | None, used: int | None) -> str:
    if status.phase == "Fetching" and status.progress:
        here, total = status.progress.bytes, status.progress.total_bytes
        share = f" of {size_text(total)}, {100 * here // total} %" if total else ""
        return f"{size_text(here)}{share}"
    if status.phase == "Starting" and not status.message:
        return f"loading, {size_text(used)} of about {size_text(reserved)}" if used and reserved else "loading"
    if status.phase == "Failed" and status.last_exit and (log := status.last_exit.log.strip()):
        return f"{status.message.replace(LAST_LINES, '')}; it said last: {log.splitlines()[-1]}"
    return status.message


def _requests(stats: Stats) -> str:
    waiting = f", {stats.queued} waiting" if stats.queued else ""
    failed = f", {stats.errors} failed" if stats.errors else ""
    return f"{stats.requests} ({stats.in_flight} now{waiting}{failed})"


class Board:
    """Reads a machine for rows; remembers the counts of the last look, of which rates are made."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._counted: Mapping[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}

    async def rows(self, state: ProxyState | None, now: float) -> list[Row]:
        """Look once; `now` is monotonic, in seconds."""
        machine = self._machine
        stats = {each.name: each.stats for each in state.services} if state else {}
        self._rate(stats, now)
        found = []
        for key, decision in machine.decisions.items():
            replicas = []
            for runner in machine.replicas(key):
                status = runner.status(None)
                used = await asyncio.to_thread(footprint_bytes, status.pid) if status.pid else None
                spec = runner.assignment.spec
                replicas.append((status, spec.memory_bytes if spec else None, used))
            name = "/".join(key)
            answers = key in machine.exposed.accepted
            rate = self._rates.get(name)
            found.append(row(key.name, decision, replicas, stats.get(name), rate, answers=answers))
        return found

    def _rate(self, stats: Mapping[str, Stats], now: float) -> None:
        counted = {name: (now, each.tokens_out) for name, each in stats.items()}
        for name, (_, tokens) in counted.items():
            if name in self._counted:
                before, earlier = self._counted[name]
                self._rates[name] = max(0, tokens - earlier) / max(now - before, 1e-6)
        self._counted = counted


def header(machine: Machine) -> str:
    """Say where to ask and how much memory is left."""
    ledger = machine.ledger
    free = f"{size_text(ledger.available_bytes)} of {size_text(ledger.budget_bytes)} of memory for models are free"
    return f"{endpoint(machine)}; {free}"


def endpoint(machine: Machine) -> str:
    """Say where to ask, or why nowhere."""
    router = machine.exposed.router
    if router is None:
        return "the endpoint starts"
    if router.error:
        return f"no endpoint: {router.error}; give another with --port"
    return f"http://{router.address}:{router.port}/v1 is the endpoint, /v1/models lists it"


def example(machine: Machine) -> str:
    """Return a command that asks the first service, once there is an endpoint."""
    router, name = machine.exposed.router, next(iter(machine.wanted.services)).name
    if router is None or router.error or machine.wishes.stop.is_set():
        return ""
    body = '{"model": "%s", "messages": [{"role": "user", "content": "Hello"}]}' % name  # noqa: UP031 - JSON has braces
    return f"curl http://{router.address}:{router.port}/v1/chat/completions -d '{body}'"


async def live(machine: Machine, console: Console, hint: Callable[[Wishes], str]) -> None:
    """Keep a table on the terminal up to date, until cancelled."""
    board = Board(machine)

    async def look() -> Group:
        rows = await board.rows(await machine.exposed.state(), time.monotonic())
        return table(header(machine), rows, example(machine), hint(machine.wishes))

    with Live(console=console, auto_refresh=False) as screen:
        try:
            while True:
                screen.update(await look(), refresh=True)
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            if machine.wishes.stop.is_set():
                screen.update(Text("everything is stopped"), refresh=True)


async def lines(machine: Machine, out: IO[str]) -> None:
    """Say what changes, until cancelled; the last word too."""
    told = Lines(machine, out)
    seen = -1
    try:
        while True:
            seen = await machine.changes.after(seen)
            told.look()
    finally:
        told.look()


def table(head: str, rows: Iterable[Row], command: str, foot: str) -> Group:
    """Draw. Text, not markup: names and messages are not ours."""
    drawn = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("SERVICE", "PHASE", "MEMORY", "TOKENS/S", "REQUESTS", ""):
        drawn.add_column(name, justify="left", overflow="fold")
    for each in rows:
        phase = Text(each.phase, style=_STYLES.get(each.phase, "yellow"))
        cells = (each.memory, each.tokens_per_second, each.requests, each.detail)
        drawn.add_row(Text(each.service, style="bold"), phase, *map(Text, cells))
    ask = [Text(command, style="cyan"), Text()] if command else []
    return Group(Text(head), Text(), drawn, Text(), *ask, Text(foot, style="dim"))


class Lines:
    """Says what changed, one line each, where there is no terminal."""

    def __init__(self, machine: Machine, out: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._machine = machine
        self._out = out
        self._clock = clock
        self._started = clock()
        self._told: dict[str, str] = {}
        self._next: dict[str, float] = {}
        self._head = ""

    def look(self) -> None:
        """Say what is new; progress is said now and then."""
        if self._machine.exposed.router and (head := endpoint(self._machine)) != self._head:
            self._head = head
            self.say(head)
        for key, decision in self._machine.decisions.items():
            replicas = ((runner.status(None), None, None) for runner in self._machine.replicas(key))
            shown = row(key.name, decision, replicas, None, None, answers=key in self._machine.exposed.accepted)
            text = f"{shown.service}: {shown.phase}" + (f" - {shown.detail}" if shown.detail else "")
            passing = shown.phase in {"Fetching", "Starting"} and self._told.get(shown.service, "").startswith(
                f"{shown.service}: {shown.phase}"
            )
            nothing_new = text in {self._told.get(shown.service), f"{shown.service}: Pending"}
            if nothing_new or (passing and self._clock() < self._next[shown.service]):
                continue
            self._told[shown.service] = text
            self._next[shown.service] = self._clock() + PROGRESS_SECONDS
            self.say(text)

    def say(self, text: str) -> None:
        """Say one line."""
        print(f"[{self._clock() - self._started:5.1f} s] {text}", file=self._out, flush=True)
