"""Inputs of a decision about copies of weights on nodes, and the changes of pods and nodes after which it is made."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from controller.models.claims import list_claims
from controller.models.copy_eviction import count_bytes, find_victims
from controller.models.jobs import Reservation
from controller.models.served import Served, read_companions, runtime_of
from controller.reconcile.indexes import (
    CLAIM_INDEX,
    MODEL_INDEX,
    NODE_INDEX,
    SERVICE_INDEX,
    controller_of,
    mounted_claims,
    namespaced,
)
from controller.reconcile.plan import Snapshot
from controller.reconcile.triggers import ENDED, end_of_pod, lacks_room, queue_seconds, waits_for_node
from crds.inferenceservice import InferenceService
from crds.meta import GROUP
from crds.model import Model
from devices.vendors import Vendors
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.kinds import PersistentVolumeClaim
from kube.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    JOBS,
    MODELS,
    NODES,
    PODS,
    PVCS,
    STORAGE_CLASSES,
    ObjectKey,
    object_key,
)
from kube.store import Store

NODE: Final = f"{GROUP}/node"
"""Annotation of a claim that is made for a certain node."""
_SELECTED_NODE: Final = "volume.kubernetes.io/selected-node"
"""Annotation by which the scheduler tells a provisioner the node."""
MOUNTING: Final = (PODS, DEPLOYMENTS)
"""Kinds of objects that mount volumes."""
_RELEASE_SECONDS: Final = 1.0
"""Time after which a pod that should have ended is seen to have ended, or to stay."""

Reserve = Callable[[InferenceService, Served], Reservation | None]
"""Returns what one replica of a service, with its accelerator stated, asks of its node; None: its spec is refused."""


class CopyConsumer(NamedTuple):
    """A service whose replicas in pods need copies."""

    service: InferenceService
    """With its accelerator stated."""
    reservation: Reservation = Reservation()
    """Demands of one replica on its node."""
    refused: frozenset[str] = frozenset()
    """Names of the claims on whose node the scheduler finds no place for a pod, and no other pod is about to leave."""
    final_seconds: float | None = None
    """Time after which refusals are final, because no other pod leaves any more; None: they are."""
    other_nodes: frozenset[str] = frozenset()
    """Nodes with a pod of the service that serves something else, such as another Model, or a claim that is deleted."""


class ObservedCopies(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a decision about copies on nodes."""

    consumers: Sequence[CopyConsumer] = ()
    """The oldest first."""
    gone_nodes: frozenset[str] = frozenset()
    """Nodes with a claim of the Model that do not exist any more."""
    pod_nodes: Mapping[str, str] = {}
    """Nodes of the pods that mount the Model's claims, by the name of the claim."""
    victims: frozenset[str] = frozenset()
    """Uids of the claims whose copies are evicted to make room on their node."""
    node_bytes: Mapping[str, int] = {}
    """Size of all copies on each node to which one of the Model is fetched."""
    binds_immediately: bool = False
    """True if the StorageClass makes a volume before a pod has a node."""


def reserve_nothing(_service: InferenceService, _served: Served) -> Reservation:
    """Return an empty reservation."""
    return Reservation()


def observe_copies(
    snapshot: Snapshot,
    model: Model,
    services: Iterable[InferenceService],
    reserve: Reserve,
    *,
    vendors: Vendors,
    limit_bytes: int | None,
    binds_immediately: bool,
) -> ObservedCopies:
    """Gather the inputs from the store.

    Args:
        snapshot: the store.
        model: the Model.
        services: those that run it in pods, each with its accelerator stated.
        reserve: see `Reserve`.
        vendors: the table of accelerators.
        limit_bytes: the administrator's limit of each node.
        binds_immediately: the result of `read_binding`.
    """
    nodes = {copy.node for copy in model.status.copies}
    claims = list_claims(snapshot, model)
    pod_nodes = dict(_find_pod_nodes(snapshot, claims))
    stated = {*map(stated_node, claims), *_list_fetch_nodes(snapshot, model), *pod_nodes.values()}
    unused = {copy.node for copy in model.status.copies if copy.unused_since}
    victims = (victim.claim for node in unused for victim in find_victims(snapshot.store, node, limit_bytes))
    return ObservedCopies(
        consumers=[
            consumer
            for service in services
            if (consumer := _observe_consumer(snapshot, model, service, reserve, vendors)) is not None
        ],
        gone_nodes=frozenset(each for each in nodes | stated if _is_gone(snapshot.store, each)),
        pod_nodes=pod_nodes,
        victims=frozenset(victims),
        node_bytes={node: count_bytes(snapshot.store, node) for node in stated - nodes},
        binds_immediately=binds_immediately,
    )


