"""The report of the queue in the status of a service, and the Events on moves that matter; in mode Kueue that of Kueue.

Of Kueue, a service also shows what it lacks to admit its pods.
"""

from datetime import UTC, datetime
from typing import Final, NamedTuple

from controller.placement.kueue import KueueQueues, KueueStanding
from controller.placement.queue_places import parse_seconds
from controller.placement.standing import ServiceStanding
from controller.placement.start_estimate import StartRange
from controller.reconcile.conditions import MESSAGE_LENGTH
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import Event
from controller.services.diagnosis import BINDING, QUEUED, SCHEDULING_GATED, WAITS_FOR_HOST
from controller.services.pods.queue_gate import name_local_queue
from controller.services.preconditions import ServiceProblem
from crds.inferenceservice import InferenceService
from crds.meta import PRIORITY_RANK, without_defaults
from crds.queue_status import EstimatedStart, NoEstimate, QueueNomination, QueueStatus
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


SILENT_QUEUE_REASONS: Final = (
    QUEUED,
    "InsufficientDevices",
    "InsufficientMemory",
    "HeadOfLine",
    "Draining",
    "CellsClosed",
    "NotConsidered",
    "AdmissionFailed",
)
"""Reasons for which Ready changes while a service waits, for which no Event is sent: those of the queue are."""
_CAUSED_BY_OTHERS: Final = frozenset({"HeadOfLine", "Draining", "Quota", "NotConsidered", "AdmissionFailed"})
"""Reasons that lie in other replicas, of which a diagnosis of one replica knows nothing."""
_MOST_LISTED: Final = 32


def build_queue_status(standing: ServiceStanding) -> Obj:
    """Return `status.queue`: the place of a service in the queue, what it waits for, and when it may start.

    Empty fields are left out. `ahead` counts by priority those that are before it.
    """
    start = standing.start

    # The cells (nodes or hosts) that it is promised, and the services of which replicas end for it.
    nominated = QueueNomination(cells=[*standing.cells[:_MOST_LISTED]], victims=[*standing.victims[:_MOST_LISTED]])

    queue = QueueStatus(
        pool=standing.pool,
        position=standing.position,
        length=standing.length,
        place=standing.place,
        waiting_for=standing.waiting_for,
        enqueued_at=_format_time(standing.enqueued_at),
        nominated=nominated if standing.cells else None,
        reason=standing.reason,
        message=standing.message[:MESSAGE_LENGTH],
        estimated_start=EstimatedStart(earliest=_format_time(start.earliest), latest=_format_time(start.latest))
        if isinstance(start, StartRange)
        else None,
        no_estimate=None if isinstance(start, StartRange) else start,
    )

    ahead = {"aheadByPriority": dict(standing.ahead)} if standing.ahead and standing.position is not None else {}
    return {name: value for name, value in without_defaults(queue).items() if value != {}} | ahead


def recall_standing(queue: QueueStatus | None) -> ServiceStanding | None:
    """Return the place in the queue that the status has, as `build_queue_status` wrote it; None if it has none.

    A new leader keeps to it until it has planned the queue. Else it would take each service out of the queue and put
    it back, with two writes.
    """
    enqueued_at = parse_seconds(queue.enqueued_at) if queue is not None else None
    if queue is None or enqueued_at is None or queue.reason is None:
        return None

    # The estimate: the earliest and the latest start, or why there is none.
    estimated = queue.estimated_start
    start: StartRange | NoEstimate = queue.no_estimate or "TooFewSeen"
    if estimated and (earliest := parse_seconds(estimated.earliest)) and (latest := parse_seconds(estimated.latest)):
        start = StartRange(earliest, latest)

    return ServiceStanding(
        pool=queue.pool,
        position=queue.position,
        length=queue.length or 0,
        ahead={
            priority: queue.ahead_by_priority[priority]
            for priority in PRIORITY_RANK
            if priority in queue.ahead_by_priority
        },
        waiting_for=queue.waiting_for,
        enqueued_at=enqueued_at,
        cells=tuple(queue.nominated.cells) if queue.nominated else (),
        victims=tuple(queue.nominated.victims) if queue.nominated else (),
        reason=queue.reason,
        message=queue.message,
        start=start,
    )


def explain_wait(problem: ServiceProblem | None, standing: ServiceStanding | None) -> ServiceProblem | None:
    """Return why a replica is not ready: the reason of the queue if that says more than the diagnosis of the replica.

    It does for a pod in the queue, and for a process about to be bound. A process that waits for a host keeps its own
    diagnosis, which knows more of hosts, unless other replicas are the reason, of which it knows nothing.
    """
    if standing is None or problem is None:
        return problem
    waits_for_host = problem.phase == "Pending" and problem.reason in WAITS_FOR_HOST
    waits_for_others = waits_for_host and standing.reason in _CAUSED_BY_OTHERS
    # QUEUED: a pod that is in the queue. BINDING: a process that fits on a host and has not been given to it yet.
    if problem.reason in {QUEUED, BINDING} or waits_for_others:
        return ServiceProblem(standing.reason, standing.message, "WaitingForGPU")
    # Its own diagnosis stays. Only the phase says that it waits.
    return problem._replace(phase="WaitingForGPU") if waits_for_host else problem


def build_queue_events(before: QueueStatus | None, after: Obj | None) -> tuple[Event, ...]:
    """Return the Events for a service that came to the queue, or is promised room; moves have none."""
    if after is None:
        return ()
    events = []

    # It came to the queue.
    if before is None and after.get("place"):
        note = f"waits at place {after['place']} of pool {after['pool']} for {after['waitingFor']}"
        events.append(Event("Normal", reason=QUEUED, note=note, action="Queue"))

    # It is promised room on cells (nodes or hosts), as soon as victims have ended there.
    promised = after.get("nominated")
    nomination = before.nominated if before is not None else None
    if promised is not None and (nomination is None or nomination.cells != promised["cells"]):
        victims = ", ".join(promised.get("victims", ())) or "others"
        note = f"gets {', '.join(promised['cells'])} as soon as replicas of {victims} have ended"
        events.append(Event("Normal", reason="Nominated", note=note, action="Queue"))
    return tuple(events)


def _format_time(seconds: float) -> str:
    return rfc3339(datetime.fromtimestamp(seconds, UTC))
