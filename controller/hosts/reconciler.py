"""The MetalHost reconciler: the liveness of hosts and its consequences, the Secret of each host, and its grants.

Leases are read every few seconds instead of watched, because only an answer shows that the API server, through which
hosts renew, was reachable: a silent watch does not show that. What a host may write is checked before it is stored, by
the policies of `deploy/chart/templates/host-policy.yaml`.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final, NamedTuple

import structlog

from controller.hosts.address_check import PAUSE_SECONDS, AddressCheck, AddressUse
from controller.hosts.drain import DRAINING, build_drained_condition, draining_facts, find_recheck_seconds
from controller.hosts.grants import (
    build_address_condition,
    build_grant_objects,
    decide_grants,
    grants_name,
    judge_address,
    read_granted_addresses,
)
from controller.hosts.liveness import (
    OUTAGE_SECONDS,
    HostDistrust,
    HostLiveness,
    Liveness,
    build_stable_condition,
    read_lease,
)
from controller.hosts.reachability import (
    AgentPlace,
    AskAgent,
    ReachabilityAnswer,
    ReachabilityProber,
    build_reachable_condition,
    find_agent_place,
)
from controller.hosts.secrets import HostSecrets, build_host_secret, list_needed_secrets
from controller.reconcile.conditions import condition, find, transitions
from controller.reconcile.indexes import (
    ADDRESS_INDEX,
    HOST_INDEX,
    OWNER_INDEX,
    controller_of,
    host_of_slice,
    namespaced,
    stated_addresses,
)
from controller.reconcile.plan import FIELD_MANAGER, Leading, Plan, Reconciler, Snapshot, decode_stored, ref
from controller.reconcile.triggers import Trigger, all_but_status, existence, owned, steady_facts
from controller.services.rollout import LEASE_EXPIRED
from controller.services.token_copies import keep_previous_tokens
from controller.services.tokens import KnownTokens
from crds.meta import HOSTS_NAMESPACE, STABLE, host_secret_key
from crds.metalhost import MetalHost
from crds.metalprocess import HostedProcess
from kube.apply import is_applied
from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.resources import (
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    LEASES,
    METAL_HOSTS,
    METAL_PROCESSES,
    ROLE_BINDINGS,
    ROLES,
    ObjectKey,
    Resource,
    object_key,
)
from kube.store import Store

READ_SECONDS: Final = 3.0
SECRETS_SECONDS: Final = 60.0
"""Time after which a host is looked at again: a changed Secret of a user is copied to all hosts within two minutes."""
_VERSION: Final = version("pomona")
"""Read once: it is in a file, and each decision about a host states it."""

_SILENT: Final = frozenset(
    {"WaitingForLease", "NotReported", "NotChecked", "AddressFree", "NotAsked", "AgentAnswered", DRAINING, STABLE}
)
"""Reasons of normal progress, of which no Event is sent."""

log = structlog.get_logger()


class LeaseReader:
    """A loop that reads the Leases while this replica leads, and keeps the `liveness` of hosts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.liveness = HostLiveness()
        self._listeners: list[Callable[[], None]] = []
        """Called after the liveness of any host has changed."""
        self._clock = clock
        self._leading: Leading | None = None
        """Client and store of this leader; None: this replica has not led yet."""
        self._reading = asyncio.Lock()
        """Held while Leases are read: answers must not overtake one another."""

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after the liveness of any host has changed."""
        self._listeners.append(listener)

    def bindable(self, host: str) -> bool:
        """Return whether processes may be bound to a host."""
        return self.liveness.find_liveness(host) == "Alive"

    def wait_seconds(self, host: str) -> float | None:
        """Return the time until the processes of an expired host count as stopped; None: it has not expired."""
        return self.liveness.wait_seconds(host, self._clock())

    async def run(self, leading: Leading) -> None:
        """Read the Leases while this replica leads."""
        self.liveness.restart()
        self._leading = leading
        while True:
            try:
                async with asyncio.timeout(OUTAGE_SECONDS / 2):
                    await self.read()
            except (ApiError, Unreachable, TimeoutError) as error:
                log.warning("leases_not_read", error=str(error) or type(error).__name__)
            await asyncio.sleep(READ_SECONDS)

    async def read(self) -> None:
        """Read all Leases now, and enqueue the hosts whose liveness has changed. Raises as `Client`.

        The processes that are being deleted on such a host are enqueued, too: they are released once it has expired.
        """
        leading = self._leading
        if leading is None:  # this replica has not led yet
            return
        store = leading.store
        async with self._reading:  # an answer that is overtaken by a later one would count as a renewal
            listed = await leading.client.list(LEASES, HOSTS_NAMESPACE)

        # 1. The hosts to observe: also those of all EndpointSlices. A host that was deleted together with its Lease
        # cannot remove its endpoints, so it is observed until it expires like any other.
        names = {obj["metadata"]["name"] for obj in store.list(METAL_HOSTS)}
        names.update(store.index_values(ENDPOINT_SLICES, HOST_INDEX))

        # 2. Their liveness, and the hosts whose liveness has changed. `today` is the wall clock; self._clock() is the
        # monotonic one.
        today = datetime.now(UTC)

        def read_expiries(host: str) -> list[str]:
            """Return the expiries that an earlier leader has written into the status of a host."""
            stored = Snapshot(store, today).read(METAL_HOSTS, ObjectKey("", host), MetalHost)
            return stored.status.lease_expiries if stored is not None else []

        changed = self.liveness.observe(names, map(read_lease, listed.items), self._clock(), today, read_expiries)

        # 3. Enqueue those hosts, and the processes that are being deleted there.
        for host in sorted(changed):
            log.info("host_liveness_changed", host=host, liveness=self.liveness.find_liveness(host))
            leading.enqueue(METAL_HOSTS, ObjectKey("", host))
            # Mostly the changed condition Ready of the host enqueues them; but if an earlier leader has written it,
            # nothing changes.
            for process in store.by_index(METAL_PROCESSES, HOST_INDEX, host):
                if "deletionTimestamp" in process["metadata"]:
                    leading.enqueue(METAL_PROCESSES, object_key(process))

        # 4. Tell the listeners, such as the queue, that the liveness of a host has changed.
        for listener in self._listeners if changed else ():
            listener()

    async def follow_renewal(self, host: str) -> None:
        """Read all Leases now if one host has renewed its Lease since they were read. Raises as `Client`."""
        if self._leading is not None:
            selector = f"metadata.name={host}"
            listed = await self._leading.client.list(LEASES, HOSTS_NAMESPACE, field_selector=selector)
            if listed.items and read_lease(listed.items[0]) != self.liveness.find_lease(host):
                await self.read()

    def find_distrust(self, host: str, today: datetime) -> HostDistrust | None:
        """Return why a host gets no new process yet, or None."""
        return self.liveness.find_distrust(host, self._clock(), today)


class HostInputs(NamedTuple):
    """Inputs that are not in the watch cache."""

    liveness: Liveness
    tokens: Mapping[str, str] | None = None
    """Base64 values for the host's Secret by data key; None: the Secret stays as it is."""
    secret: Obj | None = None
    """The host's existing Secret; None if there is none, or if `tokens` is None."""
    address_use: AddressUse | None = None
    """Another use of the host's address in the cluster; None if that is not known now."""
    reachability: ReachabilityAnswer | None = None
    """The agent's answer to the controller; None: it was not asked yet."""
    distrust: HostDistrust | None = None
    """The reason why the host is trusted late."""
    expiries: tuple[str, ...] | None = None
    """Times at which its Lease has expired lately; None: they are not known, and stay as they are."""
    place: AgentPlace | None = None
    """The place at which the agent is asked whether the controller reaches it; None: nowhere."""


