"""The Secret with a service's bearer token: its name, its content, its owner, and the replacement of the token.

Pods read the token from the Secret itself; hosts get a copy of it (`controller.hosts.secrets`), and the readiness probe
sends it. The token is replaced by a new value of the annotation `inference.pomona.dev/rotate-token` of the service, by
this annotation on the Secret, or by an edit of the Secret. The Secret notes each replacement by an identifier, which is
then put into the status: by it pods are replaced and hosts get a copy. Secrets are not watched, so that the controller
needs no right to list them: each is read again from time to time, and at once when the service has a new annotation.
"""

import base64
import hashlib
import re
import secrets
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from controller.reconcile.indexes import controller_of
from controller.reconcile.plan import Patch, child, ref
from crds.inferenceservice import InferenceService
from crds.meta import ROTATE_TOKEN, TOKEN_DIGEST, TOKEN_ROTATION, digest_request
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.resources import INFERENCE_SERVICES, SECRETS, ObjectKey, Resource, object_key

TOKEN_KEY: Final = "token"  # noqa: S105 - the name of a key
TOKEN_BYTES: Final = 32
READ_AGAIN: Final = timedelta(minutes=10)
"""Longest time after which a token Secret is read again, and so until an edit of it is followed."""

_SUFFIX: Final = "-token"
_TOKEN: Final = re.compile(rb"[!-~]{0,8192}")
"""Printable ASCII without blanks, so long that it fits into the head of a request."""


def token_name(service: str) -> str:
    """Return the name of the Secret with the bearer token of a service."""
    return f"{service}{_SUFFIX}"


def token_secret(service: InferenceService, token: str, rotation: str = "") -> tuple[Resource, Obj]:
    """Return the Secret that holds the service's bearer token; it is created once and never applied.

    Args:
        service: the service.
        token: the token.
        rotation: identifier of the replacement, if the token replaces that of a Secret which was deleted.
    """
    owner = service.metadata
    data = {TOKEN_KEY: base64.b64encode(token.encode()).decode()}
    resource, obj = child(SECRETS, token_name(owner.name), INFERENCE_SERVICES, owner, {}, type="Opaque", data=data)
    annotations = {TOKEN_DIGEST: _token_digest(owner.uid, token.encode())}
    if rotation := rotation or digest_rotation_request(service):
        annotations[TOKEN_ROTATION] = rotation
    obj["metadata"]["annotations"] = annotations
    return resource, obj


class TokenStep(NamedTuple):
    """The next step for a service's token: the creation of its Secret, or the state of a replacement."""

    new_token: str | None = None
    """A new bearer token, if the service has none."""
    rotation: str = ""
    """Identifier of the replacement that the Secret notes; empty if it is not known to differ from the status."""
    patch: Patch | None = None
    """The replacement of the token in the Secret, or the note about it, if that is still to be done."""
    again_seconds: float | None = None
    """Time until the Secret is to be read again, or until a service that waits is to report its place."""


def digest_rotation_request(service: InferenceService) -> str:
    """Return the digest of the service's annotation that asks for a new token; empty without one."""
    return digest_request(service.metadata.annotations.get(ROTATE_TOKEN, ""))


def is_new_rotation(wanted: str, rotation: str) -> bool:
    """Return whether the service's annotation asks for another replacement than `rotation`, the last one.

    The identifier of a replacement that the annotation did not ask for is the one before with a suffix.
    """
    return wanted not in {"", rotation.partition(".")[0]}


def decide_rotation(secret: Obj, service_uid: str, wanted: str) -> Patch | None:
    """Return the patch that replaces the token of a Secret, or notes a token that a user has put in; None: neither.

    The Secret notes a digest of its token, by which an edit is found, and the rotation: an identifier of the last
    replacement, by which pods and hosts get the new token. A new token is made if the Secret has none that a client
    could send, or if an annotation of the Secret or of the service asks for one. A token that was edited stays.

    Args:
        secret: the Secret of a service.
        service_uid: the service.
        wanted: the result of `digest_rotation_request`.
    """
    # 1. What the Secret notes, and who asks for another token.
    annotations = secret["metadata"].get("annotations") or {}
    token = _read_token(secret)
    noted_digest = annotations.get(TOKEN_DIGEST)
    rotation = annotations.get(TOKEN_ROTATION, "")
    edited = is_edited(secret, service_uid)
    secret_asks = ROTATE_TOKEN in annotations
    service_asks = is_new_rotation(wanted, rotation)

    # 2. Nothing is to do if this token is noted already, and nobody asks for another one.
    is_noted = noted_digest is not None and bool(token)
    if is_noted and not (edited or secret_asks or service_asks):
        return None

    # 3. The rotation: the digest of the service's annotation, or a new identifier; a mere note leaves it as it is.
    if service_asks:
        rotation = wanted
    elif edited or secret_asks or not token:
        rotation = next_rotation(rotation)

    # 4. The token: a new one, or the one that is only noted.
    must_replace = not token or (not edited and (secret_asks or service_asks))
    if must_replace:
        token = secrets.token_urlsafe(TOKEN_BYTES).encode()
        return _patch_secret(secret, service_uid, rotation, token, replace=True)
    return _patch_secret(secret, service_uid, rotation, token, replace=False)


