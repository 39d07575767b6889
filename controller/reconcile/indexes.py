"""The indexes of the controller's store: a decision finds what it needs without a look at all objects.

Each index is declared here, once, and is kept for its whole resource. A test compares them with a search of everything.
`discard_from_index` is for what a class indexes by itself, such as the services that were measured with an engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from crds.meta import (
    KUEUE_GATE,
    KUEUE_QUEUE_NAME,
    LABEL_MODEL,
    LABEL_SERVICE,
    LABEL_SERVICE_NAME,
    LABEL_SLICE_MANAGED_BY,
    QUEUE_GATE,
    SLICE_MANAGED_BY,
    gateway_shard,
    split_slice_name,
)
from crds.modelroute import split_service
from fitness.performance_store import LABEL_BENCHMARK
from kube.client import Obj
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    GATEWAY_KEYS,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODEL_ROUTES,
    MODELS,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    POD_MONITORS,
    PODS,
    PVCS,
    RESOURCE_CLAIM_TEMPLATES,
    SERVICES,
    Resource,
)
from kube.store import IndexKeys, Store

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

OWNER_INDEX: Final = "owner"
"""From namespace/uid of the controlling owner to its children: an object of another namespace is no child."""
SERVICE_INDEX: Final = "service"
"""From namespace/name of an InferenceService to its pods and EndpointSlices, and to ModelRoutes that name it.

ModelRoutes that have its name are among them.
"""
MODEL_INDEX: Final = "model"
"""From namespace/name of a Model to the InferenceServices that serve it, as main Model or companion."""
HOST_INDEX: Final = "host"
"""From a host's name to the MetalProcesses that it serves, and to its EndpointSlices."""
WAITING_INDEX: Final = "waiting"
"""From namespace/name of an InferenceService to its MetalProcesses that wait for a host."""
CLAIM_INDEX: Final = "claim"
"""From namespace/name of a PersistentVolumeClaim to the pods that mount it and have not ended, and the Deployments."""
NODE_INDEX: Final = "node"
"""From a node's name to the Models with verified copies on it, and to our pods there that have not ended."""
SHORTAGE_INDEX: Final = "shortage"
"""From a node's name to the Models with a copy that finds no space on its disk."""
KUEUE_INDEX: Final = "kueue"
"""From namespace/name of a LocalQueue of Kueue to our pods that wait in it, and the services that are given to it."""
OF_MODEL_INDEX: Final = "of-model"
"""From a Model's name to the claims that were made for a Model of this name, also an earlier one."""
GATE_INDEX: Final = "gate"
"""From namespace/name of an InferenceService to its pods that wait in the queue and mount a claim."""
REASON_INDEX: Final = "reason"
"""From the reason of the condition Ready to the InferenceServices and Models that have it; see also NOT_CHOSEN."""
NOT_CHOSEN: Final = "ServingNotChosen"
"""In REASON_INDEX, stands for services of which no known host or node holds the serving options."""
POOL_INDEX: Final = "pool"
"""From the name of an AcceleratorPool to the InferenceServices that name it."""
ADDRESS_INDEX: Final = "address"
"""From an address to the MetalHosts that state it."""
ORDERS_INDEX: Final = "orders"
"""From one value to the MetalHosts that displace processes because an administrator says so."""
HAS_ORDERS: Final = "some"

NAMESPACE_INDEX: Final = "namespace"
"""From a namespace to its GatewayKeys and ModelRoutes, and to the InferenceServices that its keys may use.

EVERY_NAMESPACE stands for services that the keys of all namespaces may use.
"""
DIGEST_INDEX: Final = "digest"
"""From the digest of a key to the GatewayKeys of which it is the key, or a previous one."""
SHARD_INDEX: Final = "shard"
"""From the name of a Secret of the gateway to the InferenceServices whose tokens it has."""

BENCHMARK_INDEX: Final = "benchmark"
"""From one value to all Jobs with the label of a benchmark that are not being deleted."""
ALL_BENCHMARKS: Final = "all"


def declare_indexes(store: Store) -> None:
    """Keep all indexes of the controller."""
    for resource, indexes in INDEXES.items():
        for name, keys in indexes.items():
            store.add_index(resource, name, keys)


