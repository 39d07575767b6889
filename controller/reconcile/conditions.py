"""Conditions, and the Events that report their changes."""

from collections.abc import Collection, Iterable

from controller.reconcile.plan import Event
from crds.meta import Condition
from kube.client import Obj

MESSAGE_LENGTH = 1024
"""Length limit of a condition's message, in characters; the API allows no more for an Event's note, the same text."""


def condition(kind: str, *, true: bool | None, reason: str, message: str, generation: int) -> Obj:
    """Return a condition without lastTransitionTime, which depends on the replaced one; `true` None is Unknown."""
    return {
        "type": kind,
        "status": "Unknown" if true is None else str(true),
        "reason": reason,
        "message": message[:MESSAGE_LENGTH],
        "observedGeneration": generation,
    }


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """Return the condition of this type, or None."""
    return next((condition for condition in conditions if condition.type == kind), None)


def has_condition(obj: Obj, kind: str) -> bool:
    """Return whether a condition of an object, as the API server sends it, is True."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == kind and condition["status"] == "True" for condition in conditions)


def transitions(
    old: Iterable[Condition],
    new: Iterable[Obj],
    *,
    action: str,
    silent: Collection[str] = (),
    normal: Collection[str] = (),
) -> tuple[Event, ...]:
    """Return one Event for each condition whose status or reason changed, unless its reason is in `silent`.

    The Event is Normal for a condition that became True or has a reason in `normal`, else a Warning: put reasons of
    normal progress into `silent` or `normal`.
    """
    # Status and reason of each condition before; the messages are not compared.
    before = {condition.type: (condition.status, condition.reason) for condition in old}
    return tuple(
        Event(
            type="Normal" if condition["status"] == "True" or condition["reason"] in normal else "Warning",
            reason=condition["reason"],
            note=condition["message"],
            action=action,
        )
        for condition in new
        if condition["reason"] not in silent
        and before.get(condition["type"]) != (condition["status"], condition["reason"])
    )
