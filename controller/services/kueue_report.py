"""Services in mode Kueue: what Kueue lacks to admit their pods, and their place in its queue as the status shows it."""

from datetime import UTC, datetime
from typing import Final, NamedTuple

from controller.placement.kueue import KueueQueues, KueueStanding
from controller.reconcile.conditions import MESSAGE_LENGTH
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.services.diagnosis import SCHEDULING_GATED
from controller.services.pods.queue_gate import name_local_queue
from controller.services.preconditions import ServiceProblem
from crds.inferenceservice import InferenceService
from crds.meta import without_defaults
from crds.queue_status import QueueStatus
from kube.client import Obj
from kube.resources import LOCAL_QUEUES, PODS
from kube.store import Store
from kube.time import rfc3339

WAITING: Final = "WaitingForKueue"
"""Reason of a service whose pods Kueue has not admitted."""
_MISSING: Final = (
    "spec.scheduling.mode is Kueue, and the controller finds no LocalQueues of kueue.x-k8s.io/v1beta2 in the cluster, "
    "without which nothing would hold the pods to a quota: install Kueue 0.15 or later, which is found within ten "
    "minutes, or set mode to Queue"
)


class KueueReport(NamedTuple):
    """Facts about Kueue that a decision about a service reads."""

    problem: ServiceProblem | None = None
    """Why its pods cannot be given to Kueue."""
    standing: KueueStanding | None = None
    """Its place in the queue; None if it does not wait there."""


NO_REPORT: Final = KueueReport()
"""That of a service in another mode."""


def read_kueue(service: InferenceService, store: Store, queues: KueueQueues | None) -> KueueReport:
    """Return why a service cannot be given to Kueue, or its standing: the place there of its first pod that waits.

    Neither, if the service is in another mode, or none of its pods waits. `queues` is what the controller has read of
    Kueue; None: it reads nothing of it.
    """
    name, namespace = name_local_queue(service), service.metadata.namespace
    if name is None or queues is None:
        return NO_REPORT

    pods = store.by_index(PODS, SERVICE_INDEX, namespaced(namespace, service.metadata.name))
    queue = store.get(LOCAL_QUEUES, name, namespace)
    if queue is not None:
        standing = queues.find_standing(namespace, pods)
        if standing is None:  # no pod waits for Kueue
            return NO_REPORT
        return KueueReport(standing=standing._replace(stopped=_explain_stop(queue)))

    # Its LocalQueue does not exist, or no LocalQueue can be read.
    if not queues.local_queues.exists:  # the controller finds no LocalQueues in the cluster
        return KueueReport(ServiceProblem("KueueMissing", _MISSING, "Failed"))
    message = f"LocalQueue {name} does not exist in namespace {namespace}: create it, or edit spec.scheduling.queueName"
    return KueueReport(ServiceProblem("LocalQueueNotFound", message, "Pending"))


def explain_kueue_wait(problem: ServiceProblem | None, standing: KueueStanding | None) -> ServiceProblem | None:
    """Return why a replica is not ready: because of Kueue if nothing but a gate holds it, else `problem`."""
    if standing is None or (problem is not None and problem.reason != SCHEDULING_GATED):
        return problem
    return ServiceProblem(WAITING, standing.message, "WaitingForGPU")


def build_kueue_status(standing: KueueStanding) -> Obj:
    """Return `status.queue` of a service that waits for Kueue."""
    place = standing.place  # None: not known; the message says why
    queue = QueueStatus(
        pool=f"kueue/{standing.queue}",
        position=place.position if place else None,
        length=standing.length if place else None,
        place=f"{place.position}/{standing.length}" if place else "",
        waiting_for=f"quota of LocalQueue {standing.queue}",
        enqueued_at=rfc3339(datetime.fromisoformat(place.enqueued_at).astimezone(UTC)) if place else None,
        message=standing.message[:MESSAGE_LENGTH],
    )
    return {name: value for name, value in without_defaults(queue).items() if value != {}}


def reads_of_queue(queue: Obj) -> object:
    """Return what a decision reads of a LocalQueue, whose counts change with each pod."""
    return queue["metadata"].get("uid"), _explain_stop(queue)


def _explain_stop(queue: Obj) -> str:
    """Return why Kueue admits nothing from a LocalQueue, in its own words; empty if it does."""
    conditions = (queue.get("status") or {}).get("conditions") or ()
    for condition in conditions:
        if condition["type"] == "Active" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return ""
