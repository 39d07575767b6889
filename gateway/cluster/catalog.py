"""The services of the cluster, as they follow from the objects that the gateway watches.

A change of an object changes the one service that it concerns, so that ten thousand endpoints cost nothing while one
of them moves. A service keeps its running requests and counts whatever changes; one that is gone refuses new ones.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from crds.meta import HTTPS, LABEL_SERVICE_NAME
from crds.rate import read_rate
from gateway.cluster.endpoint_choice import weigh_speeds
from gateway.cluster.routed_service import RoutedService
from gateway.cluster.watched_objects import WatchedRoute, WatchedService, WatchedSlice, WatchedSpeed, get_part
from gateway.proxy.config import Backend
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, MODEL_ROUTES, ObjectKey, Resource, object_key
from kube.store import Store

_BY_SERVICE: Final = "service"
_NAMES: Final = "FQDN"
"""The type of slices whose addresses are names."""
_PORT_NAME: Final = "http"
"""The port of a Service, and of its slices, at which clients are served."""


class ServiceTokens(NamedTuple):
    """The bearer token of a service, and the one before as long as an endpoint may know only that."""

    current: str
    previous: str | None = None


class Catalog:
    """All services, the endpoints and tokens of each, and the routes to them.

    Args:
        store: the store of the watched services, slices and routes.
    """

    def __init__(self, store: Store) -> None:
        self.services: dict[ObjectKey, RoutedService] = {}
        """By namespace and name."""
        self.routes: dict[ObjectKey, WatchedRoute] = {}
        """By namespace and name."""
        self.revision = 0
        """Another number after each change of which services, adapters and routes exist, and of who may use them."""
        self._store = store
        self._outdated: set[ObjectKey] = set()
        """Services whose endpoints, or token, have changed in this pass of the loop."""
        self._tokens: dict[ObjectKey, ServiceTokens] = {}
        store.add_index(ENDPOINT_SLICES, _BY_SERVICE, _list_services_of_slice)
        store.subscribe(self._take_change)

    def set_tokens(self, tokens: Mapping[ObjectKey, ServiceTokens], changed: Iterable[ObjectKey]) -> None:
        """Take the tokens of `changed` services: those in `tokens`, and none for the others."""
        for key in changed:
            if key in tokens:
                self._tokens[key] = tokens[key]
            else:
                self._tokens.pop(key, None)
            self._schedule_update(key)

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Update the service that a change of the store concerns."""
        if resource == INFERENCE_SERVICES:
            self._update_service(object_key(new or old or {}), new)
        elif resource == MODEL_ROUTES:
            self._update_route(object_key(new or old or {}), new)
        elif resource == ENDPOINT_SLICES:
            for value in {value for obj in (old, new) if obj is not None for value in _list_services_of_slice(obj)}:
                namespace, _, name = value.partition("/")
                self._schedule_update(ObjectKey(namespace, name))

    def _update_service(self, key: ObjectKey, obj: Obj | None) -> None:
        """Add, update or remove a service. One that was deleted and made anew is another service."""
        service = self.services.get(key)
        watched = get_part(obj, WatchedService)
        if service is not None and (watched is None or watched.metadata.uid != service.watched.metadata.uid):
            del self.services[key]
            service.set_backends(())
            service = None
            self.revision += 1
        if watched is None:
            return

        if service is None:
            self.services[key] = RoutedService(watched)
            self.revision += 1
            self._schedule_update(key)
        else:
            if service.watched.status.node_speeds != watched.status.node_speeds:
                self._schedule_update(key)
            self.revision += service.set_watched(watched)

    def _update_route(self, key: ObjectKey, obj: Obj | None) -> None:
        """Add, update or remove a route; a change of its status alone concerns no client."""
        former = self.routes.pop(key, None)
        watched = get_part(obj, WatchedRoute)
        if watched is not None:
            self.routes[key] = watched
        self.revision += former is None or watched is None or former.spec != watched.spec

    def _schedule_update(self, key: ObjectKey) -> None:
        """Update the endpoints of a service at the end of this pass of the loop.

        A list brings all of its slices in one pass: to read them again with each one would take a second for a
        thousand.
        """
        if not self._outdated:
            asyncio.get_running_loop().call_soon(self._update_outdated)
        self._outdated.add(key)

    def _update_outdated(self) -> None:
        outdated, self._outdated = self._outdated, set()
        for key in outdated:
            self._update_endpoints(key)

    def _update_endpoints(self, key: ObjectKey) -> None:
        """Give a service the ready endpoints of its slices, and their weights; without its token, it has none."""
        service = self.services.get(key)
        if service is None:
            return
        tokens = self._tokens.get(key)
        slices = self._store.by_index(ENDPOINT_SLICES, _BY_SERVICE, str(key)) if tokens is not None else ()
        read = [endpoint_slice for obj in slices if (endpoint_slice := get_part(obj, WatchedSlice)) is not None]
        nodes = map_urls_to_nodes(read)
        backends = build_backends(str(key), nodes, tokens)
        weights = weigh_backends(backends, nodes, service.watched.status.node_speeds)
        if backends != service.config.backends or weights != service.weights:
            service.set_backends(backends, weights)


def map_urls_to_nodes(slices: Sequence[WatchedSlice]) -> dict[str, str]:
    """Return the URLs of the ready endpoints, sorted, each with its node or host; empty: unknown."""
    pairs = {
        (f"{'https' if port.app_protocol == HTTPS else 'http'}://{_bracket(address)}:{port.port}", node)
        for endpoint_slice in slices
        if endpoint_slice.address_type != _NAMES  # which their owner may let point at anything
        for port in endpoint_slice.ports or ()
        if port.name == _PORT_NAME and port.port
        for address, node in endpoint_slice.find_ready_addresses().items()
    }
    return dict(sorted(pairs))  # of several nodes of one URL the last one, in every replica


def build_backends(service: str, urls: Iterable[str], tokens: ServiceTokens | None) -> tuple[Backend, ...]:
    """Return the backends of a service, one for each of the URLs, each with the service's token."""
    return tuple(
        Backend(f"{service} {url}", url, api_key=tokens.current, previous_api_key=tokens.previous)
        for url in urls
        if tokens is not None
    )


def weigh_backends(
    backends: Sequence[Backend], nodes: Mapping[str, str], speeds: Sequence[WatchedSpeed]
) -> dict[str, float]:
    """Return the weight of each backend, by its uid, from the speed of its node; empty: all have the same.

    The weights follow from `speeds`, and not from which backends are ready: one that comes or goes changes no other's.
    `nodes` has the node of each URL.
    """
    if not speeds:
        return {}
    *weights, unknown = weigh_speeds([*(read_rate(speed.tokens_per_second) for speed in speeds), None])
    by_node = dict(zip((speed.node for speed in speeds), weights, strict=True))
    return {backend.uid: by_node.get(nodes[backend.url], unknown) for backend in backends}


def _bracket(address: str) -> str:
    """Return an address as it stands in a URL."""
    return f"[{address}]" if ":" in address else address


def _list_services_of_slice(obj: Obj) -> Sequence[str]:
    """Return `<namespace>/<service>` of the service whose requests a slice takes, in a list; empty if it names none."""
    endpoint_slice = get_part(obj, WatchedSlice)
    labels = endpoint_slice.metadata.labels if endpoint_slice is not None else None
    name = (labels or {}).get(LABEL_SERVICE_NAME)
    return [f"{obj['metadata']['namespace']}/{name}"] if name else []
