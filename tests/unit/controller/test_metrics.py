"""The metrics of the controller: what is counted, and that docs/metrics.md lists exactly what is served."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.metrics import MOST_POOLS, OTHER_POOLS, ControllerMetrics
from controller.placement.start_estimate import StartRange
from controller.placement.start_history import UnitStart
from controller.services.traffic import TokenSource
from crds.meta import Priority
from kube.client import Obj
from kube.resources import (
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    NODE_FITNESSES,
    PODS,
    ObjectKey,
    Resource,
)
from tests.support.api_objects import GIB, condition, host, model, process, service, store
from tests.support.waiting_units import waiting_unit

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(?P<name>[a-z_]+)` \| (?P<type>counter|gauge|histogram) \|(?P<labels>[^|]*)\|", re.MULTILINE)

START = UnitStart(
    unit=waiting_unit("chat", pools=("nvidia",), priority="high"),
    wait_seconds=90.0,
    first_range=StartRange(1_100.0, 1_400.0),
    first_range_at=1_000.0,
    started_at=1_200.0,
)


def used() -> ControllerMetrics:
    """Return metrics of which each has counted something."""
    metrics = ControllerMetrics()
    metrics.observe_queue(lambda: 3, lambda: 1.5)
    metrics.count_reconcile("Model", "error", 0.1)
    metrics.count_call("get", MODELS, 200, 0.1)
    metrics.count_admission("admitted")
    metrics.count_probe("Generated")
    metrics.count_watch_restart("kopf")
    metrics.objects.count_change(MODELS, None, model())
    metrics.queue.set_depths({("nvidia", "high"): 2})
    metrics.queue.count_start(START)
    metrics.queue.count_preemption("Priority")
    metrics.queue.observe_plan(0.01)
    followed = store()
    metrics.follow_store(followed)
    metrics.models.set_tokens(ObjectKey("team", "chat"), {TokenSource("team", "qwen", "vllm", "gpu-1"): 7})
    degraded = {"type": "SpeedDegraded", "status": "True"}
    followed.put(INFERENCE_SERVICES, service(status={"conditions": [degraded]}))
    fitness = {"metadata": {"name": "gpu-1", "uid": "u", "resourceVersion": "1"}}
    facts = {"observedAt": "2026-11-21T12:00:00Z", "memoryBytes": GIB, "devices": [{"id": "0", "memoryBytes": GIB}]}
    followed.put(NODE_FITNESSES, fitness | {"status": facts})
    loaded = process("a", host="studio-1", phase="Ready")
    loaded["status"] |= {"startedAt": "2026-11-21T12:00:00Z", "readyAt": "2026-11-21T12:00:05Z"}
    followed.put(METAL_PROCESSES, loaded)
    return metrics


def served(metrics: ControllerMetrics) -> dict[str, tuple[str, frozenset[str]]]:
    """Return type and labels of each metric by name, as a scraper reads them."""
    families = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert family.samples, name
        families[name] = family.type, frozenset(labels)
    return families


def value(metrics: ControllerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def read_section() -> str:
    """Return the part of the document about the controller."""
    return DOCUMENT.read_text().partition("## Metrics and health of the controller\n")[2].partition("\n## ")[0]


def test_documented_metrics_are_those_that_are_served() -> None:
    documented = {
        row["name"]: (row["type"], frozenset(re.findall(r"`([a-z_]+)`", row["labels"])))
        for row in ROW.finditer(read_section())
    }
    assert documented == served(used())


def test_reconciles_are_counted_by_kind_and_result() -> None:
    metrics = ControllerMetrics()
    for _ in range(2):
        metrics.count_reconcile("Model", "success", 0.2)
    metrics.count_reconcile("Model", "error", 0.2)
    assert value(metrics, "controller_runtime_reconcile_total", controller="Model", result="success") == 2
    assert value(metrics, "controller_runtime_reconcile_errors_total", controller="Model") == 1
    assert value(metrics, "controller_runtime_reconcile_time_seconds_count", controller="Model") == 3


def test_unanswered_call_has_no_status_and_a_watch_no_duration() -> None:
    metrics = ControllerMetrics()
    metrics.count_call("get", MODELS, 0, 30)
    metrics.count_call("watch", MODELS, 200, 3000)
    assert value(metrics, "rest_client_requests_total", verb="get", resource="models", code="<error>") == 1
    assert value(metrics, "rest_client_requests_total", verb="watch", resource="models", code="200") == 1
    assert value(metrics, "rest_client_request_duration_seconds_count", verb="watch", resource="models") is None
    assert value(metrics, "pomona_watch_restarts_total", resource="models") is None
    metrics.count_call("watch", MODELS, 200, 3000)
    assert value(metrics, "pomona_watch_restarts_total", resource="models") == 1


def test_objects_are_counted_by_their_last_phase() -> None:
    metrics = ControllerMetrics()

    def counted(resource: Resource, phase: str) -> float | None:
        return value(metrics, "pomona_objects", kind=resource.kind, phase=phase)

    waiting, ready = process("a"), process("a", host="studio-1", phase="Ready")
    short = [condition("Ready", "True"), condition("MemoryPressure", "True")]
    changes: list[tuple[Resource, Obj | None, Obj | None]] = [
        (METAL_PROCESSES, None, waiting),
        (METAL_PROCESSES, waiting, ready),
        (METAL_PROCESSES, None, process("b")),
        (PODS, None, {"metadata": {}}),
        (METAL_HOSTS, None, host()),
        (METAL_HOSTS, host(), host(ready="False")),
        (METAL_HOSTS, None, host("studio-2", conditions=short)),
    ]
    for change in changes:
        metrics.objects.count_change(*change)
    assert (counted(METAL_PROCESSES, "Pending"), counted(METAL_PROCESSES, "Ready")) == (1, 1)
    assert value(metrics, "pomona_waiting_processes") == 1
    assert (counted(METAL_HOSTS, "Ready"), counted(METAL_HOSTS, "NotReady")) == (0, 1)
    assert counted(METAL_HOSTS, "MemoryPressure") == 1
    metrics.objects.count_change(METAL_PROCESSES, ready, None)
    assert counted(METAL_PROCESSES, "Ready") == 0


def test_names_of_pools_without_number_make_a_bounded_number_of_series() -> None:
    metrics = ControllerMetrics()
    for number in range(MOST_POOLS + 3):
        metrics.queue.set_depths({(f"pool-{number}", "high"): 1, (f"pool-{number}", "low"): 1})
        unit = msgspec.structs.replace(START.unit, pools=(f"pool-{number}",))
        metrics.queue.count_start(START._replace(unit=unit))
    assert value(metrics, "pomona_queue_depth", pool="pool-0", priority="high") == 0
    metrics.queue.set_depths({("more", "high"): 2, ("even-more", "high"): 3, ("pool-0", "high"): 4})
    assert value(metrics, "pomona_queue_depth", pool=OTHER_POOLS, priority="high") == 5
    assert value(metrics, "pomona_queue_depth", pool="pool-0", priority="high") == 4
    assert value(metrics, "pomona_queue_starts_total", pool=OTHER_POOLS, estimate="in_range") == 3
    lines = metrics.render().decode().splitlines()
    series = [line for line in lines if line.startswith("pomona_queue_depth{")]
    assert len(series) == 2 * MOST_POOLS + len(get_args(Priority))
    assert sum(line.startswith("pomona_queue_starts_total{") for line in lines) == MOST_POOLS + 1


def test_depth_of_a_queue_that_became_empty_is_0() -> None:
    metrics = ControllerMetrics()
    metrics.queue.set_depths({("nvidia", "high"): 2})
    metrics.queue.set_depths({("metal", "low"): 1})
    assert value(metrics, "pomona_queue_depth", pool="nvidia", priority="high") == 0
    assert value(metrics, "pomona_queue_depth", pool="metal", priority="low") == 1


@pytest.mark.parametrize(
    ("started_at", "estimate"), [(1_050.0, "early"), (1_100.0, "in_range"), (1_400.0, "in_range"), (1_401.0, "late")]
)
def test_start_is_counted_by_its_first_estimate(started_at: float, estimate: str) -> None:
    metrics = ControllerMetrics()
    metrics.queue.count_start(START._replace(started_at=started_at))
    assert value(metrics, "pomona_queue_starts_total", pool="nvidia", estimate=estimate) == 1
    assert value(metrics, "pomona_queue_wait_seconds_sum", pool="nvidia", priority="high") == 90
    # The middle of 100 to 400 s is 200 s.
    ratio = (started_at - 1_000) / 200
    assert value(metrics, "pomona_queue_estimate_error_ratio_sum", pool="nvidia") == pytest.approx(ratio)


def test_start_without_an_estimate_has_no_error() -> None:
    metrics = ControllerMetrics()
    metrics.queue.count_start(START._replace(first_range=None))
    assert value(metrics, "pomona_queue_starts_total", pool="nvidia", estimate="none") == 1
    assert value(metrics, "pomona_queue_estimate_error_ratio_count", pool="nvidia") == 0
