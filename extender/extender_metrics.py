"""The metrics of the extender, on a registry of their own. docs/extender.md lists them, which a test compares."""

from importlib.metadata import version
from typing import Final, Literal

import prometheus_client
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client import generate_latest as render_registry

from extender.speed_table import SpeedTable

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST.encode()
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
"""Bounds of the histogram: a scheduler waits for each answer."""

Verb = Literal["filter", "prioritize"]
Outcome = Literal["scored", "neutral", "refused", "failed"]
"""The model is known; it is not; the request cannot be decoded; a defect: all nodes passed with the neutral score."""

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # it has no annotations


class ExtenderMetrics:
    """The metrics of one process."""

    def __init__(self, table: SpeedTable) -> None:
        """Register all metrics on a registry of their own; the gauges read `table` whenever they are rendered."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        # Counted with each request.
        self._requests = Counter(
            "pomona_extender_requests",
            "Requests by verb and outcome: scored, neutral (the model is not known), refused, failed (a defect).",
            ("verb", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "pomona_extender_request_duration_seconds",
            "Time to answer a request whose body is there.",
            ("verb",),
            registry=registry,
            buckets=SECONDS,
        )
        self._rejected = Counter("pomona_extender_rejected_nodes", "Nodes that a filter rejected.", registry=registry)

        # Gauges; the value of the last one is always 1, and its label is the version.
        Gauge("pomona_extender_nodes", "Known nodes.", registry=registry).set_function(lambda: table.node_count)
        Gauge("pomona_extender_boards", "Kept score boards.", registry=registry).set_function(lambda: table.board_count)
        Gauge("pomona_build_info", "1.", ("version",), registry=registry).labels(version("pomona")).set(1)

    def count_request(self, verb: Verb, outcome: Outcome, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(verb, outcome).inc()
        self._seconds.labels(verb).observe(seconds)

    def count_rejected(self, nodes: int) -> None:
        """Count nodes that a filter rejected."""
        self._rejected.inc(nodes)

    def render(self) -> bytes:
        """Return all metrics as text."""
        return render_registry(self.registry)