def host_reconciler(leases: LeaseReader, tokens: KnownTokens, prober: ReachabilityProber) -> Reconciler:
    """Return the reconciler of hosts, which copies `tokens` to hosts and has `prober` ask their agents.

    It reads what is not watched in `observe`; `decide_host` decides by that and by the watch cache.
    """
    addresses, secrets = AddressCheck(), HostSecrets(tokens)

    async def observe(client: Client, snapshot: Snapshot, key: ObjectKey) -> HostInputs:
        """Read what is not watched, such as Secrets; of a host that is gone or expired, only what its Lease says."""
        # 1. Its Lease.
        if not leases.bindable(key.name):
            # Not Alive, but it may have renewed since Leases were read: then its endpoints must not be deleted.
            await leases.follow_renewal(key.name)
        liveness = leases.liveness.find_liveness(key.name)
        distrust = leases.find_distrust(key.name, snapshot.now)
        expiries = leases.liveness.list_expiries(key.name, snapshot.now)
        host = snapshot.get(METAL_HOSTS, key)
        if host is None:
            addresses.forget(key.name)
        if liveness == "Expired" or host is None:
            # Its tokens may be replaced while nothing here follows them.
            secrets.forget(key.name)
            # Read nothing more, so that this liveness is still current when the endpoints are deleted.
            return HostInputs(liveness, distrust=distrust, expiries=expiries)

        # 2. What else in the cluster has its address, and the place at which its agent is asked: none if something else
        # has got the address since it was granted, as the controller would connect to that.
        address = host.get("status", {}).get("address", "")
        is_granted = address in read_granted_addresses(_find_grants_role(snapshot, key.name))
        readable_host = snapshot.read(METAL_HOSTS, key, MetalHost)  # None: it cannot be decoded
        use = await addresses.find_use(client, key.name, address, granted=is_granted) if address else None
        may_connect = is_granted and not (use and use.owner)
        place = find_agent_place(readable_host) if may_connect and readable_host is not None else None

        # 3. The tokens that its processes need, and the Secret with those that it has.
        bound = snapshot.store.by_index(METAL_PROCESSES, HOST_INDEX, key.name)
        needs = list_needed_secrets(bound, functools.partial(_find_token_rotation, snapshot))
        tokens = await secrets.read_tokens(client, key.name, needs, snapshot.now)
        secret = await secrets.read_own(client, key.name, snapshot.now)
        answer = prober.find_answer(key.name, place) if place is not None else None
        return HostInputs(
            liveness, tokens, secret, use, reachability=answer, distrust=distrust, expiries=expiries, place=place
        )

    def restart() -> None:
        """Forget what was read, before this replica leads: another leader may have written since."""
        leases.liveness.restart()
        secrets.restart()

    return Reconciler(
        resource=METAL_HOSTS,
        decide=decide_host,
        reads=steady_facts,
        triggers=_list_triggers(),
        observe=observe,
        perform=prober.perform,
        written=secrets.remember,
        restart=restart,
    )


