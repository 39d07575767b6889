"""One service as the proxy holds it: its configuration of the moment, who waits for it, and what it has done."""

import time
from collections.abc import Callable, Collection

import structlog
from aiohttp import web

from gateway.proxy import routes
from gateway.proxy.answers import Tokens
from gateway.proxy.balance import InFlight, choose
from gateway.proxy.bodies import HeldBody
from gateway.proxy.config import Backend, ServiceListener, Stats
from gateway.proxy.metrics import Metrics
from gateway.proxy.turns import Turns

CLIENT_GONE = 499
"""What log and metrics call a request whose client hung up; no answer has this status."""

_log = structlog.get_logger()


class Service:
    """A configured service. Requests keep hold of theirs, so that it may leave the configuration meanwhile."""

    def __init__(self, config: ServiceListener, in_flight: InFlight, metrics: Metrics) -> None:
        self.config = config
        self.created = int(time.time())
        self.turns = Turns(self._take, lambda backend: in_flight.end(backend.uid), config.queue)
        self._in_flight = in_flight
        self.metrics = metrics.of(config.name)
        self._requests = 0
        self._errors = 0
        self._tokens = Tokens(0, 0)
        self._running: set[Visit] = set()
        self._forget: Callable[[], None] | None = lambda: metrics.forget(config.name)

    def update(self, config: ServiceListener) -> None:
        """Serve as `config` says from the next decision on; who waits is sent away when nobody is left to serve."""
        self.config = config
        self.turns.longest = config.queue
        if self.open:
            self.turns.call_up()
        else:
            self.turns.dismiss()

    @property
    def open(self) -> bool:
        """Whether there is a backend that takes new requests, now or after those that it has."""
        return choose(self.config.backends, {}) is not None

    def instead(self, tried: Collection[str]) -> Backend | None:
        """Take a place, free or not, at a backend that is not among `tried`, all of which took nothing."""
        backend = choose(self.config.backends, self._in_flight.counts(), tried)
        if backend:
            self._in_flight.begin(backend.uid)
        return backend

    def leave(self) -> None:
        """Be configured no more: running requests end, those that wait are refused, and the series are gone."""
        self.turns.dismiss()
        if self._forget:
            self._forget()
            self._forget = None

    @property
    def stats(self) -> Stats:
        """What it did so far, and does now."""
        return Stats(
            requests=self._requests,
            errors=self._errors,
            tokens_in=self._tokens.read or 0,
            tokens_out=sum((each.tokens.written or 0 for each in self._running), self._tokens.written or 0),
            in_flight=self.turns.working,
            queued=self.turns.queued,
        )

    def _take(self) -> Backend | None:
        backend = choose(self.config.backends, self._in_flight.counts(), free=True)
        if backend:
            self._in_flight.begin(backend.uid)
        return backend

    def begin(self, visit: "Visit") -> None:
        """Take a request in."""
        self._running.add(visit)

    def record(self, visit: "Visit") -> None:
        """Count a request that has ended, and write its line."""
        self._running.discard(visit)
        seconds = time.monotonic() - visit.arrived
        read, written = visit.tokens.read or 0, visit.tokens.written or 0
        self._requests += 1
        self._errors += bool(visit.error)
        self._tokens = Tokens((self._tokens.read or 0) + read, (self._tokens.written or 0) + written)
        if self._forget:
            self.metrics.answered(visit.route, visit.status, visit.error)
            self.metrics.request.observe(seconds)
            self.metrics.prompt_tokens.inc(read)
            self.metrics.generated_tokens.inc(written)
        _log.info(
            "request",
            service=self.config.name,
            route=visit.route,
            status=visit.status,
            seconds=round(seconds, 4),
            queued_seconds=round(visit.queued_seconds, 4),
            first_token_seconds=visit.first_token_seconds and round(visit.first_token_seconds, 4),
            tokens_in=visit.tokens.read,
            tokens_out=visit.tokens.written,
            request_id=visit.request_id,
            **({"error": visit.error} if visit.error else {}),
        )


class Visit:
    """One request for inference on its way, and what its line in the log will say: nothing of its content."""

    def __init__(self, request: web.BaseRequest, request_id: str, held: HeldBody) -> None:
        self.arrived = time.monotonic()
        self.request = request
        self.path = request.path
        self.route = routes.name(self.path)
        self.body = b""
        self.held = held
        self.request_id = request_id
        self.status = CLIENT_GONE
        self.queued_seconds = 0.0
        self.first_token_seconds: float | None = None
        self.tokens = Tokens()
        self.error = ""

    def forget_body(self) -> None:
        """Have it no more in memory: nobody else gets it now, and the answer may last for hours."""
        self.body = b""
        self.held.release()
