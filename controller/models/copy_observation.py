"""Inputs of a decision about copies of weights on nodes, and the changes of pods and nodes after which it is made.

Unused copies are evicted from a node whose cache is full, the one that is unused for the longest time first. All Models
come to the same choice by one pure function over all copies of the node, and each deletes only its own.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from controller.models.claims import list_claims
from controller.models.jobs import Reservation
from controller.models.served import Served, read_companions, runtime_of
from controller.reconcile.indexes import (
    CLAIM_INDEX,
    NODE_INDEX,
    SERVICE_INDEX,
    SHORTAGE_INDEX,
    controller_of,
    mounted_claims,
    namespaced,
)
from controller.reconcile.plan import Snapshot, decode_stored
from controller.reconcile.triggers import ENDED, end_of_pod, is_refused, lacks_room, queue_seconds, waits_for_node
from crds.inferenceservice import InferenceService
from crds.meta import GROUP
from crds.model import Model
from devices.vendors import Vendors
from kube.client import Obj
from kube.kinds import PersistentVolumeClaim
from kube.resources import INFERENCE_SERVICES, JOBS, MODELS, NODES, PODS, PVCS, ObjectKey, object_key
from kube.store import Store

NODE: Final = f"{GROUP}/node"
"""Annotation of a claim that is made for a certain node."""
_SELECTED_NODE: Final = "volume.kubernetes.io/selected-node"
"""Annotation by which the scheduler tells a provisioner the node."""
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
    nodes: frozenset[str] = frozenset()
    """Nodes of the pods of the service that stay, whatever they serve."""


class ObservedCopies(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a decision about copies on nodes."""

    consumers: Sequence[CopyConsumer] = ()
    """The oldest first."""
    gone_nodes: frozenset[str] = frozenset()
    """Nodes with a claim of the Model that do not exist any more."""
    pod_nodes: Mapping[str, str] = {}
    """Node of the pods that mount a claim of the Model or fetch to it, by the name of the claim."""
    refused: frozenset[str] = frozenset()
    """Names of the claims with a pod that fetches to it and for which the scheduler finds no place."""
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
    classes: Mapping[str, Obj],
) -> ObservedCopies:
    """Gather the inputs of a decision about the copies of a Model from the store.

    Args:
        snapshot: the store.
        model: the Model.
        services: those that run it in pods, each with its accelerator stated.
        reserve: see `Reserve`.
        vendors: the table of accelerators.
        limit_bytes: the administrator's limit of each node.
        classes: the result of `read_classes`.
    """
    store, namespace, copies = snapshot.store, model.metadata.namespace, model.status.copies
    claims = list_claims(snapshot, model)

    # The pods of the Model's Jobs, and all pods that mount one of its claims. By them, pod_nodes has the node of each
    # claim, and refused has the claims whose fetch finds no node.
    fetching = [
        pod
        for job in snapshot.children(JOBS, namespace, model.metadata.uid)
        for pod in snapshot.children(PODS, namespace, job["metadata"]["uid"])
    ]
    mounting = [
        pod for claim in claims for pod in store.by_index(PODS, CLAIM_INDEX, namespaced(namespace, claim.metadata.name))
    ]
    pod_nodes = {name: node for pod in (*mounting, *fetching) if (node := _node_of(pod)) for name in _claims_of(pod)}
    refused = frozenset(name for pod in fetching if is_refused(pod) for name in _claims_of(pod))

    # copy_nodes have a verified copy; claim_nodes are those that claims state or that their pods run on.
    copy_nodes = {copy.node for copy in copies}
    claim_nodes = {*map(stated_node, claims), *pod_nodes.values()} - {""}
    # The victims are copies to evict from a full node: this Model looks only where it has an unused one.
    nodes_with_unused = {copy.node for copy in copies if copy.unused_since}
    consumers = (_observe_consumer(snapshot, model, service, reserve, vendors) for service in services)
    return ObservedCopies(
        consumers=[consumer for consumer in consumers if consumer is not None],
        gone_nodes=frozenset(node for node in copy_nodes | claim_nodes if _is_deleted(store, node)),
        pod_nodes=pod_nodes,
        refused=refused,
        victims=frozenset(
            victim.claim for node in nodes_with_unused for victim in find_victims(store, node, limit_bytes)
        ),
        # Where a copy is being made, its disk may turn out to be full.
        node_bytes={
            node: sum(copy.size_bytes for copy in _list_copies(store, node)) for node in claim_nodes - copy_nodes
        },
        binds_immediately=_binds_immediately(model, classes),
    )


