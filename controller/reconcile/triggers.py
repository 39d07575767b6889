"""Triggers: the changes of other objects that enqueue an object, and the parts of them that a decision reads.

A change of anything that no decision reads enqueues nothing: an agent reports its host every few seconds, and each
status that the controller writes comes back to it as an event.
"""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from controller.reconcile.indexes import controller_of
from crds.meta import DRAINED, NOMINATED, QUEUE_GATE, REACHABLE
from kube.client import Obj
from kube.resources import ObjectKey, Resource
from kube.store import Store

Reads = Callable[[Obj], object]
"""Returns what a decision reads of an object; None: no more than if the object did not exist."""

ENDED: Final = frozenset({"Succeeded", "Failed"})
"""Phases of a pod that has ended."""
_PASSED_OVER: Final = timedelta(seconds=10)
"""Time after which the queue has certainly looked at a pod, and has no room for it."""
_NOT_READ: Final = ("resourceVersion", "managedFields")
_MEASURED: Final = (
    "availableBytes",
    "available",
    "memoryPressure",
    "swapUsedBytes",
    "gpuUsedBytes",
    "thermalLevel",
    "powerSource",
    "batteryPercent",
    "processes",
)
"""Fields that an agent measures again and again; the queue alone decides by them."""
_REPORTED: Final = frozenset({DRAINED, REACHABLE})
"""Conditions of a MetalHost for people; nothing is decided by them."""


class Trigger(NamedTuple):
    """One kind of object whose changes enqueue others."""

    resource: Resource
    keys: Callable[[Store, Obj], Iterable[ObjectKey]]
    """Returns the objects to reconcile after a change of this one."""
    reads: Reads
    finds_by_status: bool = False
    """True if `keys` finds the objects that wait for such a change by their status.

    One that is being decided may be about to wait, and its status shows that too late: it is decided again.
    """

    def concerns(self, old: Obj | None, new: Obj | None) -> bool:
        """Return whether a change from `old` to `new` matters; None: the object did not exist, or is gone."""
        return (old and self.reads(old)) != (new and self.reads(new))


def everything(obj: Obj) -> object:
    """Return the whole object, without the traces of who wrote it when."""
    metadata = {name: value for name, value in obj["metadata"].items() if name not in _NOT_READ}
    return {**obj, "metadata": metadata}


def all_but_status(obj: Obj) -> object:
    """Return an object without its status, of which its own reconciler is the only writer."""
    return everything({name: value for name, value in obj.items() if name != "status"})


def steady_facts(host: Obj) -> object:
    """Return a MetalHost without the fields that its agent measures again and again."""
    status = {name: value for name, value in host.get("status", {}).items() if name not in _MEASURED}
    return everything({**host, "status": status})


def serving_facts(host: Obj) -> object:
    """Return the fields of a MetalHost that services and processes read, without what the controller reports there.

    The condition Drained changes with each process that leaves, and each change would enqueue all that waits.
    """
    status = {name: value for name, value in host.get("status", {}).items() if name != "controllerVersion"}
    conditions = [condition for condition in status.get("conditions", ()) if condition["type"] not in _REPORTED]
    return steady_facts({**host, "status": {**status, "conditions": conditions}})


def deciding_process(process: Obj) -> object:
    """Return a MetalProcess without the measurement that its agent reports: its service does not depend on it."""
    status = {name: value for name, value in process.get("status", {}).items() if name != "performance"}
    return everything({**process, "status": status})


def is_scheduled(pod: Obj) -> bool:
    """Return whether a scheduler has looked at a pod, whatever it found, or a node runs it, whoever placed it there."""
    status = pod.get("status", {})
    is_placed = status.get("phase", "Pending") != "Pending"
    return is_placed or any(condition["type"] == "PodScheduled" for condition in status.get("conditions") or ())


def is_gated(pod: Obj) -> bool:
    """Return whether a pod waits for the queue to give it a node: until then, no scheduler tries to place it."""
    return any(gate["name"] == QUEUE_GATE for gate in pod.get("spec", {}).get("schedulingGates") or ())


def is_refused(pod: Obj) -> bool:
    """Return whether the scheduler found no node for a pod, which it tries again when nodes change."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(
        (condition["type"], condition["status"], condition.get("reason")) == ("PodScheduled", "False", "Unschedulable")
        for condition in conditions
    )


def waits_for_node(pod: Obj) -> bool:
    """Return whether a pod waits for the queue, or for the scheduler that found no node for it."""
    return is_gated(pod) or is_refused(pod)


def lacks_room(pod: Obj, now: datetime) -> bool:
    """Return whether no node has room for a pod: the scheduler says so, or the queue lets the pod wait for a while."""
    return is_refused(pod) or (_may_lack_room(pod) and queue_seconds(pod, now) is None)


def queue_seconds(pod: Obj, now: datetime) -> float | None:
    """Return the seconds after which a pod in the queue counts as one without room, because it has waited for long.

    By then the queue has certainly looked at it and passed it over. None: it counts as one already, is not in the
    queue, is promised room there, or is being deleted.
    """
    if not _may_lack_room(pod):  # not in the queue, promised room there, or being deleted
        return None
    since = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    seconds_left = (since + _PASSED_OVER - now).total_seconds()
    return seconds_left if seconds_left > 0 else None


def _may_lack_room(pod: Obj) -> bool:
    """Return whether a pod waits for the queue, and is promised no room."""
    metadata = pod["metadata"]
    is_promised = NOMINATED in (metadata.get("annotations") or {})
    return is_gated(pod) and not is_promised and "creationTimestamp" in metadata and "deletionTimestamp" not in metadata


def end_of_pod(pod: Obj, now: datetime) -> datetime | None:
    """Return the latest time at which a pod that is being deleted frees its room; None: it never will, or has done so.

    The time of the deletion is that at which the pod is killed. One that is still there later is on a lost node.
    """
    deleted = pod["metadata"].get("deletionTimestamp")
    if deleted is None or pod.get("status", {}).get("phase") in ENDED:
        return None
    due = datetime.fromisoformat(deleted)
    return due if due > now else None


def refused_pod(pod: Obj) -> object:
    """Return the uid of a pod for which the scheduler found no node, else None."""
    return pod["metadata"].get("uid") if is_refused(pod) else None


def scheduled_pod(pod: Obj) -> object:
    """Return a pod that a scheduler has handled, else None: until then it is no replica and has no problem."""
    return everything(pod) if is_scheduled(pod) else None


def offered_endpoints(endpoint_slice: Obj) -> object:
    """Return an EndpointSlice with endpoints, else None: Kubernetes makes an empty one with each Service."""
    return everything(endpoint_slice) if endpoint_slice.get("endpoints") else None


def existence(obj: Obj) -> object:
    """Return the uid of an object, so that only its creation and its end are read."""
    return obj["metadata"].get("uid")


def owned(resource: Resource, by: Resource) -> Trigger:
    """Return the trigger by which a change of an object enqueues its controlling owner, an object of `by`."""

    def keys(_store: Store, obj: Obj) -> list[ObjectKey]:
        """Return the controlling owner of an object as the one to reconcile; none if it is not of the kind `by`."""
        owner = controller_of(obj)
        if owner is None or (owner["apiVersion"], owner["kind"]) != (by.api_version, by.kind):
            return []
        # An owner that is cluster-scoped has no namespace.
        return [ObjectKey(obj["metadata"].get("namespace", "") if by.namespaced else "", owner["name"])]

    return Trigger(resource, keys, everything)
