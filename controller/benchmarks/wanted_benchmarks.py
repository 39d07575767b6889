"""The benchmarks that are worth while: each service on each device class that its replicas could be on.

Nodes of one class are looked at as one, so that the cost is that of services times classes, however many nodes there
are. Left out are processors, whose idleness nobody states, devices that pods share or claim, hosts outside of the
cluster, and services whose speed is not that of their Model alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from controller.benchmarks.benchmark_job import BenchmarkKey, build_benchmark_pod, digest_inputs
from controller.benchmarks.benchmark_plan import WantedBenchmark
from controller.models.served import Served, accelerator_of, list_companions
from controller.placement.pod_requests import count_requests
from controller.placement.pod_units import build_requirement
from controller.placement.pool_table import PoolTable, read_pools
from controller.placement.units import Cell, fits
from controller.pod_settings import PodSettings
from controller.reconcile.plan import decode_stored
from controller.services.candidates import list_candidates, state_accelerator
from controller.services.checked_replica import check_replica
from controller.services.device_classes import find_node_class
from controller.services.pods.devices import request_devices
from controller.services.pods.pod_template import EngineChoice
from crds.inferenceservice import InferenceService
from crds.model import Model
from crds.pods import PodOptions
from devices.device_class import count_devices
from fitness.performance import MOST_TOKENS_PER_SECOND, hash_model
from fitness.performance_store import PerformanceTable
from fitness.serving_devices import ServingDevices
from fitness.speed import estimate_speed, find_active_share
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, MODELS, NODES, ObjectKey
from kube.store import Store

_MOST_NODES: Final = 4
"""Idle nodes that are named for a benchmark."""


class PreparedBenchmark(NamedTuple):
    """A wanted benchmark with all that its Job is made of."""

    wanted: WantedBenchmark
    service: InferenceService
    served: Served
    choice: EngineChoice

    def find_image(self) -> str:
        """Return the image of the engine."""
        choice = self.choice
        return choice.pod.image(choice.accelerator, choice.vendor, choice.runtime) or ""

    def estimate_speed(self, classes: Iterable[ServingDevices]) -> float | None:
        """Return the estimate without corrections, in tokens a second; None: something is unknown.

        Args:
            classes: one device of each device class of the accelerator.
        """
        model, number = self.served.model, request_devices(self.service, self.choice.vendor).number
        layout, device_class = model.status.layout, self.wanted.key.device_class
        there = (each for each in classes if count_devices(each.device_class, number) == device_class)
        if layout is None or (one := next(there, None)) is None:
            return None
        devices = one._replace(device_class=device_class, device_count=max(1, number))
        share = find_active_share(model)
        found = estimate_speed(layout, self.service.spec, self.served.runtime, devices, active_share=share)
        expected = found.generation.expected if found is not None else 0.0
        # A forged header states a model of a few bytes, and an order with such a number would not be read again.
        return expected if 0 < expected < MOST_TOKENS_PER_SECOND else None


class NodeGroup(NamedTuple):
    """Nodes that are alike as far as their device class depends on it."""

    node: Obj
    """One of them."""
    cells: list[Cell]


def group_nodes(store: Store, cells: Iterable[Cell], settings: PodSettings) -> list[NodeGroup]:
    """Return the nodes with devices in groups."""
    names = {name for vendor in settings.vendors.values() for name in _list_labels(vendor.product_label, vendor)}
    groups: dict[object, NodeGroup] = {}
    for cell in cells:
        node = store.get(NODES, cell.name) if cell.kind == "node" else None
        if node is None:
            continue
        labels: dict[str, str] = node["metadata"]["labels"]
        devices = tuple(sorted(name for name, number in node["status"]["allocatable"].items() if number != "0"))
        alike = (tuple((name, labels[name]) for name in sorted(names & labels.keys())), devices)
        groups.setdefault(alike, NodeGroup(node, [])).cells.append(cell)
    return list(groups.values())


def _list_labels(product_label: str | None, vendor: object) -> list[str]:
    further = (getattr(vendor, name) for name in ("shared_label", "replicas_label", "memory_label"))
    return [each for each in (product_label, *further) if each]


class BenchmarkScope(NamedTuple):
    """All that is looked at for each service."""

    store: Store
    settings: PodSettings
    table: PerformanceTable
    pools: PoolTable
    groups: Sequence[NodeGroup]


def open_scope(store: Store, settings: PodSettings, table: PerformanceTable, cells: Iterable[Cell]) -> BenchmarkScope:
    """Return the scope of one look at all services."""
    return BenchmarkScope(
        store, settings, table, read_pools(store, settings.vendors), group_nodes(store, cells, settings)
    )


def prepare_benchmarks(scope: BenchmarkScope, service_object: Obj) -> Iterator[PreparedBenchmark]:
    """Yield the benchmarks of a service that are worth while."""
    service = next(iter(decode_stored(scope.store, INFERENCE_SERVICES, (service_object,), InferenceService)), None)
    if service is None or service.metadata.deletion_timestamp is not None or service.spec.mode != "chat":
        return
    if service.spec.suspend or list_companions(service.spec) or service.spec.container is not None:
        return
    service = _drop_own_settings(service)
    key = ObjectKey(service.metadata.namespace, service.spec.model_ref)
    found = scope.store.get(MODELS, key.name, key.namespace)
    model = next(iter(decode_stored(scope.store, MODELS, (found,), Model)), None) if found is not None else None
    if model is None or model.spec.cache.scope == "node":
        return
    vendors = scope.settings.vendors
    names = list_candidates(service, model, scope.pools, vendors) or (accelerator_of(service, model),)
    for name in names:
        if name in vendors and vendors[name].resource is not None:
            stated = state_accelerator(service, name, scope.pools, service.spec.replicas)
            yield from _prepare_on(scope, stated, model, name)


def _drop_own_settings(service: InferenceService) -> InferenceService:
    """Return a service with the image and arguments of Pomona alone.

    The measurement is that of a model hash, which others may use, and these could make it anything.
    """
    return replace(service, spec=replace(service.spec, image=None, extra_args=[], pod=PodOptions()))


def _prepare_on(
    scope: BenchmarkScope, service: InferenceService, model: Model, accelerator: str
) -> Iterator[PreparedBenchmark]:
    checked = check_replica(scope.store, service, model, (), scope.settings)
    served, choice = checked.checked.served, checked.choice
    if served is None or choice is None or checked.checked.problem is not None:
        return
    namespace, name = service.metadata.namespace, service.metadata.name
    model_hash = hash_model(model, served.runtime, service.spec)
    known = scope.table.list_classes(model_hash, namespace)
    need, requirement = None, None
    cells: dict[str, list[Cell]] = {}
    for group in scope.groups:
        device_class = find_node_class(service, accelerator, choice.vendor, group.node)
        if device_class is not None and device_class not in known:
            cells.setdefault(device_class, []).extend(group.cells)
    for device_class, there in sorted(cells.items()):
        if need is None or requirement is None:
            pod = build_benchmark_pod(service, served, choice, scope.settings)
            need, requirement = count_requests(pod), build_requirement(pod, None)
        able = [each for each in there if not requirement.refuse(each)]
        if not able:
            continue
        idle = [each.name for each in able if not each.closed and fits(need, each.free)]
        wanted = WantedBenchmark(
            BenchmarkKey(namespace, model_hash, device_class),
            ObjectKey(namespace, name),
            accelerator,
            digest_inputs(service, choice, scope.settings),
            tuple(idle[:_MOST_NODES]),
        )
        yield PreparedBenchmark(wanted, service, served, choice)
