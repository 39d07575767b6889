"""The benchmarks that are worth while: each service on each device class that its replicas could be on.

Nodes of one class are looked at as one, so that the cost is that of services times classes, however many nodes there
are. Left out are processors, whose idleness nobody states, devices that pods share or claim, hosts outside of the
cluster, and services whose speed is not that of their Model alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from controller.benchmarks.benchmark_job import BenchmarkKey, MeasuredEngine, build_benchmark_pod, digest_inputs
from controller.benchmarks.benchmark_plan import WantedBenchmark
from controller.models.served import Served, accelerator_of, list_companions
from controller.placement.pod_requests import count_requests
from controller.placement.pod_units import build_requirement
from controller.placement.pool_table import PoolTable, read_pools
from controller.placement.units import Cell, fits
from controller.pod_settings import PodSettings
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import decode_stored
from controller.services.candidates import list_candidates, state_accelerator
from controller.services.checked_replica import check_replica
from controller.services.device_classes import find_node_class
from controller.services.endpoints import Endpoint, list_ready_endpoints, list_replica_addresses
from controller.services.pods.devices import request_devices
from controller.services.pods.pod_template import EngineChoice
from controller.services.serving_choice import apply_choice
from crds.inferenceservice import InferenceService
from crds.model import Model
from crds.pods import PodOptions
from devices.device_class import scale_class
from fitness.performance import MOST_TOKENS_PER_SECOND, hash_model
from fitness.performance_store import PerformanceTable
from fitness.serving_devices import ServingDevices
from fitness.speed import estimate_speed, find_active_share
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, MODELS, NODES, PODS, ObjectKey
from kube.store import Store

_MOST_NODES: Final = 4
"""Idle nodes that are named for a benchmark."""


class PreparedBenchmark(NamedTuple):
    """A wanted benchmark with all that its Job is made of."""

    wanted: WantedBenchmark
    service: InferenceService
    served: Served
    choice: EngineChoice

    def describe_engine(self, classes: Iterable[ServingDevices]) -> MeasuredEngine:
        """Return what is stored with the measurement: Model, engine, image, accelerator, and the estimate of the speed.

        `classes` has one device of each device class of the accelerator, by which the speed is estimated.
        """
        choice = self.choice
        image = choice.pod.find_image(choice.accelerator, choice.vendor, choice.runtime) or ""
        name = self.served.model.metadata.name
        return MeasuredEngine(name, choice.runtime, image, self.wanted.accelerator, self._estimate_speed(classes))

    def _estimate_speed(self, classes: Iterable[ServingDevices]) -> float | None:
        """Return the speed as it is estimated without what other benchmarks have shown, in tokens a second.

        None: the Model's layout or the device is not known, or there is no estimate, or no plausible one.
        """
        model = self.served.model
        layout, device_class = model.status.layout, self.wanted.key.device_class
        number = request_devices(self.service, self.choice.vendor).number  # the devices that one replica asks for
        # The device of which `number` make the measured class: for the class of two L4, it is one L4.
        matching = (one for one in classes if scale_class(one.device_class, number) == device_class)
        if layout is None or (device := next(matching, None)) is None:
            return None

        # Estimate with all devices of the replica. Of a mixture of experts, a share of the weights is active.
        devices = device._replace(device_class=device_class, device_count=max(1, number))
        share = find_active_share(model)
        estimate = estimate_speed(layout, self.service.spec, self.served.runtime, devices, active_share=share)
        expected = estimate.generation.expected if estimate is not None else 0.0
        # A forged header states a model of a few bytes, and a record with such a number would not be read again.
        return expected if 0 < expected < MOST_TOKENS_PER_SECOND else None


class NodeGroup(NamedTuple):
    """Nodes that are alike as far as their device class depends on it."""

    node: Obj
    """One of them."""
    cells: list[Cell]


def group_nodes(store: Store, cells: Iterable[Cell], settings: PodSettings) -> list[NodeGroup]:
    """Return the nodes with devices, grouped by the labels and resources that decide their device class."""
    # The labels of a node that decide its device class, of all vendors of accelerators.
    vendors = settings.vendors.values()
    label_names = {
        name
        for vendor in vendors
        for name in (vendor.product_label, vendor.shared_label, vendor.replicas_label, vendor.memory_label)
        if name
    }

    # By its labels and resources, each group of nodes that are alike; hosts, the other kind of cell, are left out.
    groups: dict[object, NodeGroup] = {}
    for cell in cells:
        node = store.get(NODES, cell.name) if cell.kind == "node" else None
        if node is None:
            continue
        labels: dict[str, str] = node["metadata"]["labels"]
        resources = tuple(sorted(name for name, number in node["status"]["allocatable"].items() if number != "0"))
        hardware_labels = tuple((name, labels[name]) for name in sorted(label_names & labels.keys()))
        # The first node of a group stands for all of them.
        group = groups.setdefault((hardware_labels, resources), NodeGroup(node, []))
        group.cells.append(cell)
    return list(groups.values())


class BenchmarkScope(NamedTuple):
    """The inputs by which the benchmarks of each service are listed."""

    store: Store
    settings: PodSettings
    table: PerformanceTable
    pools: PoolTable
    groups: Sequence[NodeGroup]


def open_scope(store: Store, settings: PodSettings, table: PerformanceTable, cells: Iterable[Cell]) -> BenchmarkScope:
    """Read pools and nodes once, for the benchmarks of all services."""
    return BenchmarkScope(
        store, settings, table, read_pools(store, settings.vendors), group_nodes(store, cells, settings)
    )


def prepare_benchmarks(scope: BenchmarkScope, service_object: Obj) -> Iterator[PreparedBenchmark]:
    """Yield the benchmarks of a service that are worth while, on each accelerator that it may use.

    There are none of a service that is deleted or suspended, does not serve chat, has companions (such as a draft model
    or adapters) or a container of its own, or whose Model is missing or has a copy on each node. A service or Model
    that cannot be decoded has none.
    """
    # 1. The service, unless it is one of those without benchmarks; None: it cannot be decoded.
    service = next(iter(decode_stored(scope.store, INFERENCE_SERVICES, (service_object,), InferenceService)), None)
    if service is None or service.metadata.deletion_timestamp is not None or service.spec.mode != "chat":
        return
    if service.spec.suspend or list_companions(service.spec) or service.spec.container is not None:
        return

    # 2. Its Model; scope "node" means a copy on each node.
    key = ObjectKey(service.metadata.namespace, service.spec.model_ref)
    stored = scope.store.get(MODELS, key.name, key.namespace)
    model = next(iter(decode_stored(scope.store, MODELS, (stored,), Model)), None) if stored is not None else None
    if model is None or model.spec.cache.scope == "node":
        return

    # 3. Measure it with Pomona's image and arguments: others may use the result, and those that a service states could
    # make it anything.
    replicas = _find_replicas(scope.store, service)
    service = apply_choice(service)
    service = replace(service, spec=replace(service.spec, image=None, extra_args=[], pod=PodOptions()))

    # 4. The accelerators: its candidates if it may choose among several, else the single one that it or its Model
    # states. Left out are those without devices to count, such as processors (resource None).
    vendors = scope.settings.vendors
    names = list_candidates(service, model, scope.pools, vendors) or (accelerator_of(service, model),)
    for name in names:
        if name in vendors and vendors[name].resource is not None:
            # stated: a copy of the service that states this one accelerator.
            stated = state_accelerator(service, name, scope.pools, service.spec.replicas)
            yield from _prepare_on_accelerator(scope, stated, model, name, replicas)


def _find_replicas(store: Store, service: InferenceService) -> dict[str, Endpoint]:
    """Return the pods of a service that can be measured, by the name of their node.

    There are none if the service is not Ready, or has requests now, which a measurement would slow down.
    """
    if service.status.phase != "Ready" or service.status.requests_per_minute:
        return {}
    metadata = service.metadata
    slices = store.by_index(ENDPOINT_SLICES, SERVICE_INDEX, namespaced(metadata.namespace, metadata.name))
    pods = store.by_index(PODS, SERVICE_INDEX, namespaced(metadata.namespace, metadata.name))
    addresses = list_replica_addresses(pods, hosts=())  # a replica on a host is measured by the host itself
    endpoints = (endpoint for endpoint in list_ready_endpoints(slices) if endpoint.address in addresses)
    return {endpoint.node: endpoint for endpoint in endpoints if endpoint.node}


def _prepare_on_accelerator(
    scope: BenchmarkScope,
    service: InferenceService,
    model: Model,
    accelerator: str,
    replicas: Mapping[str, Endpoint],
) -> Iterator[PreparedBenchmark]:
    """Yield the benchmarks of a service on the device classes of one accelerator, without those that were measured.

    1. Check the service: nothing is measured of one that cannot have a replica on this accelerator.
    2. Collect the cells (nodes) of each device class that has no measurement yet.
    3. Yield a class if a node of it suits the pod, or a replica of the service is there. The replica is measured in
       place of a Job; a Job gets one of the nodes that are idle now.

    Args:
        scope: the store and what was read once for all services.
        service: the service, which states this accelerator.
        model: its Model.
        accelerator: the accelerator.
        replicas: the idle replicas of the service, by node.
    """
    # 1. served: the Model and its engine. choice: the engine of a pod and its hardware; None: it runs on no node.
    checked = check_replica(scope.store, service, model, companions=(), settings=scope.settings)
    served, choice = checked.checked.served, checked.choice
    if served is None or choice is None or checked.checked.problem is not None:
        return
    # 2. Cells by device class; nodes of one group are alike, so one of them tells the class of all.
    namespace, name = service.metadata.namespace, service.metadata.name
    model_hash = hash_model(model, served.runtime, service.spec)
    measured = scope.table.list_classes(model_hash, namespace)
    cells: dict[str, list[Cell]] = {}
    for group in scope.groups:
        device_class = find_node_class(service, accelerator, choice.vendor, group.node)
        if device_class is not None and device_class not in measured:
            cells.setdefault(device_class, []).extend(group.cells)
    if not cells:
        return
    # 3. The demands of its pod, and the nodes that meet them.
    pod = build_benchmark_pod(service, served, choice, scope.settings)
    need, requirement = count_requests(pod), build_requirement(pod, None)
    for device_class, class_cells in sorted(cells.items()):
        # suitable: nodes whose labels and taints admit the pod. Idle ones also take new units and have room now.
        suitable = [cell for cell in class_cells if not requirement.refuse(cell)]
        replica = next((replicas[cell.name] for cell in class_cells if cell.name in replicas), None)
        if not suitable and replica is None:
            continue
        idle_names = [cell.name for cell in suitable if not cell.closed and fits(need, cell.free)]
        wanted = WantedBenchmark(
            key=BenchmarkKey(namespace, model_hash, device_class),
            service=ObjectKey(namespace, name),
            accelerator=accelerator,
            inputs=digest_inputs(service, choice, scope.settings),
            is_ready=service.status.phase == "Ready",
            nodes=tuple(idle_names[:_MOST_NODES]),
            replica=replica,
        )
        yield PreparedBenchmark(wanted, service, served, choice)