def _binds_immediately(model: Model, classes: Mapping[str, Obj]) -> bool:
    """Return whether the StorageClass of a Model makes a volume before a pod has a node; False if it was not read."""
    storage_class = classes.get(model.spec.cache.storage_class_name or "")
    # A class that could not be read is tried, as if its volumes waited for a node.
    return storage_class is not None and storage_class.get("volumeBindingMode", "Immediate") == "Immediate"


def _observe_consumer(
    snapshot: Snapshot, model: Model, service: InferenceService, reserve: Reserve, vendors: Vendors
) -> CopyConsumer | None:
    """Return a service with what its pods need and lack; None: its spec is refused.

    1. What one replica asks of its node.
    2. The refused claims: those that a waiting pod mounts, because their nodes have no room for it. A claim does not
       count while another pod is about to leave its node, as the waiting one may fit then.
    3. The time until the next change of that without an event: a pod in the queue counts as one without room, or a
       leaving pod should have left.
    4. The nodes on which its pods stay.
    """
    store, now = snapshot.store, snapshot.now
    namespace, name = service.metadata.namespace, service.metadata.name
    companions = read_companions(lambda key: snapshot.read(MODELS, key, Model), service)
    stored = store.get(INFERENCE_SERVICES, name, namespace)
    reserve_replica = functools.partial(
        reserve, service, Served(model, runtime_of(service, model, vendors), companions)
    )
    # 1. What a replica asks of its node. Computed once for each version of the service and its Models (by `derive`): a
    # Model may have a thousand services, and each change of a pod of one of them makes a decision.
    models = (model, *(companion.model for companion in companions))
    if stored is None:
        reservation = reserve_replica()
    else:
        reservation = store.derive(INFERENCE_SERVICES, stored, "reservation", reserve_replica, *models)
    if reservation is None:
        return None

    # 2. The refused claims.
    pods = store.by_index(PODS, SERVICE_INDEX, namespaced(namespace, name))
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    refused_claims = {claim for pod in staying if lacks_room(pod, now) for claim in _claims_of(pod)}
    # By claim, the time at which a pod that is being deleted has left; without those of a lost node, which stay.
    end_times = {claim: end for pod in pods if (end := end_of_pod(pod, now)) is not None for claim in _claims_of(pod)}

    # 3. A refusal is not final while a pod waits in the queue, or while another pod leaves the node of a refused one.
    wait_seconds = [seconds for pod in pods if (seconds := queue_seconds(pod, now)) is not None]
    wait_seconds += [
        (end_times[claim] - now).total_seconds() + _RELEASE_SECONDS for claim in refused_claims & end_times.keys()
    ]

    # 4. The nodes where its pods stay.
    nodes = {_node_of(pod) for pod in staying if not _has_ended(pod)}
    return CopyConsumer(
        service=service,
        reservation=reservation,
        refused=frozenset(refused_claims - end_times.keys()),
        final_seconds=min(wait_seconds, default=None),
        nodes=frozenset(node for node in nodes if node and not _is_deleted(store, node)),
    )


def stated_node(claim: PersistentVolumeClaim) -> str:
    """Return the node that a claim states, which its volume is made on; empty if it states none."""
    annotations = claim.metadata.annotations
    return annotations.get(NODE) or annotations.get(_SELECTED_NODE) or ""


def _node_of(pod: Obj) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def _claims_of(pod: Obj) -> list[str]:
    return mounted_claims(pod.get("spec") or {})


def _has_ended(pod: Obj) -> bool:
    return (pod.get("status") or {}).get("phase") in ENDED


def _is_deleted(store: Store, node: str) -> bool:
    """Return whether a node has been deleted; if the store has no nodes at all, that is not known."""
    return bool(node) and store.count(NODES) > 0 and store.get(NODES, node) is None


class StoredCopy(NamedTuple):
    """One copy on a node, of any Model, in the order in which copies are evicted."""

    unused_since: str
    """Empty: the copy is in use, and stays."""
    model: ObjectKey
    claim: str
    """metadata.uid of its PersistentVolumeClaim."""
    size_bytes: int


def choose_victims(copies: Iterable[StoredCopy], limit_bytes: int) -> list[StoredCopy]:
    """Return the copies of one node to evict, so that the others take at most `limit_bytes` if possible.

    Only copies that are not in use are evicted, the longest unused one first.
    """
    copies = list(copies)
    total_bytes, victims = sum(copy.size_bytes for copy in copies), list[StoredCopy]()
    if total_bytes <= limit_bytes:
        return victims
    # A copy sorts by the time since which it is unused.
    for copy in sorted(copy for copy in copies if copy.unused_since):
        if total_bytes > limit_bytes:
            victims.append(copy)
            total_bytes -= copy.size_bytes
    return victims


