"""Hosts as the controller serves them: whether they live, what follows when not, and the Secret each may read.

Leases are read every few seconds instead of watched, because only an answer shows that the API server, through which
hosts renew, was there: the silence of a watch does not.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from controller.lives import OUTAGE_SECONDS, Life, Lives, read_lease
from controller.plan import Key, Kind, Leading, Plan, Snapshot, child, ref
from controller.pods import TOKEN_KEY
from controller.processes import LEASE_EXPIRED
from controller.status import condition, find, transitions
from crds.meta import HOSTS_NAMESPACE, SLICE_MANAGED_BY
from crds.metalhost import MetalHost
from kube.client import Client, Obj
from kube.errors import ApiError, NotFound, Unreachable
from kube.resources import ENDPOINT_SLICES, LEASES, METAL_HOSTS, METAL_PROCESSES, SECRETS, Resource
from kube.store import Store

READ_SECONDS: Final = 3.0
_SLICE_MANAGED_BY_LABEL: Final = "endpointslice.kubernetes.io/managed-by"
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
        registered = [obj["metadata"]["name"] for obj in store.list(METAL_HOSTS)]
        changed = self.lives.observe(registered, map(read_lease, found.items), self._clock(), datetime.now(UTC))
        for host in sorted(changed):
            log.info("host", host=host, life=self.lives.life(host))
            enqueue(METAL_HOSTS, Key("", host))
        for listener in self._listeners if changed else ():
            listener()


class SecretKey(NamedTuple):
    """A Secret that a host needs, and of which only the key `token` is copied."""

    namespace: str
    name: str

    @property
    def data_key(self) -> str:
        """The key of its copy in the host's Secret; a namespace has no underscore."""
        return f"{self.namespace}_{self.name}_{TOKEN_KEY}"


class HostFacts(NamedTuple):
    """What is known of a host beside its objects."""

    life: Life
    tokens: Mapping[str, str]
    """Base64 values of the host's Secret by data key."""


def needed_secrets(host: str, processes: Iterable[Obj]) -> list[SecretKey]:
    """Return the Secrets that the processes of a host need, sorted."""
    found = set()
    for obj in processes:
        spec = obj["spec"]
        if spec.get("hostName") == host:
            names = (spec["tokenSecret"], spec.get("sourceSecret"))
            found |= {SecretKey(obj["metadata"]["namespace"], name) for name in names if name}
    return sorted(found)


class HostKind:
    """Registration of the reconciler of hosts, and the Secrets that it has read lately."""

    def __init__(self, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch = watch
        self._clock = clock
        self._read: dict[str, tuple[list[SecretKey], float, dict[str, str]]] = {}

    def kind(self) -> Kind:
        """Return the registration."""
        return Kind(
            resource=METAL_HOSTS,
            decide=decide,
            maps={METAL_PROCESSES: _host_of_process, ENDPOINT_SLICES: _host_of_slice},
            observe=self.observe,
        )

    async def observe(self, client: Client, snapshot: Snapshot, key: Key) -> HostFacts:
        """Read what a decision about a host needs. Raises as `Client`."""
        if not self._watch.bindable(key.name):
            # It may have come, or come back, since Leases were read: then its endpoints must not be deleted.
            await self._watch.read()
        return HostFacts(self._watch.lives.life(key.name), await self._tokens(client, snapshot, key.name))

    async def _tokens(self, client: Client, snapshot: Snapshot, host: str) -> Mapping[str, str]:
        needed = needed_secrets(host, snapshot.store.list(METAL_PROCESSES))
        last_needed, read_at, tokens = self._read.get(host, ([], 0.0, {}))
        complete = len(tokens) == len(needed)
        if needed != last_needed or not complete or self._clock() - read_at > SECRETS_SECONDS:
            tokens = {}
            for secret in needed:
                token = await _token(client, secret)
                if token is not None:
                    tokens[secret.data_key] = token
            self._read[host] = (needed, self._clock(), tokens)
        return tokens


async def _token(client: Client, secret: SecretKey) -> str | None:
    try:
        found = await client.get(SECRETS, secret.name, secret.namespace)
    except NotFound:
        return None
    data: dict[str, Any] = found.get("data") or {}
    return data.get(TOKEN_KEY)


def _host_of_process(_store: Store, process: Obj) -> list[Key]:
    host = process["spec"].get("hostName")
    return [Key("", host)] if host else []


def _host_of_slice(_store: Store, obj: Obj) -> list[Key]:
    metadata = obj["metadata"]
    if metadata.get("labels", {}).get(_SLICE_MANAGED_BY_LABEL) != SLICE_MANAGED_BY:
        return []
    _service, _dot, host = metadata["name"].partition(".")
    return [Key("", host)]


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
    return Plan(
        apply=(_secret(host, facts.tokens),),
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
