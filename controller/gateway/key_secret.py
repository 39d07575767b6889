"""The Secret with the key of a GatewayKey: its content, the replacement of the key, and the digests in the status.

The Secret is what counts: if it has another key than the status, however that came about, the status follows, and the
former key stays valid for a while. A key is replaced only after the status has followed it, so that no key is lost
before its time is over, wherever the controller dies.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from controller.reconcile.indexes import controller_of
from controller.reconcile.plan import Patch, child, ref
from crds.gatewaykey import (
    KEY_ENTRY,
    MOST_PREVIOUS_KEYS,
    GatewayKey,
    GatewayKeyStatus,
    PreviousKey,
    digest_key,
    key_secret_name,
    read_key,
)
from crds.meta import KEY_ROTATION, ROTATE_KEY, digest_request
from kube.client import Obj
from kube.resources import GATEWAY_KEYS, SECRETS, Resource
from kube.time import rfc3339

_KEY: Final = re.compile(rb"[!-~]{32,8192}")
"""Printable ASCII without blanks: too long to be guessed, and so short that it fits into the head of a request."""
_KEY_BYTES: Final = 32


_MADE_KEY: Final = re.compile(r"pomona-([0-9a-f]{8})-.*")


def generate_key(namespace: str) -> str:
    """Return a new key with 256 random bits for a namespace.

    Its beginning tells scanners of published code whose key it is, and binds it to the namespace: a key that has leaked
    opens nothing elsewhere once its owner has withdrawn it.
    """
    return f"pomona-{_mark_namespace(namespace)}-{secrets.token_urlsafe(_KEY_BYTES)}"


def _mark_namespace(namespace: str) -> str:
    return hashlib.sha256(namespace.encode()).hexdigest()[:8]


def is_made_for(secret: Obj, key_uid: str) -> bool:
    """Return whether the controller made this Secret for this GatewayKey: another owner's Secret is never used."""
    owner = controller_of(secret)
    return owner is not None and owner["uid"] == key_uid


def is_left_behind(secret: Obj, key: GatewayKey) -> bool:
    """Return whether a Secret was made for a former GatewayKey of this name: garbage collection deletes it soon."""
    owner = controller_of(secret)
    return owner is not None and (owner["kind"], owner["name"]) == (GATEWAY_KEYS.kind, key.metadata.name)


def read_digest(secret: Obj) -> str:
    """Return the digest of the key in a Secret; empty if it has none that is long enough, and that a client can send.

    A key that was made for another namespace is none.
    """
    key = read_key(secret)
    if not _KEY.fullmatch(key):
        return ""
    made = _MADE_KEY.fullmatch(key.decode())
    is_foreign = made is not None and made[1] != _mark_namespace(secret["metadata"]["namespace"])
    return "" if is_foreign else digest_key(key.decode())


def read_rotation(secret: Obj) -> str:
    """Return the identifier of the last replacement that a Secret notes; empty if there was none."""
    rotation: str = (secret["metadata"].get("annotations") or {}).get(KEY_ROTATION, "")
    return rotation


def read_wanted_rotation(key: GatewayKey) -> str:
    """Return the identifier of the replacement that the annotation of a GatewayKey asks for; empty without one."""
    return digest_request(key.metadata.annotations.get(ROTATE_KEY, ""))


def build_key_secret(owner: GatewayKey, key: str) -> tuple[Resource, Obj]:
    """Return the Secret with a new key; it is created once and never applied."""
    data = {KEY_ENTRY: base64.b64encode(key.encode()).decode()}
    name = key_secret_name(owner.metadata.name)
    resource, secret = child(SECRETS, name, GATEWAY_KEYS, owner.metadata, {}, type="Opaque", data=data)
    if rotation := read_wanted_rotation(owner):
        secret["metadata"]["annotations"] = {KEY_ROTATION: rotation}
    return resource, secret


def replace_key(secret: Obj, key: str, rotation: str) -> Patch:
    """Return the patch that puts another key into a Secret, and notes the replacement in an annotation.

    It fails if the Secret has changed since. Other entries and annotations stay.
    """
    metadata = secret["metadata"]
    annotations = (metadata.get("annotations") or {}) | {KEY_ROTATION: rotation}
    data = (secret.get("data") or {}) | {KEY_ENTRY: base64.b64encode(key.encode()).decode()}
    return Patch(
        ref(SECRETS, secret),
        [
            {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
            {"op": "add", "path": "/metadata/annotations", "value": annotations},
            {"op": "add", "path": "/data", "value": data},
        ],
    )


class ValidKeys(NamedTuple):
    """The digests of the keys that are valid."""

    digest: str
    """That of the key in the Secret; empty if there is none."""
    previous: list[PreviousKey]
    """Those that were replaced, the latest first."""

    @property
    def next_end(self) -> datetime | None:
        """Time at which the next one of the replaced keys is valid no more; None without any."""
        return min((datetime.fromisoformat(key.valid_until) for key in self.previous), default=None)


def follow_key(
    status: GatewayKeyStatus, digest: str, overlap_seconds: int, now: datetime, foreign: Iterable[str] = ()
) -> ValidKeys:
    """Return the valid keys after the Secret was read.

    Args:
        status: the status of the GatewayKey, with the valid keys before.
        digest: that of the key in the Secret; empty if it has none that may be used.
        overlap_seconds: time for which a key is valid after it was replaced.
        now: the wall clock.
        foreign: digests of keys that belong to another GatewayKey, which are not valid here at all.
    """
    # 1. The former key, if the Secret has another one. The API's times are whole seconds, which are rounded up.
    latest_end = now + timedelta(seconds=overlap_seconds)
    valid_until = rfc3339(latest_end + timedelta(seconds=1 if latest_end.microsecond else 0))
    previous = list(status.previous)
    if status.digest not in {"", digest}:
        previous.insert(0, PreviousKey(digest=status.digest, valid_until=valid_until))

    # 2. No replaced key is valid for longer than the present overlap, none that is in force again, and none twice.
    valid: dict[str, PreviousKey] = {}
    for key in previous:
        end = min(datetime.fromisoformat(key.valid_until), datetime.fromisoformat(valid_until))
        if overlap_seconds and end > now and key.digest not in {digest, *foreign, *valid}:
            valid[key.digest] = PreviousKey(digest=key.digest, valid_until=rfc3339(end))
    return ValidKeys(digest, list(valid.values())[:MOST_PREVIOUS_KEYS])
