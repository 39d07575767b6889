"""What the proxy counts and measures for Prometheus, by service. A service that is gone takes its series along."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_LABELS: Final = ("namespace", "service")
_BRIEF_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LONG_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# A second series for each, with the time at which it began, would double what is scraped.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # it has no annotations


class Level(NamedTuple):
    """What a service does at this moment."""

    service: str
    in_flight: int
    queued: int


class ServiceMetrics:
    """The series of one service."""

    def __init__(self, metrics: "Metrics", service: str) -> None:
        namespace, _, name = service.rpartition("/")
        self._requests = metrics.requests
        self._errors = metrics.errors
        self._own = {"namespace": namespace, "service": name}
        self.prompt_tokens = metrics.prompt_tokens.labels(**self._own)
        self.generated_tokens = metrics.generated_tokens.labels(**self._own)
        self.first_token = metrics.first_token.labels(**self._own)
        self.inter_token = metrics.inter_token.labels(**self._own)
        self.queue = metrics.queue.labels(**self._own)
        self.request = metrics.request.labels(**self._own)

    def answered(self, route: str, status: int, error: str) -> None:
        """Count one request and, where `error` names one, why it failed."""
        self._requests.labels(**self._own, route=route, status=status).inc()
        if error:
            self._errors.labels(**self._own, reason=error).inc()


class Metrics:
    """All series; `levels` tells what each service does now."""

    def __init__(self, levels: Callable[[], Iterable[Level]]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Levels(levels))
        self.requests = Counter(
            "pomona_proxy_requests",
            "Requests, by the status that their clients got; 499: the client hung up.",
            (*_LABELS, "route", "status"),
            registry=registry,
        )
        self.errors = Counter(
            "pomona_proxy_errors",
            "Requests that failed: queue_full, no_server, engine_error, engine_broke_off.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "pomona_proxy_prompt_tokens", "Tokens of prompts, as engines say.", _LABELS, registry=registry
        )
        self.generated_tokens = Counter(
            "pomona_proxy_generated_tokens", "Generated tokens, as engines say.", _LABELS, registry=registry
        )
        self.first_token = self._histogram("time_to_first_token", "Of streams, from the request's end.", _LONG_SECONDS)
        self.inter_token = self._histogram("inter_token", "Of streams, between two tokens.", _BRIEF_SECONDS)
        self.queue = self._histogram("queue", "Before a request got its turn.", _LONG_SECONDS)
        self.request = self._histogram("request", "From a request's arrival to its end.", _LONG_SECONDS)

    def of(self, service: str) -> ServiceMetrics:
        """Return the series of `service`."""
        return ServiceMetrics(self, service)

    def forget(self, service: str) -> None:
        """Remove the series of `service`."""
        namespace, _, name = service.rpartition("/")
        for metric in (self.requests, self.errors, self.prompt_tokens, self.generated_tokens):
            metric.remove_by_labels({"namespace": namespace, "service": name})
        for histogram in (self.first_token, self.inter_token, self.queue, self.request):
            histogram.remove_by_labels({"namespace": namespace, "service": name})

    def text(self) -> bytes:
        """Return everything in Prometheus' text form."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pomona_proxy_{name}_seconds", what, _LABELS, buckets=buckets, registry=self._registry)


class _Levels(Collector):
    """Gauges that are read when somebody asks."""

    def __init__(self, levels: Callable[[], Iterable[Level]]) -> None:
        self._levels = levels

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        in_flight = GaugeMetricFamily("pomona_proxy_in_flight", "Requests that are worked on.", labels=_LABELS)
        queued = GaugeMetricFamily("pomona_proxy_queued", "Requests that wait for their turn.", labels=_LABELS)
        for level in self._levels():
            namespace, _, name = level.service.rpartition("/")
            in_flight.add_metric((namespace, name), level.in_flight)
            queued.add_metric((namespace, name), level.queued)
        return iter((in_flight, queued))
