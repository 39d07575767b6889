"""One service of the proxy: its current configuration, its queue, and its counts."""

import time
from collections.abc import Callable, Collection

import structlog

from gateway.proxy import paths
from gateway.proxy.body_budget import BodyReservation
from gateway.proxy.config import Backend, ServiceListener, ServiceStats
from gateway.proxy.load_balancer import InFlight, pick_backend
from gateway.proxy.metrics import ProxyMetrics
from gateway.proxy.request_body import NO_BODY
from gateway.proxy.request_queue import RequestQueue
from gateway.proxy.response_body import TokenCount

CLIENT_GONE = 499
"""Status in log and metrics of a request whose client hung up; no response has it."""

_log = structlog.get_logger()


class Service:
    """A configured service. A running request keeps its service, even after that has left the configuration."""

    def __init__(self, config: ServiceListener, in_flight: InFlight, metrics: ProxyMetrics) -> None:
        self.config = config
        self.created = int(time.time())
        self.queue = RequestQueue(self._take_slot, lambda backend: in_flight.end(backend.uid), config.queue_limit)
        self._in_flight = in_flight
        self.metrics = metrics.for_service(config.name)
        self._requests = 0
        self._errors = 0
        self._tokens = TokenCount(0, 0)
        self._running: set[InferenceRequest] = set()
        self._forget_metrics: Callable[[], None] | None = lambda: metrics.forget(config.name)

    def update(self, config: ServiceListener) -> None:
        """Apply `config` from the next decision on; refuse the waiting requests if no backend is left."""
        self.config = config
        self.queue.limit = config.queue_limit
        if self.has_backend:
            self.queue.admit_waiting()
        else:
            self.queue.refuse_waiting()

    @property
    def has_backend(self) -> bool:
        """True if a backend takes new requests, now or when one of its slots is free."""
        return pick_backend(self.config.backends, {}) is not None

    def take_other_backend(self, tried: Collection[str]) -> Backend | None:
        """Take a backend, with or without a free slot, except those in `tried`, which accepted no connection."""
        backend = pick_backend(self.config.backends, self._in_flight.counts(), tried)
        if backend:
            self._in_flight.begin(backend.uid)
        return backend

    def remove(self) -> None:
        """Leave the configuration: running requests end, waiting ones are refused, the metric series are removed."""
        self.queue.refuse_waiting()
        if self._forget_metrics:
            self._forget_metrics()
            self._forget_metrics = None

    @property
    def stats(self) -> ServiceStats:
        """The counts of ended and running requests."""
        return ServiceStats(
            requests=self._requests,
            errors=self._errors,
            tokens_in=self._tokens.prompt or 0,
            tokens_out=sum((each.tokens.generated or 0 for each in self._running), self._tokens.generated or 0),
            in_flight=self.queue.in_flight,
            queued=self.queue.queued,
        )

    def _take_slot(self) -> Backend | None:
        backend = pick_backend(self.config.backends, self._in_flight.counts(), only_free=True)
        if backend:
            self._in_flight.begin(backend.uid)
        return backend

    def begin(self, inference: "InferenceRequest") -> None:
        """Count a request as running."""
        self._running.add(inference)

    def record(self, inference: "InferenceRequest") -> None:
        """Count and log a request that has ended."""
        self._running.discard(inference)
        seconds = time.monotonic() - inference.arrived
        prompt, generated = inference.tokens.prompt or 0, inference.tokens.generated or 0
        self._requests += 1
        self._errors += bool(inference.error)
        self._tokens = TokenCount((self._tokens.prompt or 0) + prompt, (self._tokens.generated or 0) + generated)
        if self._forget_metrics:
            self.metrics.count_request(inference.route, inference.status, inference.error)
            self.metrics.request_seconds.observe(seconds)
            self.metrics.prompt_tokens += prompt
            self.metrics.generated_tokens += generated
        _log.info(
            "request_finished",
            service=self.config.name,
            route=inference.route,
            status=inference.status,
            seconds=round(seconds, 4),
            queued_seconds=round(inference.queued_seconds, 4),
            first_token_seconds=inference.first_token_seconds and round(inference.first_token_seconds, 4),
            tokens_in=inference.tokens.prompt,
            tokens_out=inference.tokens.generated,
            request_id=inference.request_id,
            **({"error": inference.error} if inference.error else {}),
        )


class InferenceRequest:
    """One request for inference, with the values of its log line; that line has nothing of the request's content."""

    def __init__(self, path: str, request_id: str, reservation: BodyReservation) -> None:
        self.arrived = time.monotonic()
        self.path = path
        self.route = paths.route_name(path)
        self.body = NO_BODY
        self.reservation = reservation
        self.request_id = request_id
        self.status = CLIENT_GONE
        self.queued_seconds = 0.0
        self.first_token_seconds: float | None = None
        self.tokens = TokenCount()
        self.error = ""

    def free_body(self) -> None:
        """Free the request body: no other backend gets it now, and the response may last for hours."""
        self.body = NO_BODY
        self.reservation.release()
