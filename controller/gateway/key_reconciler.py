"""The GatewayKey reconciler: it makes the Secret with the key, and reports which keys the gateway accepts.

The gateway recognises a key by the digest in the status of its GatewayKey. Two GatewayKeys with the same key would be
one for another: whoever knew a key of others could put it into a GatewayKey of their own, and the requests of others
would count, and go, as theirs. So a digest belongs to the GatewayKey that had it first, and no other one reports it.
"""

import functools
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from controller.gateway.key_secret import (
    ValidKeys,
    build_key_secret,
    follow_key,
    generate_key,
    is_left_behind,
    is_made_for,
    read_digest,
    read_rotation,
    read_wanted_rotation,
    replace_key,
)
from controller.gateway.key_usage import KeyCounts, add_counts, encode_usage
from controller.gateway.usage_reader import UsageReader
from controller.reconcile.conditions import condition, transitions
from controller.reconcile.indexes import DIGEST_INDEX, NAMESPACE_INDEX, controller_of, list_admitted, list_digests
from controller.reconcile.plan import Event, Patch, Plan, Reconciler, Snapshot
from controller.reconcile.triggers import Trigger
from controller.services.tokens import find_due_time
from crds.gatewaykey import EVERY_NAMESPACE, GatewayKey, GatewayKeyUsage, key_secret_name, may_use, read_expiry_seconds
from crds.meta import without_defaults
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, SECRETS, ObjectKey, Resource, object_key
from kube.store import Store

PROBLEM_SECONDS: Final = 60.0
"""Time after which a Secret is read again that has no key which may be used: its owner corrects it."""
LEFT_BEHIND_SECONDS: Final = 2.0
"""Pause before a Secret is read again that garbage collection is about to delete."""
MOST_COMPARISONS: Final = 20_000
"""Comparisons of patterns with services after which a key counts as one that opens some: tenants choose patterns."""
AT_ONCE: Final = 0.0
"""Pause after the Secret was written, whose answer the next decision reads: Secrets are not watched."""

WAITING: Final = "WaitingForKey"
VALID: Final = "Valid"
SUSPENDED: Final = "Suspended"


class KeyInputs(NamedTuple):
    """Inputs that are not in the watch cache."""

    secret: Obj | None
    """The Secret of the key's name, whoever made it; None if there is none."""
    new_key: str
    """A key that no Secret has yet."""
    again_seconds: float
    """Time until the Secret is to be read again."""
    is_taken: bool = False
    """The key in the Secret belongs to another GatewayKey."""
    counts: KeyCounts | None = None
    """The counts of the gateway's replicas; None: the usage of the key is not to be written now."""


class _CachedSecret(NamedTuple):
    key_uid: str
    secret: Obj
    read_again_at: datetime


