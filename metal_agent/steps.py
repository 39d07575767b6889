"""Tells the cluster of each step against memory pressure: an Event about the process that it is about, or the host."""

from collections import deque
from collections.abc import Mapping
from typing import Final

from kube.client import Client, Obj
from kube.errors import NotFound
from kube.events import EventType, Recorder
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from metal_agent.pressure import Action, Ask, Evict, Hold, Keep, Release, Return
from metal_agent.runner import Runner

_REASONS: Final[dict[type[Action], tuple[EventType, str]]] = {
    Hold: ("Warning", "MemoryPressure"),
    Ask: ("Warning", "Displacing"),
    Keep: ("Normal", "Staying"),
    Evict: ("Warning", "Evicted"),
    Release: ("Normal", "MemoryPressureOver"),
    Return: ("Normal", "Returning"),
}


class Steps:
    """The steps of `host` that are still to be told; `runners` are its processes by uid."""

    def __init__(self, client: Client, recorder: Recorder, host: str, runners: Mapping[str, Runner]) -> None:
        self._client = client
        self._recorder = recorder
        self._host = host
        self._runners = runners
        self._untold: deque[tuple[Action, str]] = deque(maxlen=100)

    def add(self, step: Action, note: str) -> None:
        """Have `step` told, with the sentence `note`; of very many that the API does not take, the first are lost."""
        self._untold.append((step, note))

    async def tell(self) -> None:
        """Record what is untold. Raises ApiError and Unreachable, and then it is called again."""
        while self._untold:
            step, note = self._untold[0]
            kind, reason = _REASONS[type(step)]
            about = await self._about(step)
            self._untold.popleft()
            if about:
                await self._recorder.event(about, kind, reason, note, "RelievePressure")

    async def _about(self, step: Action) -> Obj | None:
        uid = getattr(step, "uid", None)
        runner = self._runners.get(uid) if uid else None
        try:
            if runner:
                return await self._client.get(METAL_PROCESSES, runner.assignment.name, runner.assignment.namespace)
            return None if uid else await self._client.get(METAL_HOSTS, self._host)
        except NotFound:
            return None
