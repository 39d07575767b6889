"""The writer of the queue's decisions: it gives units their cells, notes promises and places, and evicts.

Each write first looks at the object as it is known now; one that has changed since the decision is left to the next
round. Leadership is required right before each write, since a suspended leader may wake up between any two of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, NamedTuple

import structlog

from controller.placement.effects import (
    Labels,
    Operations,
    admit_pod,
    annotate,
    bind_process,
    build_eviction,
    find_gate,
)
from controller.placement.ledger import Claim
from controller.placement.observed_units import encode_nomination
from controller.placement.queue_places import find_own_place, format_place
from controller.placement.units import Nomination, Unit, UnitKind
from controller.placement.unscheduled_pods import find_refusal
from controller.reconcile.indexes import controller_of
from controller.reconcile.plan import Leading
from crds.meta import ENQUEUED_AT, LABEL_SERVICE, NOMINATED
from kube.client import Obj
from kube.errors import ApiError, Conflict, NotFound, Unreachable
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, POD_DISRUPTION_BUDGETS, PODS, ObjectKey, Resource

READ_AGAIN_SECONDS: Final = 1.0
EVICTION_PATIENCE_SECONDS: Final = 60.0
"""Time for which a PodDisruptionBudget may refuse an eviction; then the pod is deleted, as the scheduler's own
preemption does at once: a budget is for drains, and spec.evictionProtection protects from the queue."""
_REFUSED_BY_BUDGET: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.INTERNAL_SERVER_ERROR})
"""Answers to an eviction that a PodDisruptionBudget refuses; the second if the pod has two of them."""
_QUEUE_MANAGER: Final = "pomona-queue"
"""Owner of the annotations of the queue."""

log = structlog.get_logger()


class StaleUnit(Exception):  # noqa: N818 - no error: the next round decides about the unit as it is
    """The object of a unit has changed since the decision, or is gone."""


class _EvictionRefusals(NamedTuple):
    """Times of the loop at which evictions of a pod were refused."""

    first: float
    latest: float


class AdmissionWriter:
    """The writes of one leader."""

    def __init__(self, leading: Leading) -> None:
        """Write as the leader, whose leadership is required right before each write."""
        self._client, self._store = leading.client, leading.store
        self._require_leadership = leading.require_leadership
        self._refusals: dict[str, _EvictionRefusals] = {}
        """Refusals of evictions, by uid of the pod."""

    async def admit(self, uid: str, claim: Claim) -> None:
        """Write its cell (node or host) into each object of a unit, so that it may start there.

        A pod is pinned to its node and loses the queue's gate, which held it back from the scheduler; without cells it
        goes to any node with the labels of the claim. A MetalProcess is bound to its host. An object that has its cell
        already is left as it is.

        Raises StaleUnit if an object is gone or changed, ApiError and Unreachable; after the last, the object may have
        its cell.
        """
        names, cells = claim.objects, claim.cells
        # By object, the name of its node or host; empty if there are no cells. A cell is `node/NAME` or `host/NAME`.
        machines = [cell.partition("/")[2] for cell in cells] if cells else [""] * len(names)

        for name, machine in zip(names, machines, strict=True):
            obj = self._find(_resource_of(claim.kind), name)
            # The uid of a gang is that of its first pod, so its objects are not compared.
            if claim.kind != "gang" and obj["metadata"]["uid"] != uid:
                raise StaleUnit(f"{name} is the name of a successor")

            if claim.kind != "process":
                await self._ungate(name, obj, machine, claim.node_labels)
            elif claim.memory_bytes and obj["spec"]["memoryBytes"] > claim.memory_bytes:
                # To give up is safe: a late write of another leader fails, since binding tests the resourceVersion.
                raise StaleUnit(f"{name} needs more memory by now")
            else:
                await self._bind(name, obj, machine)

    async def _bind(self, name: ObjectKey, process: Obj, host: str) -> None:
        """Write the host into a process that has none. Raises as `admit`; StaleUnit if it has another one."""
        bound = process["spec"].get("hostName")
        if bound == host:
            return
        if bound:
            raise StaleUnit(f"MetalProcess {name} is bound to {bound}")
        await self._patch(METAL_PROCESSES, name, bind_process(process, host, datetime.now(UTC)))
        log.info("process_bound", process=str(name), host=host, memory_bytes=process["spec"]["memoryBytes"])

    async def _ungate(self, name: ObjectKey, pod: Obj, node: str, node_labels: Labels) -> None:
        """Pin a pod to its node and remove the queue's gate in one patch, so that it can start nowhere else.

        A pod without the gate, which holds it back from the scheduler, stays as it is. Raises as `admit`.
        """
        if find_gate(pod) is not None and not pod["metadata"].get("annotations"):
            # A JSON patch would have to know whether the pod has any annotation: so a merge patch adds one first.
            # It is that of its queue place, the time since which it waits.
            await self.keep_place("pod", name, format_place(find_own_place(pod)))
            # It may have lost its gate meanwhile.
            pod = self._find(PODS, name)
        if find_gate(pod) is None:
            return
        await self._patch(PODS, name, admit_pod(pod, node, node_labels))
        log.info("pod_admitted", pod=str(name), node=node)

    async def nominate(self, unit: Unit, nomination: Nomination | None) -> None:
        """Annotate a unit with the cells that it is promised, or remove that annotation. Raises as `admit`."""
        value = encode_nomination(nomination) if nomination is not None else None
        for name in unit.objects:
            self._find_object(unit, name)
            await self._annotate(_resource_of(unit.key.kind), name, NOMINATED, value)

    async def keep_place(self, kind: UnitKind, name: ObjectKey, enqueued_at: str) -> None:
        """Annotate a pod or process with its queue place. Raises as `admit`."""
        await self._annotate(_resource_of(kind), name, ENQUEUED_AT, enqueued_at)

    async def evict(self, victim: Unit, preemptor: Unit) -> None:
        """Evict the pods, or delete the process, of a unit for another one; objects that are gone are skipped.

        Raises StaleUnit if the preemptor is gone, ApiError and Unreachable.
        """
        # Only to check: this raises StaleUnit if the preemptor is gone.
        for name in preemptor.objects:
            self._find_object(preemptor, name)

        for name in victim.objects:
            try:
                obj = self._find_object(victim, name)
            except StaleUnit:
                continue  # it is gone already
            if victim.key.kind != "process":
                await self._evict_pod(name, obj)
                continue

            # A process has no eviction: it is deleted.
            self._require_leadership()
            try:
                await self._client.delete(METAL_PROCESSES, name.name, name.namespace, uid=obj["metadata"]["uid"])
            except (NotFound, Conflict):
                log.info("unit_gone", object=str(name))

    async def _evict_pod(self, name: ObjectKey, pod: Obj) -> None:
        """Evict a pod; delete it if only our own PodDisruptionBudget refuses, or if budgets have refused for too long.

        Raises ApiError and Unreachable, also while a budget of a user refuses.
        """
        uid, now = pod["metadata"]["uid"], asyncio.get_running_loop().time()
        self._require_leadership()
        try:
            await self._client.create_subresource(PODS, name.name, name.namespace, "eviction", build_eviction(pod))
        except (NotFound, Conflict):
            log.info("unit_gone", object=str(name))
        except ApiError as error:
            # Two kinds of refusal are overruled: by our own budget, and by budgets of users for too long.
            if self._is_refused_by_own_budget(pod, error):
                log.info("own_budget_overruled", pod=str(name))
            elif error.status in _REFUSED_BY_BUDGET and self._is_out_of_patience(uid, now):
                log.warning("eviction_overruled", pod=str(name), error=str(error))
            else:
                raise

            # The pod is deleted instead.
            self._require_leadership()
            await self._client.delete(PODS, name.name, name.namespace, uid=uid)
        self._refusals.pop(uid, None)

    def _is_refused_by_own_budget(self, pod: Obj, error: ApiError) -> bool:
        """Return whether only the budget that Pomona has made for a service refuses the eviction of its pod.

        That budget is for drains of nodes. The queue evicts several replicas of a service at once where it must.
        """
        metadata = pod["metadata"]
        service = (metadata.get("labels") or {}).get(LABEL_SERVICE, "")
        budget = self._store.get(POD_DISRUPTION_BUDGETS, service, metadata["namespace"])
        owner = controller_of(budget) if budget is not None else None
        if owner is None or (owner["kind"], owner["name"]) != (INFERENCE_SERVICES.kind, service):
            return False

        # The cause names the one budget that refuses; a pod with two of them gets another status.
        is_named = any(service in message.split() for _, message in error.causes)
        return error.status == HTTPStatus.TOO_MANY_REQUESTS and is_named

    def _is_out_of_patience(self, uid: str, now: float) -> bool:
        """Note a refused eviction, and return whether evictions of this pod have been refused for too long."""
        # An eviction that was given up long ago begins anew.
        self._refusals = {
            pod_uid: refusals
            for pod_uid, refusals in self._refusals.items()
            if now - refusals.latest < EVICTION_PATIENCE_SECONDS
        }

        first_refused_at = self._refusals[uid].first if uid in self._refusals else now
        self._refusals[uid] = _EvictionRefusals(first=first_refused_at, latest=now)
        return now - first_refused_at >= EVICTION_PATIENCE_SECONDS

    async def requeue(self, unit: Unit) -> None:
        """Delete pods that no scheduler places, so that their successors wait in the queue. Raises as `admit`."""
        if find_refusal(self._store, unit) is None:
            raise StaleUnit(f"the scheduler places {unit.key} now")
        for name in unit.objects:
            pod = self._find_object(unit, name)
            self._require_leadership()
            try:
                await self._client.delete(PODS, name.name, name.namespace, uid=pod["metadata"]["uid"])
            except (NotFound, Conflict):
                log.info("unit_gone", object=str(name))

    async def read(self, kind: UnitKind, names: Sequence[ObjectKey]) -> None:
        """Read objects into the store after a write of unknown outcome, with retries until each is known."""
        for name in names:
            while True:
                if await self._try_read(_resource_of(kind), name):
                    break
                await asyncio.sleep(READ_AGAIN_SECONDS)

    async def _try_read(self, resource: Resource, name: ObjectKey) -> bool:
        """Read an object into the store, or remove it there if it is gone; return False if the API server fails."""
        # An object that is made under the same name during the read must not be removed.
        stored = self._store.get(resource, name.name, name.namespace)
        try:
            current = await self._client.get(resource, name.name, name.namespace)
        except NotFound:
            if stored is not None:
                self._store.remove(resource, name.namespace, name.name, uid=stored["metadata"]["uid"])
        except (ApiError, Unreachable) as error:
            log.warning("unit_not_read", object=str(name), error=str(error))
            return False
        else:
            self._store.put(resource, current)
        return True

    def _find(self, resource: Resource, name: ObjectKey) -> Obj:
        """Return an object of the store. Raises StaleUnit if it is gone or being deleted."""
        stored = self._store.get(resource, name.name, name.namespace)
        if stored is None or "deletionTimestamp" in stored["metadata"]:
            raise StaleUnit(f"{resource.kind} {name} is gone")
        return stored

    def _find_object(self, unit: Unit, name: ObjectKey) -> Obj:
        """Return an object of a unit. Raises StaleUnit if it is gone, also if another one has its name.

        The objects of a gang are not compared: its uid is that of its first pod.
        """
        stored = self._find(_resource_of(unit.key.kind), name)
        if unit.key.kind != "gang" and stored["metadata"]["uid"] != unit.uid:
            raise StaleUnit(f"{name} is the name of a successor")
        return stored

    async def _patch(self, resource: Resource, name: ObjectKey, operations: Operations) -> None:
        """Patch an object by a JSON patch, and put the answer into the store, which the watch would bring later."""
        self._require_leadership()
        self._store.put(resource, await self._client.patch_json(resource, name.name, name.namespace, operations))

    async def _annotate(self, resource: Resource, name: ObjectKey, annotation: str, value: str | None) -> None:
        """Set an annotation, or remove it if `value` is None; nothing is written if it is so already."""
        obj = self._find(resource, name)
        if (obj["metadata"].get("annotations") or {}).get(annotation) == value:
            return
        patch = annotate(obj, {annotation: value})
        self._require_leadership()
        answer = await self._client.patch_merge(
            resource, name.name, name.namespace, patch, field_manager=_QUEUE_MANAGER
        )
        self._store.put(resource, answer)


async def write_at_once(most: int, writes: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Make independent writes, at most `most` of them at a time."""
    gate = asyncio.Semaphore(most)

    async def make(write: Callable[[], Awaitable[object]]) -> None:
        """Make one write, after a wait while `most` others are under way."""
        async with gate:
            await write()

    async with asyncio.TaskGroup() as tasks:
        for write in writes:
            tasks.create_task(make(write))


def _resource_of(kind: UnitKind) -> Resource:
    """Return the resource of a unit's objects: pods also for a gang."""
    return METAL_PROCESSES if kind == "process" else PODS