class KeySecrets:
    """The Secrets of GatewayKeys as they were read or written last, and to which GatewayKey each key belongs.

    A Secret is read again within ten minutes, and at once when a replacement of the key is asked for.
    """

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._cached: dict[ObjectKey, _CachedSecret] = {}
        """By GatewayKey, of those that have a Secret which was made for them."""
        self._first_holders: dict[str, ObjectKey] = {}
        """The GatewayKey whose Secret was first seen with a digest: its status may not show that yet."""
        self._now = now

    async def observe(self, client: Client, snapshot: Snapshot, key: ObjectKey) -> KeyInputs | None:
        """Return the inputs of a decision; None for a GatewayKey that is gone. Raises as `Client`."""
        gateway_key = snapshot.read(GATEWAY_KEYS, key, GatewayKey)
        if gateway_key is None or gateway_key.metadata.deletion_timestamp is not None:
            self._forget(key)
            return None
        secret = await self._read(client, key, gateway_key, snapshot.now)
        # From here on nothing is awaited until the decision: no other GatewayKey is decided about in between.
        cached = self._cached.get(key)
        if secret is None or cached is None:  # there is none, or somebody else made it
            ends_soon = secret is not None and is_left_behind(secret, gateway_key)
            return KeyInputs(secret, generate_key(key.namespace), LEFT_BEHIND_SECONDS if ends_soon else PROBLEM_SECONDS)
        digest = read_digest(secret)
        is_taken = bool(digest) and self._belongs_to_another(snapshot.store, key, digest)
        if not digest or is_taken:
            due = min(cached.read_again_at, snapshot.now + timedelta(seconds=PROBLEM_SECONDS))
            self._cached[key] = cached = cached._replace(read_again_at=due)
        again_seconds = (cached.read_again_at - snapshot.now).total_seconds()
        return KeyInputs(secret, generate_key(key.namespace), max(again_seconds, 1.0), is_taken)

    def remember(self, resource: Resource, secret: Obj) -> None:
        """Keep a Secret as the answer to a write has it."""
        owner = controller_of(secret)
        if resource == SECRETS and owner is not None:
            self._keep(ObjectKey(secret["metadata"]["namespace"], owner["name"]), owner["uid"], secret, self._now())

    def restart(self) -> None:
        """Forget all Secrets: another leader may have written since."""
        self._cached.clear()
        self._first_holders.clear()

    async def _read(self, client: Client, key: ObjectKey, gateway_key: GatewayKey, now: datetime) -> Obj | None:
        """Return the Secret of a GatewayKey, cached unless it is due or a replacement is asked for; None without one.

        Only Secrets that were made for this GatewayKey are kept.
        """
        cached, uid = self._cached.get(key), gateway_key.metadata.uid
        is_fresh = cached is not None and cached.key_uid == uid and now < cached.read_again_at
        if cached is not None and is_fresh and not _must_replace(gateway_key, cached.secret):
            return cached.secret
        try:
            secret = await client.get(SECRETS, key_secret_name(key.name), key.namespace)
        except (NotFound, Forbidden):
            # Where the controller may not read Secrets it makes none either: the refusal of that is reported.
            self._forget(key)
            return None
        if is_made_for(secret, uid):
            self._keep(key, uid, secret, now)
        else:
            self._forget(key)
        return secret

    def _keep(self, key: ObjectKey, uid: str, secret: Obj, now: datetime) -> None:
        cached = self._cached.get(key)
        if cached is not None and read_digest(cached.secret) != read_digest(secret):
            self._forget(key)
        self._cached[key] = _CachedSecret(uid, secret, find_due_time(uid, now))

    def _forget(self, key: ObjectKey) -> None:
        cached = self._cached.pop(key, None)
        if cached is not None and self._first_holders.get(digest := read_digest(cached.secret)) == key:
            del self._first_holders[digest]

    def _belongs_to_another(self, store: Store, key: ObjectKey, digest: str) -> bool:
        """Return whether another GatewayKey had this key first; else note that it belongs to this one.

        Of two that report it already, as after the restoration of a backup, it belongs to the one that is older.
        """
        own = store.get(GATEWAY_KEYS, key.name, key.namespace)
        holders = store.by_index(GATEWAY_KEYS, DIGEST_INDEX, digest)
        others = [holder for holder in holders if object_key(holder) != key]
        if own is not None and digest in list_digests(own):
            is_taken = any(_sort_by_age(other) < _sort_by_age(own) for other in others)
        else:
            is_taken = bool(others) or self._first_holders.get(digest, key) != key
        if not is_taken:
            self._first_holders[digest] = key
        return is_taken


def _sort_by_age(key: Obj) -> tuple[str, str]:
    metadata = key["metadata"]
    return metadata["creationTimestamp"], metadata["uid"]


def key_reconciler(secrets: KeySecrets, usage: UsageReader, *, has_gateway: bool) -> Reconciler:
    """Return the reconciler of GatewayKeys; without a gateway it makes no Secret, and only says so."""

    async def observe(client: Client, snapshot: Snapshot, key: ObjectKey) -> KeyInputs | None:
        inputs = await secrets.observe(client, snapshot, key)
        stored = snapshot.get(GATEWAY_KEYS, key)
        if inputs is None or stored is None:
            return inputs
        return inputs._replace(counts=usage.take_counts(stored["metadata"]["uid"]))

    def restart() -> None:
        secrets.restart()
        usage.restart()

    return Reconciler(
        resource=GATEWAY_KEYS,
        decide=functools.partial(decide_key, has_gateway=has_gateway),
        triggers=(Trigger(INFERENCE_SERVICES, list_keys_of_service, read_access),),
        observe=observe if has_gateway else None,
        written=secrets.remember,
        restart=restart,
    )


def read_access(service: Obj) -> object:
    """Return what decisions about keys and routes read of a service: that it is there, and whom it admits."""
    return service["metadata"].get("uid"), list_admitted(service)


