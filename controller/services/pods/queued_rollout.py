"""The rollout of pods that wait for the queue: an earlier pod makes way once its place is promised to a new one.

A new pod is created beside the earlier ones and waits. The queue gives it a node that has room, or nominates it for the
place of an earlier pod of its service. Only then that one ends, so that no other service gets the place in between.
Pods of an earlier template that wait, too, have no place that they could lose, and end at once: else the queue might
give the next place to what nobody wants any more.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from controller.reconcile.triggers import ENDED, is_gated
from crds.meta import NOMINATED
from kube.client import Obj

_TEMPLATE: Final = "pod-template-hash"
"""Label by which a Deployment tells the pods of its templates apart."""


class _NominatedPlace(msgspec.Struct, frozen=True):
    """The part of a nomination that a rollout reads."""

    victims: list[str] = []


def limit_unavailable(pods: Iterable[Obj], replicas: int, *, is_refused: bool) -> int | None:
    """Return the replicas that may be unavailable now, or None if no pod of an earlier template is left.

    A Deployment ends earlier pods that wait before those that serve, and none while new ones are not ready. So as many
    may be unavailable as have no place, and one more while a place is promised.

    Args:
        pods: the pods of the Deployment that are not being deleted.
        replicas: pods that should have a place: those that are wanted, without those that are about to give it back.
        is_refused: True if a quota or the scheduler refused a new pod that would fit in the place of an earlier one.
    """
    present = [pod for pod in pods if pod.get("status", {}).get("phase") not in ENDED]
    if not is_refused and len({_template_of(pod) for pod in present}) <= 1:
        return None
    waiting = [pod for pod in present if is_gated(pod)]
    holding = [pod for pod in present if not is_gated(pod)]
    promised = sum(map(_awaits_place, waiting)) - sum(_takes_place(pod, holding) for pod in waiting)
    makes_way = any(_takes_place(pod, holding) for pod in waiting)
    missing = max(0, replicas - len(holding) - promised)
    # A pod that a quota lets be created takes the place that the one before it gave back.
    refused = 1 + max(0, replicas - len(present)) if is_refused else 0
    return max(missing + makes_way, refused)


def _awaits_place(pod: Obj) -> bool:
    return bool(_list_victims(pod))


def _takes_place(pod: Obj, holding: Sequence[Obj]) -> bool:
    """Return whether a pod that waits is promised the place of a pod of its service that still has it."""
    victims = set(_list_victims(pod))
    return any(each["metadata"]["uid"] in victims for each in holding)


def _list_victims(pod: Obj) -> list[str]:
    """Return the uids of what ends for a pod; an annotation that somebody has edited names none."""
    text = (pod["metadata"].get("annotations") or {}).get(NOMINATED, "")
    try:
        return msgspec.json.decode(text, type=_NominatedPlace).victims if text else []
    except msgspec.MsgspecError:
        return []


def _template_of(pod: Obj) -> str:
    template: str = (pod["metadata"].get("labels") or {}).get(_TEMPLATE, "")
    return template
