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


class _MarkedPod(NamedTuple):
    """A pod with the label."""

    created: str
    mark: str
    """Its value of the label."""
    uid: str


class _MarkedPods(NamedTuple):
    """Pods with the label, by what became of them."""

    ready: list[_MarkedPod]
    """Those that serve."""
    placed: list[_MarkedPod]
    """All that have a node, and can end there."""
    lost: list[_MarkedPod]
    """Those on lost nodes."""
    in_vain: list[_MarkedPod]
    """Those that wait for the sake of pods with this volume."""


def choose_volume_mark(claim: str, pods: Iterable[Obj], present: Obj | None, now: datetime) -> VolumeMark:
    """Return the mark of a claim for new pods: the value of the label by which they follow pods with its volume.

    If pods run, it is one of theirs, the present one if possible. If pods with the present one are stuck (lost with
    their node, or waiting in vain for pods that are gone), it is a new one, made of the uids of these pods, so that new
    pods follow nobody. Else the present one stays.

    Args:
        claim: the claim.
        pods: all pods that mount it and have not ended, of any service.
        present: the Deployment as it is; None: there is none yet.
        now: the time.
    """
    label = name_label(claim)
    pods = [pod for pod in pods if label in pod["metadata"]["labels"]]
    sorted_pods = _sort_pods(pods, label, now)
    labels: Obj = present["spec"]["template"].get("metadata", {}).get("labels", {}) if present is not None else {}
    present_mark: str = labels.get(label, FIRST_MARK)

    # 1. Follow the pods that run: with the present value if one of them has it, else with that of the newest.
    if running := sorted_pods.ready or sorted_pods.placed:
        has_present = present_mark in {pod.mark for pod in running}
        mark = present_mark if has_present else max(running).mark
        return VolumeMark(mark, _find_seconds_to_loss(pods, now))

    # 2. If pods with the present value are stuck, choose a new one, unless another value has not helped before. Lost
    # pods come first, so that services which learn of the same pods at different times choose the same value.
    # Pods that wait in vain with two values: the newer value has not helped.
    if len({pod.mark for pod in sorted_pods.in_vain}) > 1:
        return VolumeMark(present_mark)
    for stuck in (sorted_pods.lost, sorted_pods.in_vain):
        if present_mark in {pod.mark for pod in stuck}:
            uids = " ".join(sorted(pod.uid for pod in stuck))
            return VolumeMark(hashlib.sha256(uids.encode()).hexdigest()[:_DIGITS])
    return VolumeMark(present_mark)


def _sort_pods(pods: Iterable[Obj], label: str, now: datetime) -> _MarkedPods:
    """Return pods with the label, sorted by what became of them; those that wait for another cause are left out.

    A pod is lost if it should have ended some time ago, which tells that its node is gone.
    """
    sorted_pods = _MarkedPods(ready=[], placed=[], lost=[], in_vain=[])

    for pod in pods:
        metadata = pod["metadata"]
        marked = _MarkedPod(metadata.get("creationTimestamp", ""), metadata["labels"][label], metadata["uid"])
        loss = _find_loss_time(pod)

        if loss is not None and loss <= now:
            sorted_pods.lost.append(marked)
        elif _waits_in_vain(pod):
            sorted_pods.in_vain.append(marked)
        elif node_of(pod):
            sorted_pods.placed.append(marked)  # also if it is ending
            if loss is None and is_ready(pod):
                sorted_pods.ready.append(marked)
    return sorted_pods


def _find_loss_time(pod: Obj) -> datetime | None:
    """Return the time at which a pod that is being deleted counts as lost, or None."""
    deleted = pod["metadata"].get("deletionTimestamp")
    return datetime.fromisoformat(deleted) + _LOST if deleted is not None else None


def _find_seconds_to_loss(pods: Iterable[Obj], now: datetime) -> float | None:
    """Return the seconds until the next pod counts as lost, if another pod waits for its node."""
    pods = list(pods)
    # A lost pod matters only if others wait for a node, for which the mark would change.
    if not any(map(waits_for_node, pods)):
        return None
    losses = (_find_loss_time(pod) for pod in pods)
    return min(((loss - now).total_seconds() for loss in losses if loss is not None and loss > now), default=None)


def _waits_in_vain(pod: Obj) -> bool:
    """Return whether a pod was refused only because it must follow pods with its volume.

    No other affinity holds it, and the scheduler's message names no resource: one that also lacks room is tried again
    as soon as a pod ends.
    """
    messages = [condition.get("message", "") for condition in pod["status"].get("conditions", ())]
    return (
        is_refused(pod)
        and follows_only_its_volume(pod)
        and any(_REFUSED_BY_AFFINITY in message and _LACKS_ROOM not in message for message in messages)
    )
