"""The nodes on which the volumes of a waiting pod can be mounted: the queue must choose one of them.

A volume that is bound states its nodes, if not all can reach it. One that can be attached to a single node keeps pods
on the node of those that have it already. The claims that we make are in the store. A PersistentVolume, and the claim
of a user, are read once, when a pod first waits for them: what is asked of them does not change while a pod mounts
them, and a watch would bring those of the whole cluster.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
import structlog

from controller.placement.cell_registry import CellRegistry
from controller.placement.node_rules import matches_term
from controller.placement.pod_requests import find_taken_node
from controller.reconcile.indexes import CLAIM_INDEX, mounted_claims, namespaced
from controller.reconcile.plan import Leading, decode_stored
from kube.backoff import backoff_seconds
from kube.client import Client, Obj
from kube.errors import ApiError, Forbidden, NotFound, Unreachable
from kube.kinds import PersistentVolume, PersistentVolumeClaim
from kube.resources import PERSISTENT_VOLUMES, PODS, PVCS, ObjectKey, Resource
from kube.store import Store

FIRST_RETRY_SECONDS: Final = 1.0
LAST_RETRY_SECONDS: Final = 60.0
UNBOUND_SECONDS: Final = 30.0
"""Time after which the claim of a user is read again that was not bound, or that could not be read."""
BOUND_SECONDS: Final = 600.0
"""Time after which an object is read again: one of the same name may have taken its place."""
READS_AT_ONCE: Final = 8
_MANY_READ: Final = 4096
"""Number of objects from which on those are forgotten that nobody has asked for since they were due."""
_HOSTNAME: Final = "kubernetes.io/hostname"
_SHARED: Final = frozenset({"ReadWriteMany", "ReadOnlyMany"})
"""Access modes with which a volume is on several nodes at once."""
_NOWHERE: Final[frozenset[str]] = frozenset()

log = structlog.get_logger()


class _Reading(NamedTuple):
    obj: PersistentVolumeClaim | PersistentVolume | None
    """None: it does not exist, or may not be read."""
    is_refused: bool
    due: float
    """When to read it again, on the clock."""


class NodeSelection:
    """The nodes with an accelerator, by the terms of a node selector."""

    def __init__(self, nodes: Iterable[Obj]) -> None:
        """Search among these nodes."""
        self._nodes = list(nodes)
        self._by_label: dict[str, dict[str, list[Obj]]] = {}
        """By label key and value; only keys that a term has named so far."""
        self._selected: dict[bytes, frozenset[str]] = {}
        """Names of the nodes that meet terms, by the terms as JSON."""

    def select(self, terms: Sequence[Obj]) -> frozenset[str]:
        """Return the names of the nodes that meet one of the terms; equal terms are compared with the nodes once."""
        key = msgspec.json.encode(terms)
        names = self._selected.get(key)
        if names is None:
            names = self._selected[key] = frozenset(
                node["metadata"]["name"] for term in terms for node in self._narrow(term) if matches_term(term, node)
            )
        return names

    def _narrow(self, term: Obj) -> Iterable[Obj]:
        """Return the nodes that may meet a term; all nodes if it has no expression with the operator In.

        A local volume names its node by such an expression: then only nodes with that label value are compared.
        """
        # A node must meet all expressions of a term, so the first one with In is enough to leave out most nodes.
        for expression in term.get("matchExpressions") or ():
            if expression["operator"] == "In":
                labelled = self._group_by_label(expression["key"])
                return [node for value in expression["values"] for node in labelled.get(value, ())]
        return self._nodes

    def _group_by_label(self, key: str) -> dict[str, list[Obj]]:
        """Return the nodes by the value of one of their labels."""
        by_value = self._by_label.get(key)
        if by_value is None:
            by_value = self._by_label[key] = {}
            for node in self._nodes:
                if (value := node["metadata"]["labels"].get(key)) is not None:
                    by_value.setdefault(value, []).append(node)
        return by_value


class BoundVolumes:
    """The nodes of volumes, with a cache of the claims and volumes that were read from the API server.

    Args:
        store: has pods and our claims.
        cells: have the nodes.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, store: Store, cells: CellRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        """Answer from the store, and from what `run` or `read_once` reads.

        Args:
            store: the watch cache.
            cells: the registry of nodes, among which the volumes' nodes are searched.
            clock: a monotonic clock in seconds.
        """
        self._store = store
        self._cells = cells
        self._clock = clock

        # The nodes, among which those of a volume are selected.
        self._node_selection = NodeSelection(())
        self._selected_revision = -1
        """Revision of the nodes from which `_node_selection` was made."""
        self._is_selection_current = False
        """No cell has changed since the revision of the nodes was last read."""
        cells.subscribe(self._note_change)

        # The cache of what was read from the API server.
        self._forget_from = _MANY_READ
        """Number of readings from which on those that nobody needs are forgotten."""
        self._readings: dict[tuple[Resource, ObjectKey], _Reading] = {}
        """Claims and volumes that were read."""

        # What `find_nodes` lacked, for `run` or `read_once`.
        self._wanted: dict[tuple[Resource, ObjectKey], None] = {}
        """Objects to read next."""
        self._is_wanted = asyncio.Event()
        """Set while there are objects to read: `run` waits for it."""
        self._listeners: list[Callable[[], None]] = []  # called once wanted objects were read

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener()` after something was read: nodes may be known for pods that had none."""
        self._listeners.append(listener)

    def find_nodes(self, pod: Obj) -> frozenset[str] | None:
        """Return the only nodes on which the volumes of a waiting pod can be mounted; None: any node will do.

        For each claim that the pod mounts, both the volume itself and the pods that share it may restrict the nodes;
        the answer is what all restrictions have in common. Until `run` has read all that this depends on, it is an
        empty set.
        """
        common: frozenset[str] | None = None
        namespace = pod["metadata"].get("namespace", "")
        for name in mounted_claims(pod.get("spec") or {}):
            # The nodes on which the pod can join those that mount the same claim; None: any.
            sharing = self._store.by_index(PODS, CLAIM_INDEX, namespaced(namespace, name))
            claim, is_known = self._find_claim(ObjectKey(namespace, name))
            modes = claim.spec.access_modes if claim is not None else ()
            nodes_of_sharing = list_nodes_of_sharing(pod, modes, self._list_placed(name, sharing))

            # The nodes that can reach the volume; None: all.
            nodes_of_volume = self._find_volume_nodes(claim, is_known=is_known)

            for nodes in (nodes_of_sharing, nodes_of_volume):
                if nodes is not None:
                    common = nodes if common is None else common & nodes
        return common

    def has_read(self, pod: Obj) -> bool:
        """Return whether `find_nodes` has all its inputs; `run` reads missing ones soon."""
        namespace = pod["metadata"].get("namespace", "")
        for name in mounted_claims(pod.get("spec") or {}):
            claim, is_known = self._find_claim(ObjectKey(namespace, name))
            if is_known and claim is not None and claim.spec.volume_name:
                _volume, is_known = self._look_up(PERSISTENT_VOLUMES, ObjectKey("", claim.spec.volume_name))
            if not is_known:
                return False
        return True

    def _find_claim(self, key: ObjectKey) -> tuple[PersistentVolumeClaim | None, bool]:
        """Return a claim of the store or cache, and whether that is known; if not, it is read soon.

        A claim that does not exist, that we may not read, or that cannot be decoded, is None and counts as known.
        """
        stored = self._store.get(PVCS, key.name, key.namespace)
        if stored is not None:
            claims = decode_stored(self._store, PVCS, (stored,), PersistentVolumeClaim)
            return (claims[0] if claims else None), True
        claim, is_known = self._look_up(PVCS, key)
        return claim if isinstance(claim, PersistentVolumeClaim) else None, is_known

    def _list_placed(self, claim: str, sharing: Sequence[Obj]) -> Sequence[Obj]:
        """Return those of the pods that share a claim which have a node.

        The answer is kept in the store until one of the pods changes, as all waiting pods of the claim ask for it.
        """

        def gather() -> Sequence[Obj]:
            """Return the pods that have a node; called only if no answer is kept."""
            return [pod for pod in sharing if find_taken_node(pod)]

        if not sharing:
            return ()
        # Kept with the first of the pods, under this name, until `sharing` is another sequence.
        return self._store.derive(PODS, sharing[0], f"placed with {claim}", gather, sharing)

    async def run(self, leading: Leading) -> None:
        """Read for ever the objects that `find_nodes` lacked, and call the listeners after that."""
        failures = 0  # in a row
        while True:
            await self._is_wanted.wait()
            try:
                while self._wanted:
                    await self._read_some(leading.client)
                    failures = 0
            except (ApiError, Unreachable) as error:
                # What was not read is still wanted, so the loop reads it again after a pause.
                failures += 1
                log.warning("volume_not_read", error=str(error))
                await asyncio.sleep(backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS))
                continue

            # Everything was read.
            self._is_wanted.clear()
            for listener in self._listeners:
                listener()

    async def read_once(self, client: Client) -> bool:
        """Read what `find_nodes` has lacked until now, instead of `run`; return whether it lacked anything.

        Raises ApiError, Unreachable.
        """
        lacked = bool(self._wanted)
        while self._wanted:
            await self._read_some(client)
        return lacked

    async def _read_some(self, client: Client) -> None:
        """Read some of the wanted objects at once; those that fail are wanted again, and the first error is raised."""
        wanted = list(itertools.islice(self._wanted, READS_AT_ONCE))  # each: resource and key
        for reference in wanted:
            del self._wanted[reference]

        reads = (self._read_object(client, *reference) for reference in wanted)
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        failed = {reference: error for reference, error in zip(wanted, outcomes, strict=True) if error is not None}
        self._wanted |= dict.fromkeys(failed)
        errors = list(failed.values())
        if errors:
            raise errors[0]

    async def _read_object(self, client: Client, resource: Resource, key: ObjectKey) -> None:
        """Read a claim or volume into the cache; one that does not exist, or may not be read, is kept as None."""
        # 1. Read it.
        obj: PersistentVolumeClaim | PersistentVolume | None = None
        is_refused = False
        try:
            answer = await client.get(resource, key.name, key.namespace or None)
            if resource == PVCS:
                obj = msgspec.convert(answer, PersistentVolumeClaim)
            else:
                obj = msgspec.convert(answer, PersistentVolume)
        except NotFound:
            pass  # a claim that is to come, or a volume that was deleted under its claim
        except Forbidden as error:
            log.warning("volume_refused", resource=str(resource), key=str(key), error=str(error))
            is_refused = True

        # 2. Make room. `_forget_from` grows with what is kept, so that a reading seldom looks at all others.
        if len(self._readings) >= self._forget_from:
            self._forget_unused()

        # 3. Keep it. A claim without a volume, or an object that does not exist, is read again soon: that may change.
        is_bound = isinstance(obj, PersistentVolume) or (obj is not None and obj.spec.volume_name)
        due = self._clock() + (BOUND_SECONDS if is_bound or is_refused else UNBOUND_SECONDS)
        self._readings[resource, key] = _Reading(obj, is_refused=is_refused, due=due)

    def _forget_unused(self) -> None:
        """Forget objects that no pod has needed since they were due to be read again."""
        now = self._clock()
        self._readings = {
            key: reading for key, reading in self._readings.items() if reading.due > now or key in self._wanted
        }
        self._forget_from = max(_MANY_READ, 2 * len(self._readings))

    def _note_change(self) -> None:
        """Note that a cell has changed, so that the selection of nodes may be outdated."""
        self._is_selection_current = False

    def _look_up(
        self, resource: Resource, key: ObjectKey
    ) -> tuple[PersistentVolumeClaim | PersistentVolume | None, bool]:
        """Return an object of the cache, and whether it was read; if it was not, or is outdated, it is read soon.

        An object that is missing, or that we may not read, is None and counts as read.
        """
        reading = self._readings.get((resource, key))
        if reading is None or reading.due <= self._clock():
            self._wanted[resource, key] = None
            self._is_wanted.set()
        return (reading.obj, True) if reading is not None else (None, False)

    def _find_volume_nodes(self, claim: PersistentVolumeClaim | None, *, is_known: bool) -> frozenset[str] | None:
        """Return the nodes of the volume of a claim; None: it is anywhere, or not bound, or we may not read it.

        There are no nodes until claim and volume are read, and while the volume does not exist.
        """
        if claim is None:
            return None if is_known else _NOWHERE  # unknown: the pod waits until the claim is read
        if not claim.spec.volume_name:
            return None  # it is not bound to a volume yet

        key = ObjectKey("", claim.spec.volume_name)  # a volume is in no namespace
        volume, is_known = self._look_up(PERSISTENT_VOLUMES, key)
        if not isinstance(volume, PersistentVolume):
            # Only if we may not read it, the volume restricts nothing. Otherwise it is not read yet, or does not exist.
            is_refused = is_known and self._readings[PERSISTENT_VOLUMES, key].is_refused
            return None if is_refused else _NOWHERE
        return self._select(volume.node_terms) if volume.node_terms is not None else None

    def _select(self, terms: Sequence[Obj]) -> frozenset[str]:
        """Return the names of the present nodes that meet one of the terms of a volume's node affinity."""
        # To read the revision costs a look at each host, so it is read only after a cell has changed.
        if not self._is_selection_current:
            revision = self._cells.node_revision
            if revision != self._selected_revision:
                nodes = (cell.node for cell in self._cells.list_cells() if cell.node is not None)
                self._node_selection, self._selected_revision = NodeSelection(nodes), revision
            self._is_selection_current = True
        return self._node_selection.select(terms)


def list_nodes_of_sharing(pod: Obj, access_modes: Collection[str], sharing: Iterable[Obj]) -> frozenset[str] | None:
    """Return the only nodes on which a pod can join the pods that share its volume; None: any node will do.

    1. A pod that we keep on one node with others has a podAffinity for them, by which the scheduler decides: it must go
       where they are.
    2. Any other pod may go anywhere if the volume can be on several nodes, or its access modes are unknown. Else it
       follows the pods that have the volume and do not end: once they end, the volume becomes free.

    Args:
        pod: a pod that waits.
        access_modes: those of the claim.
        sharing: all pods that mount it and have not ended; those without a node may be left out.
    """
    # The labels of the pods that it must join, by each term of its affinity.
    affinity = ((pod.get("spec") or {}).get("affinity") or {}).get("podAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or ()
    terms = [
        (term.get("labelSelector") or {}).get("matchLabels") or {}
        for term in required
        if term["topologyKey"] == _HOSTNAME
    ]
    # The volume can be on several nodes at once (a mode of `_SHARED`), or its modes are unknown: it restricts nothing.
    if not terms and (not access_modes or not _SHARED.isdisjoint(access_modes)):
        return None

    # Find the pods that decide: those that the terms select (rule 1), or those that do not end (rule 2).
    others = [
        other for other in sharing if other["metadata"]["uid"] != pod["metadata"]["uid"] and find_taken_node(other)
    ]
    if terms:
        decisive = [other for other in others if any(_has_labels(other, labels) for labels in terms)]
    else:
        decisive = [other for other in others if "deletionTimestamp" not in other["metadata"]]
    nodes = frozenset(map(find_taken_node, decisive))
    return nodes or None  # no pod that decides has a node: any node will do


def _has_labels(pod: Obj, labels: Obj) -> bool:
    """Return whether a pod has all of these labels; False if there are none, as they would select any pod."""
    there: Obj = pod["metadata"].get("labels") or {}
    return bool(labels) and labels.items() <= there.items()
