"""The Secret with a service's bearer token: its name, its content, its owner, and the replacement of the token.

Pods read the token from the Secret itself; hosts get a copy of it (`controller.hosts.secrets`), and the readiness probe
sends it. A new value of the service's annotation `inference.pomona.dev/rotate-token` replaces the token: first in the
Secret, which notes the value, then the value is put into the status, by which pods are replaced and hosts get a copy.
"""

import base64
import hashlib
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from controller.reconcile.indexes import controller_of
from controller.reconcile.plan import Patch, child, ref
from crds.inferenceservice import InferenceService
from crds.meta import ROTATE_TOKEN
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import INFERENCE_SERVICES, SECRETS, ObjectKey, Resource

TOKEN_KEY: Final = "token"  # noqa: S105 - the name of a key
TOKEN_BYTES: Final = 32
READ_AGAIN: Final = timedelta(minutes=10)
"""Time after which a token Secret that was seen is read again."""


def token_name(service: str) -> str:
    """Return the name of the Secret with the bearer token of a service."""
    return f"{service}-token"


def token_secret(service: InferenceService, token: str) -> tuple[Resource, Obj]:
    """Return the Secret that holds the service's bearer token; it is created once and never applied."""
    owner = service.metadata
    data = {TOKEN_KEY: _encode(token)}
    resource, obj = child(SECRETS, token_name(owner.name), INFERENCE_SERVICES, owner, {}, type="Opaque", data=data)
    if rotation := wanted_rotation(service):
        obj["metadata"]["annotations"] = {ROTATE_TOKEN: rotation}
    return resource, obj


class TokenRotation(NamedTuple):
    """The state of a replacement of the token."""

    done: str = ""
    """The value for which the Secret has its token; empty if that is not known to differ from the status."""
    patch: Patch | None = None
    """The replacement of the token in the Secret, if that is still to be done."""


def wanted_rotation(service: InferenceService) -> str:
    """Return the digest of the annotation that asks for a new token; empty without one."""
    value = service.metadata.annotations.get(ROTATE_TOKEN, "")
    return hashlib.sha256(value.encode()).hexdigest()[:16] if value else ""


async def read_rotation(client: Client, service: InferenceService) -> TokenRotation:
    """Return the next step of a replacement. Reads nothing unless the annotation is new. Raises as `Client`."""
    wanted, owner = wanted_rotation(service), service.metadata
    if wanted in {"", service.status.token_rotation}:
        return TokenRotation()
    try:
        secret = await client.get(SECRETS, token_name(owner.name), owner.namespace)
    except NotFound:
        return TokenRotation()
    if not is_token_secret(secret, owner.uid):
        return TokenRotation()
    annotations = secret["metadata"].get("annotations") or {}
    if annotations.get(ROTATE_TOKEN) == wanted:
        return TokenRotation(wanted)
    return TokenRotation(patch=replace_token(secret, wanted, secrets.token_urlsafe(TOKEN_BYTES)))


def replace_token(secret: Obj, rotation: str, token: str) -> Patch:
    """Return the patch that replaces the token of exactly this version of the Secret."""
    metadata = secret["metadata"]
    annotations = {**(metadata.get("annotations") or {}), ROTATE_TOKEN: rotation}
    operations: Sequence[Obj] = (
        {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
        {"op": "add", "path": "/metadata/annotations", "value": annotations},
        {"op": "add", "path": "/data", "value": {**(secret.get("data") or {}), TOKEN_KEY: _encode(token)}},
    )
    return Patch(ref(SECRETS, secret), operations)


def _encode(token: str) -> str:
    return base64.b64encode(token.encode()).decode()


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
