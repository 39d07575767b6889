"""Kueue, to which services in mode Kueue give their pods: its labels, and the places of pods in its LocalQueues.

Kueue's webhook puts a scheduling gate on each pod with the label of a LocalQueue, and its manager removes it once the
quota of the ClusterQueue has room. Only its visibility API knows the order of those that wait. The leader reads it
every ten seconds, once for each LocalQueue in which a pod of ours waits, and never two at once: if it hangs or refuses,
only the places are unknown.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
import structlog

from controller.reconcile.indexes import KUEUE_INDEX, namespaced, waits_for_kueue
from controller.reconcile.optional_kinds import OptionalKind
from controller.reconcile.plan import Leading
from crds.meta import KUEUE_QUEUE_NAME, LABEL_SERVICE, ApiStruct
from kube.backoff import backoff_seconds
from kube.client import Client, Obj
from kube.errors import ApiError, NotFound, Unreachable
from kube.resources import INFERENCE_SERVICES, LOCAL_QUEUES, PODS, VISIBLE_QUEUES, ObjectKey

PENDING: Final = "pendingworkloads"
"""Subresource of `VISIBLE_QUEUES`."""
READ_SECONDS: Final = 10.0
"""Pause between two readings of all queues."""
MOST_SECONDS: Final = 60.0
"""Longest pause, while the API fails."""
TIMEOUT_SECONDS: Final = 5.0
STALE_SECONDS: Final = 30.0
"""Time without an answer after which the places in a queue are unknown."""

log = structlog.get_logger()


class _PodOwner(msgspec.Struct, frozen=True):
    uid: str = ""


class _WorkloadMetadata(ApiStruct, frozen=True):
    name: str = ""
    owner_references: list[_PodOwner] = []
    creation_timestamp: str = ""


class _PendingWorkload(ApiStruct, frozen=True):
    metadata: _WorkloadMetadata
    position_in_cluster_queue: Annotated[int, msgspec.Meta(ge=0)]
    position_in_local_queue: Annotated[int, msgspec.Meta(ge=0)]


class _PendingWorkloads(msgspec.Struct, frozen=True):
    items: list[_PendingWorkload]


class KueuePlace(NamedTuple):
    """The place of one pod."""

    position: int
    """In its LocalQueue; the first is 1."""
    ahead: int
    """Pods that are ahead in the ClusterQueue, which may be of other LocalQueues."""
    enqueued_at: str
    """Time since which it waits."""
    workload: str
    """Name of Kueue's Workload, whose condition QuotaReserved has the reason."""


class KueueAnswer(NamedTuple):
    """The last answer about one LocalQueue."""

    places: Mapping[str, KueuePlace] = {}
    """By the uid of the pod. One that is not there was found inadmissible, or Kueue has not seen it yet."""
    problem: str = ""
    """Why the places are unknown; empty if they are known."""
    read_at: float = 0.0


class KueueStanding(NamedTuple):
    """The place of a service: that of its first pod that waits."""

    namespace: str
    queue: str
    """The LocalQueue."""
    place: KueuePlace | None
    """None: unknown; `problem` has the reason."""
    length: int
    """Pods that wait in the LocalQueue."""
    problem: str
    stopped: str = ""
    """Why Kueue admits nothing from the LocalQueue, in its own words; empty if it does."""

    @property
    def message(self) -> str:
        """Sentence about the place for people."""
        if self.stopped:
            return f"waiting in LocalQueue {self.queue} of Kueue, which admits nothing now: {self.stopped}"
        if self.place is None:
            return f"waiting in LocalQueue {self.queue} of Kueue; {self.problem}"
        text = f"waiting in LocalQueue {self.queue} of Kueue at position {self.place.position} of {self.length}"
        return (
            f"{text}, with {self.place.ahead} ahead in its ClusterQueue: for the reason see `kubectl describe workload "
            f"-n {self.namespace} {self.place.workload}`"
        )


