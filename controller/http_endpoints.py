"""The HTTP ports of the controller: metrics, and the probes of its pod.

They run in threads with event loops of their own, because /healthz must answer while that of the controller is stuck.
Neither port is needed to reconcile, so the controller goes on without a port that is taken, and tries it again until it
is free.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.http.whole_answers import AnswerServer, PacedRendering, Route, WholeAnswer, serve_answers

BEAT_SECONDS: Final = 1.0
STUCK_SECONDS: Final = 15.0
"""An event loop that has not run for this long is stuck; no step of the controller takes a tenth of that."""
RETRY_SECONDS: Final = 5.0
OFF: Final = "0"

log = structlog.get_logger()


class BindAddress(NamedTuple):
    """An address to listen on; an empty host is every address of the machine."""

    host: str
    port: int


Routes = Mapping[str, Callable[[], WholeAnswer]]


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
        """Last sign of life of the event loop, which `beat` renews each second."""
        self.is_ready = False
        """The caches are full."""

    async def beat(self) -> None:
        """Note the time each second, as long as the event loop runs."""
        while True:
            self._beat_at = self._clock()
            await asyncio.sleep(BEAT_SECONDS)

    def answer_healthz(self) -> WholeAnswer:
        """Answer 500 if the event loop is stuck."""
        silent_seconds = self._clock() - self._beat_at
        if silent_seconds > STUCK_SECONDS:
            return WholeAnswer(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"the event loop has been stuck for {silent_seconds:.0f} s\n".encode()
            )
        return WholeAnswer(HTTPStatus.OK, b"ok\n")

    def answer_readyz(self) -> WholeAnswer:
        """Answer 503 until the caches are full: only then can this replica lead."""
        if not self.is_ready:
            return WholeAnswer(HTTPStatus.SERVICE_UNAVAILABLE, b"the caches are not full yet\n")
        return self.answer_healthz()

    @property
    def routes(self) -> Routes:
        """The paths of the probes."""
        return {"/healthz": self.answer_healthz, "/readyz": self.answer_readyz}


def metrics_routes(render: Callable[[], bytes]) -> Routes:
    """Return the path of the metrics."""
    rendering = PacedRendering(render)
    return {"/metrics": lambda: WholeAnswer(HTTPStatus.OK, rendering.read(), CONTENT_TYPE_LATEST.encode())}


@contextlib.contextmanager
def serve(option: str, address: BindAddress | None, routes: Routes) -> Iterator[BindAddress | None]:
    """Serve the routes in a thread while in this context.

    Yields the served address, or None if the option turns the port off or the first try to listen failed.
    """
    if address is None:
        yield None
        return
    thread = _ServingThread(option, address, routes)
    thread.start()
    thread.tried.wait()
    try:
        yield thread.served
    finally:
        thread.end()


class _ServingThread(threading.Thread):
    """A thread that serves one address, as soon as it is free."""

    def __init__(self, option: str, address: BindAddress, routes: Routes) -> None:
        super().__init__(name=option, daemon=True)
        self.tried = threading.Event()
        """The address was tried once."""
        self.served: BindAddress | None = None
        """The address that is served, with the real port; None until a try to listen has succeeded."""
        self._address = address
        self._server = AnswerServer({path: Route(_ignore_request(make)) for path, make in routes.items()})
        # Made here, as `end` needs it, and run in the thread.
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        """Set by `end`, in the loop of this thread."""

    def run(self) -> None:
        """Serve until `end`."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # it ends what is left, too
                runner.run(self._serve())
        finally:
            self.tried.set()  # whatever has ended the thread, the controller must not wait for it

    def end(self) -> None:
        """End the thread, and free the port."""
        self._loop.call_soon_threadsafe(self._ending.set)
        self.join()

    async def _serve(self) -> None:
        """Serve until `end`; while the address cannot be used, log each new problem and try again."""
        problem = ""  # the last one that was logged
        while not self._ending.is_set():
            try:
                # Listen, and serve until the end.
                async with serve_answers(self._server, *self._address) as (host, port):
                    self.served = BindAddress(host, port)
                    if self.tried.is_set():  # an earlier try has failed and was logged
                        log.info("port_served", option=self.name, address=f"{host}:{port}")
                    self.tried.set()  # `serve` waits for the first try, whatever comes of it
                    await self._ending.wait()

            # The address cannot be used. UnicodeError: a host name that cannot be encoded.
            except (OSError, UnicodeError) as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning(
                        "port_not_served",
                        option=self.name,
                        address=f"{self._address.host}:{self._address.port}",
                        error=problem,
                        way_out=f"free the port, or set {self.name} to another address or 0; it is tried every "
                        f"{RETRY_SECONDS:.0f} s",
                    )
                self.tried.set()
                # Try again after a pause, which the end shortens.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), RETRY_SECONDS)


def _ignore_request(make: Callable[[], WholeAnswer]) -> Callable[[object], WholeAnswer]:
    """Return the route that answers every request with what `make` returns."""
    return lambda _: make()