def list_keys_of_service(store: Store, service: Obj) -> list[ObjectKey]:
    """Return the GatewayKeys that open a service: its end may leave one without any, and its begin changes that."""
    admitted = list_admitted(service)
    if EVERY_NAMESPACE in admitted:
        keys = store.list(GATEWAY_KEYS)
    else:
        namespaces = dict.fromkeys((service["metadata"]["namespace"], *admitted))
        keys = [key for name in namespaces for key in store.by_index(GATEWAY_KEYS, NAMESPACE_INDEX, name)]
    return [object_key(key) for key in keys if _opens(key["metadata"]["namespace"], key["spec"], service)]


def _opens(key_namespace: str, spec: Obj, service: Obj) -> bool:
    metadata = service["metadata"]
    patterns = spec.get("services") or ()
    return may_use(key_namespace, patterns, metadata["namespace"], metadata["name"], list_admitted(service))


def decide_key(snapshot: Snapshot, key: ObjectKey, *, has_gateway: bool) -> Plan:
    """Return all writes for a GatewayKey: its Secret if there is none, a replacement of the key, and the status."""
    gateway_key = snapshot.read(GATEWAY_KEYS, key, GatewayKey)
    if gateway_key is None or gateway_key.metadata.deletion_timestamp is not None:
        return Plan()
    inputs: KeyInputs | None = snapshot.inputs
    now, spec, status = snapshot.now, gateway_key.spec, gateway_key.status

    # 1. The Secret, if it was made for this GatewayKey, and the keys that are valid.
    secret = inputs.secret if inputs is not None else None
    own_secret = secret if secret is not None and is_made_for(secret, gateway_key.metadata.uid) else None
    valid = _find_valid_keys(gateway_key, inputs, own_secret, now)

    # 2. The Secret that is to be made, or the next key in it: a key is replaced only after the status has it.
    create: tuple[tuple[Resource, Obj], ...] = ()
    patch: tuple[Patch, ...] = ()
    must_replace = own_secret is not None and _must_replace(gateway_key, own_secret)
    if inputs is not None and secret is None:
        create = (build_key_secret(gateway_key, inputs.new_key),)
    elif inputs is not None and own_secret is not None and must_replace and valid.digest == status.digest:
        patch = (replace_key(own_secret, inputs.new_key, read_wanted_rotation(gateway_key)),)

    # 3. The status, and when something changes by itself.
    ready = _build_ready(snapshot.store, gateway_key, inputs, now, has_gateway=has_gateway)
    counts = inputs.counts if inputs is not None else None
    usage = add_counts(status.usage, counts, now) if counts is not None else status.usage
    ends = [read_expiry_seconds(spec), valid.next_end.timestamp() if valid.next_end else math.inf]
    pauses = [end - now.timestamp() for end in ends if now.timestamp() < end < math.inf]
    if inputs is not None:
        pauses.append(AT_ONCE if create or must_replace else inputs.again_seconds)
    return Plan(
        create=create,
        patch=patch,
        status=_build_status(gateway_key, valid, own_secret, usage, ready),
        events=(
            *transitions(status.conditions, [ready], action="Check", silent={WAITING, VALID}, normal={SUSPENDED}),
            *_report_replacement(gateway_key, valid),
        ),
        again_seconds=min(pauses, default=None),
    )


def _find_valid_keys(
    gateway_key: GatewayKey, inputs: KeyInputs | None, own_secret: Obj | None, now: datetime
) -> ValidKeys:
    """Return the valid keys; as long as the Secret is missing, which is made now, its key stays the present one."""
    status, overlap_seconds = gateway_key.status, gateway_key.spec.overlap_seconds
    if inputs is None or inputs.secret is None:
        return follow_key(status, status.digest, overlap_seconds, now)
    digest = read_digest(own_secret) if own_secret is not None else ""
    if inputs.is_taken:
        return follow_key(status, "", overlap_seconds, now, foreign=(digest,))
    return follow_key(status, digest, overlap_seconds, now)


def _must_replace(gateway_key: GatewayKey, secret: Obj) -> bool:
    """Return whether the annotation of a GatewayKey asks for a replacement that its Secret does not note."""
    return read_wanted_rotation(gateway_key) not in {"", read_rotation(secret)}