def controller_of(obj: Obj) -> Obj | None:
    """Return the owner reference of the object that controls this one, or None."""
    references: list[Obj] = obj["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)


def companion_names(service: Obj) -> set[str]:
    """Return the names of the companions of a service as the API server sent it."""
    spec = service["spec"]
    names = {adapter["modelRef"] for adapter in spec.get("adapters") or []}
    names |= {spec.get("projectorModelRef"), (spec.get("speculative") or {}).get("draftModelRef")}
    return {name for name in names if name}


def model_names(service: Obj) -> set[str]:
    """Return the names of all Models of a service as the API server sent it."""
    return {service["spec"]["modelRef"], *companion_names(service)}


def namespaced(namespace: str, name: str) -> str:
    """Return the value under which an index has an object of a namespace."""
    return f"{namespace}/{name}"


def owner_key(owner: Obj) -> str:
    """Return the value under which `OWNER_INDEX` has the children of an object."""
    return namespaced(owner["metadata"]["namespace"], owner["metadata"]["uid"])


def host_of_slice(obj: Obj) -> str:
    """Return the host whose agent wrote an EndpointSlice; empty if no agent did."""
    metadata = obj["metadata"]
    if metadata.get("labels", {}).get(LABEL_SLICE_MANAGED_BY) != SLICE_MANAGED_BY:
        return ""
    _service, host = split_slice_name(metadata["name"])
    return host


def _owners(obj: Obj) -> list[str]:
    owner = controller_of(obj)
    return [namespaced(obj["metadata"]["namespace"], owner["uid"])] if owner else []


def _value_at(*path: str, in_namespace: bool = True) -> IndexKeys:
    """Return the keys of an index by the value of the field at `path`, by default with the namespace of the object."""

    def keys(obj: Obj) -> list[str]:
        """Return the value of the field at `path` as the only key; none if the object lacks the field."""
        value: Any = obj
        for name in path:
            value = (value or {}).get(name)
        if not value:
            return []
        return [namespaced(obj["metadata"]["namespace"], value) if in_namespace else value]

    return keys


def _benchmarks(job: Obj) -> list[str]:
    metadata = job["metadata"]
    is_benchmark = LABEL_BENCHMARK in (metadata.get("labels") or {}) and "deletionTimestamp" not in metadata
    return [ALL_BENCHMARKS] if is_benchmark else []


def _models(obj: Obj) -> list[str]:
    return [namespaced(obj["metadata"]["namespace"], name) for name in model_names(obj)]


def _service_of_waiting_process(obj: Obj) -> list[str]:
    spec = obj["spec"]
    return [] if spec.get("hostName") else [namespaced(obj["metadata"]["namespace"], spec["serviceName"])]


def _host_of_slice(obj: Obj) -> list[str]:
    host = host_of_slice(obj)
    return [host] if host else []


def _reasons(obj: Obj) -> list[str]:
    status = obj.get("status") or {}
    reasons = [condition["reason"] for condition in status.get("conditions") or () if condition["type"] == "Ready"]
    serving = status.get("serving")
    return reasons if serving is None or serving.get("inputs") else [*reasons, NOT_CHOSEN]


def mounted_claims(pod_spec: Obj) -> list[str]:
    """Return the names of the PersistentVolumeClaims that a pod's spec mounts."""
    claims = (volume.get("persistentVolumeClaim") for volume in pod_spec.get("volumes") or ())
    return sorted({claim["claimName"] for claim in claims if claim})


def _has_ended(pod: Obj) -> bool:
    return pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}


def _node_of_pod(pod: Obj) -> list[str]:
    node = pod.get("spec", {}).get("nodeName")
    return [node] if node and not _has_ended(pod) else []


def waits_for_kueue(pod: Obj) -> bool:
    """Return whether a pod waits for Kueue to admit it; one that is being deleted does not."""
    gates = pod.get("spec", {}).get("schedulingGates") or ()
    return any(gate["name"] == KUEUE_GATE for gate in gates) and "deletionTimestamp" not in pod["metadata"]


_queue_label: Final = _value_at("metadata", "labels", KUEUE_QUEUE_NAME)


def _kueue_queue_of_pod(pod: Obj) -> Iterable[str]:
    return _queue_label(pod) if waits_for_kueue(pod) else []


def _claims_of_pod(pod: Obj) -> list[str]:
    if _has_ended(pod):
        return []
    return [namespaced(pod["metadata"]["namespace"], claim) for claim in mounted_claims(pod.get("spec") or {})]


_service_of_pod: Final = _value_at("metadata", "labels", LABEL_SERVICE)


def _service_of_gated_pod(pod: Obj) -> Iterable[str]:
    spec = pod.get("spec") or {}
    is_gated = any(gate.get("name") == QUEUE_GATE for gate in spec.get("schedulingGates") or ())
    return _service_of_pod(pod) if is_gated and mounted_claims(spec) else []


def _claims_of_deployment(deployment: Obj) -> list[str]:
    spec = deployment.get("spec", {}).get("template", {}).get("spec") or {}
    return [namespaced(deployment["metadata"]["namespace"], claim) for claim in mounted_claims(spec)]


def _stated_nodes(field: str) -> IndexKeys:
    """Return the keys of an index of Models by the nodes in a list of their status."""

    def keys(model: Obj) -> set[str]:
        """Return the node of each entry of the list."""
        return {entry["node"] for entry in (model.get("status") or {}).get(field) or ()}

    return keys