def is_edited(secret: Obj, service_uid: str) -> bool:
    """Return whether the token of a Secret was edited since the controller noted it."""
    noted = (secret["metadata"].get("annotations") or {}).get(TOKEN_DIGEST)
    return noted not in {None, _token_digest(service_uid, _read_token(secret))}


def _read_token(secret: Obj) -> bytes:
    """Return the token, or nothing if no client could send it, so that it is replaced."""
    token = base64.b64decode((secret.get("data") or {}).get(TOKEN_KEY) or "").strip()
    return token if _TOKEN.fullmatch(token) else b""


def next_rotation(rotation: str) -> str:
    """Return the identifier of a replacement that follows `rotation`, and for which the service has no annotation."""
    return f"{rotation.partition('.')[0]}.{secrets.token_hex(4)}"


def _patch_secret(secret: Obj, service_uid: str, rotation: str, token: bytes, *, replace: bool) -> Patch:
    """Return the patch that notes token and rotation in the Secret, and with `replace` also writes the token into it.

    It fails if the Secret has changed since. An annotation that asked for a new token is removed.
    """
    metadata = secret["metadata"]
    noted = {TOKEN_DIGEST: _token_digest(service_uid, token)} | ({TOKEN_ROTATION: rotation} if rotation else {})
    kept = {key: value for key, value in (metadata.get("annotations") or {}).items() if key != ROTATE_TOKEN}

    operations: list[Obj] = [
        # The patch fails if the Secret has another version by now.
        {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
        {"op": "add", "path": "/metadata/annotations", "value": kept | noted},
    ]
    if replace:
        data = (secret.get("data") or {}) | {TOKEN_KEY: base64.b64encode(token).decode()}
        operations.append({"op": "add", "path": "/data", "value": data})
    return Patch(ref(SECRETS, secret), operations)


def _token_digest(service_uid: str, token: bytes) -> str:
    """Return the digest of a token by which an edit is found later."""
    return hashlib.sha256(service_uid.encode() + b"/" + token.strip()).hexdigest()[:16]


class _CachedSecret(NamedTuple):
    service_uid: str
    rotation: str
    token: str
    """As it is in the Secret, in base64."""
    read_again_at: datetime


class KnownTokens:
    """A cache of the token Secrets that were created or read, as Secrets are not watched.

    The Secret of a new service is created and copied to its hosts without being read. Any other is read once, for the
    service and for all hosts that know of the same replacement. It is read again within `READ_AGAIN`, so that an edited
    Secret is followed and a deleted one is replaced. The Secret of a service whose replicas all wait is not.
    """

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._cached: dict[ObjectKey, _CachedSecret] = {}
        """By namespace and name of the Secret."""
        self._listeners: list[Callable[[ObjectKey], None]] = []
        self._now = now

    def subscribe(self, listener: Callable[[ObjectKey], None]) -> None:
        """Call `listener` with each service whose token becomes known, or another one."""
        self._listeners.append(listener)

    def known_token(self, service: ObjectKey, service_uid: str) -> str | None:
        """Return the token of a service in base64, as it was read or written last; None if it is not known."""
        cached = self._cached.get(_secret_key(service))
        return cached.token if cached is not None and cached.service_uid == service_uid else None

    async def find_step(
        self,
        client: Client,
        service_key: ObjectKey,
        service: InferenceService,
        now: datetime,
        *,
        has_replicas: bool,
        all_replicas_wait: bool,
    ) -> TokenStep:
        """Return the next step for the service's token: make a Secret, patch it, or let replicas follow its rotation.

        The Secret is read, and then cached, if it is not cached, if it is time to read it again, or if the service has
        a new annotation that asks for another token.

        Args:
            client: the API.
            service_key: namespace and name of the service.
            service: the service.
            now: the time of the decision.
            has_replicas: whether it has what makes replicas, which may know a token already.
            all_replicas_wait: whether all of its replicas wait in the queue: none reads the Secret before it starts.

        Raises as `Client`.
        """
        key = _secret_key(service_key)
        uid, cached, wanted = service.metadata.uid, self._cached.get(key), digest_rotation_request(service)

        # A cached Secret is used until it is due again, or as long as all replicas wait.
        is_fresh = (
            cached is not None and cached.service_uid == uid and (all_replicas_wait or now < cached.read_again_at)
        )

        if cached is None or not is_fresh or is_new_rotation(wanted, cached.rotation):
            if cached is None and not service.status.conditions:
                # A new service. If an earlier leader has made the Secret already, its creation fails as a conflict.
                return TokenStep(_make_token())
            try:
                secret = await client.get(SECRETS, key.name, key.namespace)
            except Forbidden:
                # The controller is held to other namespaces: the creation is refused too, and that is reported.
                return TokenStep(_make_token())
            except NotFound:
                self._cached.pop(key, None)
                # Replicas have the token of a Secret that was deleted: they are to follow the new one.
                rotation = next_rotation(wanted) if has_replicas else ""
                return TokenStep(_make_token(), rotation)

            # Another owner has a Secret of this name: the creation fails, and that is reported.
            if not is_token_secret(secret, uid):
                self._cached.pop(key, None)
                return TokenStep(_make_token())
            if patch := decide_rotation(secret, uid, wanted):
                return TokenStep(patch=patch)
            cached = self._keep(key, _build_cache_entry(secret, uid, now))

        # Empty: the status has this replacement already.
        rotation = "" if cached.rotation == service.status.token_rotation else cached.rotation
        due = find_due_time(uid, now) if all_replicas_wait else cached.read_again_at
        return TokenStep(rotation=rotation, again_seconds=(due - now).total_seconds())

    def is_known(self, key: ObjectKey, service_uid: str, rotation: str) -> bool:
        """Return whether the token as of a replacement is known; the arguments are those of `find_token`."""
        cached = self._cached.get(key)
        return cached is not None and (cached.service_uid, cached.rotation) == (service_uid, rotation)

    async def find_token(self, client: Client, key: ObjectKey, service_uid: str, rotation: str) -> str | None:
        """Return the token of a service in base64, for its replicas on a host; None if it has none.

        If no token of this replacement is cached, the Secret is read and cached. If another task has cached the Secret
        meanwhile, the token that was read here is returned, although it may be the earlier one, and is not cached.

        Args:
            client: the API.
            key: namespace and name of the Secret.
            service_uid: the service that must own it.
            rotation: the service's `status.tokenRotation`: if another is known, the Secret is read.

        Raises as `Client`.
        """
        # 1. The cached token, if it is that of the replacement.
        cached = self._cached.get(key)
        if cached is not None and self.is_known(key, service_uid, rotation):
            return cached.token

        # 2. Else that of the Secret.
        try:
            secret = await client.get(SECRETS, key.name, key.namespace)
        except NotFound:
            secret = None

        # While this task was reading, another one may have cached a later state of the Secret, which must stay.
        is_newer_known = self._cached.get(key) is not cached  # another entry by now
        if secret is None or not is_token_secret(secret, service_uid):
            if cached is not None and cached.service_uid == service_uid and not is_newer_known:
                del self._cached[key]
            return None

        if not is_newer_known:
            self._cache(secret, service_uid, self._now())

        token: str | None = (secret.get("data") or {}).get(TOKEN_KEY)
        return token

    def remember(self, resource: Resource, secret: Obj) -> None:
        """Cache a token Secret as the answer to a write has it; answers to other writes are ignored."""
        owner = controller_of(secret)
        if resource == SECRETS and owner is not None:
            self._cache(secret, owner["uid"], self._now())

    def read_again(self, key: ObjectKey) -> None:
        """Mark the Secret of a service as outdated, so that its next reconcile reads it."""
        if (cached := self._cached.get(_secret_key(key))) is not None:
            self._cached[_secret_key(key)] = cached._replace(read_again_at=datetime.min.replace(tzinfo=UTC))

    def restart(self) -> None:
        """Forget all Secrets: another leader may have written since."""
        self._cached.clear()

    def forget(self, key: ObjectKey) -> None:
        """Forget a service that is gone."""
        self._cached.pop(_secret_key(key), None)

    def _cache(self, secret: Obj, service_uid: str, now: datetime) -> None:
        """Cache a Secret. If its token must be replaced or noted first, forget it, so that the next step reads it."""
        key = object_key(secret)
        # "": leave the annotation of the service out of account.
        if decide_rotation(secret, service_uid, "") is not None:
            self._cached.pop(key, None)
        else:
            self._keep(key, _build_cache_entry(secret, service_uid, now))

    def _keep(self, key: ObjectKey, entry: _CachedSecret) -> _CachedSecret:
        """Cache a Secret, and tell the listeners about its token if that is another one than before."""
        before = self._cached.get(key)
        self._cached[key] = entry
        if before is None or (before.service_uid, before.token) != (entry.service_uid, entry.token):
            for listener in self._listeners:
                listener(ObjectKey(key.namespace, key.name.removesuffix(_SUFFIX)))
        return entry


def _secret_key(service: ObjectKey) -> ObjectKey:
    return ObjectKey(service.namespace, token_name(service.name))


def _build_cache_entry(secret: Obj, service_uid: str, now: datetime) -> _CachedSecret:
    rotation = secret["metadata"]["annotations"].get(TOKEN_ROTATION, "")
    return _CachedSecret(service_uid, rotation, secret["data"][TOKEN_KEY], find_due_time(service_uid, now))


def find_due_time(service_uid: str, now: datetime) -> datetime:
    """Return when to read a Secret again: in 5 to 10 minutes, so that not all are read at once."""
    share = zlib.crc32(service_uid.encode()) / 2**32
    return now + READ_AGAIN * (0.5 + share / 2)


def _make_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def is_token_secret(secret: Obj, service_uid: str) -> bool:
    """Return whether the controller made this Secret for this service: another owner's Secret is never used."""
    owner = controller_of(secret)
    return owner is not None and owner["uid"] == service_uid