def _build_status(
    gateway_key: GatewayKey, valid: ValidKeys, secret: Obj | None, usage: GatewayKeyUsage | None, ready: Obj
) -> Obj:
    """Return the whole status, without empty fields."""
    rotation = read_rotation(secret) if secret is not None else gateway_key.status.rotation
    fields = {
        "observedGeneration": gateway_key.metadata.generation,
        "digest": valid.digest,
        "previous": [without_defaults(key) for key in valid.previous],
        "rotation": rotation,
        "usage": encode_usage(usage) if usage is not None else None,
    }
    return {name: value for name, value in fields.items() if value} | {"conditions": [ready]}


def _report_replacement(gateway_key: GatewayKey, valid: ValidKeys) -> tuple[Event, ...]:
    """Return the Event about a key that was replaced, if one was."""
    former = gateway_key.status.digest
    if former in {"", valid.digest}:
        return ()
    ends = [key.valid_until for key in valid.previous if key.digest == former]
    note = f"the former key is valid until {ends[0]}" if ends else "the former key is not valid any more"
    return (Event("Normal", "KeyReplaced", f"the key was replaced: {note}", "Replace"),)


def _build_ready(
    store: Store, gateway_key: GatewayKey, inputs: KeyInputs | None, now: datetime, *, has_gateway: bool
) -> Obj:
    """Return the condition Ready: whether the gateway accepts the key for any service, else the first obstacle."""
    problem = _find_secret_problem(gateway_key, inputs, has_gateway=has_gateway)
    reason, message = problem or _find_spec_problem(store, gateway_key, now) or (VALID, "")
    if reason == VALID:
        message = f"the gateway accepts the key in Secret {key_secret_name(gateway_key.metadata.name)}"
    true = None if reason == WAITING else reason == VALID
    return condition("Ready", true=true, reason=reason, message=message, generation=gateway_key.metadata.generation)


def _find_secret_problem(
    gateway_key: GatewayKey, inputs: KeyInputs | None, *, has_gateway: bool
) -> tuple[str, str] | None:
    """Return why there is no key, as a reason and a message; None: there is one."""
    name = key_secret_name(gateway_key.metadata.name)
    if not has_gateway:
        return "NoGateway", "the cluster has no gateway: install the chart with gateway.enabled=true"
    if inputs is None or inputs.secret is None:
        return WAITING, f"waiting for Secret {name}, which the controller makes"
    if not is_made_for(inputs.secret, gateway_key.metadata.uid):
        if is_left_behind(inputs.secret, gateway_key):
            return WAITING, f"waiting until Secret {name} of a former GatewayKey of this name is deleted"
        message = f"Secret {name} was not made for this GatewayKey: delete it, or choose another name for the key"
        return "SecretTaken", message
    if not read_digest(inputs.secret):
        return "InvalidKey", (
            f"entry key of Secret {name} is no key of this namespace: put in at least 32 printable ASCII characters "
            "without blanks, or delete the Secret to get a new key"
        )
    if inputs.is_taken:
        return "KeyTaken", f"another GatewayKey has the key in Secret {name}: delete the Secret to get a new key"
    return None


def _find_spec_problem(store: Store, gateway_key: GatewayKey, now: datetime) -> tuple[str, str] | None:
    """Return why the gateway accepts the key for no service, as a reason and a message; None: it does."""
    spec, namespace = gateway_key.spec, gateway_key.metadata.namespace
    if spec.suspend:
        return SUSPENDED, "spec.suspend is true: set it to false to let the gateway accept the key"
    if read_expiry_seconds(spec) <= now.timestamp():
        return "Expired", f"spec.expiresAt is {spec.expires_at}, which is over: set a later time"
    patterns = {"services": spec.services}
    left = MOST_COMPARISONS // max(1, len(spec.services))
    for value in (namespace, EVERY_NAMESPACE):
        for service in store.by_index(INFERENCE_SERVICES, NAMESPACE_INDEX, value):
            if not left or _opens(namespace, patterns, service):
                return None
            left -= 1
    way_out = f"make an InferenceService, or have spec.access of one admit namespace {namespace}"
    if spec.services:
        message = f"spec.services fits no service that namespace {namespace} may use: correct it, {way_out}; "
        message += "a ModelRoute is opened by the names of its services"
        return "NoService", message
    return "NoService", f"namespace {namespace} has no service, and no other one admits it: {way_out}"