def stated_pools(service: Obj) -> list[str]:
    """Return the pools that an InferenceService names."""
    names: list[str] = (service["spec"].get("scheduling") or {}).get("pools") or []
    return names


def stated_addresses(host: Obj) -> list[str]:
    """Return the address that a MetalHost states, if any."""
    address = host.get("status", {}).get("address")
    return [address] if address else []


def list_admitted(service: Obj) -> Sequence[str]:
    """Return the namespaces that a service admits beside its own."""
    admitted: Sequence[str] = (service["spec"].get("access") or {}).get("namespaces") or ()
    return admitted


def _list_namespaces(service: Obj) -> set[str]:
    """Return the namespaces whose keys may use a service: its own, and those that it admits."""
    return {service["metadata"]["namespace"], *list_admitted(service)}


def _list_services_of_route(route: Obj) -> set[str]:
    """Return the services that a route names, and the one that has its name."""
    namespace, spec = route["metadata"]["namespace"], route["spec"]
    named = (target["name"] for target in (*spec["services"], *(spec.get("fallbacks") or ())))
    return {namespaced(*split_service(name, namespace)) for name in (route["metadata"]["name"], *named)}


def list_digests(key: Obj) -> set[str]:
    """Return the digests of all keys of a GatewayKey that are valid."""
    status = key.get("status") or {}
    digests = {status.get("digest"), *(entry["digest"] for entry in status.get("previous") or ())}
    return {digest for digest in digests if digest}


def _find_orders(host: Obj) -> list[str]:
    """Return the key of `ORDERS_INDEX` if a host is being drained or has a taint NoExecute."""
    spec = host.get("spec") or {}
    evicts = any(taint.get("effect") == "NoExecute" for taint in spec.get("taints") or ())
    return [HAS_ORDERS] if spec.get("drain") or evicts else []


INDEXES: Final[Mapping[Resource, Mapping[str, IndexKeys]]] = {
    DEPLOYMENTS: {OWNER_INDEX: _owners, CLAIM_INDEX: _claims_of_deployment},
    SERVICES: {OWNER_INDEX: _owners},
    POD_DISRUPTION_BUDGETS: {OWNER_INDEX: _owners},
    NETWORK_POLICIES: {OWNER_INDEX: _owners},
    POD_MONITORS: {OWNER_INDEX: _owners},
    RESOURCE_CLAIM_TEMPLATES: {OWNER_INDEX: _owners},
    JOBS: {OWNER_INDEX: _owners, BENCHMARK_INDEX: _benchmarks},
    PVCS: {OWNER_INDEX: _owners, OF_MODEL_INDEX: _value_at("metadata", "labels", LABEL_MODEL)},
    PODS: {
        OWNER_INDEX: _owners,
        SERVICE_INDEX: _service_of_pod,
        CLAIM_INDEX: _claims_of_pod,
        NODE_INDEX: _node_of_pod,
        GATE_INDEX: _service_of_gated_pod,
        KUEUE_INDEX: _kueue_queue_of_pod,
    },
    METAL_HOSTS: {ADDRESS_INDEX: stated_addresses, ORDERS_INDEX: _find_orders},
    METAL_PROCESSES: {
        OWNER_INDEX: _owners,
        HOST_INDEX: _value_at("spec", "hostName", in_namespace=False),
        WAITING_INDEX: _service_of_waiting_process,
    },
    ENDPOINT_SLICES: {SERVICE_INDEX: _value_at("metadata", "labels", LABEL_SERVICE_NAME), HOST_INDEX: _host_of_slice},
    INFERENCE_SERVICES: {
        MODEL_INDEX: _models,
        REASON_INDEX: _reasons,
        KUEUE_INDEX: _value_at("spec", "scheduling", "queueName"),
        POOL_INDEX: stated_pools,
        NAMESPACE_INDEX: _list_namespaces,
        SHARD_INDEX: lambda service: [gateway_shard(service["metadata"]["namespace"], service["metadata"]["name"])],
    },
    GATEWAY_KEYS: {NAMESPACE_INDEX: lambda key: [key["metadata"]["namespace"]], DIGEST_INDEX: list_digests},
    MODEL_ROUTES: {
        NAMESPACE_INDEX: lambda route: [route["metadata"]["namespace"]],
        SERVICE_INDEX: _list_services_of_route,
    },
    MODELS: {
        NODE_INDEX: _stated_nodes("copies"),
        SHORTAGE_INDEX: _stated_nodes("shortages"),
    },
}


def discard_from_index(index: dict[_Key, set[_Value]], key: _Key, value: _Value) -> None:
    """Remove a value from the set of a key, and the key if its set is empty then."""
    index[key].discard(value)
    if not index[key]:
        del index[key]