class KueueQueues:
    """The LocalQueues in which pods of ours wait, with the last answer about each.

    Args:
        namespaces: the only namespaces of the controller; none: all.
    """

    def __init__(self, namespaces: Sequence[str] = ()) -> None:
        """Start without answers; `namespaces` are the only ones to read, none: all."""
        self.local_queues = OptionalKind(LOCAL_QUEUES, "", namespaces)
        self._answers: dict[ObjectKey, KueueAnswer] = {}

    async def run(self, leading: Leading) -> None:
        """Read all LocalQueues for ever, with longer pauses while the API fails."""
        failures = 0
        while True:
            failed = await self.read_all(leading)
            failures = failures + 1 if failed else 0
            pause = backoff_seconds(failures, first=READ_SECONDS, most=MOST_SECONDS) if failed else READ_SECONDS
            await asyncio.sleep(pause)

    async def read_all(self, leading: Leading) -> bool:
        """Read each LocalQueue once, and enqueue the services whose place changed; return whether the API failed."""
        waiting = [ObjectKey(*value.split("/")) for value in leading.store.index_values(PODS, KUEUE_INDEX)]
        self._answers = {queue: self._answers[queue] for queue in waiting if queue in self._answers}
        for queue in sorted(waiting):
            answer = await self._read(leading.client, queue)
            if answer is None:
                # All queues are of one API: the others would only wait for it too.
                self._forget_stale(leading, waiting)
                return True
            self._record_answer(leading, queue, answer)
        return False

    def find_standing(self, namespace: str, pods: Iterable[Obj]) -> KueueStanding | None:
        """Return the standing of a service with these pods; None if none of them waits for Kueue."""
        waiting = [pod for pod in pods if waits_for_kueue(pod)]
        if not waiting:
            return None
        queue = waiting[0]["metadata"]["labels"][KUEUE_QUEUE_NAME]
        # `_NOT_READ` has no places, and says that Kueue was not asked yet.
        answer = self._answers.get(ObjectKey(namespace, queue), _NOT_READ)
        places = [answer.places[uid] for pod in waiting if (uid := pod["metadata"]["uid"]) in answer.places]
        first_place = min(places, default=None)  # places begin with the position
        problem = ""
        if first_place is None:
            problem = answer.problem or _INADMISSIBLE.format(namespace=namespace)
        return KueueStanding(namespace, queue, first_place, length=len(answer.places), problem=problem)

    async def _read(self, client: Client, queue: ObjectKey) -> KueueAnswer | None:
        """Return the answer about one LocalQueue; None: the API does not answer."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                summary = await client.get_subresource(VISIBLE_QUEUES, queue.name, queue.namespace, PENDING)
            return KueueAnswer(parse_pending(summary), read_at=loop.time())
        except NotFound:
            problem = _NO_QUEUE.format(name=queue.name, namespace=queue.namespace)
            return KueueAnswer(problem=problem, read_at=loop.time())
        except (ApiError, Unreachable, TimeoutError, msgspec.ValidationError) as error:
            log.warning("kueue_not_read", queue=str(queue), error=str(error) or f"no answer in {TIMEOUT_SECONDS:g} s")
            return None

    def _forget_stale(self, leading: Leading, queues: Iterable[ObjectKey]) -> None:
        """Replace missing answers, and those older than STALE_SECONDS, by one without places."""
        now = asyncio.get_running_loop().time()
        for queue in queues:
            last = self._answers.get(queue)
            if last is None or now - last.read_at > STALE_SECONDS:
                read_at = last.read_at if last is not None else 0.0  # that of the last real answer
                self._record_answer(leading, queue, KueueAnswer(problem=_NO_ANSWER, read_at=read_at))

    def _record_answer(self, leading: Leading, queue: ObjectKey, answer: KueueAnswer) -> None:
        """Store the answer about a LocalQueue, and enqueue the services with a pod there whose standing it changes."""
        last = self._answers.get(queue, _NOT_READ)
        self._answers[queue] = answer
        # These two are part of the standing of each pod in the queue.
        concerns_all_pods = (last.problem, len(last.places)) != (answer.problem, len(answer.places))
        for pod in leading.store.by_index(PODS, KUEUE_INDEX, namespaced(*queue)):
            metadata = pod["metadata"]
            service = metadata.get("labels", {}).get(LABEL_SERVICE)
            if service and (
                concerns_all_pods or last.places.get(metadata["uid"]) != answer.places.get(metadata["uid"])
            ):
                leading.enqueue(INFERENCE_SERVICES, ObjectKey(metadata["namespace"], service))


def parse_pending(summary: Obj) -> dict[str, KueuePlace]:
    """Return the place of each pod in a PendingWorkloadsSummary, by its uid. Raises msgspec.ValidationError."""
    workloads = msgspec.convert(summary, _PendingWorkloads).items
    return {
        owner.uid: KueuePlace(
            position=workload.position_in_local_queue + 1,  # Kueue counts from 0
            ahead=workload.position_in_cluster_queue,
            enqueued_at=workload.metadata.creation_timestamp,
            workload=workload.metadata.name,
        )
        for workload in workloads
        for owner in workload.metadata.owner_references
    }


_NO_QUEUE: Final = (
    "its visibility API knows no LocalQueue {name} in namespace {namespace}: create it, or edit "
    "spec.scheduling.queueName"
)
_NO_ANSWER: Final = (
    "its visibility API does not answer, so that the position is unknown: see `kubectl get apiservice "
    "v1beta2.visibility.kueue.x-k8s.io` and the log of Kueue's manager"
)
_INADMISSIBLE: Final = (
    "its visibility API does not list the pod: if this lasts, see `kubectl get workloads -n {namespace}` for the reason"
)
_NOT_READ: Final = KueueAnswer(problem="its visibility API has not been asked yet")
