"""Find the service for a request: the port of a service serves that one, the port of the router serves all of them.

The router of a gateway, where each key has services of its own, is in `gateway.cluster.keys`.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from gateway.http.headers import Headers, find_foreign_field
from gateway.proxy import errors
from gateway.proxy.config import RouterListener
from gateway.proxy.inference_head import authorize, read_key_digest
from gateway.proxy.service import RequestedModel, Service, ServiceAdapter, add_adapters
from gateway.proxy.token_counts import TokenCount

if TYPE_CHECKING:
    from gateway.proxy.inference_request import InferenceRequest


class RequestAdmission(Protocol):
    """The admission of one request by the limits of its client."""

    def settle(self, service: Service, tokens: TokenCount, *, was_served: bool, was_left: bool) -> None:
        """Replace what was reserved by what was used of a service; called once, when the request has ended."""

    def render_fields(self) -> bytes:
        """Return the lines of the header fields about what the limits still admit."""


class Router(Protocol):
    """The services that one client may use."""

    @property
    def name(self) -> str:
        """The name in errors and log."""

    @property
    def keeps_open(self) -> bool:
        """True if streams that wait get comments: at what clients reach, and not at the replicas behind a gateway."""

    @property
    def counts_tokens(self) -> bool:
        """True if the tokens of each request are charged, so that every stream has to end with their counts."""

    @property
    def namespace(self) -> str:
        """The namespace of the client; empty: it is not known."""

    @property
    def key(self) -> str:
        """The client's key in the log: of a gateway `<namespace>/<name>`; empty: it has none of its own."""

    def services(self) -> Mapping[str, RequestedModel]:
        """Return the services, adapters and routes, by the model name that clients use."""

    def listed_names(self) -> list[str]:
        """Return the sorted names in the list of models."""

    def find_model(self, model: str | None) -> RequestedModel:
        """Return the service, adapter or route that a request names. Raises RequestError."""

    def admit(
        self, request: "InferenceRequest", service: Service
    ) -> RequestAdmission | Awaitable[RequestAdmission] | None:
        """Admit a request to a service within the limits of its client; None: it has none. Raises RequestError."""

    def remember(self, request: "InferenceRequest") -> None:
        """Note that a request of the client begins: it ends with the right of the client."""

    def forget(self, request: "InferenceRequest") -> None:
        """Note that a request has ended."""


class ListenerRouter(Protocol):
    """The services behind a listener, and the decision who may use them."""

    @property
    def name(self) -> str:
        """The name in errors and log."""

    @property
    def is_serving(self) -> bool:
        """True if the listener is healthy: requests are taken."""

    @property
    def web_origins(self) -> Collection[str] | None:
        """The origins whose web pages may ask, or `*` for all; None: the listener is not for browsers."""

    def authorize(self, headers: Headers) -> Router:
        """Return the router for the client of a request, by its header fields. Raises RequestError."""


def list_served(services: Mapping[str, Service | ServiceAdapter]) -> list[str]:
    """Return the sorted names of the services that take requests now: not of those that load or have failed."""
    return sorted(name for name, service in services.items() if service.has_backend)


class _UnlimitedRouter:
    """The part of a router whose clients have no keys of their own: no limits, and a token that is not revoked."""

    counts_tokens = False
    namespace = ""
    key = ""

    def admit(self, request: "InferenceRequest", service: Service) -> None:
        """Admit each request: only a gateway has limits."""

    def remember(self, request: "InferenceRequest") -> None:
        """Do nothing: a token admits until its listener ends."""

    def forget(self, request: "InferenceRequest") -> None:
        """Do nothing."""


class SingleServiceRouter(_UnlimitedRouter):
    """The port of one service: it answers whatever model a request names, but for adapters that it does not have.

    `SERVICE:NAME` is one: the answer of the plain model would pass for that of the adapter.
    """

    keeps_open = False
    web_origins = None

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def name(self) -> str:
        """The name in errors and log."""
        return self._service.title

    @property
    def is_serving(self) -> bool:
        """True if the service takes requests."""
        return self._service.has_backend

    def listed_names(self) -> list[str]:
        """Return the names of the service and its adapters, unless it loads or has failed."""
        return list_served(self.services())

    def authorize(self, headers: Headers) -> Router:
        """Admit clients with the service's token, or with the one before while that is valid. Raises RequestError."""
        authorize(headers, self._service.config.valid_tokens(time.time()))
        return self

    def services(self) -> Mapping[str, Service | ServiceAdapter]:
        """Return the one service and its adapters, by the model names that clients use."""
        return add_adapters({self._service.model: self._service})

    def find_model(self, model: str | None) -> RequestedModel:
        """Return the one service, or its adapter that a request names. Raises RequestError: it has no such adapter."""
        service = self._service
        if model is not None and ":" in model:
            name, _, adapter = model.partition(":")
            if name.rpartition("/")[2] == service.model:
                return service.find_adapter(model, adapter)
        return service


