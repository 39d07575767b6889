"""The surge pod, which takes over before a slow replica is stopped.

The Deployment gets one pod more, which waits for the queue. Once as many others are ready as are wanted, it gets one
less, and its ReplicaSet ends the pod with the least deletion cost, which is the one that was marked before.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from controller.placement.replacement import PresentReplica, is_active
from controller.reconcile.plan import Patch, ref
from controller.reconcile.triggers import ENDED
from controller.services.pods.observed_deployments import is_ready, node_of
from crds.meta import DELETION_COST
from crds.placement import SpeedReplacement
from kube.client import Obj
from kube.resources import PODS

_FIRST_TO_END: Final = "-2147483647"
"""A cost that nobody else states."""
_PATH: Final = f"/metadata/annotations/{DELETION_COST.replace('/', '~1')}"


def list_present_replicas(pods: Iterable[Obj]) -> list[PresentReplica]:
    """Return the pods of a service that neither have ended nor are being deleted, the newest last.

    Each has what the replacement of a slow replica reads: its place, whether it is ready, and whether it ends first.
    """
    living = [
        pod
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"] and pod.get("status", {}).get("phase") not in ENDED
    ]
    living.sort(key=lambda pod: (str(pod["metadata"].get("creationTimestamp")), pod["metadata"]["name"]))

    return [
        PresentReplica(
            uid=pod["metadata"]["uid"],
            place=f"node/{node}" if (node := node_of(pod)) else "",
            is_ready=is_ready(pod),
            is_marked=_is_first_to_end(pod),  # it has the least deletion cost
            name=pod["metadata"]["name"],
            addresses=tuple(address["ip"] for address in pod.get("status", {}).get("podIPs") or ()),
        )
        for pod in living
    ]


def mark_leaving(replacement: SpeedReplacement | None, pods: Sequence[Obj]) -> tuple[Patch, ...]:
    """Return the patches that mark the replaced pod, which is then deleted first, and take back other marks."""
    leaving_uid = replacement.uid if replacement is not None and is_active(replacement) else ""
    wrongly_marked = [pod for pod in pods if _is_first_to_end(pod) != (pod["metadata"]["uid"] == leaving_uid)]
    return tuple(_toggle_first_to_end(pod) for pod in wrongly_marked)


def _toggle_first_to_end(pod: Obj) -> Patch:
    """Return the patch that gives a pod the least deletion cost, so that it is deleted first, or removes this cost."""
    same = {"op": "test", "path": "/metadata/uid", "value": pod["metadata"]["uid"]}
    if _is_first_to_end(pod):  # _PATH: the annotation with the cost
        return Patch(ref(PODS, pod), (same, {"op": "remove", "path": _PATH}))
    return Patch(ref(PODS, pod), (same, {"op": "add", "path": _PATH, "value": _FIRST_TO_END}))


def _is_first_to_end(pod: Obj) -> bool:
    return (pod["metadata"].get("annotations") or {}).get(DELETION_COST) == _FIRST_TO_END
