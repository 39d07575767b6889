"""The keys of clients: each is found by its SHA-256, and leads to the services that it may use.

A key has 256 random bits, so a fast digest is enough, and a look-up by it shows nothing of other keys by its time. Who
asks follows from the key alone: no header and no field of a request changes it.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final

from crds.gatewaykey import GatewayKeySpec, may_use, read_expiry_seconds
from crds.gatewayquota import GatewayQuotaSpec
from crds.modelroute import may_lead, split_service
from gateway.cluster.admission import Admissions, KeyAdmission
from gateway.cluster.catalog import Catalog
from gateway.cluster.rate_limits import LimitScope, RateLimits
from gateway.cluster.routed_service import RoutedService
from gateway.cluster.usable_route import UsableRoute
from gateway.cluster.usage import KeyTotal
from gateway.cluster.watched_objects import RouteTarget, WatchedKey, WatchedQuota, WatchedRoute, get_part
from gateway.http.headers import Headers
from gateway.proxy import errors
from gateway.proxy.inference_head import read_key_digest
from gateway.proxy.service import RequestedModel, Service, add_adapters
from kube.client import Obj
from kube.resources import GATEWAY_KEYS, GATEWAY_QUOTAS, INFERENCE_SERVICES, ObjectKey, Resource, object_key
from kube.store import Store

if TYPE_CHECKING:
    from gateway.proxy.inference_request import InferenceRequest

SWEEP_SECONDS: Final = 1.0
"""The pause between two looks for keys that have expired, whose running requests end."""


class ClientKey:
    """A WatchedKey, and the services that it may use; it stays the same object as long as the GatewayKey exists.

    Args:
        watched: the GatewayKey.
        catalog: all services.
        admissions: admits its requests.
    """

    def __init__(self, watched: WatchedKey, catalog: Catalog, admissions: Admissions) -> None:
        self.watched = watched
        self.namespace = watched.metadata.namespace
        """The namespace of its clients."""
        self.full_name = f"{self.namespace}/{watched.metadata.name}"
        self.total = KeyTotal(self.namespace, watched.metadata.name)
        """Its requests and their tokens."""
        self._admissions = admissions
        self._scopes: tuple[LimitScope, ...] = ()
        """Its limits, and those of its namespace."""
        self.credentials: dict[str, Credential] = {}
        """The secrets that admit its clients, by digest: the key, and those that it has replaced."""
        self._catalog = catalog

        # What was found and listed, as long as the catalog has this revision.
        self._revision = -1
        self._found: dict[str, RequestedModel] = {}
        """By the name that a client has used."""
        self._leads: dict[tuple[ObjectKey, bool], bool] = {}
        """True for a service that routes lead to; apart for those that hide a service of their own name."""
        self._listed: Mapping[str, RequestedModel] | None = None

    @property
    def name(self) -> str:
        """The name in errors and log."""
        return f"GatewayKey {self.full_name}"

    def update(self, watched: WatchedKey, ceiling: LimitScope | None) -> None:
        """Take the GatewayKey as it is now, and the ceiling of its namespace; None: there is none."""
        self.watched = watched
        self._revision = -1
        limits, limiter = read_limits(watched.spec), self._admissions.limiter
        own: tuple[LimitScope, ...] = ()
        if any(limits):
            own = (limiter.find_scope(watched.metadata.uid, f"{self.name}: spec", limits),)
        else:
            limiter.forget_scope(watched.metadata.uid)
        self._scopes = (*own, ceiling) if ceiling else own

    def admit(self, request: "InferenceRequest", service: RoutedService) -> KeyAdmission | Awaitable[KeyAdmission]:
        """Admit a request within the limits of the key and of its namespace. Raises RequestError."""
        return self._admissions.admit(request, service, self.total, self._scopes)

    def list_models(self) -> Mapping[str, RequestedModel]:
        """Return what it may use: services and routes of its namespace by their names, others as NAMESPACE/SERVICE.

        A service whose name a route of its namespace has is listed as NAMESPACE/SERVICE, too.
        """
        self._forget_outdated()
        if self._listed is None:
            routes = {
                key.name: route
                for key, watched in self._catalog.routes.items()
                if key.namespace == self.namespace and (route := self._build_route(watched))
            }
            services = {
                service.model if key.namespace == self.namespace and key.name not in routes else str(key): service
                for key, service in self._catalog.services.items()
                if self._may_use(key, service)
            }
            self._listed = {**add_adapters(services), **routes}
        return self._listed

    def find_model(self, model: str | None) -> RequestedModel:
        """Return the route, service or adapter of this name. Raises RequestError: the key may use none of this name.

        A name without a namespace is one of the key's own namespace, so that no other one can take a name over.
        """
        self._forget_outdated()
        if model is None:
            raise errors.missing_model(self.list_models())
        if found := self._found.get(model):
            return found
        found = self._find(model)
        if found is None:
            name, colon, adapter = model.partition(":")
            named = self._find(name) if colon else None
            if named is None:
                raise errors.model_not_found(model, self.list_models())
            found = named.find_adapter(model, adapter)
        self._found[model] = found
        return found

    def _find(self, model: str) -> RoutedService | UsableRoute | None:
        """Return the route or service of this name, or None if the key may use none."""
        return self._find_route(model) or self._find_service(ObjectKey(*split_service(model, self.namespace)))

    def _find_service(self, key: ObjectKey) -> RoutedService | None:
        """Return a service, or None if the key may not use it."""
        service = self._catalog.services.get(key)
        return service if service is not None and self._may_use(key, service) else None

    def _find_route(self, name: str) -> UsableRoute | None:
        """Return the route of this name in the key's namespace, or None if it leads the key to no service."""
        watched = self._catalog.routes.get(ObjectKey(self.namespace, name))
        return self._build_route(watched) if watched is not None else None

    def _build_route(self, watched: WatchedRoute) -> UsableRoute | None:
        """Return a route of the key's namespace with the services that the key may use by it; None: there is none."""
        hides_service = ObjectKey(self.namespace, watched.metadata.name) in self._catalog.services

        def find_target(target: RouteTarget) -> RoutedService | None:
            key = ObjectKey(*split_service(target.name, self.namespace))
            service = self._catalog.services.get(key)
            if service is None:
                return None
            leads = self._leads.get((key, hides_service))
            if leads is None:
                access, patterns = service.watched.spec.access.namespaces, self.watched.spec.services
                leads = may_lead(self.namespace, patterns, key.namespace, key.name, access, hides_service=hides_service)
                self._leads[key, hides_service] = leads
            return service if leads else None

        route = UsableRoute(watched, find_target)
        return route if route.is_usable else None

    def _forget_outdated(self) -> None:
        if self._revision != self._catalog.revision:
            self._revision = self._catalog.revision
            self._found.clear()
            self._leads.clear()
            self._listed = None

    def _may_use(self, key: ObjectKey, service: RoutedService) -> bool:
        access = service.watched.spec.access.namespaces
        return may_use(self.namespace, self.watched.spec.services, key.namespace, key.name, access)


