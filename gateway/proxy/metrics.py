"""The proxy's metrics for Prometheus, by service. A service that leaves the configuration loses its series.

Counts are plain numbers, and become metrics when they are scraped: prometheus_client's own counters, which are made
for several threads, would take as long as the rest of what is recorded of a short request. The text is made here, too,
because that library takes longer to import than the proxy's own modules.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gateway.proxy.service import Service

PROXY_PREFIX: Final = "pomona_proxy"
"""The begin of the names of a proxy's metrics; a gateway has one of its own."""
CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
FIELDS: Final = b"Content-Type: %b\r\n" % CONTENT_TYPE
"""The header field of a response with series."""
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_REQUESTS: Final = "Requests, by the status that the client got; 499: the client hung up."
_ERRORS: Final = (
    "Failed requests, by reason: queue_full, no_server, engine_error, engine_broke_off, stopped; of a gateway also "
    "not_admitted and key_revoked."
)
_FALLBACKS: Final = "Requests that went on to another service of their route, which counts them, by cause."
_COUNTERS: Final = {
    "prompt_tokens": ("prompt_tokens_total", "Tokens of prompts, as engines report them."),
    "generated_tokens": ("generated_tokens_total", "Generated tokens, as engines report them."),
    "lone_tokens": ("lone_tokens_total", "Tokens after the first one of streams beside which no other request ran."),
    "lone_seconds": ("lone_token_seconds_total", "Time that these tokens took."),
}
"""By attribute of `ServiceMetrics`: name and description."""
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


class DurationHistogram:
    """The number of durations up to each of `bounds`, in seconds, and their sum."""

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
        self.fallbacks: Counter[str] = Counter()
        """By cause."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        # By these two, the speed of an engine that works on one request only.
        self.lone_tokens = 0
        """Tokens of streams that had the service to themselves, after the first one of each."""
        self.lone_seconds = 0.0
        """The time that the engine took for these tokens."""
        self.first_token_seconds = DurationHistogram(_REQUEST_BUCKETS)
        self.inter_token_seconds = DurationHistogram(_TOKEN_BUCKETS)
        self.queue_seconds = DurationHistogram(_REQUEST_BUCKETS)
        self.request_seconds = DurationHistogram(_REQUEST_BUCKETS)


def render_metrics(services: Mapping[str, "Service"], prefix: str = PROXY_PREFIX) -> bytes:
    """Return the series of all services, by their names, in Prometheus' text form; their names begin with `prefix`.

    1. Requests by route and status, errors by reason, and fallbacks by cause.
    2. Each counter and each histogram, by the tables of their names above.
    3. Gauges: requests in flight and in the queue.
    """
    # Each service with its labels: its namespace and its name.
    labeled = [(_labels(name), service) for name, service in services.items()]
    counts = [(labels, service.metrics) for labels, service in labeled]

    # 1. A family is the lines of one metric; each sample of it has labels and a value.
    requests = [
        (labels | {"route": route, "status": str(status)}, count)
        for labels, metrics in counts
        for (route, status), count in metrics.requests.items()
    ]
    failures = [
        (labels | {"reason": reason}, count) for labels, metrics in counts for reason, count in metrics.errors.items()
    ]
    fallbacks = [
        (labels | {"cause": cause}, count) for labels, metrics in counts for cause, count in metrics.fallbacks.items()
    ]
    lines = family_lines(f"{prefix}_requests_total", _REQUESTS, "counter", requests)
    lines += family_lines(f"{prefix}_errors_total", _ERRORS, "counter", failures)
    if fallbacks:  # only a gateway has routes
        lines += family_lines(f"{prefix}_fallbacks_total", _FALLBACKS, "counter", fallbacks)

    # 2. Both tables have the name and the description of a metric, by attribute of `ServiceMetrics`. A histogram has a
    #    line for each bucket, of which the last one counts all, and two for number and sum.
    for attribute, (name, description) in _COUNTERS.items():
        samples = [(labels, getattr(metrics, attribute)) for labels, metrics in counts]
        lines += family_lines(f"{prefix}_{name}", description, "counter", samples)
    for attribute, (short_name, description) in _HISTOGRAMS.items():
        name = f"{prefix}_{short_name}"
        lines += family_lines(name, description, "histogram", ())
        for labels, metrics in counts:
            histogram: DurationHistogram = getattr(metrics, attribute)
            buckets = histogram.buckets()
            lines += [_series_line(f"{name}_bucket", count, labels | {"le": bound}) for bound, count in buckets]
            _, total = buckets[-1]
            lines.append(_series_line(f"{name}_count", total, labels))
            lines.append(_series_line(f"{name}_sum", histogram.sum_seconds, labels))

    # 3. The gauges.
    in_flight = [(labels, service.queue.in_flight) for labels, service in labeled]
    queued = [(labels, service.queue.queued) for labels, service in labeled]
    lines += family_lines(f"{prefix}_in_flight", "Requests that an engine is working on.", "gauge", in_flight)
    lines += family_lines(f"{prefix}_queued", "Requests that wait for a free slot.", "gauge", queued)
    return "".join(lines).encode()


def render_engine_up(service: str, *, is_up: bool) -> bytes:
    """Return the gauge by which the proxy of a pod says whether the series of the engine of `service` are there."""
    description = "1 if the engine's own series are here, all of them."
    return "".join(
        family_lines(f"{PROXY_PREFIX}_engine_metrics_up", description, "gauge", [(_labels(service), is_up)])
    ).encode()


def family_lines(name: str, description: str, kind: str, samples: Iterable[tuple[dict[str, str], float]]) -> list[str]:
    """Return the lines of a family, each sample of which has labels and a value."""
    series = [_series_line(name, value, labels) for labels, value in samples]
    return [f"# HELP {name} {description}\n", f"# TYPE {name} {kind}\n", *series]


def _labels(service: str) -> dict[str, str]:
    namespace, _, name = service.rpartition("/")
    return {"namespace": namespace, "service": name}


def _series_line(name: str, value: float, labels: dict[str, str]) -> str:
    """Return the line of one series, with its labels in the order of their names."""
    quoted = ",".join(f'{label}="{labels[label].translate(_ESCAPES)}"' for label in sorted(labels))
    return f"{name}{{{quoted}}} {float(value)}\n"
