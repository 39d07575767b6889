"""One service behind the gateway: its endpoints, in pods and on hosts, and the choice of one for each request.

Nothing waits here: each endpoint has a proxy of its own with a queue and slots, which knows its engine better.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from gateway.cluster.affinity import find_affinity
from gateway.cluster.endpoint_choice import EndpointGroup, GatewayEndpoint, choose_endpoint
from gateway.cluster.retry_budget import RetryBudget
from gateway.cluster.token_estimate import estimate_prompt_tokens
from gateway.cluster.watched_objects import WatchedService
from gateway.proxy import errors
from gateway.proxy.config import Backend
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.service import Service, ServiceAdapter

if TYPE_CHECKING:
    from gateway.proxy.inference_request import InferenceRequest

_LOADING: Final = frozenset({"Pending", "Downloading", "WaitingForGPU", "Progressing"})
"""Phases of a service without an endpoint that will have one."""
_UNCOUNTED: Final = InFlight(lambda _: None)
"""Counts no requests: each endpoint has its outstanding tokens."""


class RoutedBackends(NamedTuple):
    """The endpoints of a service. `name` is `<namespace>/<service>`."""

    name: str
    backends: tuple[Backend, ...] = ()
    queue_limit: int = 0
    load_seconds: float = 0.0
    problem: str = ""

    @property
    def model(self) -> str:
        """The name of the service, which its endpoints have for the model, too."""
        return self.name.rpartition("/")[2]

    def valid_tokens(self, now: float) -> tuple[str, ...]:
        """Return none: a service has no listener of its own here."""
        del now
        return ()


class RoutedService(Service):
    """A service of the cluster.

    Args:
        watched: the InferenceService.
    """

    def __init__(self, watched: WatchedService) -> None:
        self.endpoints: dict[str, GatewayEndpoint] = {}
        """By the uid of the backend; an endpoint that is gone stays as long as it works on a request."""
        self.weights: Mapping[str, float] = {}
        """By the uid of the backend; one without is 1."""
        self._backends: dict[str, Backend] = {}  # those that take requests, by uid
        self._group = EndpointGroup(())
        self._retries = RetryBudget()
        self._turn = 0  # a number that grows with each request
        self.watched = watched
        """The InferenceService as it was seen last."""
        super().__init__(RoutedBackends(f"{watched.metadata.namespace}/{watched.metadata.name}"), _UNCOUNTED)
        self.created = int(datetime.fromisoformat(watched.metadata.creation_timestamp).timestamp())

    def set_watched(self, watched: WatchedService) -> bool:
        """Take the InferenceService as it is now; return whether who may use it, or its adapters, have changed."""
        is_changed = watched.spec != self.watched.spec
        self.watched = watched
        if is_changed:
            self.update(self.config)
        return is_changed

    def list_adapters(self) -> Iterable[str]:
        """Return the names of the adapters that requests choose, whether or not an endpoint has them yet."""
        return [adapter.model_ref for adapter in self.watched.spec.adapters if adapter.on_request]

    def find_adapter(self, model: str, adapter: str) -> ServiceAdapter:
        """Return the adapter that `model` names. Raises RequestError: requests choose none of this name."""
        if found := self.adapters.get(adapter):
            return found
        if any(known.model_ref == adapter for known in self.watched.spec.adapters):
            raise errors.adapter_not_found(model, self.adapters, "this adapter is always applied")
        raise errors.adapter_not_found(model, self.adapters)

    def takes(self, request: "InferenceRequest") -> bool:
        """Return whether an endpoint takes a request; the endpoint knows its adapters."""
        del request
        return self.has_backend

    def set_backends(self, backends: tuple[Backend, ...], weights: Mapping[str, float] = {}) -> None:
        """Take other endpoints or weights. One that was known before keeps its state, as it does when it comes back."""
        known = self.endpoints
        self._backends = {backend.uid: backend for backend in backends}
        self.endpoints = {
            backend.uid: known.get(backend.uid) or GatewayEndpoint(backend.uid, slots=self.watched.slots)
            for backend in backends
        }
        self.weights = weights
        for uid, endpoint in self.endpoints.items():
            endpoint.weight = weights.get(uid, 1.0)
        self._group = EndpointGroup(tuple(self.endpoints.values()))
        self.endpoints |= {uid: endpoint for uid, endpoint in known.items() if endpoint.outstanding_tokens}
        self.update(RoutedBackends(self.config.name, backends))

    def take_backend(self, request: "InferenceRequest", tried: Collection[str] = ()) -> Backend | None:
        """Take an endpoint: that of the request's conversation, or the one with the least work."""
        if not tried and len(self._group.endpoints) > 1:
            read_affinity(request)
        tokens = estimate_prompt_tokens(request.body)
        self._turn += 1
        now = time.monotonic()
        endpoint = choose_endpoint(self._group, request.affinity, tokens, excluded=tried, now=now, turn=self._turn)
        if endpoint is None:
            return None
        endpoint.begin_request(tokens, now)
        request.reserved = tokens
        return self._backends[endpoint.uid]

    def free_backend(self, uid: str, reserved: int) -> None:
        """Note that an endpoint works no more on a request of so many tokens."""
        self.endpoints[uid].end_request(reserved)

    def begin_request(self, request: "InferenceRequest") -> None:
        """Count a request as running, and for the budget of those that are tried at another endpoint."""
        super().begin_request(request)
        self._retries.note_request(time.monotonic())

    def may_try_elsewhere(self, backend: Backend) -> bool:
        """Decide whether a request that an endpoint has failed may go to another one, by the budget of such tries.

        Those of an ejected endpoint need none, as long as another one works: it gets no more requests, so that they
        cannot multiply.
        """
        now, endpoint = time.monotonic(), self.endpoints.get(backend.uid)
        ejected = [other for other in self._group.endpoints if other.health.ejected_until > now]
        if endpoint in ejected and len(ejected) < len(self._group.endpoints):
            return True
        return len(self._group.endpoints) > 1 and self._retries.try_take(now)

    def note_unreachable(self, backend: Backend) -> None:
        """Eject an endpoint that accepts no connection, before the API server hears of it."""
        if endpoint := self.endpoints.get(backend.uid):
            endpoint.health.note_unreachable(time.monotonic())

    def note_reached(self, backend: Backend) -> None:
        """Note that an endpoint has begun to answer."""
        if endpoint := self.endpoints.get(backend.uid):
            endpoint.health.note_success()

    def describe(self) -> dict[str, object]:
        """Return what the list of models says of it, beside its name, by the names that clients read."""
        length = self.watched.context_length
        lengths = {"context_length": length, "max_model_len": length} if length else {}
        about = {"service": self.config.name, "phase": self.watched.status.phase}
        return {**lengths, "status": {"value": self.state}, "pomona": about}

    @property
    def state(self) -> str:
        """State in the words of the list of models: loaded (it takes requests), loading or unloaded."""
        if self.has_backend:
            return "loaded"
        return "loading" if self.watched.status.phase in _LOADING else "unloaded"


def read_affinity(request: "InferenceRequest") -> int | None:
    """Return the number of the request's conversation, and keep it with the request; None: it has none."""
    if request.affinity is None:
        headers = request.exchange.head.headers
        request.affinity = find_affinity(headers, request.route, request.body.fields, request.router.namespace)
    return request.affinity
