"""The serving options of a service that its spec leaves out, chosen by its Model and the machines that it may use.

The choice is made once for a spec and a Model, and kept in the status: it does not follow each machine that comes or
goes, which would replace replicas. The rest of the controller reads the service that `apply_choice` returns, in whose
spec nothing is missing.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from controller.models.served import METAL, Companion, Served, accelerator_of, runtime_of
from controller.placement.node_rules import NodeRules
from controller.placement.nodes import NodeSize, list_node_sizes
from controller.placement.pool_table import PoolTable, read_pools
from controller.placement.units import HostRequirement
from controller.pod_settings import PodSettings
from controller.reconcile.indexes import OWNER_INDEX, SERVICE_INDEX, namespaced
from controller.reconcile.plan import Snapshot
from controller.services.candidates import list_candidates, state_accelerator
from controller.services.metal_processes import list_hosts
from controller.services.pods.devices import request_devices
from controller.services.pods.queue_gate import is_queued
from controller.services.replica_memory import describe_workload, measure_replica
from crds.inferenceservice import InferenceService
from crds.model import Model
from crds.quantity import parse_quantity, quantity_bytes
from crds.serving import ServingChoice
from crds.size import GIB, MIB
from devices.products import find_product
from devices.vendors import VENDORS, Vendor
from fitness.memory import Workload
from fitness.serving_defaults import AllowedMachine, choose_options, count_contexts
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, METAL_PROCESSES, PODS, ObjectKey
from kube.store import Store
from runtimes.pod import EnginePod
from runtimes.registry import find_runtime

_INPUTS: Final = (
    *("model_ref", "runtime", "hardware", "node_selector", "scheduling", "image"),
    *("context_length", "parallel", "prompt_cache", "mode", "cache_type_k", "cache_type_v", "extra_args"),
    *("speculative", "projector_model_ref", "adapters"),
)
"""Fields of the spec of which an edit chooses anew."""
_NODE_SHARE: Final = 0.875
"""The part of a node's memory that a replica may take: the rest is left to the pods of the system."""
_NOT_READY: Final = {"key": "node.kubernetes.io/not-ready", "operator": "Exists"}
"""Tolerated: each node begins so."""


def apply_choice(service: InferenceService, choice: ServingChoice | None = None) -> InferenceService:
    """Return the service with the options that its spec leaves out; without a choice, those that its status shows."""
    choice = choice or service.status.serving
    if choice is None:
        return service
    stated = service.spec
    spec = structs.replace(
        stated,
        context_length=stated.context_length or choice.context_length,
        parallel=stated.parallel or choice.parallel,
        prompt_cache=choice.prompt_cache or None if stated.prompt_cache is None else stated.prompt_cache,
    )
    return structs.replace(service, spec=spec, status=structs.replace(service.status, serving=choice))


def without_choice(snapshot: Snapshot, service: InferenceService) -> InferenceService:
    """Return the service with no serving options but those that users have decided, as its stored spec states them."""
    key = ObjectKey(service.metadata.namespace, service.metadata.name)
    stored = snapshot.read(INFERENCE_SERVICES, key, InferenceService) or service
    options = {name: getattr(stored.spec, name) for name in ("context_length", "parallel", "prompt_cache")}
    return structs.replace(service, spec=structs.replace(service.spec, **options))


def choose_serving(
    store: Store,
    service: InferenceService,
    model: Model | None,
    companions: Sequence[Companion],
    settings: PodSettings,
) -> InferenceService:
    """Return the service with all options in its spec, and the choice in its status.

    The last choice stays for the same spec and Models while a replica is placed or a machine holds it, and while a
    Model is not known. One that no known machine holds has no `inputs`, so that it is made anew when one comes.
    """
    last, models = service.status.serving, [model, *(companion.model for companion in companions)]
    known = [one for one in models if one is not None and (one.status.gguf or one.spec.stated_bytes is not None)]
    if model is None or len(known) < len(models):
        return apply_choice(service)
    inputs, is_placed = _digest_inputs(service, known), _is_placed(store, service)
    if last is not None and is_placed and last.inputs in {inputs, ""}:
        return apply_choice(service, structs.replace(last, inputs=inputs))

    served = Served(model, runtime_of(service, model, settings.vendors), tuple(companions))
    places = list(_list_places(store, service, served, settings))
    machines = [machine for place in places for machine in place.machines]
    # Where its Models state their memory it is that alone: a replica gets no more, wherever it runs.
    if (stated_bytes := measure_replica(service, served).stated_bytes) is not None:
        machines = [AllowedMachine(describe_workload(served), stated_bytes)]

    def is_held(choice: ServingChoice) -> bool:
        """Return whether one of the machines holds a replica with this choice."""
        options = apply_choice(service, choice).spec
        return any(machine.holds(options) for machine in machines)

    if last is not None and last.inputs == inputs and (not machines or is_held(last)):
        return apply_choice(service)
    choice = _choose(service, model, machines)
    cpu = min((place.cpu for place in places if place.cpu), key=lambda cpu: parse_quantity(cpu) or 0, default="")
    inputs = inputs if is_placed or is_held(choice) else ""
    return apply_choice(service, structs.replace(choice, cpu=cpu, inputs=inputs))


