"""The rollout of pods that wait for the queue: an earlier pod makes way once its place is promised to a new one.

A new pod is created beside the earlier ones and waits. The queue gives it a node that has room, or nominates it for the
place of an earlier pod of its service. Only then that one ends, so that no other service gets the place in between.
Pods of an earlier template that wait, too, have no place that they could lose, and end at once: else the queue might
give the next place to what nobody wants any more.
"""

from collections.abc import Iterable
from typing import Final

from controller.placement.observed_units import parse_nomination
from controller.reconcile.triggers import ENDED, is_gated
from kube.client import Obj

_TEMPLATE: Final = "pod-template-hash"
"""Label by which a Deployment tells the pods of its templates apart."""


def limit_unavailable(pods: Iterable[Obj], replicas: int, *, is_refused: bool) -> int | None:
    """Return maxUnavailable for a Deployment whose pods wait for the queue; None: it has one template, no refusal.

    It decides when earlier pods end. Kubernetes ends those first that wait. With as many unavailable replicas allowed
    as have no place anyway, no pod that serves ends. One more is allowed once the queue nominates a new pod: it
    promises it the place of a victim, an earlier pod that is to end for it.

    Args:
        pods: the pods of the Deployment that are not being deleted.
        replicas: pods that should have a place: those that are wanted, without those that are about to give it back.
        is_refused: True if a quota or the scheduler refused a new pod that would fit in the place of an earlier one.
    """
    present = [pod for pod in pods if pod.get("status", {}).get("phase") not in ENDED]
    if not is_refused and len({_template_of(pod) for pod in present}) <= 1:
        return None

    placed_uids = {pod["metadata"]["uid"] for pod in present if not is_gated(pod)}
    # The promises of the queue to pods behind the gate, each with the uids of its victims.
    stated = [parse_nomination(pod) for pod in present if is_gated(pod)]
    nominations = [nomination for nomination in stated if nomination is not None]

    # Once the victims of a nomination are gone, the queue is about to give the place.
    waiting_for_victims = [nomination for nomination in nominations if nomination.victims & placed_uids]
    about_to_be_placed = len(nominations) - len(waiting_for_victims)

    # Those that have no place anyway may be unavailable, and one more if a nomination waits for its victims.
    without_place = max(0, replicas - len(placed_uids) - about_to_be_placed)
    unavailable = without_place + 1 if waiting_for_victims else without_place
    if not is_refused:
        return unavailable

    # A pod that a quota lets be created takes the place that the one before it gave back.
    return max(unavailable, 1 + max(0, replicas - len(present)))


def _template_of(pod: Obj) -> str:
    template: str = (pod["metadata"].get("labels") or {}).get(_TEMPLATE, "")
    return template
