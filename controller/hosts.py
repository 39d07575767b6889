"""Hosts as the controller serves them: whether they live, what follows when not, and the Secret each may read.

Leases are read every few seconds instead of watched, because only an answer shows that the API server, through which
hosts renew, was there: the silence of a watch does not.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec
import structlog

from controller.lives import OUTAGE_SECONDS, Life, Lives, read_lease
from controller.plan import FIELD_MANAGER, Key, Kind, Leading, Plan, Snapshot, child, controller_of, ref
from controller.pods import TOKEN_KEY, is_token_secret
from controller.processes import LEASE_EXPIRED
from controller.status import condition, find, transitions
from crds.meta import HOSTS_NAMESPACE, LABEL_SLICE_MANAGED_BY, SLICE_MANAGED_BY, host_secret_key
from crds.metalhost import MetalHost
from kube.apply import is_applied
from kube.client import Client, Obj
from kube.errors import ApiError, NotFound, Unreachable
from kube.resources import ENDPOINT_SLICES, LEASES, METAL_HOSTS, METAL_PROCESSES, SECRETS, Resource
from kube.store import Store

READ_SECONDS: Final = 3.0
SECRETS_SECONDS: Final = 60.0
"""How late a changed Secret of a user is copied to the hosts that need it."""

log = structlog.get_logger()


class Watch:
    """Reads the Leases while this replica leads, and keeps `lives`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.lives = Lives()
        self._listeners: list[Callable[[], None]] = []
        self._clock = clock
        self._leading: Leading | None = None

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after the life of any host has changed."""
        self._listeners.append(listener)

    def bindable(self, host: str) -> bool:
        """Whether a host may be given work."""
        return self.lives.life(host) == "Alive"

    def wait_seconds(self, host: str) -> float | None:
        """Return how long an expired host has to stay so until what it ran counts as stopped; None: not expired."""
        return self.lives.wait_seconds(host, self._clock())

    async def run(self, leading: Leading) -> None:
        """Read for ever."""
        self.lives.restart()
        self._leading = leading
        while True:
            try:
                async with asyncio.timeout(OUTAGE_SECONDS / 2):
                    await self.read()
            except (ApiError, Unreachable, TimeoutError) as error:
                log.warning("leases not read", error=str(error) or type(error).__name__)
            await asyncio.sleep(READ_SECONDS)

    async def read(self) -> None:
        """Read all Leases now, and have what a change concerns decided anew. Raises as `Client`."""
        if self._leading is None:
            return
        client, store, _, enqueue, *_ = self._leading
        found = await client.list(LEASES, HOSTS_NAMESPACE)
        names = {obj["metadata"]["name"] for obj in store.list(METAL_HOSTS)}
        # One that was removed with its Lease cannot withdraw its endpoints: it expires as any other.
        names |= {key.name for obj in store.list(ENDPOINT_SLICES) for key in _host_of_slice(store, obj)}
        changed = self.lives.observe(names, map(read_lease, found.items), self._clock(), datetime.now(UTC))
        for host in sorted(changed):
            log.info("host", host=host, life=self.lives.life(host))
            enqueue(METAL_HOSTS, Key("", host))
        for listener in self._listeners if changed else ():
            listener()


class SecretKey(NamedTuple):
    """A Secret that a host needs, and of which only the key `token` is copied."""

    namespace: str
    name: str
    service_uid: str
    """The service that must own it; empty for a Secret of the user's own."""


class HostFacts(NamedTuple):
    """What is known of a host beside its objects."""

    life: Life
    tokens: Mapping[str, str] | None = None
    """Base64 values for the host's Secret by data key; None: it needs none now."""
    secret: Obj | None = None
    """The host's Secret as it is."""


def needed_secrets(host: str, processes: Iterable[Obj]) -> list[SecretKey]:
    """Return the Secrets that the processes of a host need, sorted."""
    found = set()
    for obj in processes:
        spec, namespace = obj["spec"], obj["metadata"]["namespace"]
        if spec.get("hostName") == host:
            if owner := controller_of(obj):
                found.add(SecretKey(namespace, spec["tokenSecret"], owner["uid"]))
            for each in (spec, *spec.get("furtherArtifacts", ())):
                if "sourceSecret" in each:
                    found.add(SecretKey(namespace, each["sourceSecret"], ""))
    return sorted(found)


