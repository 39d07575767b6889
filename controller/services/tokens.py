"""The Secret with a service's bearer token: its name, its content, and its owner.

Pods read the token from the Secret itself; hosts get a copy of it (`controller.hosts.secrets`), and the readiness probe
sends it.
"""

import base64
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from controller.reconcile.indexes import controller_of
from controller.reconcile.plan import child
from crds.inferenceservice import InferenceService
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import INFERENCE_SERVICES, SECRETS, ObjectKey, Resource

TOKEN_KEY: Final = "token"  # noqa: S105 - the name of a key
READ_AGAIN: Final = timedelta(minutes=10)
"""Time after which a token Secret that was seen is read again."""


def token_name(service: str) -> str:
    """Return the name of the Secret with the bearer token of a service."""
    return f"{service}-token"


def token_secret(service: InferenceService, token: str) -> tuple[Resource, Obj]:
    """Return the Secret that holds the service's bearer token; it is created once and never applied."""
    owner = service.metadata
    data = {TOKEN_KEY: base64.b64encode(token.encode()).decode()}
    return child(SECRETS, token_name(owner.name), INFERENCE_SERVICES, owner, {}, type="Opaque", data=data)


class _Sighting(NamedTuple):
    service_uid: str
    seen: datetime


class KnownTokens:
    """The services whose token Secret was created or seen, as Secrets are not watched.

    A new service's Secret is created without a look at it first; any other is read once, and again after
    `READ_AGAIN`, so that a deleted Secret is replaced.
    """

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._seen: dict[ObjectKey, _Sighting] = {}
        self._now = now

    async def is_there(self, client: Client, key: ObjectKey, service: InferenceService, now: datetime) -> bool:
        """Return whether the service has its Secret. Raises as `Client`."""
        uid, seen = service.metadata.uid, self._seen.get(key)
        if seen is not None and seen.service_uid == uid and now - seen.seen < READ_AGAIN:
            return True
        if seen is None and not service.status.conditions:
            return False  # never decided: one that another leader made before it died is found by its creation
        try:
            secret = await client.get(SECRETS, token_name(key.name), key.namespace)
        except NotFound:
            self.forget(key)
            return False
        if not is_token_secret(secret, uid):
            return False
        self._seen[key] = _Sighting(uid, now)
        return True

    def remember(self, resource: Resource, secret: Obj) -> None:
        """Note the answer to the creation of a Secret."""
        owner = controller_of(secret)
        if resource == SECRETS and owner is not None:
            key = ObjectKey(secret["metadata"]["namespace"], owner["name"])
            self._seen[key] = _Sighting(owner["uid"], self._now())

    def forget(self, key: ObjectKey) -> None:
        """Forget a service that is gone."""
        self._seen.pop(key, None)


def is_token_secret(secret: Obj, service_uid: str) -> bool:
    """Return whether the controller made this Secret for this service: another owner's Secret is never used."""
    owner = controller_of(secret)
    return owner is not None and owner["uid"] == service_uid
