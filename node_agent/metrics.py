"""Metrics of a node agent: its devices as they were read last, its probes, and its requests to the API server."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crds.nodefitness import NodeDevice
from kube.resources import Resource
from node_agent.node_labels import LabelConflict

_LABELS: Final = ("gpu", "node")

log = structlog.get_logger()


class NodeMetrics:
    """The metrics of one agent.

    Args:
        node: the name of the Node, the label `node`.
        prefix: what the names begin with: `pomona`, or `flexinfer` for the dashboards of that project.
    """

    def __init__(self, node: str, prefix: str) -> None:
        """Register all metrics, with names that begin with `prefix`, on a registry of their own."""
        self._registry = registry = CollectorRegistry()
        self._devices = _DeviceCollector(node, prefix)
        self._conflicts: Sequence[LabelConflict] = ()
        registry.register(self._devices)

        # The probes, which have the Node as their label.
        name = f"{prefix}_node_agent"
        probes = Counter(f"{name}_probes", "Probes of the hardware.", ["node"], registry=registry)
        failures_help = "Probes that hung, failed, or named a problem."
        failed = Counter(f"{name}_probe_failures", failures_help, ["node"], registry=registry)
        seconds = Gauge(f"{name}_probe_seconds", "Duration of the last probe.", ["node"], registry=registry)
        conflicts_help = "Labels of the Node that another labeller owns."
        conflicting = Gauge(f"{name}_label_conflicts", conflicts_help, ["node"], registry=registry)
        self._probes, self._failures = probes.labels(node), failed.labels(node)
        self._seconds, self._conflicting = seconds.labels(node), conflicting.labels(node)

        # The requests, which have labels of their own.
        calls_help = "Requests to the API server; code 0: no answer."
        self._calls = Counter(f"{name}_api_requests", calls_help, ["verb", "code"], registry=registry)

    def show_devices(self, devices: Sequence[NodeDevice]) -> None:
        """Show the devices that were read last."""
        self._devices.devices = devices

    def count_probe(self, seconds: float, *, failed: bool) -> None:
        """Count a probe."""
        self._probes.inc()
        self._failures.inc(failed)
        self._seconds.set(seconds)

    def note_conflicts(self, conflicts: Sequence[LabelConflict]) -> None:
        """Set the gauge of conflicting labels, and log each conflict that the last call did not have."""
        # _conflicts: those of the last call; _conflicting: the gauge with their number
        for conflict in conflicts:
            if conflict not in self._conflicts:
                log.warning(
                    "label_conflict",
                    label=conflict.name,
                    wanted=conflict.wanted,
                    present=conflict.present,
                    owner=conflict.owner,
                )
        self._conflicts = conflicts
        self._conflicting.set(len(conflicts))

    def count_call(self, verb: str, resource: Resource, status: int, seconds: float) -> None:
        """Count a request to the API server."""
        del resource, seconds
        self._calls.labels(verb, str(status)).inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _DeviceCollector(Collector):
    """Gauges of the devices of now: a device that vanishes takes its series with it."""

    def __init__(self, node: str, prefix: str) -> None:
        self._node = node
        self._prefix = prefix
        self.devices: Sequence[NodeDevice] = ()

    def collect(self) -> Iterator[Metric]:
        """Yield each gauge with a value for each device that states it; a partition counts as a device."""
        # For each metric, its help text and how it is read from a device; None: the device does not state it.
        values: dict[str, tuple[str, Callable[[NodeDevice], float | None]]] = {
            "temperature_celsius": ("Temperature of a device.", lambda device: device.temperature_celsius),
            "utilization_ratio": (
                "Utilization of a device, from 0 to 1.",
                lambda device: None if device.utilization_percent is None else device.utilization_percent / 100,
            ),
            "memory_bytes": ("Memory of a device.", lambda device: device.memory_bytes),
            "memory_free_bytes": ("Memory of a device that nothing uses.", lambda device: device.free_bytes),
        }

        for metric, (text, read) in values.items():
            family = GaugeMetricFamily(f"{self._prefix}_gpu_{metric}", text, labels=_LABELS)
            for device in self.devices:
                if (value := read(device)) is not None:
                    name = f"{device.id}/{device.partition}" if device.partition else device.id
                    family.add_metric((name, self._node), value)
            yield family