class ModelRouter(_UnlimitedRouter):
    """The port of all services: the model that a request names decides."""

    name = "the router"
    keeps_open = True

    def __init__(self) -> None:
        self._keys: Mapping[str, ApiKeyRouter] = {}
        """The router for clients of each key, by its digest; empty: programs of this machine need none."""
        self._hosts: Collection[str] = ()
        """Further names of this machine that its programs use."""
        self.web_origins: Collection[str] = ()
        """The origins whose web pages may ask, or `*` for all."""
        self._by_name: Mapping[str, Service] = {}
        """By the full name, `<namespace>/<service>`."""
        self._by_model: Mapping[str, Service] = {}
        """By the name without the namespace; by the full name where several services share the short one."""
        self._listed: Mapping[str, Service | ServiceAdapter] = {}
        """The same services, and their adapters."""

    def configure(self, listener: RouterListener | None, services: Mapping[str, Service]) -> None:
        """Route to `services`, as they are configured now, for the clients that `listener` admits; None: there is none.

        A service is listed by its model, the name without its namespace, if no other service has the same one.
        """
        if listener:
            self._keys = {key.sha256: ApiKeyRouter(self, key.name) for key in listener.keys}
            self._hosts, self.web_origins = frozenset(listener.allowed_hosts), frozenset(listener.allowed_origins)
        self._by_name = dict(services)
        counts = Counter(service.model for service in services.values())
        self._by_model = {
            service.model if counts[service.model] == 1 else service.config.name: service
            for service in services.values()
        }
        self._listed = add_adapters(self._by_model)

    @property
    def is_serving(self) -> bool:
        """True if any service takes requests."""
        return any(service.has_backend for service in self._by_model.values())

    def listed_names(self) -> list[str]:
        """Return the names of the services and adapters that take requests."""
        return list_served(self._listed)

    def authorize(self, headers: Headers) -> Router:
        """Admit clients with a key or, if there is none, programs of this machine. Raises RequestError."""
        if self._keys:
            # By its digest, so that the time shows nothing of a key that nearly matches.
            if client_router := self._keys.get(read_key_digest(headers)):
                return client_router
            raise errors.invalid_router_key()
        if foreign := find_foreign_field(headers, self._hosts, self.web_origins):
            raise errors.foreign_origin(*foreign)
        return self

    def services(self) -> Mapping[str, Service | ServiceAdapter]:
        """Return all services and adapters; services that share one name are listed as `<namespace>/<service>`."""
        return self._listed

    def find_model(self, model: str | None) -> RequestedModel:
        """Return the service or adapter of that name, with or without its namespace. Raises RequestError."""
        if model is None:
            raise errors.missing_model(self.listed_names())
        if found := self._by_model.get(model) or self._by_name.get(model):
            return found
        name, colon, adapter = model.partition(":")
        service = self._by_model.get(name) or self._by_name.get(name) if colon else None
        if service is None:
            raise errors.model_not_found(model, self.listed_names())
        return service.find_adapter(model, adapter)


class ApiKeyRouter(_UnlimitedRouter):
    """The services of a ModelRouter for the clients of one key, which log and metrics name."""

    def __init__(self, router: ModelRouter, key: str) -> None:
        self._router = router
        self.name = router.name
        self.keeps_open = router.keeps_open
        self.key = key
        """The name of the key."""

    def services(self) -> Mapping[str, RequestedModel]:
        """Return all services and adapters."""
        return self._router.services()

    def listed_names(self) -> list[str]:
        """Return the names of the services and adapters that take requests."""
        return self._router.listed_names()

    def find_model(self, model: str | None) -> RequestedModel:
        """Return the service or adapter of that name. Raises RequestError."""
        return self._router.find_model(model)

    def admit(self, request: "InferenceRequest", service: Service) -> None:
        """Admit each request, and count it for its key."""
        del request
        service.metrics.key_requests[self.key] += 1
