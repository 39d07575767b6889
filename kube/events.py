"""Kubernetes Events for people: what happened to an object and why.

The same thing happening again becomes a count on the first Event, and never more than a write a minute. An Event is
news, not state: a failed write is logged and forgotten.
"""

from typing import Literal

from kube.client import Client, Obj

EventType = Literal["Normal", "Warning"]


class Recorder:
    """Writes Events in the name of `controller` (such as `pomona.dev/controller`), process `instance`."""

    def __init__(self, client: Client, controller: str, instance: str) -> None:
        raise NotImplementedError

    async def event(self, regarding: Obj, type: EventType, reason: str, note: str, action: str) -> None:  # noqa: A002 - the API's name
        """Tell that `reason` (CamelCase) happened to `regarding` while doing `action`; `note` is the sentence.

        Never raises for a failed write. At most 5 seconds.
        """
        raise NotImplementedError
