"""The ports that a process of the product has opened, found by its sockets, and a check of them under attack."""

import asyncio
import ssl
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

import psutil

from tests.support.live_processes import run_beside
from tests.support.port_attack import KINDS

MOST_GROWTH_BYTES: Final = 20 << 20
ANSWER_SECONDS: Final = 1.0
"""The kubelet waits so long, unless a probe says otherwise. A limit of the median: this machine has other work."""
PATIENCE_SECONDS: Final = 20.0
_PROBES: Final = ("/healthz", "/health")


class OpenPort(NamedTuple):
    """A listening socket."""

    pid: int
    host: str
    port: int
    is_tls: bool = False

    @property
    def place(self) -> str:
        """The place as `port_attack` reads it."""
        return f"{self.host}:{self.port}{'/tls' if self.is_tls else ''}"


def find_ports(pids: Iterable[int]) -> list[OpenPort]:
    """Return all TCP ports on which these processes listen; an address for all is asked at loopback."""
    ports = set[OpenPort]()
    for pid in pids:
        for socket in psutil.Process(pid).net_connections("tcp"):
            if socket.status == psutil.CONN_LISTEN:
                host = "127.0.0.1" if socket.laddr.ip in {"0.0.0.0", "::"} else socket.laddr.ip
                ports.add(OpenPort(pid, host, socket.laddr.port))
    return sorted(ports)


def list_processes(variable: str, value: str) -> list[int]:
    """Return the processes with this value of an environment variable."""
    pids = list[int]()
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value:
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


async def ask(port: OpenPort, path: str) -> float:
    """Ask as a kubelet does, by a new connection; return the seconds until the whole answer was there."""
    context = ssl._create_unverified_context() if port.is_tls else None  # noqa: S323 - as the kubelet
    started_at = time.monotonic()
    reader, writer = await asyncio.open_connection(port.host, port.port, ssl=context)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {port.host}:{port.port}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        if not answer:
            raise ConnectionResetError(f"{port} closed the connection before it had read the request")
        assert answer.startswith(b"HTTP/1.1 "), (port, path, answer[:100])
        return time.monotonic() - started_at
    finally:
        writer.transport.abort()


async def ask_again(port: OpenPort, path: str) -> float:
    """Ask until an answer comes, as a kubelet does before it counts a failure; return the seconds of all tries."""
    started_at = time.monotonic()
    while True:
        try:
            await ask(port, path)
        except ConnectionError:
            continue
        return time.monotonic() - started_at


def _read_resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


async def _read_settled_bytes(pids: set[int]) -> dict[int, int]:
    """Return the memory of each process once it has done what it does at its start: it stands still for a second."""
    sizes = {pid: _read_resident_bytes(pid) for pid in pids}
    for _ in range(30):
        before = sizes
        await asyncio.sleep(1)
        sizes = {pid: _read_resident_bytes(pid) for pid in pids}
        if all(abs(size - before[pid]) < 1 << 20 for pid, size in sizes.items()):
            break
    return sizes


async def check_attacked_ports(
    ports: list[OpenPort],
    *,
    seconds: float = 4.0,
    count: int = 150,
    kinds: tuple[str, ...] = KINDS,
    most_growth_bytes: int = MOST_GROWTH_BYTES,
) -> None:
    """Attack all these ports at once from other addresses; fail unless each answers and no process grows or ends.

    Args:
        ports: the ports, of any processes.
        seconds: the time of the attack.
        count: the connections to each port at any time.
        kinds: what the attacker does.
        most_growth_bytes: the memory that each process may take more than before.
    """
    for port in ports:
        for path in (*_PROBES, "/metrics"):  # what is imported or made once counts as no growth
            await ask(port, path)
    before = await _read_settled_bytes({port.pid for port in ports})
    places = [port.place for port in ports]
    argv = [sys.executable, "-m", "tests.support.port_attack", str(seconds), str(count), ",".join(kinds), *places]
    async with run_beside(*argv, stdout=asyncio.subprocess.PIPE) as attacker:
        assert attacker.stdout is not None
        assert await attacker.stdout.readline() == b"ready\n"
        done, most, answers = await _probe_until_line(attacker.stdout, ports)
        assert await attacker.wait() == 0
    assert all(kind.encode() in done for kind in kinds), f"a kind of attack did not take place: {done!r}"
    growth = {_name(pid): (most[pid] - size) / (1 << 20) for pid, size in before.items()}
    medians = {f"{_name(port.pid)} {port.place}": statistics.median(answers[port]) for port in ports}
    print("growth in MiB:", growth, "seconds:", medians, max(map(max, answers.values())), done)
    for port in ports:
        await ask_again(port, _PROBES[0])
    assert all(mib * (1 << 20) <= most_growth_bytes for mib in growth.values()), growth
    assert all(seconds <= ANSWER_SECONDS for seconds in medians.values()), medians


async def _probe_until_line(
    output: asyncio.StreamReader, ports: list[OpenPort]
) -> tuple[bytes, dict[int, int], dict[OpenPort, list[float]]]:
    """Probe all ports until a program has printed a line.

    Returns the line, the most memory of each process in bytes, and the seconds that each answer of a port has taken.
    """
    most = dict.fromkeys((port.pid for port in ports), 0)
    answers: dict[OpenPort, list[float]] = {port: [] for port in ports}
    while True:
        for port in ports:
            for path in _PROBES:
                answers[port].append(await asyncio.wait_for(ask_again(port, path), PATIENCE_SECONDS))
            most[port.pid] = max(most[port.pid], _read_resident_bytes(port.pid))
        try:
            async with asyncio.timeout(0.1):
                return await output.readline(), most, answers
        except TimeoutError:
            continue


def _name(pid: int) -> str:
    """Return the command of `pomona` that a process runs, and its pid."""
    words = psutil.Process(pid).cmdline()
    return f"{words[words.index('cli.main') + 1] if 'cli.main' in words else ' '.join(words[1:4])} {pid}"
