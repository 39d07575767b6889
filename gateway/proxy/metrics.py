"""The proxy's metrics for Prometheus, by service. A service that leaves the configuration loses its series.

Counts are plain numbers, and become metrics when they are scraped: prometheus_client's own counters, which are made
for several threads, would take as long as the rest of what is recorded of a short request.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_PREFIX: Final = "pomona_proxy"
_LABELS: Final = ("namespace", "service")
_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_HISTOGRAMS: Final = {
    "first_token_seconds": (
        "time_to_first_token_seconds",
        "From a request's arrival to its first token; streams only.",
    ),
    "inter_token_seconds": ("inter_token_seconds", "Between two tokens; streams only."),
    "queue_seconds": ("queue_seconds", "From a request's arrival in the queue to a free slot."),
    "request_seconds": ("request_seconds", "From a request's arrival to its end."),
}
"""By attribute of `ServiceMetrics`: name and description."""


class ServiceLoad(NamedTuple):
    """The requests of a service at this moment."""

    service: str
    in_flight: int
    queued: int


class DurationHistogram:
    """The number of durations up to each of `bounds`, in seconds, and their sum."""

    __slots__ = ("_bounds", "_counts", "sum_seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum_seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return the bound of each bucket and the number of durations up to it."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        return buckets


class ServiceMetrics:
    """The counts of one service."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By route and status."""
        self.errors: Counter[str] = Counter()
        """By reason."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.first_token_seconds = DurationHistogram(_REQUEST_BUCKETS)
        self.inter_token_seconds = DurationHistogram(_TOKEN_BUCKETS)
        self.queue_seconds = DurationHistogram(_REQUEST_BUCKETS)
        self.request_seconds = DurationHistogram(_REQUEST_BUCKETS)

    def count_request(self, route: str, status: int, error: str) -> None:
        """Count one request and, if `error` is not empty, its failure."""
        self.requests[route, status] += 1
        if error:
            self.errors[error] += 1


class ProxyMetrics(Collector):
    """The counts of all services; `loads` returns the current load of each."""

    def __init__(self, loads: Callable[[], Iterable[ServiceLoad]]) -> None:
        self._loads = loads
        self._services: defaultdict[str, ServiceMetrics] = defaultdict(ServiceMetrics)

    def for_service(self, service: str) -> ServiceMetrics:
        """Return the counts of `service`."""
        return self._services[service]

    def forget(self, service: str) -> None:
        """Remove the series of `service`."""
        self._services.pop(service, None)

    def text(self) -> bytes:
        """Return all series in Prometheus' text form."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Return the counts as metrics."""
        services = {_labels(service): metrics for service, metrics in self._services.items()}
        yield from _collect_counters(services)
        for attribute, (name, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"{_PREFIX}_{name}", text, labels=_LABELS)
            for labels, metrics in services.items():
                histogram: DurationHistogram = getattr(metrics, attribute)
                family.add_metric(labels, histogram.buckets(), histogram.sum_seconds)
            yield family
        in_flight = GaugeMetricFamily(f"{_PREFIX}_in_flight", "Requests that an engine is working on.", labels=_LABELS)
        queued = GaugeMetricFamily(f"{_PREFIX}_queued", "Requests that wait for a free slot.", labels=_LABELS)
        for load in self._loads():
            in_flight.add_metric(_labels(load.service), load.in_flight)
            queued.add_metric(_labels(load.service), load.queued)
        yield from (in_flight, queued)


def _collect_counters(services: Mapping[tuple[str, str], ServiceMetrics]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        f"{_PREFIX}_requests",
        "Requests, by the status that the client got; 499: the client hung up.",
        labels=(*_LABELS, "route", "status"),
    )
    errors = CounterMetricFamily(
        f"{_PREFIX}_errors",
        "Failed requests, by reason: queue_full, no_server, engine_error, engine_broke_off.",
        labels=(*_LABELS, "reason"),
    )
    prompt = CounterMetricFamily(
        f"{_PREFIX}_prompt_tokens", "Tokens of prompts, as engines report them.", labels=_LABELS
    )
    generated = CounterMetricFamily(
        f"{_PREFIX}_generated_tokens", "Generated tokens, as engines report them.", labels=_LABELS
    )
    for labels, metrics in services.items():
        for (route, status), count in metrics.requests.items():
            requests.add_metric((*labels, route, str(status)), count)
        for reason, count in metrics.errors.items():
            errors.add_metric((*labels, reason), count)
        prompt.add_metric(labels, metrics.prompt_tokens)
        generated.add_metric(labels, metrics.generated_tokens)
    yield from (requests, errors, prompt, generated)


def _labels(service: str) -> tuple[str, str]:
    namespace, _, name = service.rpartition("/")
    return namespace, name
