"""The HTTP ports of the controller: metrics, and the probes of its pod.

They run in threads of their own, because /healthz must answer while the event loop is stuck. Neither port is needed to
reconcile, so the controller goes on without a port that is taken, and tries it again until it is free.
"""

import asyncio
import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, NamedTuple

import structlog
from prometheus_client import CONTENT_TYPE_LATEST

BEAT_SECONDS: Final = 1.0
STUCK_SECONDS: Final = 15.0
"""An event loop that has not run for this long is stuck; no step of the controller takes a tenth of that."""
REQUEST_SECONDS: Final = 10.0
"""A client that sends nothing for this long is hung up on."""
RETRY_SECONDS: Final = 5.0
OFF: Final = "0"

log = structlog.get_logger()


class BindAddress(NamedTuple):
    """An address to listen on; an empty host is every address of the machine."""

    host: str
    port: int


class HttpAnswer(NamedTuple):
    """The answer to a GET."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Routes = Mapping[str, Callable[[], HttpAnswer]]


def parse_bind_address(text: str) -> BindAddress | None:
    """Return the address of `HOST:PORT` or `:PORT`; None for `0`, which turns the port off. Raises ValueError."""
    if text == OFF:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or not 0 <= int(port) <= 65535:  # noqa: PLR2004 - ports
        raise ValueError(f"{text!r} is no address to listen on: give HOST:PORT, :PORT, or 0 to turn it off")
    return BindAddress(host.removeprefix("[").removesuffix("]"), int(port))


class ControllerHealth:
    """The facts behind /healthz and /readyz. Only `beat` and `is_ready` are written by the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat_at = clock()
        self.is_ready = False
        """The caches are full."""

    async def beat(self) -> None:
        """Show for ever that the event loop runs."""
        while True:
            self._beat_at = self._clock()
            await asyncio.sleep(BEAT_SECONDS)

    def answer_healthz(self) -> HttpAnswer:
        """Answer 500 if the event loop is stuck."""
        silent_seconds = self._clock() - self._beat_at
        if silent_seconds > STUCK_SECONDS:
            return HttpAnswer(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"the event loop has been stuck for {silent_seconds:.0f} s\n".encode()
            )
        return HttpAnswer(HTTPStatus.OK, b"ok\n")

    def answer_readyz(self) -> HttpAnswer:
        """Answer 503 until the caches are full: only then can this replica lead."""
        if not self.is_ready:
            return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE, b"the caches are not full yet\n")
        return self.answer_healthz()

    @property
    def routes(self) -> Routes:
        """The paths of the probes."""
        return {"/healthz": self.answer_healthz, "/readyz": self.answer_readyz}


def metrics_routes(render: Callable[[], bytes]) -> Routes:
    """Return the path of the metrics."""
    return {"/metrics": lambda: HttpAnswer(HTTPStatus.OK, render(), CONTENT_TYPE_LATEST)}


@contextlib.contextmanager
def serve(option: str, address: BindAddress | None, routes: Routes) -> Iterator[BindAddress | None]:
    """Serve the routes in a thread; returns the address, or None if it is off, or taken: then it is tried again."""
    if address is None:
        yield None
        return
    thread = _ServingThread(option, address, routes)
    served = thread.bind()
    thread.start()
    try:
        yield served
    finally:
        thread.end()


class _ServingThread(threading.Thread):
    """A thread that serves one address, as soon as it is free."""

    def __init__(self, option: str, address: BindAddress, routes: Routes) -> None:
        super().__init__(name=option, daemon=True)
        self._address = address
        self._routes = routes
        self._server: _Server | None = None
        self._ending = threading.Event()
        self._problem = ""

    def bind(self) -> BindAddress | None:
        """Return the address that is served now, or None if it is taken, which is logged once."""
        try:
            self._server = _Server(self._address, self._routes)
        except OSError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning(
                    "port_not_served",
                    option=self.name,
                    address=f"{self._address.host}:{self._address.port}",
                    error=str(error),
                    way_out=f"free the port, or set {self.name} to another address or 0; it is tried every "
                    f"{RETRY_SECONDS:.0f} s",
                )
            return None
        host, port = self._server.server_address[:2]
        return BindAddress(str(host), port)

    def run(self) -> None:
        """Serve until `end`."""
        while self._server is None:
            if self._ending.wait(RETRY_SECONDS):
                return
            if served := self.bind():
                log.info("port_served", option=self.name, address=f"{served.host}:{served.port}")
        with self._server:
            while not self._ending.is_set():
                self._server.handle_request()

    def end(self) -> None:
        """End the thread, and free the port."""
        self._ending.set()
        self.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    timeout = 0.2
    """Seconds between two looks at whether the thread is to end."""

    def __init__(self, address: BindAddress, routes: Routes) -> None:
        self.routes = routes
        everywhere = not address.host and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if everywhere or ":" in address.host else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not that of HTTPServer, which asks for the name of the address and may wait for the answer.
        socketserver.TCPServer.server_bind(self)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answer by the routes of the server."""
        make = self.server.routes.get(self.path.partition("?")[0])
        answer = make() if make else HttpAnswer(HTTPStatus.NOT_FOUND, b"not found\n")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Log nothing: probes come every few seconds."""
