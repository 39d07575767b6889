"""The triggers of services: the services that a change of another object concerns, found by indexes of the store."""

from collections.abc import Callable
from typing import Final

from controller.placement.nodes import read_sizes
from controller.reconcile.indexes import (
    CLAIM_INDEX,
    HOST_INDEX,
    KUEUE_INDEX,
    MODEL_INDEX,
    NOT_CHOSEN,
    POOL_INDEX,
    REASON_INDEX,
    WAITING_INDEX,
    mounted_claims,
    namespaced,
)
from controller.reconcile.triggers import (
    Trigger,
    all_but_status,
    deciding_process,
    everything,
    offered_endpoints,
    owned,
    refused_pod,
    scheduled_pod,
    serving_facts,
    waits_for_node,
)
from controller.services.preconditions import DEVICE_TOO_SMALL
from controller.services.queue_report import reads_of_queue
from crds.meta import LABEL_MODEL, LABEL_SERVICE, LABEL_SERVICE_NAME
from kube.client import Obj
from kube.resources import (
    ACCELERATOR_POOLS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    LOCAL_QUEUES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    NETWORK_POLICIES,
    NODES,
    POD_DISRUPTION_BUDGETS,
    POD_MONITORS,
    PODS,
    RESOURCE_CLAIM_TEMPLATES,
    SERVICES,
    ObjectKey,
    object_key,
)
from kube.store import Store

OF_PODS: Final = (DEPLOYMENTS, POD_DISRUPTION_BUDGETS, NETWORK_POLICIES, POD_MONITORS)
"""Kinds of the objects that a service has as long as it has pods."""
_OWNED: Final = (SERVICES, RESOURCE_CLAIM_TEMPLATES, *OF_PODS)


def list_triggers() -> tuple[Trigger, ...]:
    """Return the triggers of the reconciler of services.

    Each has a kind, the function that finds the services which a change of an object concerns, and the function that
    returns the part of the object in which a change matters.
    """
    return (
        *(owned(resource, INFERENCE_SERVICES) for resource in _OWNED),
        owned(METAL_PROCESSES, INFERENCE_SERVICES)._replace(reads=deciding_process),
        Trigger(MODELS, services_of_model, everything),
        Trigger(METAL_HOSTS, _services_of_host, serving_facts),
        Trigger(ACCELERATOR_POOLS, _services_of_pool, all_but_status),
        Trigger(NODES, _services_without_device, read_sizes, finds_by_status=True),
        Trigger(PODS, _service_by_label(LABEL_SERVICE), scheduled_pod),
        Trigger(PODS, _services_of_fetch, refused_pod),
        Trigger(LOCAL_QUEUES, _services_of_queue, reads_of_queue),
        Trigger(PODS, _services_beside_volume, _place_of_pod, finds_by_status=True),
        Trigger(ENDPOINT_SLICES, _service_by_label(LABEL_SERVICE_NAME), offered_endpoints),
    )


def services_of_model(store: Store, model: Obj) -> list[ObjectKey]:
    """Return the services that serve a model."""
    named = namespaced(model["metadata"]["namespace"], model["metadata"]["name"])
    return [object_key(obj) for obj in store.by_index(INFERENCE_SERVICES, MODEL_INDEX, named)]


def _services_of_queue(store: Store, queue: Obj) -> list[ObjectKey]:
    """Return the services that are given to a LocalQueue of Kueue."""
    named = namespaced(queue["metadata"]["namespace"], queue["metadata"]["name"])
    return [object_key(obj) for obj in store.by_index(INFERENCE_SERVICES, KUEUE_INDEX, named)]


def _services_of_fetch(store: Store, pod: Obj) -> list[ObjectKey]:
    """Return the services that serve the Model whose weights this pod fetches, and so wait for it."""
    metadata = pod["metadata"]
    name = (metadata.get("labels") or {}).get(LABEL_MODEL)
    model = store.get(MODELS, name, metadata["namespace"]) if name else None
    return services_of_model(store, model) if model is not None else []


def _services_without_device(store: Store, _node: Obj) -> list[ObjectKey]:
    """Return the services for which no device is large enough, or no node known: another node may be."""
    waiting = (store.by_index(INFERENCE_SERVICES, REASON_INDEX, reason) for reason in (DEVICE_TOO_SMALL, NOT_CHOSEN))
    return list({object_key(obj): None for services in waiting for obj in services})


def _services_of_pool(store: Store, pool: Obj) -> list[ObjectKey]:
    """Return the services that name a pool, and those for which its slices of devices are too small."""
    naming = store.by_index(INFERENCE_SERVICES, POOL_INDEX, pool["metadata"]["name"])
    return [*map(object_key, naming), *_services_without_device(store, pool)]


def _place_of_pod(pod: Obj) -> object:
    """Return the node of a pod, and whether it is being deleted; None before it has a node."""
    node = pod.get("spec", {}).get("nodeName")
    return (node, "deletionTimestamp" in pod["metadata"]) if node else None


def _services_beside_volume(store: Store, pod: Obj) -> list[ObjectKey]:
    """Return the services whose pods wait for a node and mount a volume of this pod: they may follow it."""
    namespace = pod["metadata"]["namespace"]
    return [
        ObjectKey(namespace, mounting_pod["metadata"]["labels"][LABEL_SERVICE])
        for claim in mounted_claims(pod.get("spec") or {})
        for mounting_pod in store.by_index(PODS, CLAIM_INDEX, namespaced(namespace, claim))
        if LABEL_SERVICE in mounting_pod["metadata"]["labels"] and waits_for_node(mounting_pod)
    ]


def _services_of_host(store: Store, host: Obj) -> list[ObjectKey]:
    """Return the services that a host serves, and those that wait for a host, each once."""
    served = store.by_index(METAL_PROCESSES, HOST_INDEX, host["metadata"]["name"])
    services = {ObjectKey(obj["metadata"]["namespace"], obj["spec"]["serviceName"]): None for obj in served}
    # A value of the index is NAMESPACE/NAME of a service with a process that waits for a host.
    waiting = (ObjectKey(*value.split("/")) for value in store.index_values(METAL_PROCESSES, WAITING_INDEX))
    return [*(services | dict.fromkeys(waiting))]


def _service_by_label(label: str) -> Callable[[Store, Obj], list[ObjectKey]]:
    """Return a function that returns the service that this label of an object names."""

    def keys(_store: Store, obj: Obj) -> list[ObjectKey]:
        metadata = obj["metadata"]
        service = metadata.get("labels", {}).get(label)
        return [ObjectKey(metadata["namespace"], service)] if service else []

    return keys
