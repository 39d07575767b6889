"""Send an Event for each step of a hold, about the process of the step or about the host."""

from collections import deque
from collections.abc import Mapping
from typing import Final

from kube.client import Client, Obj
from kube.errors import NotFound
from kube.events import EventRecorder, EventType
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from metal_agent.memory.pressure_policy import ActionKind, HoldAction
from metal_agent.supervise.runner import Runner

_REASONS: Final[dict[ActionKind, tuple[EventType, str, str]]] = {
    "hold": ("Warning", "MemoryPressure", "RelievePressure"),
    "release": ("Normal", "MemoryPressureOver", "RelievePressure"),
    "return": ("Normal", "Returning", "RelievePressure"),
    "pause": ("Normal", "Paused", "PauseHost"),
    "resume": ("Normal", "Resumed", "PauseHost"),
    "displace": ("Warning", "Displacing", "Displace"),
    "cancel": ("Normal", "Staying", "Displace"),
    "evict": ("Warning", "Evicted", "Displace"),
    "hasten": ("Warning", "Evicted", "RelievePressure"),
}
"""Type, reason and action of the Event of each step."""


class HoldEvents:
    """The Events of `host` that are still to be sent; `runners` are its processes by uid."""

    def __init__(self, client: Client, recorder: EventRecorder, host: str, runners: Mapping[str, Runner]) -> None:
        self._client, self._recorder = client, recorder
        self._host, self._runners = host, runners
        self._unsent: deque[tuple[HoldAction, str]] = deque(maxlen=100)

    def add(self, step: HoldAction, note: str) -> None:
        """Queue an Event for `step` with the message `note`; the last 100 are kept while the API takes none."""
        self._unsent.append((step, note))

    async def send(self) -> None:
        """Send the queued Events of steps, such as an eviction, the oldest first; skip those whose object is gone.

        Raises ApiError and Unreachable; the rest is then sent by the next call.
        """
        while self._unsent:  # steps, each with the message of its Event
            oldest = self._unsent[0]
            step, note = oldest
            event_type, reason, action = _REASONS[step.kind]  # such as "Warning", "Evicted" and "Displace"
            about = await self._find_object(step)
            # It stays queued while the API cannot be asked. A full queue may have dropped it meanwhile.
            if self._unsent and self._unsent[0] is oldest:
                self._unsent.popleft()
            if about:
                await self._recorder.event(about, event_type, reason, note, action)

    async def _find_object(self, step: HoldAction) -> Obj | None:
        """Return the object of the Event: the process of the step, or the host; None if it is gone."""
        runner = self._runners.get(step.uid)
        try:
            if runner:
                return await self._client.get(METAL_PROCESSES, runner.assignment.name, runner.assignment.namespace)
            # A step without a uid is about the whole host; the process of any other step is gone.
            return None if step.uid else await self._client.get(METAL_HOSTS, self._host)
        except NotFound:
            return None