def _observe_consumer(
    snapshot: Snapshot, model: Model, service: InferenceService, reserve: Reserve, vendors: Vendors
) -> CopyConsumer | None:
    namespace, name = service.metadata.namespace, service.metadata.name
    companions = read_companions(lambda key: snapshot.read(MODELS, key, Model), service)
    stored = snapshot.store.get(INFERENCE_SERVICES, name, namespace)
    measure = functools.partial(reserve, service, Served(model, runtime_of(service, model, vendors), companions))
    # A Model may have a thousand services, each pod of which wakes it.
    models = (model, *(companion.model for companion in companions))
    reservation = (
        measure()
        if stored is None
        else snapshot.store.derive(INFERENCE_SERVICES, stored, "reservation", measure, *models)
    )
    if reservation is None:
        return None
    pods = snapshot.store.by_index(PODS, SERVICE_INDEX, namespaced(namespace, name))
    refused = {
        claim for pod in pods if _lacks_place(pod, snapshot.now) for claim in mounted_claims(pod.get("spec") or {})
    }
    # The pods of a lost node are never gone, which is no reason to wait for them.
    ends = [(end, pod) for pod in pods if (end := end_of_pod(pod, snapshot.now)) is not None]
    leaving = {claim for _end, pod in ends for claim in mounted_claims(pod.get("spec") or {})}
    # A pod that the queue lets wait has no room later than one that the scheduler refuses.
    waits = (queue_seconds(pod, snapshot.now) for pod in pods)
    final_seconds = min((seconds for seconds in waits if seconds is not None), default=None)
    if refused & leaving:
        final_seconds = (max(end for end, _pod in ends) - snapshot.now).total_seconds() + _RELEASE_SECONDS
    return CopyConsumer(
        service, reservation, frozenset(refused - leaving), final_seconds, _list_other_nodes(snapshot, model, pods)
    )


def _list_other_nodes(snapshot: Snapshot, model: Model, pods: Iterable[Obj]) -> frozenset[str]:
    """Return the nodes of pods that stay and mount no claim of the Model, or only one that is being deleted."""
    there = list_claims(snapshot, model)
    claims = {claim.metadata.name for claim in there if claim.metadata.deletion_timestamp is None}
    nodes = {
        str((pod.get("spec") or {}).get("nodeName") or "")
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and (pod.get("status") or {}).get("phase") not in ENDED
        and claims.isdisjoint(mounted_claims(pod.get("spec") or {}))
    }
    return frozenset(node for node in nodes if node and not _is_gone(snapshot.store, node))


def _find_pod_nodes(snapshot: Snapshot, claims: Iterable[PersistentVolumeClaim]) -> Iterator[tuple[str, str]]:
    """Yield the names of the claims that pods mount, with the node of such a pod."""
    for claim in claims:
        namespace, name = claim.metadata.namespace, claim.metadata.name
        for pod in snapshot.store.by_index(PODS, CLAIM_INDEX, namespaced(namespace, name)):
            if node := (pod.get("spec") or {}).get("nodeName"):
                yield name, node


def _list_fetch_nodes(snapshot: Snapshot, model: Model) -> Iterator[str]:
    """Yield the nodes of the pods of the Model's Jobs."""
    namespace = model.metadata.namespace
    for job in snapshot.children(JOBS, namespace, model.metadata.uid):
        for pod in snapshot.children(PODS, namespace, job["metadata"]["uid"]):
            yield pod.get("spec", {}).get("nodeName") or ""


def stated_node(claim: PersistentVolumeClaim) -> str:
    """Return the node that a claim states, which its volume is made on; empty if it states none."""
    annotations = claim.metadata.annotations
    return annotations.get(NODE) or annotations.get(_SELECTED_NODE) or ""


def _is_gone(store: Store, node: str) -> bool:
    """Return whether a node does not exist; if none is known at all, nothing is concluded."""
    return bool(node) and store.count(NODES) > 0 and store.get(NODES, node) is None


def _lacks_place(pod: Obj, now: datetime) -> bool:
    return lacks_room(pod, now) and "deletionTimestamp" not in pod["metadata"]


async def read_binding(client: Client, snapshot: Snapshot, model: Model) -> bool:
    """Return whether the StorageClass of copies makes volumes before a pod has a node, which no copy can use.

    It is read only before a service's first claim; one that may not be read counts as suitable. Raises as `Client`.
    """
    cache = model.spec.cache
    if cache.scope != "node" or cache.storage_class_name is None:
        return False
    namespace = model.metadata.namespace
    claims = list_claims(snapshot, model)
    is_known = any(claim.spec.storage_class_name == cache.storage_class_name for claim in claims)
    consumers = snapshot.store.by_index(INFERENCE_SERVICES, MODEL_INDEX, namespaced(namespace, model.metadata.name))
    if is_known or not consumers:
        return False
    try:
        storage_class = await client.get(STORAGE_CLASSES, cache.storage_class_name)
    except (Forbidden, NotFound):
        return False
    return bool(storage_class.get("volumeBindingMode", "Immediate") == "Immediate")


def models_of_mounts(store: Store, user: Obj) -> list[ObjectKey]:
    """Return the Models whose copies a pod mounts, or any of whose volumes a Deployment does."""
    namespace, spec = user["metadata"]["namespace"], user.get("spec") or {}
    is_deployment = "template" in spec
    keys = set()
    for name in mounted_claims((spec.get("template") or {}).get("spec") or spec):
        claim = store.get(PVCS, name, namespace)
        owner = controller_of(claim) if claim is not None else None
        model = store.get(MODELS, owner["name"], namespace) if owner is not None else None
        if model is not None and (is_deployment or (model["spec"].get("cache") or {}).get("scope") == "node"):
            keys.add(object_key(model))
    return sorted(keys)


def mounts(user: Obj) -> object:
    """Return what copies depend on of a pod or a Deployment: what it mounts, and whether it has a place."""
    spec = user.get("spec") or {}
    if "template" in spec:
        return mounted_claims(spec["template"].get("spec") or {})
    is_over = (user.get("status") or {}).get("phase") in ENDED
    is_ending = "deletionTimestamp" in user["metadata"]
    return None if is_over else (mounted_claims(spec), not is_ending and waits_for_node(user))


def models_on_node(store: Store, node: Obj) -> list[ObjectKey]:
    """Return the Models with a copy on a node."""
    return [object_key(model) for model in store.by_index(MODELS, NODE_INDEX, node["metadata"]["name"])]
