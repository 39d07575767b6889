"""A ModelRoute as the clients of one key may use it: the service of each conversation, and those that stand in for it.

The services share the conversations by weighted rendezvous hashing, as the endpoints of a service do: every replica of
the gateway chooses alike, and an edit of a weight moves no more conversations than it has to.
"""

import random
from collections.abc import Callable, Collection
from datetime import datetime
from typing import TYPE_CHECKING, Final, NoReturn, get_args

from crds.modelroute import Cause
from gateway.cluster.endpoint_choice import hash_seed, score_choice
from gateway.cluster.routed_service import RoutedService, read_affinity
from gateway.cluster.watched_objects import RouteTarget, WatchedRoute
from gateway.proxy import errors

if TYPE_CHECKING:
    from gateway.proxy.inference_request import InferenceRequest

_CAUSES: Final = frozenset[str](get_args(Cause))
_CONTEXT: Final[Cause] = "ContextTooLong"

FindService = Callable[[RouteTarget], RoutedService | None]
"""Returns the service that a route names; None: there is none, or the key may not use it by the route."""


class UsableRoute:
    """A route with those of its services that a key may use, as long as the catalog has the same revision.

    Args:
        watched: the ModelRoute.
        find_service: finds the services.
    """

    def __init__(self, watched: WatchedRoute, find_service: FindService) -> None:
        metadata = watched.metadata
        self.model = metadata.name
        self.title = f"ModelRoute {metadata.namespace}/{metadata.name}"
        self.created = int(datetime.fromisoformat(metadata.creation_timestamp).timestamp())
        self._weights: dict[RoutedService, int] = {}
        for target in watched.spec.services:
            if target.weight and (service := find_service(target)):
                self._weights[service] = self._weights.get(service, 0) + target.weight
        self._seeds = {service: hash_seed(service.config.name) for service in self._weights}
        self._fallbacks = [
            (service, frozenset(target.when) or _CAUSES)
            for target in watched.spec.fallbacks
            if (service := find_service(target))
        ]

    @property
    def is_usable(self) -> bool:
        """True if a request has a service to go to."""
        return bool(self._weights) or self.find_fallback("Unavailable", ()) is not None

    def find_adapter(self, model: str, adapter: str) -> NoReturn:
        """Raise RequestError: a route has no adapters."""
        del adapter
        raise errors.adapter_not_found(model, (), "adapters are chosen of services, and this is a ModelRoute")

    def choose_service(self, request: "InferenceRequest") -> RoutedService:
        """Return the service of the request's conversation; without one, any by weight.

        If none of the weighted services is there, one that stands in for them.
        """
        if len(self._weights) > 1:
            number = read_affinity(request)
            return self.choose_by_number(random.getrandbits(64) if number is None else number)
        service = next(iter(self._weights), None) or self.find_fallback("Unavailable", ())
        assert service  # noqa: S101 - a route is found only while it is usable
        return service

    def choose_by_number(self, number: int) -> RoutedService:
        """Return the weighted service for a conversation with this number, of 64 bits."""
        seeds = self._seeds
        return max(self._weights, key=lambda service: score_choice(number, seeds[service], self._weights[service]))

    def find_fallback(self, cause: Cause, tried: Collection[object]) -> RoutedService | None:
        """Return the first service that stands in for one with this failure, and that was not tried; None: none."""
        return next((service for service, when in self._fallbacks if cause in when and service not in tried), None)

    def describe(self) -> dict[str, object]:
        """Return what the list of models says of it: what holds for whatever service answers.

        Its context is the smallest one, or a larger one that stands in for that.
        """
        services = list(self._weights) or [service for service, _ in self._fallbacks]
        lengths = [service.watched.context_length for service in services]
        stand_ins = [service.watched.context_length or 0 for service, when in self._fallbacks if _CONTEXT in when]
        length = max([min(filter(None, lengths)), *stand_ins]) if any(lengths) else None
        states = [service.state for service in services]
        state = next((state for state in ("loaded", "loading") if state in states), "unloaded")
        return {
            **({"context_length": length, "max_model_len": length} if length else {}),
            "status": {"value": state},
            "pomona": {
                "route": self.title.partition(" ")[2],
                "services": [service.config.name for service in services],
            },
        }
