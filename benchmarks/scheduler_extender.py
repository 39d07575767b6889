"""The time of the extender's answers, beside a server on the same listener that returns each body as it came.

A scheduler waits for each answer, so one client on one connection sends one request after the other, to both in turns.
`python -m benchmarks.scheduler_extender`
"""

import socket
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Final

import msgspec
import psutil

from benchmarks.report import Figure, print_figures
from benchmarks.servers.filled_extender import name_node
from benchmarks.servers.ways import Server, run_server
from crds.meta import LABEL_SERVICE

NODES: Final = 5000
SERVICES: Final = 1000
NAMES: Final = (1000, 5000)
REQUESTS: Final = 1000
WARM_REQUESTS: Final = 50
CHANGED_NODES: Final = 50
"""Nodes whose utilization changes between two requests, as within a second of 5,000 nodes."""
GOAL_MS: Final = 5.0
MIB: Final = 2**20


class Client:
    """One connection that is kept."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, path: str, body: bytes) -> bytes:
        """Send a request, and return the body of the answer. Raises ConnectionResetError."""
        self._socket.sendall(b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\n" % path.encode())
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        received = bytearray()
        length = -1
        while length < 0 or len(received) < length:
            piece = self._socket.recv(1 << 20)
            if not piece:
                raise ConnectionResetError(f"closed after {bytes(received)!r}")
            received += piece
            head, separator, rest = received.partition(b"\r\n\r\n") if length < 0 else (b"", b"", received)
            if separator:
                assert head.startswith(b"HTTP/1.1 200 "), head  # noqa: S101 - else the figures are those of a refusal
                length, received = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]), rest
        return bytes(received)

    def measure_ms(self, path: str, body: bytes) -> float:
        """Return the time of a request."""
        began = time.perf_counter()
        self.ask(path, body)
        return (time.perf_counter() - began) * 1000


def build_request(service: int, names: int) -> bytes:
    """Return the ExtenderArgs of a pod of a service."""
    container = {"name": "engine", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    metadata = {"name": "p", "namespace": "team", "labels": {LABEL_SERVICE: f"service-{service}"}}
    pod = {"metadata": metadata, "spec": {"containers": [container], "serviceAccountName": "default"}}
    return msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": [name_node(number) for number in range(names)]})


def measure_answers(extender: Client, echo: Client, names: int) -> list[Figure]:
    """Measure requests for one service, whose answers are ready."""
    body = build_request(0, names)
    times: dict[str, list[float]] = {"/prioritize": [], "/filter": [], "/echo": []}
    for path in (*times,) * WARM_REQUESTS:
        (echo if path == "/echo" else extender).measure_ms(path, body)
    for _ in range(REQUESTS):
        for path, taken in times.items():
            taken.append((echo if path == "/echo" else extender).measure_ms(path, body))
    return [
        Figure(f"{path}, {names:,} names, p{percent}", value, floor, GOAL_MS if percent == 99 else None, "ms")  # noqa: PLR2004
        for path in ("/prioritize", "/filter")
        for percent in (50, 99)
        for value, floor in [(_percentile(times[path], percent), _percentile(times["/echo"], percent))]
    ]


def measure_changes(extender: Client, echo: Client, server: Server) -> list[Figure]:
    """Measure requests after, and while, some nodes change, whose scores are computed again."""
    body = build_request(0, NODES)
    times: dict[str, list[float]] = {"after": [], "while": [], "echo": []}
    for _ in range(REQUESTS):
        _begin_change(server, CHANGED_NODES)
        _end_change(server)
        times["after"].append(extender.measure_ms("/prioritize", body))
        _begin_change(server, CHANGED_NODES)
        times["while"].append(extender.measure_ms("/prioritize", body))
        _end_change(server)
        times["echo"].append(echo.measure_ms("/echo", body))
    goals = {50: None, 99: GOAL_MS}
    return [
        Figure(f"{moment} {CHANGED_NODES} nodes change, p{percent}", value, floor, goal, "ms")
        for moment in ("after", "while")
        for percent, goal in goals.items()
        for value, floor in [(_percentile(times[moment], percent), _percentile(times["echo"], percent))]
    ]


def measure_services(extender: Client, server: Server) -> list[Figure]:
    """Ask for each service once: its answers are not ready, and those of others are dropped for them."""
    times = [extender.measure_ms("/prioritize", build_request(number, NODES)) for number in range(SERVICES)]
    resident = psutil.Process(server.pid).memory_info().rss / MIB
    return [
        *(
            Figure(
                f"first request of a service, {NODES:,} names, p{percent}",
                _percentile(times, percent),
                None,
                None,
                "ms",
            )
            for percent in (50, 99)
        ),
        Figure(f"memory with {NODES:,} nodes and {SERVICES:,} services", resident, None, None, "MiB"),
    ]


def measure_processor_time(extender: Client, server: Server, echo: Client, echo_server: Server) -> Figure:
    """Measure what a request costs the processor, which other load on the machine changes little."""
    body = build_request(0, NODES)
    spent = []
    for client, process in ((extender, psutil.Process(server.pid)), (echo, psutil.Process(echo_server.pid))):
        began = sum(process.cpu_times()[:2])
        for _ in range(REQUESTS):
            client.ask("/prioritize", body)
        spent.append((sum(process.cpu_times()[:2]) - began) * 1000 / REQUESTS)
    return Figure(f"processor time of /prioritize, {NODES:,} names", spent[0], spent[1], None, "ms")


def _begin_change(server: Server, nodes: int) -> None:
    assert server.process.stdin is not None  # noqa: S101 - it is a pipe
    server.process.stdin.write(f"{nodes}\n")
    server.process.stdin.flush()


def _end_change(server: Server) -> None:
    assert server.process.stdout is not None  # noqa: S101 - it is a pipe
    server.process.stdout.readline()


def _percentile(times: list[float], percent: int) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1]


def main() -> int:
    """Print the figures; return 1 if a goal is missed."""
    with ExitStack() as stack:
        server = stack.enter_context(run_server("filled_extender", str(NODES), str(SERVICES)))
        echo_server = stack.enter_context(run_server("echo_server"))
        extender, echo = Client(server.port), Client(echo_server.port)
        before = psutil.getloadavg()[0]
        figures = [figure for names in NAMES for figure in measure_answers(extender, echo, names)]
        figures.append(measure_processor_time(extender, server, echo, echo_server))
        figures += [*measure_changes(extender, echo, server), *measure_services(extender, server)]
        print_figures(f"scheduler extender, load of the machine {before:.1f} before", figures)
    return int(any("MISSED" in figure.verdict for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