def _list_triggers() -> tuple[Trigger, ...]:
    """Return the changes of other objects after which hosts are decided again."""
    return (
        *(owned(resource, METAL_HOSTS) for resource in (ROLES, ROLE_BINDINGS)),
        Trigger(METAL_HOSTS, _hosts_at_address, stated_addresses),  # another host may get the address
        Trigger(METAL_PROCESSES, _host_of_process, all_but_status),  # grants and tokens follow the processes
        Trigger(METAL_PROCESSES, _drained_hosts_of_siblings, draining_facts),  # replacements let a drain go on
        Trigger(ENDPOINT_SLICES, _host_of_slice, existence),  # those of an expired host are deleted
        Trigger(INFERENCE_SERVICES, _hosts_of_service, _read_token_rotation),  # a new token is copied to hosts
    )


def _host_of_process(_store: Store, process: Obj) -> list[ObjectKey]:
    host = process["spec"].get("hostName")
    return [ObjectKey("", host)] if host else []


def _drained_hosts_of_siblings(store: Store, process: Obj) -> list[ObjectKey]:
    """Return the drained hosts with a process of the same service: a change of this one may let their drain go on."""
    owner = controller_of(process)
    if owner is None:
        return []
    siblings = store.by_index(METAL_PROCESSES, OWNER_INDEX, namespaced(process["metadata"]["namespace"], owner["uid"]))
    # The process itself, too: one that is gone is not among the siblings any more.
    names = {sibling["spec"].get("hostName") for sibling in (*siblings, process)}
    hosts = [store.get(METAL_HOSTS, name) for name in sorted(filter(None, names))]
    return [object_key(host) for host in hosts if host and host.get("spec", {}).get("drain")]


def _hosts_at_address(store: Store, host: Obj) -> list[ObjectKey]:
    """Return the hosts that state the same address as this one, which has changed: one of them may get it.

    It is called with the host as it was before the change, and as it is after it.
    """
    return [
        object_key(other)
        for address in stated_addresses(host)
        for other in store.by_index(METAL_HOSTS, ADDRESS_INDEX, address)
    ]