class Credential:
    """One secret that admits clients of a key: its current one, or one that it has replaced. It routes their requests.

    Args:
        key: the key.
        valid_until: the end of its validity, in seconds since 1970.
    """

    keeps_open = True
    counts_tokens = True

    def __init__(self, key: ClientKey, valid_until: float) -> None:
        self.client_key = key
        self.valid_until = valid_until
        self.running: set[InferenceRequest] = set()
        """The requests that it has admitted and that have not ended, also those whose body is still coming."""
        self.namespace = key.namespace
        """The namespace of its clients."""
        self.key = key.full_name
        """The key in the log."""

    @property
    def name(self) -> str:
        """The name in errors and log."""
        return self.client_key.name

    def services(self) -> Mapping[str, RequestedModel]:
        """Return the services and routes that its clients may use."""
        return self.client_key.list_models()

    def listed_names(self) -> list[str]:
        """Return the names of all of them: also of those without replicas, which a request may wake later."""
        return sorted(self.client_key.list_models())

    def find_model(self, model: str | None) -> RequestedModel:
        """Return the service or route that a request names.

        Raises RequestError, also if the credential was revoked while the body came.
        """
        if self.valid_until <= time.time():
            raise errors.key_revoked(self.name)
        return self.client_key.find_model(model)

    def remember(self, request: "InferenceRequest") -> None:
        """Note that a request begins: it ends when the credential is revoked."""
        self.running.add(request)

    def forget(self, request: "InferenceRequest") -> None:
        """Note that a request has ended."""
        self.running.discard(request)

    def admit(self, request: "InferenceRequest", service: Service) -> KeyAdmission | Awaitable[KeyAdmission]:
        """Admit a request within the limits of the key and of its namespace. Raises RequestError."""
        assert isinstance(service, RoutedService)  # noqa: S101 - the key has found it
        return self.client_key.admit(request, service)


