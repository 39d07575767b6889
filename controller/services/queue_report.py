"""The report of the queue in the status of a service, and the Events on moves that matter."""

from datetime import UTC, datetime
from typing import Final

from controller.placement.queue_places import parse_seconds
from controller.placement.standing import ServiceStanding
from controller.placement.start_estimate import StartRange
from controller.reconcile.conditions import MESSAGE_LENGTH
from controller.reconcile.plan import Event
from controller.services.diagnosis import BINDING, QUEUED, WAITS_FOR_HOST
from controller.services.preconditions import ServiceProblem
from crds.meta import PRIORITY_RANK, without_defaults
from crds.queue_status import EstimatedStart, NoEstimate, QueueNomination, QueueStatus
from kube.client import Obj
from kube.time import rfc3339

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
