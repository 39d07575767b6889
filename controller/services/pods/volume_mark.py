"""The value of the label by which pods of a ReadWriteOnce volume find its one node (`one_node.py`).

It changes when no pod that has it can run: the scheduler counts pods of a lost node, too, which stay until somebody
deletes them, and would hold new ones there for ever. And a pod that was refused for the sake of one that is gone since
is not tried again for minutes; a new pod is tried at once. All services of a volume choose alike, since they look at
the same pods. Where pods serve, their value stays: the volume is there.
"""

import hashlib
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from controller.reconcile.triggers import is_refused, waits_for_node
from controller.services.pods.observed_deployments import is_ready, node_of
from controller.services.pods.one_node import FIRST_MARK, follows_only_its_volume, name_label
from kube.client import Obj

_LOST: Final = timedelta(seconds=20)
"""Time after which a pod that should have ended is on a lost node: a kubelet may be late by seconds."""
_DIGITS: Final = 8
_REFUSED_BY_AFFINITY: Final = "didn't match pod affinity rules"
_LACKS_ROOM: Final = "Insufficient"
"""A pod that lacks room, too, is tried again as soon as another one ends."""


class VolumeMark(NamedTuple):
    """A value of the label."""

    value: str
    again_seconds: float | None = None
    """Time after which a pod that is being deleted counts as lost, and another value may be needed."""


class _Marked(NamedTuple):
    """Pods with the label, by how they stand: the value of each, and what tells the pods apart."""

    ready: list[tuple[str, str]]
    """The values of pods that serve, each after the time at which its pod was created."""
    placed: list[tuple[str, str]]
    """The values of all pods that have a node, and can end there, in the same form."""
    lost: list[tuple[str, str]]
    """The values of pods of lost nodes, each before the uid of its pod."""
    in_vain: list[tuple[str, str]]
    """The values of pods that wait for the sake of pods with this volume, in the same form."""


def choose_mark(claim: str, pods: Iterable[Obj], present: Obj | None, now: datetime) -> VolumeMark:
    """Return the value of a claim's label for new pods.

    If pods run, it is one of theirs, the present one if possible. If pods with the present one are stuck, it is a new
    one, made of the uids of these pods. Else the present one stays.

    Args:
        claim: the claim.
        pods: all pods that mount it and have not ended, of any service.
        present: the Deployment as it is; None: there is none yet.
        now: the time.
    """
    label = name_label(claim)
    pods = [pod for pod in pods if label in pod["metadata"]["labels"]]
    marked = _sort_pods(pods, label, now)
    labels: Obj = present["spec"]["template"].get("metadata", {}).get("labels", {}) if present is not None else {}
    mark: str = labels.get(label, FIRST_MARK)
    if running := marked.ready or marked.placed:
        if mark not in {other for _created, other in running}:
            mark = max(running)[1]
        return VolumeMark(mark, _find_seconds_to_loss(pods, now))
    if len({other for other, _uid in marked.in_vain}) > 1:
        return VolumeMark(mark)  # another value did not help
    # One after the other, so that services which learn of the same pods at different times choose the same value.
    for stuck in (marked.lost, marked.in_vain):
        if mark in {other for other, _uid in stuck}:
            uids = " ".join(sorted(uid for _mark, uid in stuck))
            return VolumeMark(hashlib.sha256(uids.encode()).hexdigest()[:_DIGITS])
    return VolumeMark(mark)


def _sort_pods(pods: Iterable[Obj], label: str, now: datetime) -> _Marked:
    """Return the values that pods have for a label, sorted by what became of the pods."""
    marked = _Marked([], [], [], [])
    for pod in pods:
        metadata, mark = pod["metadata"], pod["metadata"]["labels"][label]
        loss = _find_loss_time(pod)
        if loss is not None and loss <= now:
            marked.lost.append((mark, metadata["uid"]))
        elif _waits_in_vain(pod):
            marked.in_vain.append((mark, metadata["uid"]))
        elif node_of(pod):
            created = metadata.get("creationTimestamp", "")
            marked.placed.append((created, mark))
            if loss is None and is_ready(pod):
                marked.ready.append((created, mark))
    return marked


def _find_loss_time(pod: Obj) -> datetime | None:
    """Return the time at which a pod that is being deleted counts as lost, or None."""
    deleted = pod["metadata"].get("deletionTimestamp")
    return datetime.fromisoformat(deleted) + _LOST if deleted is not None else None


def _find_seconds_to_loss(pods: Iterable[Obj], now: datetime) -> float | None:
    """Return the seconds until the next pod counts as lost, if another pod waits for its node."""
    pods = list(pods)
    if not any(map(waits_for_node, pods)):
        return None
    losses = (_find_loss_time(pod) for pod in pods)
    return min(((loss - now).total_seconds() for loss in losses if loss is not None and loss > now), default=None)


def _waits_in_vain(pod: Obj) -> bool:
    """Return whether a pod was refused only because of the pods with its volume."""
    messages = [condition.get("message", "") for condition in pod["status"].get("conditions", ())]
    return (
        is_refused(pod)
        and follows_only_its_volume(pod)
        and any(_REFUSED_BY_AFFINITY in message and _LACKS_ROOM not in message for message in messages)
    )
