"""The pods of Jobs, and why the API server refuses some: by a quota, a LimitRange or a webhook.

A Job has no condition for a refusal: Kubernetes' Job controller reports it by an Event alone. Events are not watched.
Those about a Job without a pod are read, as each Job is for a moment, and longer only if its pod is refused.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec
import structlog

from controller.reconcile.conditions import MESSAGE_LENGTH
from controller.reconcile.plan import Snapshot
from crds.meta import ObjectMeta
from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.resources import EVENTS, JOBS, PODS

FAILED_CREATE: Final = "FailedCreate"
"""Reason of the Event, and of the condition that has its words."""
DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
"""Reason of the condition of a Job that took too long."""
PODLESS_SECONDS: Final = 5.0
"""Age from which on a Job without a pod is looked into."""
LOOK_SECONDS: Final = 15.0
"""Time between two looks."""
_MOST_JOBS: Final = 8
"""Jobs of a Model that are looked into at once: each costs a request."""
_MOST_EVENTS: Final = 16
"""Events about a Job that are read: a tenant may write them, too, each as large as an object can be."""
_LIMIT_MISSING: Final = "must specify"
"""Words of a quota that counts what a container does not state."""

log = structlog.get_logger()


class ObservedPods(msgspec.Struct, frozen=True):
    """The pods of Jobs."""

    by_job: Mapping[str, Sequence[Obj]] = {}
    """Pods by the uid of their Job."""
    refusals: Mapping[str, str] = {}
    """The API server's words about the pods that it refuses, by the uid of the Job."""

    def find(self, job: Obj) -> Sequence[Obj]:
        """Return the pods of a Job."""
        return self.by_job.get(job["metadata"]["uid"], ())


NO_PODS: Final = ObservedPods()


def find_refusal_check_seconds(job: Obj, pods: Sequence[Obj], now: datetime) -> float | None:
    """Return the seconds until the next check whether the API server refuses the pod of a Job.

    None: no check is needed, because the Job has a pod, or because it is not created yet.
    """
    created = job["metadata"].get("creationTimestamp")
    if pods or created is None:
        return None
    # The first check is `PODLESS_SECONDS` after the creation, and the others are `LOOK_SECONDS` apart.
    until_first_check = PODLESS_SECONDS - _age_seconds(created, now)
    return until_first_check if until_first_check > 0 else LOOK_SECONDS


async def read_refusals(client: Client, snapshot: Snapshot, owner: ObjectMeta) -> Mapping[str, str]:
    """Return why the pods of an object's Jobs are refused, by the uid of the Job.

    Only the newest Jobs without a pod are looked into. If Events cannot be read, what was found so far is returned:
    the controller may lack the right, or the store of Events, which may be a separate one, does not answer.
    """
    namespace, refusals = owner.namespace, dict[str, str]()
    # The Jobs without a pod, the newest first.
    jobs = snapshot.children(JOBS, namespace, owner.uid)
    podless = [job for job in jobs if _lacks_pod(job, snapshot)]
    podless.sort(key=lambda job: str(job["metadata"]["creationTimestamp"]), reverse=True)

    for job in podless[:_MOST_JOBS]:
        uid = job["metadata"]["uid"]
        try:
            # Of each Event about the Job, only its note and time are kept.
            events = await client.list(
                EVENTS,
                namespace,
                field_selector=f"regarding.uid={uid},reason={FAILED_CREATE}",
                part=_keep_note,
                most=_MOST_EVENTS,
            )
        except (ApiError, Unreachable) as error:
            log.warning("events_not_readable", job=f"{namespace}/{job['metadata']['name']}", error=str(error))
            return refusals

        # The last Event counts; without any, nothing is refused.
        if events.items:
            last = max(events.items, key=lambda event: str(event["time"]))
            refusals[uid] = advise_on_refusal(str(last["note"]))
    return refusals


def advise_on_refusal(words: str) -> str:
    """Return the API server's words about a pod that it refuses; for a quota of limits with the way out."""
    if _LIMIT_MISSING not in words:
        return words
    return (
        f"{words}; the quota counts what containers need not state: create a LimitRange whose default and "
        "defaultRequest state it for all containers of the namespace"
    )


def _lacks_pod(job: Obj, snapshot: Snapshot) -> bool:
    """Return whether a Job has had no pod although it is old enough for one."""
    metadata = job["metadata"]
    created = metadata.get("creationTimestamp")
    if created is None or _age_seconds(created, snapshot.now) < PODLESS_SECONDS or "deletionTimestamp" in metadata:
        return False

    conditions = (job.get("status") or {}).get("conditions") or ()
    # A Job that has ended had a pod, which may be gone by now, unless it ended because it took too long.
    has_had_pod = any(
        condition["status"] == "True"
        and (
            condition["type"] == "Complete"
            or (condition["type"] == "Failed" and condition.get("reason") != DEADLINE_EXCEEDED)
        )
        for condition in conditions
    )
    return not has_had_pod and not snapshot.children(PODS, metadata["namespace"], metadata["uid"])


def _keep_note(event: Obj) -> Obj:
    """Return the note of an Event, cut to the length of a message, and its last time."""
    series = event.get("series") or {}
    metadata = event["metadata"]
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return {
        "metadata": {"name": metadata["name"]},
        "note": (event.get("note") or "")[:MESSAGE_LENGTH],
        "time": next((time for time in times if time), metadata.get("creationTimestamp") or ""),
    }


def _age_seconds(created: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(created)).total_seconds()
