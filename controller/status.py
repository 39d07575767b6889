"""Conditions and the Events that tell of their changes: how a status is written by pure decisions."""

from collections.abc import Collection, Iterable
from typing import Literal

from crds.meta import Condition
from controller.plan import Event
from kube.client import Obj

MESSAGE_LENGTH = 1024
"""Characters of an Event's note and of a condition's message that a person still reads; the API allows 1,024 in a note."""


def condition(kind: str, *, true: bool | None, reason: str, message: str, generation: int) -> Obj:
    """Return a condition without lastTransitionTime, which depends on the one that it replaces; None is Unknown."""
    status = "Unknown" if true is None else str(true)
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message[:MESSAGE_LENGTH],
        "observedGeneration": generation,
    }


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """Return the condition of this type, or None."""
    return next((each for each in conditions if each.type == kind), None)


def transitions(
    old: Iterable[Condition], new: Iterable[Obj], *, action: str, warnings: Collection[str]
) -> tuple[Event, ...]:
    """Return one Event for each condition whose status or reason changed; a reason in `warnings` is a Warning."""
    before = {each.type: (each.status, each.reason) for each in old}
    return tuple(
        Event(_severity(each["reason"], warnings), each["reason"], each["message"], action)
        for each in new
        if before.get(each["type"]) != (each["status"], each["reason"])
    )


def _severity(reason: str, warnings: Collection[str]) -> Literal["Normal", "Warning"]:
    return "Warning" if reason in warnings else "Normal"
