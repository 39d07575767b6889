"""The gauges of the density API, computed when they are read. docs/density-api.md lists them, which a test compares."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Final

import prometheus_client
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from console.density_queries import count_fitting
from console.density_snapshot import DensitySnapshot
from console.fit_table import FitTable, compute_score
from fitness.fit import FIT_LEVELS

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_NODE_GAUGES: Final = {
    "score": "Score of the model that fits best, from 0 to 100.",
    "stale": "1 if the facts of the node are stale.",
    "ram_total_gb": "Memory of the node in GiB.",
    "ram_available_gb": "Memory of the node that is neither used nor requested, in GiB.",
    "gpu_vram_gb": "Memory of the largest device in GiB; of a host its budget.",
    "gpu_count": "Devices.",
    "model_count": "Models that fit.",
}

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # it has no annotations


class DensityCollector(Collector):
    """The gauges of one snapshot."""

    def __init__(self, snapshot: DensitySnapshot, table: FitTable) -> None:
        self._snapshot, self._table = snapshot, table

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a gauge for each fact of nodes and hosts, then the totals; an unknown value has no series.

        Score and number of models are computed once for each profile: nodes of a profile are alike.
        """
        snapshot = self._snapshot

        # 1. Begin a gauge for each fact. _NODE_GAUGES: its help text, by the end of its name
        families = {
            name: GaugeMetricFamily(f"pomona_density_node_{name}", text, labels=("node",))
            for name, text in _NODE_GAUGES.items()
        }

        # 2. Score and number of models for each profile, kept by the name of each of its nodes. The score is that of
        #    the model that fits best. `slowness` is the negated speed.
        flags = snapshot.flag_models(None)  # models of all namespaces count
        fits = dict[str, tuple[float, int]]()
        for profile in snapshot.profiles:
            ranked = self._table.rank_models(snapshot.models, profile)
            score = compute_score(FIT_LEVELS[ranked[0].level], tokens_per_second=-ranked[0].slowness) if ranked else 0.0
            summary = score, count_fitting(snapshot, self._table, profile, flags)
            fits.update(dict.fromkeys(profile.names, summary))

        # 3. The series of each node. One on which nothing may be placed has no profile, and score and number are 0.
        for name in snapshot.names:
            shown, (score, count) = snapshot.describe_machine(name), fits.get(name, (0.0, 0))
            facts = {
                "score": score,
                "stale": float(snapshot.machines[name].is_stale),
                "ram_total_gb": shown.total_ram_gb,
                "ram_available_gb": shown.available_ram_gb,
                "gpu_vram_gb": shown.gpu_vram_gb,
                "gpu_count": float(shown.gpu_count),
                "model_count": float(count),
            }
            for gauge, value in facts.items():
                if value is not None:
                    families[gauge].add_metric((name,), value)
        yield from families.values()

        # 4. The totals.
        stale = sum(machine.is_stale for machine in snapshot.machines.values())
        totals = {"total": ("Nodes and hosts.", len(snapshot.machines)), "stale": ("Stale nodes and hosts.", stale)}
        for name, (text, value) in totals.items():
            yield GaugeMetricFamily(f"pomona_density_cluster_nodes_{name}", text, value=value)


def build_process_registry() -> CollectorRegistry:
    """Return the metrics of this process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Gauge("pomona_build_info", "1.", ("version",), registry=registry).labels(version("pomona")).set(1)
    return registry


def render_metrics(process: CollectorRegistry, snapshot: DensitySnapshot, table: FitTable) -> bytes:
    """Return all metrics as text."""
    registry = CollectorRegistry()
    registry.register(DensityCollector(snapshot, table))
    return generate_latest(process) + generate_latest(registry)