def _hosts_of_service(store: Store, service: Obj) -> list[ObjectKey]:
    """Return the hosts to which processes of a service are bound."""
    metadata = service["metadata"]
    processes = store.by_index(METAL_PROCESSES, OWNER_INDEX, namespaced(metadata["namespace"], metadata["uid"]))
    names = {process["spec"].get("hostName") for process in processes}
    return [ObjectKey("", name) for name in sorted(filter(None, names))]


def _read_token_rotation(service: Obj | None) -> str:
    """Return the identifier of the last replacement of a service's token; empty if there was none."""
    rotation: str = ((service or {}).get("status") or {}).get("tokenRotation", "")
    return rotation


def _find_token_rotation(snapshot: Snapshot, service: ObjectKey) -> str:
    """Return the same of a service by its key; empty if it is gone."""
    return _read_token_rotation(snapshot.get(INFERENCE_SERVICES, service))


def _host_of_slice(_store: Store, obj: Obj) -> list[ObjectKey]:
    host = host_of_slice(obj)
    return [ObjectKey("", host)] if host else []


def decide_host(snapshot: Snapshot, key: ObjectKey) -> Plan:
    """Return all writes for a host: grants, conditions and Secret; if it has expired, also delete its EndpointSlices.

    The grants are a Role with what the host may publish: its address, and the services and processes bound to it. A
    host whose Lease has expired cannot withdraw its EndpointSlices, and clients would be sent to them for ever.
    """
    host = snapshot.read(METAL_HOSTS, key, MetalHost)
    inputs: HostInputs = snapshot.inputs  # as `observe` has read them
    has_expired = inputs.liveness == "Expired"
    slices = snapshot.store.by_index(ENDPOINT_SLICES, HOST_INDEX, key.name)
    # A host that is not registered any more cannot withdraw its endpoints either.
    delete = tuple(ref(ENDPOINT_SLICES, obj) for obj in slices) if has_expired else ()
    if host is None or host.metadata.deletion_timestamp is not None:
        return Plan(delete=delete, effects=(AskAgent(None),))

    # 1. Its grants, by what else has its address.
    claimants = _list_claimants(snapshot, host)
    roles = {claimant.metadata.name: _find_grants_role(snapshot, claimant.metadata.name) for claimant in claimants}
    verdict = judge_address(host, claimants, roles, inputs.address_use)
    bound = snapshot.store.by_index(METAL_PROCESSES, HOST_INDEX, key.name)
    # An expired host keeps its grants, as its processes may still run; but not those of a former host of its name.
    keeps_grants = has_expired and not _has_former_grants(snapshot, key.name)
    grants = () if keeps_grants else build_grant_objects(host, decide_grants(host, verdict, bound))

    # 2. Its conditions.
    hosted = decode_stored(snapshot.store, METAL_PROCESSES, bound, HostedProcess)
    siblings = _list_siblings(snapshot, hosted) if host.spec.drain else {}
    # None: this leader has not observed the host yet, so what an earlier one has found stays.
    expiries = host.status.lease_expiries if inputs.expiries is None else list(inputs.expiries)
    all_conditions = (
        _ready_condition(host, inputs.liveness),
        build_address_condition(host, verdict),
        build_reachable_condition(host, inputs.reachability),
        build_drained_condition(host, hosted, siblings, snapshot.now),
        build_stable_condition(host, expiries, inputs.distrust),
    )
    conditions = [condition for condition in all_conditions if condition is not None]

    # 3. The seconds until the next decision: the least of these.
    waits = [PAUSE_SECONDS if verdict.reason == "NotChecked" else SECRETS_SECONDS]
    if (recheck_seconds := find_recheck_seconds(host, hosted, siblings, snapshot.now)) is not None:
        waits.append(recheck_seconds)
    if inputs.distrust is not None and inputs.distrust.left_seconds is not None:
        waits.append(inputs.distrust.left_seconds)

    # 4. Its Secret, if that changes; AskAgent has the agent asked at the place, or nowhere without one.
    changed_secret = _plan_secret(host, inputs, bound, snapshot.now)
    return Plan(
        apply=grants if changed_secret is None else (changed_secret, *grants),
        delete=delete,
        status={
            "conditions": conditions,
            "controllerVersion": _VERSION,
            **({"leaseExpiries": expiries} if expiries else {}),
        },
        events=transitions(host.status.conditions, conditions, action="Watch", silent=_SILENT),
        again_seconds=min(waits),
        effects=(AskAgent(inputs.place),),
    )