def _is_placed(store: Store, service: InferenceService) -> bool:
    """Return whether a replica serves on a host, or has a node, so that another choice has a cost."""
    namespace, owner = service.metadata.namespace, namespaced(service.metadata.namespace, service.metadata.uid)
    processes = store.by_index(METAL_PROCESSES, OWNER_INDEX, owner)
    if any(process.get("status", {}).get("phase") == "Ready" for process in processes):
        return True
    # Without a Deployment, pods are those of an earlier service of this name.
    pods = store.by_index(PODS, SERVICE_INDEX, namespaced(namespace, service.metadata.name))
    has_node = any(pod.get("spec", {}).get("nodeName") for pod in pods)
    return has_node and bool(store.by_index(DEPLOYMENTS, OWNER_INDEX, owner))


def choose_for_host(
    service: InferenceService, model: Model | None, companions: Sequence[Companion], budget_bytes: int
) -> InferenceService:
    """Return the service with all options in its spec, for one host that has so much memory for it."""
    if model is None:
        return service
    served = Served(model, runtime_of(service, model, VENDORS), tuple(companions))
    budget_bytes = budget_bytes // GIB * GIB or budget_bytes  # as in a cluster, which may take the process over
    limit_bytes = min(budget_bytes, measure_replica(service, served).stated_bytes or budget_bytes)
    return apply_choice(service, _choose(service, model, [AllowedMachine(describe_workload(served), limit_bytes)]))


def _choose(service: InferenceService, model: Model, machines: Sequence[AllowedMachine]) -> ServingChoice:
    """Return the choice for a service and its Model."""
    header = model.status.gguf
    options, message = choose_options(service.spec, header.context_length if header is not None else None, machines)
    return ServingChoice(
        context_length=options.context_tokens,
        parallel=options.parallel,
        prompt_cache=str(options.prompt_cache or ""),
        message="; ".join(filter(None, (message, count_contexts(options, machines)))),
    )


def _digest_inputs(service: InferenceService, models: Sequence[Model]) -> str:
    """Return a digest of the fields of the spec and of the weights for which the options are chosen.

    Empty fields are left out, so a field that a later version adds does not change the digest.
    """
    stated = {name: value for name in _INPUTS if (value := getattr(service.spec, name)) not in (None, [], {})}
    resources = service.spec.resources
    memory = [resources.memory, resources.memory_limit, resources.gpu]
    weights = [
        (model.spec.source, model.spec.stated_bytes, model.status.size_bytes, header and header.context_length)
        for model in models
        for header in [model.status.gguf]
    ]
    return hashlib.sha256(msgspec.json.encode([stated, memory, weights], order="sorted")).hexdigest()[:16]


class _Place(NamedTuple):
    """The machines of one accelerator that a service may use."""

    machines: list[AllowedMachine]
    cpu: str = ""
    """CPU for the engine of a pod there; empty: none."""


def _list_places(store: Store, service: InferenceService, served: Served, settings: PodSettings) -> Iterator[_Place]:
    """Yield the different sizes of the devices, hosts and nodes that a service may use, by accelerator."""
    model, table = served.model, read_pools(store, settings.vendors)
    for name in list_candidates(service, model, table, settings.vendors) or (accelerator_of(service, model),):
        candidate = state_accelerator(service, name, table, replicas=1)
        workload = describe_workload(served._replace(runtime=runtime_of(candidate, model, settings.vendors)))
        if name == METAL:
            yield _Place(_list_hosts(store, candidate, workload, table))
        elif name in settings.vendors:
            yield _list_nodes(store, candidate, workload, table, settings)