class KeyTable:
    """All keys: the router of the gateway's listener.

    Args:
        store: the store of the watched keys.
        catalog: all services.
        admissions: admits the requests of all keys.
        is_complete: returns whether services and keys were listed once.
    """

    name = "the gateway"
    web_origins = None

    def __init__(self, store: Store, catalog: Catalog, admissions: Admissions, is_complete: Callable[[], bool]) -> None:
        self.keys: dict[ObjectKey, ClientKey] = {}
        """By namespace and name of the GatewayKey."""
        self._catalog = catalog
        self._admissions = admissions
        self._ceilings: dict[str, LimitScope] = {}
        """The limits of all keys of a namespace together, by the namespace."""
        self._is_complete = is_complete
        self._by_digest: dict[str, tuple[Credential, ...]] = {}
        """Credentials by the SHA-256 of their secret, in hexadecimal digits. Of several, that of the oldest key counts:
        a tenant who copies the digest of another's key takes nothing over."""
        store.subscribe(self._take_change)

    @property
    def is_serving(self) -> bool:
        """True once services and keys were listed."""
        return self._is_complete()

    def authorize(self, headers: Headers) -> Credential:
        """Return the credential that a client has sent. Raises RequestError, also while not all is listed."""
        if not self._is_complete():
            raise errors.service_unavailable("the gateway")
        credentials = self._by_digest.get(read_key_digest(headers))
        if credentials is None or credentials[0].valid_until <= time.time():
            raise errors.invalid_gateway_key()
        return credentials[0]

    async def end_expired(self) -> None:
        """End the running requests of each credential when it expires, for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.time()
            for key in self.keys.values():
                for digest in [digest for digest, found in key.credentials.items() if found.valid_until <= now]:
                    self._remove(key, digest)

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Add, update or remove a key, and end the running requests of credentials that are not valid any more.

        A quota is the ceiling of its namespace, and a service that is gone leaves the usage of all keys.
        """
        name = object_key(new or old or {})
        if resource == GATEWAY_QUOTAS:
            self._set_ceiling(name.name, get_part(new, WatchedQuota))
        if resource == INFERENCE_SERVICES and new is None:
            self._admissions.usage.forget_service(str(name))
        if resource != GATEWAY_KEYS:
            return
        watched = get_part(new, WatchedKey)
        key = self.keys.get(name)
        if key is not None and (watched is None or watched.metadata.uid != key.watched.metadata.uid):
            for digest in list(key.credentials):
                self._remove(key, digest)
            del self.keys[name]
            self._admissions.usage.forget_key(*name)
            self._admissions.limiter.forget_scope(key.watched.metadata.uid)
            key = None
        if watched is None or (key is not None and key.watched == watched):
            return

        if key is None:
            key = self.keys[name] = ClientKey(watched, self._catalog, self._admissions)
        key.update(watched, self._ceilings.get(name.namespace))
        valid = list_valid_digests(watched, time.time())
        for digest in key.credentials.keys() - valid.keys():
            self._remove(key, digest)
        for digest, valid_until in valid.items():
            if digest in key.credentials:
                key.credentials[digest].valid_until = valid_until
            else:
                self._add(key, digest, valid_until)

    def _set_ceiling(self, namespace: str, quota: WatchedQuota | None) -> None:
        """Take the limits of all keys of a namespace together; None: there are none any more."""
        limiter, former = self._admissions.limiter, self._ceilings.pop(namespace, None)
        if former is not None and (quota is None or quota.metadata.uid != former.scope_id):
            limiter.forget_scope(former.scope_id)
        if quota is not None:
            path, limits = f"GatewayQuota {namespace}: spec", read_limits(quota.spec)
            self._ceilings[namespace] = limiter.find_scope(quota.metadata.uid, path, limits)
        for key in self.keys.values():
            if key.namespace == namespace:
                key.update(key.watched, self._ceilings.get(namespace))

    def _add(self, key: ClientKey, digest: str, valid_until: float) -> None:
        credential = key.credentials[digest] = Credential(key, valid_until)
        sharing = (*self._by_digest.get(digest, ()), credential)
        self._by_digest[digest] = tuple(sorted(sharing, key=_order_by_age))

    def _remove(self, key: ClientKey, digest: str) -> None:
        """Admit no client by a credential any more, and end its running requests."""
        revoked = key.credentials.pop(digest)
        revoked.valid_until = -math.inf
        others = tuple(credential for credential in self._by_digest[digest] if credential is not revoked)
        if others:
            self._by_digest[digest] = others
        else:
            del self._by_digest[digest]
        for request in tuple(revoked.running):
            request.interrupt("key_revoked", errors.key_revoked(key.name))


def list_valid_digests(key: WatchedKey, now: float) -> dict[str, float]:
    """Return the digests that admit clients of a GatewayKey, with the end of their validity in seconds since 1970."""
    if key.spec.suspend or not key.status.digest:
        return {}
    expires_at = read_expiry_seconds(key.spec)
    ends = {former.digest: datetime.fromisoformat(former.valid_until).timestamp() for former in key.status.previous}
    ends[key.status.digest] = math.inf
    return {digest: min(end, expires_at) for digest, end in ends.items() if min(end, expires_at) > now}


def read_limits(spec: GatewayKeySpec | GatewayQuotaSpec) -> RateLimits:
    """Return the limits that a key, or the quota of a namespace, states."""
    return RateLimits(spec.requests_per_minute, spec.tokens_per_minute, spec.concurrent_requests)


def _order_by_age(credential: Credential) -> tuple[str, str]:
    metadata = credential.client_key.watched.metadata
    return metadata.creation_timestamp, metadata.uid