def find_victims(store: Store, node: str, limit_bytes: int | None) -> list[StoredCopy]:
    """Return the copies to evict from a node whose copies take more bytes than the least of its limits.

    The limits are the administrator's `limit_bytes` (None: there is none), and for each fetch that found the disk full,
    the bytes of copies that may stay so that it succeeds.
    """
    # Models of which a fetch to this node found the disk full: their statuses state the limits.
    models_short_of_space = decode_stored(store, MODELS, store.by_index(MODELS, SHORTAGE_INDEX, node), Model)
    limits = [
        shortage.keep_bytes
        for model in models_short_of_space
        for shortage in model.status.shortages
        if shortage.node == node
    ]
    if limit_bytes is not None:
        limits.append(limit_bytes)

    # The least limit holds; without any, nothing is evicted.
    return choose_victims(_list_copies(store, node), min(limits)) if limits else []


def _list_copies(store: Store, node: str) -> Sequence[StoredCopy]:
    """Return the verified copies of all Models on a node, which are gathered once until one of these Models changes."""
    models, stored_node = store.by_index(MODELS, NODE_INDEX, node), store.get(NODES, node)

    def gather() -> Sequence[StoredCopy]:
        return [copy for model in models for copy in _group_copies(store, model).get(node, ())]

    return gather() if stored_node is None else store.derive(NODES, stored_node, "copies", gather, models)


def _group_copies(store: Store, model: Obj) -> Mapping[str, Sequence[StoredCopy]]:
    """Return the verified copies of a Model by node, which are read once until it changes: it may have hundreds."""

    def group() -> Mapping[str, Sequence[StoredCopy]]:
        by_node: dict[str, list[StoredCopy]] = {}
        for decoded in decode_stored(store, MODELS, [model], Model):
            for copy in decoded.status.copies:
                stored_copy = StoredCopy(copy.unused_since, object_key(model), copy.claim, copy.size_bytes)
                by_node.setdefault(copy.node, []).append(stored_copy)
        return by_node

    return store.derive(MODELS, model, "copies by node", group)


def models_of_victims(store: Store, model: Obj, limit_bytes: int | None) -> list[ObjectKey]:
    """Return the Models with a copy to evict from one of the nodes of this Model."""
    nodes = {entry["node"] for entries in read_copies(model) for entry in entries}
    return sorted({victim.model for node in nodes for victim in find_victims(store, node, limit_bytes)})


def read_copies(model: Obj) -> list[list[Obj]]:
    """Return the copies and shortages of a Model, by which copies of other Models are evicted."""
    status = model.get("status") or {}
    return [status.get("copies") or [], status.get("shortages") or []]


def models_of_mounts(store: Store, user: Obj) -> list[ObjectKey]:
    """Return the Models whose volumes a pod or a Deployment mounts; of a pod, only those with a copy on each node."""
    namespace, spec = user["metadata"]["namespace"], user.get("spec") or {}
    is_deployment = "template" in spec  # else it is a pod
    keys = set()
    for name in mounted_claims((spec.get("template") or {}).get("spec") or spec):
        claim = store.get(PVCS, name, namespace)
        owner = controller_of(claim) if claim is not None else None
        model = store.get(MODELS, owner["name"], namespace) if owner is not None else None
        if model is not None and (is_deployment or (model["spec"].get("cache") or {}).get("scope") == "node"):
            keys.add(object_key(model))
    return sorted(keys)


def read_mounts(user: Obj) -> object:
    """Return the fields of a pod or a Deployment that decisions about Models read: a change of them triggers one.

    The result is only compared with that of another version of `user`. It has the claims that it mounts, and of a pod
    whether it waits for a node. None: it is a pod that has ended.
    """
    spec = user.get("spec") or {}
    if "template" in spec:  # a Deployment
        return mounted_claims(spec["template"].get("spec") or {})
    is_ending = "deletionTimestamp" in user["metadata"]
    return None if _has_ended(user) else (mounted_claims(spec), not is_ending and waits_for_node(user))


def models_on_node(store: Store, node: Obj) -> list[ObjectKey]:
    """Return the Models with a copy on a node."""
    return [object_key(model) for model in store.by_index(MODELS, NODE_INDEX, node["metadata"]["name"])]
