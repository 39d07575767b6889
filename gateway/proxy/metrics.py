"""The proxy's metrics for Prometheus, by service. A service that leaves the configuration loses its series.

Counts are plain numbers, and become metrics when they are scraped: prometheus_client's own counters, which are made
for several threads, would take as long as the rest of what is recorded of a short request. The text is made here, too,
because that library takes longer to import than the proxy's own modules.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gateway.proxy.service import Service

PROXY_PREFIX: Final = "pomona_proxy"
"""The begin of the names of a proxy's metrics; a gateway has one of its own."""
CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
FIELDS: Final = b"Content-Type: %b\r\n" % CONTENT_TYPE
"""The header field of a response with series."""
_PIECES_PER_TURN: Final = 16
"""The pieces of a text that are rendered at once, in about a millisecond."""
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LABELED_COUNTERS: Final = {
    "requests": (
        "requests_total",
        ("route", "status"),
        "Requests, by the status that the client got; 499: the client hung up.",
    ),
    "errors": (
        "errors_total",
        ("reason",),
        (
            "Failed requests, by reason: queue_full, no_server, engine_error, engine_broke_off, stopped; of a gateway "
            "also not_admitted and key_revoked."
        ),
    ),
    "fallbacks": (
        "fallbacks_total",
        ("cause",),
        "Requests that went on to another service of their route, which counts them, by cause.",
    ),
    "key_requests": ("key_requests_total", ("key",), "Requests by the name of the client's key."),
}
"""By attribute of `ServiceMetrics`: name, the labels that its keys are the values of, and description."""
_RARE_COUNTERS: Final = frozenset({"fallbacks", "key_requests"})
"""Those of them that most proxies do not have: only a gateway has routes, and only `pomona up` keys of this kind."""
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
_GAUGES: Final = {
    "in_flight": "Requests that an engine is working on.",
    "queued": "Requests that wait for a free slot.",
}
"""By attribute of `RequestQueue`, which is the name, too: description."""


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
        self.key_requests: Counter[str] = Counter()
        """By the name of the key, where clients have keys for the router."""
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
    """Return the series of all services, by their names, in Prometheus' text form; their names begin with `prefix`."""
    return "".join(list_series(services, prefix)).encode()


def list_series(services: Mapping[str, "Service"], prefix: str) -> Iterator[str]:
    """Yield the text of `render_metrics` in pieces: of each family (the lines of one metric) the lines of one service.

    Between two pieces other work may go on, which counts further requests; a histogram is one piece.
    """
    # Each service with its labels: its namespace and its name.
    labeled = [(_labels(name), service) for name, service in services.items()]

    # 1. Counters with a series for each key of a Counter.
    for attribute, (short_name, label_names, description) in _LABELED_COUNTERS.items():
        if attribute in _RARE_COUNTERS and not any(getattr(service.metrics, attribute) for _, service in labeled):
            continue
        name = f"{prefix}_{short_name}"
        yield _family_head(name, description, "counter")
        for labels, service in labeled:
            counts: Counter[tuple[str, int] | str] = getattr(service.metrics, attribute)
            keys = [(key if isinstance(key, tuple) else (key,), count) for key, count in counts.items()]
            further = [(dict(zip(label_names, map(str, key), strict=True)), count) for key, count in keys]
            yield "".join([_series_line(name, count, labels | more) for more, count in further])

    # 2. Counters and gauges with one series.
    for attribute, (short_name, description) in _COUNTERS.items():
        name = f"{prefix}_{short_name}"
        yield _family_head(name, description, "counter")
        for labels, service in labeled:
            yield _series_line(name, getattr(service.metrics, attribute), labels)
    for attribute, description in _GAUGES.items():
        name = f"{prefix}_{attribute}"
        yield _family_head(name, description, "gauge")
        for labels, service in labeled:
            yield _series_line(name, getattr(service.queue, attribute), labels)

    # 3. Histograms, which have a line for each bucket, of which the last one counts all, and two for number and sum.
    for attribute, (short_name, description) in _HISTOGRAMS.items():
        name = f"{prefix}_{short_name}"
        yield _family_head(name, description, "histogram")
        for labels, service in labeled:
            histogram: DurationHistogram = getattr(service.metrics, attribute)
            buckets = histogram.buckets()
            lines = [_series_line(f"{name}_bucket", count, labels | {"le": bound}) for bound, count in buckets]
            lines.append(_series_line(f"{name}_count", buckets[-1][1], labels))
            lines.append(_series_line(f"{name}_sum", histogram.sum_seconds, labels))
            yield "".join(lines)


async def render_in_turns(pieces: Iterable[str]) -> bytes:
    """Return the text of all pieces; after some of them other work gets a turn."""
    text: list[str] = []
    for piece in pieces:
        text.append(piece)
        if len(text) % _PIECES_PER_TURN == 0:
            await asyncio.sleep(0)
    return "".join(text).encode()


def render_engine_up(service: str, *, is_up: bool) -> bytes:
    """Return the gauge by which the proxy of a pod says whether the series of the engine of `service` are there."""
    name = f"{PROXY_PREFIX}_engine_metrics_up"
    head = _family_head(name, "1 if the engine's own series are here, all of them.", "gauge")
    return (head + _series_line(name, is_up, _labels(service))).encode()


def list_family(
    name: str, description: str, kind: str, samples: Iterable[tuple[dict[str, str], float]]
) -> Iterator[str]:
    """Yield the lines of a family, each sample of which has labels and a value."""
    yield _family_head(name, description, kind)
    for labels, value in samples:
        yield _series_line(name, value, labels)


def _family_head(name: str, description: str, kind: str) -> str:
    return f"# HELP {name} {description}\n# TYPE {name} {kind}\n"


def _labels(service: str) -> dict[str, str]:
    namespace, _, name = service.rpartition("/")
    return {"namespace": namespace, "service": name}


def _series_line(name: str, value: float, labels: dict[str, str]) -> str:
    """Return the line of one series, with its labels in the order of their names."""
    quoted = ",".join(f'{label}="{labels[label].translate(_ESCAPES)}"' for label in sorted(labels))
    return f"{name}{{{quoted}}} {float(value)}\n"
