"""The keys of clients: each is found by its SHA-256, and leads to the services that it may use.

A key has 256 random bits, so a fast digest is enough, and a look-up by it shows nothing of other keys by its time. Who
asks follows from the key alone: no header and no field of a request changes it.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

from crds.gatewaykey import GatewayKey, digest_key, may_use, read_expiry_seconds
from gateway.cluster.catalog import Catalog
from gateway.cluster.routed_service import RoutedService
from gateway.cluster.watched_objects import get_part
from gateway.http.headers import Headers
from gateway.proxy import errors
from gateway.proxy.inference_head import read_credentials
from gateway.proxy.service import Service
from kube.client import Obj
from kube.resources import GATEWAY_KEYS, ObjectKey, Resource, object_key
from kube.store import Store

SWEEP_SECONDS: Final = 1.0
"""The pause between two looks for keys that have expired, whose running requests end."""


class ClientKey:
    """A GatewayKey, and the services that it may use; it stays the same object as long as the GatewayKey exists.

    Args:
        watched: the GatewayKey.
        catalog: all services.
    """

    def __init__(self, watched: GatewayKey, catalog: Catalog) -> None:
        self.watched = watched
        self.credentials: dict[str, Credential] = {}
        """What admits its clients, by digest: the key, and those that it has replaced."""
        self._catalog = catalog

        # What was found and listed, as long as the catalog has this revision.
        self._revision = -1
        self._found: dict[str, RoutedService] = {}
        """By the name that a client has used."""
        self._listed: Mapping[str, RoutedService] | None = None

    @property
    def namespace(self) -> str:
        """The namespace of its clients."""
        return self.watched.metadata.namespace

    @property
    def name(self) -> str:
        """The name in errors and log."""
        return f"GatewayKey {self.namespace}/{self.watched.metadata.name}"

    def update(self, watched: GatewayKey) -> None:
        """Take the GatewayKey as it is now."""
        self.watched = watched
        self._revision = -1

    def list_services(self) -> Mapping[str, RoutedService]:
        """Return the services that it may use: those of its namespace by their names, others as NAMESPACE/SERVICE."""
        self._forget_outdated()
        if self._listed is None:
            self._listed = {
                service.model if key.namespace == self.namespace else service.config.name: service
                for key, service in self._catalog.services.items()
                if self._may_use(key, service)
            }
        return self._listed

    def find_service(self, model: str | None) -> RoutedService:
        """Return the service that a request names. Raises RequestError: it does not exist, or the key may not use it.

        A name without a namespace is one of the key's own namespace, so that no other one can take a name over.
        """
        self._forget_outdated()
        if model is None:
            raise errors.missing_model(self.list_services())
        if found := self._found.get(model):
            return found
        namespace, slash, name = model.partition("/")
        key = ObjectKey(namespace, name) if slash else ObjectKey(self.namespace, model)
        service = self._catalog.services.get(key)
        if service is None or not self._may_use(key, service):
            raise errors.model_not_found(model, self.list_services())
        self._found[model] = service
        return service

    def _forget_outdated(self) -> None:
        if self._revision != self._catalog.revision:
            self._revision = self._catalog.revision
            self._found.clear()
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

    def __init__(self, key: ClientKey, valid_until: float) -> None:
        self.key = key
        self.valid_until = valid_until

    @property
    def name(self) -> str:
        """The name in errors and log."""
        return self.key.name

    @property
    def namespace(self) -> str:
        """The namespace of its clients."""
        return self.key.namespace

    def services(self) -> Mapping[str, Service]:
        """Return the services that its clients may use."""
        return self.key.list_services()

    def listed_names(self) -> list[str]:
        """Return the names of all of them: also of those without replicas, which a request may wake later."""
        return sorted(self.key.list_services())

    def find_service(self, model: str | None) -> RoutedService:
        """Return the service that a request names. Raises RequestError, also if it was revoked while the body came."""
        if self.valid_until <= time.time():
            raise errors.key_revoked(self.name)
        return self.key.find_service(model)


class KeyTable:
    """All keys: the router of the gateway's listener.

    Args:
        store: the store of the watched keys.
        catalog: all services.
        is_complete: returns whether services and keys were listed once.
    """

    name = "the gateway"

    def __init__(self, store: Store, catalog: Catalog, is_complete: Callable[[], bool]) -> None:
        self.keys: dict[ObjectKey, ClientKey] = {}
        """By namespace and name of the GatewayKey."""
        self._catalog = catalog
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
        """Return the credential that a client has sent. Raises RequestError."""
        credentials = self._by_digest.get(digest_key(read_credentials(headers).decode(errors="replace")))
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
        """Add, update or remove a key, and end the running requests of credentials that are not valid any more."""
        if resource != GATEWAY_KEYS:
            return
        name = object_key(new or old or {})
        watched = get_part(new, GatewayKey) if new is not None else None
        key = self.keys.get(name)
        if key is not None and (watched is None or watched.metadata.uid != key.watched.metadata.uid):
            for digest in list(key.credentials):
                self._remove(key, digest)
            del self.keys[name]
            key = None
        if watched is None:
            return

        if key is None:
            key = self.keys[name] = ClientKey(watched, self._catalog)
        key.update(watched)
        valid = list_valid_digests(watched, time.time())
        for digest in key.credentials.keys() - valid.keys():
            self._remove(key, digest)
        for digest, valid_until in valid.items():
            if digest in key.credentials:
                key.credentials[digest].valid_until = valid_until
            else:
                self._add(key, digest, valid_until)

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
        for service in self._catalog.services.values():
            for request in service.running_requests():
                if request.router is revoked:
                    request.interrupt("key_revoked", errors.key_revoked(key.name))


def list_valid_digests(key: GatewayKey, now: float) -> dict[str, float]:
    """Return the digests that admit clients of a GatewayKey, with the end of their validity in seconds since 1970."""
    if key.spec.suspend or not key.status.digest:
        return {}
    expires_at = read_expiry_seconds(key.spec)
    ends = {former.digest: datetime.fromisoformat(former.valid_until).timestamp() for former in key.status.previous}
    ends[key.status.digest] = math.inf
    return {digest: min(end, expires_at) for digest, end in ends.items() if min(end, expires_at) > now}


def _order_by_age(credential: Credential) -> tuple[str, str]:
    metadata = credential.key.watched.metadata
    return metadata.creation_timestamp, metadata.uid