def _plan_secret(
    host: MetalHost, inputs: HostInputs, bound: Iterable[Obj], now: datetime
) -> tuple[Resource, Obj] | None:
    """Return the Secret of a host to apply; None if its tokens were not read, or it has this content already."""
    if inputs.tokens is None:
        return None
    # Of the tokens of services, replaced ones stay valid for a while.
    keys = {host_secret_key(process["metadata"]["namespace"], process["spec"]["tokenSecret"]) for process in bound}
    existing = (inputs.secret or {}).get("data") or {}
    secret = build_host_secret(host, keep_previous_tokens(inputs.tokens, keys, existing, now))
    # Compared here, because Secrets are not in the watch cache.
    is_unchanged = inputs.secret is not None and is_applied(*secret, inputs.secret, FIELD_MANAGER)
    return None if is_unchanged else secret


def _list_siblings(snapshot: Snapshot, bound: Iterable[HostedProcess]) -> dict[str, list[HostedProcess]]:
    """Return each affected service's processes on other hosts, keyed by service uid."""
    by_owner: dict[str, list[HostedProcess]] = {}
    for process in bound:
        owner = process.owner_uid
        if owner and owner not in by_owner:
            siblings = snapshot.children(METAL_PROCESSES, process.metadata.namespace, owner)
            by_owner[owner] = [
                sibling
                for sibling in decode_stored(snapshot.store, METAL_PROCESSES, siblings, HostedProcess)
                if sibling.spec.host_name != process.spec.host_name
            ]
    return by_owner


def _has_former_grants(snapshot: Snapshot, name: str) -> bool:
    """Return whether the Role of this name belongs to a former host, whose address may be that of another one."""
    role = snapshot.get(ROLES, ObjectKey(HOSTS_NAMESPACE, grants_name(name)))
    return role is not None and _find_grants_role(snapshot, name) is None


def _find_grants_role(snapshot: Snapshot, name: str) -> Obj | None:
    """Return the Role of a host; None if there is none, or it belongs to a former host of this name."""
    role = snapshot.get(ROLES, ObjectKey(HOSTS_NAMESPACE, grants_name(name)))
    host = snapshot.get(METAL_HOSTS, ObjectKey("", name))
    owner = controller_of(role) if role else None
    return role if host and owner and owner["uid"] == host["metadata"]["uid"] else None


def _list_claimants(snapshot: Snapshot, host: MetalHost) -> list[MetalHost]:
    """Return the hosts that state the address of this host, itself among them."""
    hosts = snapshot.store.by_index(METAL_HOSTS, ADDRESS_INDEX, host.status.address) if host.status.address else []
    decoded = decode_stored(snapshot.store, METAL_HOSTS, hosts, MetalHost)
    return [claimant for claimant in decoded if claimant.metadata.deletion_timestamp is None]


def _ready_condition(host: MetalHost, liveness: Liveness) -> Obj:
    """Return the condition Ready: whether the host renews its Lease.

    Until this leader has seen a renewal or an expiry, what an earlier one has found stays.
    """
    lease = f"Lease {HOSTS_NAMESPACE}/{host.metadata.name}"
    # If nobody has observed the host yet; true=None means status Unknown.
    true, reason, message = None, "WaitingForLease", f"waiting for the first renewal of {lease}"
    if liveness == "Alive":
        true, reason, message = True, "LeaseRenewed", "the host renews its Lease"
    elif liveness == "Expired":
        true, reason = False, LEASE_EXPIRED
        message = (
            f"{lease} has expired: the host's endpoints are removed, and its processes are replaced where another host "
            "fits; check that the host is up, reaches the API server and runs `pomona agent`"
        )
    elif (last := find(host.status.conditions, "Ready")) is not None:  # as an earlier leader has found it
        true, reason, message = {"True": True, "False": False}.get(last.status), last.reason, last.message
    return condition("Ready", true=true, reason=reason, message=message, generation=host.metadata.generation)