def _list_hosts(store: Store, service: InferenceService, workload: Workload, table: PoolTable) -> list[AllowedMachine]:
    """Return the memory for models of the hosts that a service may use, in whole GiB."""
    spec, pools = service.spec, service.spec.scheduling.pools or [METAL]
    selector, tolerations = frozenset(spec.node_selector.items()), tuple(spec.tolerations)
    requirement = HostRequirement(workload.runtime, service.metadata.namespace, selector, tolerations)
    _hosts, capacities = list_hosts(store)
    budgets = {
        capacity.budget_bytes // GIB * GIB or capacity.budget_bytes
        for capacity in capacities
        if not (capacity.is_cordoned or requirement.refuse_host(capacity))
        and table.find_pool(METAL, dict(capacity.labels)) in pools
    }
    return [AllowedMachine(workload, budget_bytes) for budget_bytes in budgets]


def _list_nodes(
    store: Store, service: InferenceService, workload: Workload, table: PoolTable, settings: PodSettings
) -> _Place:
    """Return the devices, or nodes without devices, that admit a pod of a service with one accelerator."""
    spec, accelerator = service.spec, service.spec.hardware.accelerator or ""
    vendor = settings.vendors[accelerator]
    devices, pools = request_devices(service, vendor), spec.scheduling.pools or [accelerator]
    has_pools = is_queued(service, devices, settings) and len(table.list_pools(accelerator)) > 1
    tolerations = [*msgspec.to_builtins([*vendor.tolerations, *spec.tolerations]), _NOT_READY]
    rules = NodeRules({"nodeSelector": spec.node_selector, "tolerations": tolerations})

    def admits(node: Obj) -> bool:
        is_in_pool = not has_pools or table.find_pool(accelerator, node["metadata"]["labels"]) in pools
        return is_in_pool and rules.admit(node)

    nodes = list_node_sizes(store, accelerator, vendor, admits)
    cpu = choose_cpu(find_runtime(workload.runtime).pod, devices.number, nodes)
    memory_sizes = {int(node.memory_bytes * _NODE_SHARE) * max(1, devices.number) for node in nodes}
    if (stated := spec.resources.memory or spec.resources.memory_limit) is not None:
        memory_sizes = {min(size, quantity_bytes(stated)) for size in memory_sizes}
    if not devices.number:
        return _Place([AllowedMachine(workload, size, node_bytes=size) for size in memory_sizes], cpu)

    sizes, node_bytes = _list_device_sizes(service, vendor, nodes), min(memory_sizes, default=0)
    return _Place([AllowedMachine(workload, size, devices.number, node_bytes) for size in sizes], cpu)


def choose_cpu(engine: EnginePod | None, devices: int, nodes: Collection[NodeSize]) -> str:
    """Return the CPU that an engine requests, as the API server writes it; empty: its needs are unknown.

    They are never more than the largest node has for its devices, or in all. On a processor they are a quarter of that,
    so that several services share a node: for two threads at least, and 8 at most.
    """
    if engine is None or engine.cores is None:
        return ""
    largest = max((node.millicores for node in nodes), default=0) or (1 << 20 if devices else 2250)
    room = max(100, largest * max(1, devices) - 250)  # the proxy and DaemonSets get 250
    millicores = min((engine.cores + devices) * 1000 if devices else min(8000, max(1500, room // 4)), room)
    return f"{millicores}m" if millicores % 1000 else f"{millicores // 1000}"


def _list_device_sizes(service: InferenceService, vendor: Vendor, nodes: Collection[NodeSize]) -> set[int]:
    """Return the different memories of a device: as the service states it, of the products that it names, or of nodes.

    Sizes of nodes are those of whole devices; that of a partition is known only if it is stated.
    """
    hardware, selector = service.spec.hardware, service.spec.hardware.device_selector
    if stated := hardware.memory or (selector.memory if selector is not None else None):
        return {quantity_bytes(stated)}
    if selector is not None or hardware.resource not in {None, vendor.resource}:
        return set()
    products = (find_product(hardware.accelerator or "", name) for name in hardware.products)
    listed = {product.memory_mib * MIB for product in products if product is not None and product.memory_mib}
    return listed or {node.device_bytes for node in nodes if node.device_bytes is not None}