def kind(watch: Watch) -> Kind:
    """Register the reconciler of hosts."""

    async def observe(client: Client, snapshot: Snapshot, key: Key) -> HostFacts:
        if not watch.bindable(key.name):
            # It may have come, or come back, since Leases were read: then its endpoints must not be deleted.
            await watch.read()
        life = watch.lives.life(key.name)
        if life == "Expired" or snapshot.get(METAL_HOSTS, key) is None:
            return HostFacts(life)  # nothing may come between this look and the end of its endpoints
        tokens: dict[str, str] = {}
        for needed in needed_secrets(key.name, snapshot.store.list(METAL_PROCESSES)):
            secret = await _read(client, needed.namespace, needed.name)
            if token := secret and _token(secret, needed.service_uid):
                tokens[host_secret_key(needed.namespace, needed.name)] = token
        return HostFacts(life, tokens, await _read(client, HOSTS_NAMESPACE, key.name))

    return Kind(
        resource=METAL_HOSTS,
        decide=decide,
        maps={METAL_PROCESSES: _host_of_process, ENDPOINT_SLICES: _host_of_slice},
        observe=observe,
    )


def _token(secret: Obj, service_uid: str) -> str | None:
    if service_uid and not is_token_secret(secret, service_uid):
        return None
    token: str | None = (secret.get("data") or {}).get(TOKEN_KEY)
    return token


async def _read(client: Client, namespace: str, name: str) -> Obj | None:
    try:
        return await client.get(SECRETS, name, namespace)
    except NotFound:
        return None


def _host_of_process(_store: Store, process: Obj) -> list[Key]:
    host = process["spec"].get("hostName")
    return [Key("", host)] if host else []


def _host_of_slice(_store: Store, obj: Obj) -> list[Key]:
    metadata = obj["metadata"]
    if metadata.get("labels", {}).get(LABEL_SLICE_MANAGED_BY) != SLICE_MANAGED_BY:
        return []
    _service, _dot, host = metadata["name"].partition(".")
    return [Key("", host)] if host else []


def decide(snapshot: Snapshot, key: Key) -> Plan:
    """Decide about one host: its Secret, its condition Ready, and its endpoints once it is given up."""
    host = snapshot.read(METAL_HOSTS, key, MetalHost)
    facts: HostFacts = snapshot.facts
    expired = facts.life == "Expired"
    slices = [obj for obj in snapshot.store.list(ENDPOINT_SLICES) if _host_of_slice(snapshot.store, obj) == [key]]
    # A host that is not registered any more cannot withdraw its endpoints either.
    delete = tuple(ref(ENDPOINT_SLICES, obj) for obj in slices) if expired else ()
    if host is None or host.metadata.deletion_timestamp is not None:
        return Plan(delete=delete)
    ready = _ready(host, facts.life)
    secret = _secret(host, facts.tokens) if facts.tokens is not None else None
    # No watch feeds Secrets into the store, so what is there was read.
    differs = secret and (facts.secret is None or not is_applied(*secret, facts.secret, FIELD_MANAGER))
    return Plan(
        apply=(secret,) if secret and differs else (),
        delete=delete,
        status={"conditions": [ready]},
        events=transitions(host.status.conditions, [ready], action="Watch", silent={"WaitingForLease"}),
        again_seconds=SECRETS_SECONDS,
    )


def _ready(host: MetalHost, life: Life) -> Obj:
    generation = host.metadata.generation
    if life == "Alive":
        message = "the host renews its Lease"
        return condition("Ready", true=True, reason="LeaseRenewed", message=message, generation=generation)
    if life == "Expired":
        message = (
            f"Lease {HOSTS_NAMESPACE}/{host.metadata.name} is not renewed: its endpoints are withdrawn, its processes "
            "are replaced where another host fits; see whether it is up, reaches the API server, and runs the agent"
        )
        return condition("Ready", true=False, reason=LEASE_EXPIRED, message=message, generation=generation)
    last = find(host.status.conditions, "Ready")
    if last is not None:
        return condition(
            "Ready",
            true={"True": True, "False": False}.get(last.status),
            reason=last.reason,
            message=last.message,
            generation=generation,
        )
    message = f"waiting for the first renewal of Lease {HOSTS_NAMESPACE}/{host.metadata.name}"
    return condition("Ready", true=None, reason="WaitingForLease", message=message, generation=generation)


def _secret(host: MetalHost, tokens: Mapping[str, str]) -> tuple[Resource, Obj]:
    """Return the one Secret that this host may read, as a whole: what is not needed any more leaves it."""
    owner = msgspec.structs.replace(host.metadata, namespace=HOSTS_NAMESPACE)
    return child(SECRETS, host.metadata.name, METAL_HOSTS, owner, {}, type="Opaque", data=dict(tokens))
