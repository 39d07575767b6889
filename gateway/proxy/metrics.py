"""The proxy's metrics for Prometheus, by service. A service that leaves the configuration loses its series."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_LABELS: Final = ("namespace", "service")
_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# By default, each counter and histogram has one more series, with its creation time.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # it has no annotations


class ServiceLoad(NamedTuple):
    """The requests of a service at this moment."""

    service: str
    in_flight: int
    queued: int


class ServiceMetrics:
    """The metric series of one service."""

    def __init__(self, metrics: "ProxyMetrics", service: str) -> None:
        namespace, _, name = service.rpartition("/")
        self._requests = metrics.requests
        self._errors = metrics.errors
        self._labels = {"namespace": namespace, "service": name}
        self.prompt_tokens = metrics.prompt_tokens.labels(**self._labels)
        self.generated_tokens = metrics.generated_tokens.labels(**self._labels)
        self.first_token_seconds = metrics.first_token_seconds.labels(**self._labels)
        self.inter_token_seconds = metrics.inter_token_seconds.labels(**self._labels)
        self.queue_seconds = metrics.queue_seconds.labels(**self._labels)
        self.request_seconds = metrics.request_seconds.labels(**self._labels)

    def count_request(self, route: str, status: int, error: str) -> None:
        """Count one request and, if `error` is not empty, its failure."""
        self._requests.labels(**self._labels, route=route, status=status).inc()
        if error:
            self._errors.labels(**self._labels, reason=error).inc()


class ProxyMetrics:
    """The metric series of all services; `loads` returns the current load of each."""

    def __init__(self, loads: Callable[[], Iterable[ServiceLoad]]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_LoadGauges(loads))
        self.requests = Counter(
            "pomona_proxy_requests",
            "Requests, by the status that the client got; 499: the client hung up.",
            (*_LABELS, "route", "status"),
            registry=registry,
        )
        self.errors = Counter(
            "pomona_proxy_errors",
            "Failed requests, by reason: queue_full, no_server, engine_error, engine_broke_off.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "pomona_proxy_prompt_tokens", "Tokens of prompts, as engines report them.", _LABELS, registry=registry
        )
        self.generated_tokens = Counter(
            "pomona_proxy_generated_tokens", "Generated tokens, as engines report them.", _LABELS, registry=registry
        )
        self.first_token_seconds = self._histogram(
            "time_to_first_token", "From a request's arrival to its first token; streams only.", _REQUEST_BUCKETS
        )
        self.inter_token_seconds = self._histogram("inter_token", "Between two tokens; streams only.", _TOKEN_BUCKETS)
        self.queue_seconds = self._histogram(
            "queue", "From a request's arrival in the queue to a free slot.", _REQUEST_BUCKETS
        )
        self.request_seconds = self._histogram("request", "From a request's arrival to its end.", _REQUEST_BUCKETS)

    def for_service(self, service: str) -> ServiceMetrics:
        """Return the metric series of `service`."""
        return ServiceMetrics(self, service)

    def forget(self, service: str) -> None:
        """Remove the series of `service`."""
        namespace, _, name = service.rpartition("/")
        for metric in (self.requests, self.errors, self.prompt_tokens, self.generated_tokens):
            metric.remove_by_labels({"namespace": namespace, "service": name})
        for histogram in (self.first_token_seconds, self.inter_token_seconds, self.queue_seconds, self.request_seconds):
            histogram.remove_by_labels({"namespace": namespace, "service": name})

    def text(self) -> bytes:
        """Return all series in Prometheus' text form."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pomona_proxy_{name}_seconds", help_text, _LABELS, buckets=buckets, registry=self._registry)


class _LoadGauges(Collector):
    """Gauges that are computed when they are scraped."""

    def __init__(self, loads: Callable[[], Iterable[ServiceLoad]]) -> None:
        self._loads = loads

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        in_flight = GaugeMetricFamily(
            "pomona_proxy_in_flight", "Requests that an engine is working on.", labels=_LABELS
        )
        queued = GaugeMetricFamily("pomona_proxy_queued", "Requests that wait for a free slot.", labels=_LABELS)
        for load in self._loads():
            namespace, _, name = load.service.rpartition("/")
            in_flight.add_metric((namespace, name), load.in_flight)
            queued.add_metric((namespace, name), load.queued)
        return iter((in_flight, queued))
