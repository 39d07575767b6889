"""One service behind the gateway: its endpoints, in pods and on hosts, and the choice of one for each request.

Nothing waits here: each endpoint has a proxy of its own with a queue and slots, which knows its engine better.
"""

from typing import Final

import msgspec

from gateway.cluster.watched_objects import WatchedService
from gateway.proxy.config import Backend
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.service import Service

_LOADING: Final = frozenset({"Pending", "Downloading", "WaitingForGPU", "Progressing"})
"""Phases of a service without an endpoint that will have one."""


class RoutedBackends(msgspec.Struct, frozen=True):
    """The endpoints of a service. `name` is `<namespace>/<service>`."""

    name: str
    backends: tuple[Backend, ...] = ()
    queue_limit: int = 0

    @property
    def model(self) -> str:
        """The name of the service, which its endpoints have for the model, too."""
        return self.name.rpartition("/")[2]

    def valid_tokens(self, now: float) -> tuple[str, ...]:
        """Return none: a service has no listener of its own here."""
        del now
        return ()


class RoutedService(Service):
    """A service of the cluster."""

    def __init__(self, watched: WatchedService, in_flight: InFlight) -> None:
        super().__init__(RoutedBackends(f"{watched.metadata.namespace}/{watched.metadata.name}"), in_flight)
        self.watched = watched
        """The InferenceService as it was seen last."""

    def describe(self) -> dict[str, object]:
        """Return what the list of models says of it, beside its name, by the names that clients read."""
        length = self.watched.context_length
        lengths = {"context_length": length, "max_model_len": length} if length else {}
        phase = self.watched.status.phase
        state = "loaded" if self.has_backend else "loading" if phase in _LOADING else "unloaded"
        return {**lengths, "status": {"value": state}, "pomona": {"service": self.config.name, "phase": phase}}
