"""This host's EndpointSlices: one for each service that it serves, whose one endpoint is the proxy's port for it.

The controller may have declared this host lost while it had no contact, deleted its slices and started its processes
elsewhere. So an endpoint is made ready only while the Lease is fresh, and after a gap only for processes that a fresh
list still assigns to this host. Making an endpoint not ready is always allowed.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import structlog

from crds import meta
from crds.meta import slice_name, split_slice_name
from kube.backoff import backoff_seconds
from kube.client import Client, Obj
from kube.errors import Forbidden, Invalid, NotFound
from kube.resources import ENDPOINT_SLICES, ObjectKey

FIELD_MANAGER: Final = "pomona-metal-agent"
RENEW_SECONDS: Final = 10.0
LEASE_SECONDS: Final = 40
_GRANT_SECONDS: Final = 0.05
_LONGEST_GRANT_SECONDS: Final = 2.0
_GAP_SECONDS: Final = 25.0
"""More than two missed renewals, and well below LEASE_SECONDS, after which the controller declares a host lost."""

log = structlog.get_logger()


class Clocks(msgspec.Struct, frozen=True):
    """One moment, in seconds of both clocks."""

    monotonic: float
    wall: float

    def since(self, earlier: "Clocks") -> float:
        """Return the seconds since `earlier`, by the clock that has advanced more."""
        return max(self.monotonic - earlier.monotonic, abs(self.wall - earlier.wall))


class Freshness(msgspec.Struct):
    """The condition for a ready endpoint: the Lease is fresh, and the assignments were listed after the last gap.

    Both clocks count: a Mac's monotonic clock stands still in sleep, and a wall clock can be set.
    """

    renewed_at: Clocks | None = None
    has_fresh_list: bool = False
    """True if a fresh list was read after the last gap."""
    gap_count: int = 0
    """Number of gaps so far: a list is fresh only if there was none since it was requested."""

    def note_renewal(self, now: Clocks) -> bool:
        """Note a renewal of the Lease at `now`; return True while the assignments have to be listed again.

        The first renewal, and one that comes late, end a gap: the controller may have moved processes of this host
        meanwhile, so the list that was read before counts no more. The agent sets `has_fresh_list` after the next one.
        """
        is_after_gap = self.renewed_at is None or now.since(self.renewed_at) > _GAP_SECONDS
        if is_after_gap:
            self.has_fresh_list = False
            self.gap_count += 1  # a list that was requested before is not fresh
        self.renewed_at = now
        return not self.has_fresh_list

    def may_serve(self, now: Clocks) -> bool:
        """Return True if an endpoint may be made ready."""
        return self.has_fresh_list and self.renewed_at is not None and now.since(self.renewed_at) < LEASE_SECONDS


class SliceMember(msgspec.Struct, frozen=True):
    """One process of a service on this host, as its endpoint is built from it."""

    uid: str
    name: str
    ready: bool
    stopping: bool = False
    """It ends after the requests in progress."""


class SliceRefusal(NamedTuple):
    """A slice that the API server refuses, because the controller has not granted it to this host."""

    message: str
    tries: int

    @property
    def retry_seconds(self) -> float:
        """The seconds until the next try: a grant follows a binding at once, unless the controller is away."""
        return backoff_seconds(self.tries, first=_GRANT_SECONDS, most=_LONGEST_GRANT_SECONDS)


def find_service(slice_: Obj, host: str) -> ObjectKey | None:
    """Return the service of a slice, or None if the slice is not of `host`."""
    service, owner = split_slice_name(slice_["metadata"]["name"])
    return ObjectKey(slice_["metadata"]["namespace"], service) if owner == host else None


def build_slice(
    service: ObjectKey, host: str, address: str, port: int | None, members: Sequence[SliceMember], *, tls: bool = False
) -> Obj | None:
    """Return the EndpointSlice of `service` on `host`; None if it has no process (`members`) or no port here.

    Its one endpoint is the proxy's `port` at `address`. That is ready if any process is. Without a ready process, but
    with one that still ends its requests, it is terminating and serving. Deleted with the processes, its owners.
    """
    if not members or port is None:
        return None
    namespace, name = service
    ready = any(member.ready for member in members)
    stopping = not ready and any(member.stopping for member in members)

    return {
        "metadata": {
            "name": slice_name(name, host),
            "namespace": namespace,
            "labels": {
                meta.LABEL_SERVICE_NAME: name,
                meta.LABEL_SLICE_MANAGED_BY: meta.SLICE_MANAGED_BY,
                meta.LABEL_MANAGED_BY: meta.MANAGED_BY,
                meta.LABEL_HOST: host,
            },
            "ownerReferences": [
                {"apiVersion": meta.API_VERSION, "kind": "MetalProcess", "name": member.name, "uid": member.uid}
                for member in members
            ],
        },
        "addressType": f"IPv{ipaddress.ip_address(address).version}",
        # The name must be that of the Service's port, with or without a certificate: Kubernetes joins ports by name.
        "ports": [{"name": "http", "port": port, "protocol": "TCP"} | ({"appProtocol": meta.HTTPS} if tls else {})],
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"ready": ready, "serving": ready or stopping, "terminating": stopping},
            }
        ],
    }


class Endpoints:
    """The slices of `host` in the API; `wanted` returns the desired slice of a service at the time of a write."""

    def __init__(self, client: Client, host: str, wanted: Callable[[ObjectKey], Obj | None]) -> None:
        """Begin without knowledge of what is in the API; `wanted` returns the desired slice of a service, or None."""
        self._client = client
        self._host = host
        self._build_wanted = wanted
        self._applied: dict[ObjectKey, Obj | None] = {}
        """The slices as this agent wrote them last; None if it removed the slice."""
        self.refusals: dict[ObjectKey, SliceRefusal] = {}
        """The last refusal of each slice that the API server does not accept now."""
        # A withdrawal must never be overtaken by an earlier write of a ready endpoint.
        self._locks: WeakValueDictionary[ObjectKey, asyncio.Lock] = WeakValueDictionary()

    def forget(self) -> None:
        """Forget what was written, so that each next `publish` writes: the controller may have deleted our slices."""
        self._applied.clear()

    async def list_services(self) -> set[ObjectKey]:
        """Return the services of which the API has slices of this host. Raises ApiError and Unreachable."""
        ours = f"{meta.LABEL_SLICE_MANAGED_BY}={meta.SLICE_MANAGED_BY},{meta.LABEL_HOST}={self._host}"
        listed = await self._client.list_metadata(ENDPOINT_SLICES, label_selector=ours)
        return {service for item in listed.items if (service := find_service(item, self._host)) is not None}

    async def find_outdated(self) -> set[ObjectKey]:
        """Return the services whose slice in the API is not as this agent wrote it last: missing, or left behind.

        A slice is missing if others deleted it, such as a controller that declared this host lost; the agent does not
        watch slices. One is left behind if this agent removed it and it exists. What was written is forgotten for
        both, so that the next `publish` writes anyway. Raises ApiError and Unreachable.
        """
        # _applied: the slices as this agent wrote them last, by service; None: it removed the slice.
        existing = await self.list_services()
        applied = {service for service, slice_ in self._applied.items() if slice_ is not None}
        removed = self._applied.keys() - applied
        missing, left_behind = applied - existing, removed & existing
        # Keep those that are written and exist. All removed ones are forgotten: services come and go all the time.
        self._applied = {service: self._applied[service] for service in applied - missing}
        return missing | left_behind

    async def publish(self, service: ObjectKey) -> None:
        """Write or delete the slice of `service` as desired, unless this agent wrote just that last time.

        Raises ApiError and Unreachable; Forbidden while the controller has not granted the service or the address to
        this host.
        """
        # One write of a service at a time, so that an earlier one never overtakes a withdrawal.
        async with self._locks.setdefault(service, asyncio.Lock()):
            wanted = self._build_wanted(service)
            # _applied: the slices as this agent wrote them last, by service; None: it removed the slice.
            if service in self._applied and self._applied[service] == wanted:
                return

            self._applied.pop(service, None)  # unknown until the write below has succeeded
            if wanted is None:
                await self._remove(service)
            else:
                await self._apply_or_withdraw(service, wanted)
                log.info("endpoint_published", service=str(service), conditions=wanted["endpoints"][0]["conditions"])

            self.refusals.pop(service, None)  # the API server has accepted it
            self._applied[service] = wanted

    async def _apply_or_withdraw(self, service: ObjectKey, wanted: Obj) -> None:
        """Apply the slice; raises Forbidden, and notes the refusal, if the controller has not granted it.

        If the refused slice was to make the endpoint not ready, the slice is deleted instead, which needs no grant.
        """
        try:
            await self._apply(service, wanted)
        except Forbidden as error:
            earlier = self.refusals.get(service, SliceRefusal("", 0))
            if earlier.message != error.message:
                log.warning("endpoint_refused", service=str(service), error=error.message)
            self.refusals[service] = SliceRefusal(error.message, earlier.tries + 1)
            # The earlier slice, which stays, may be ready: it would still bring requests here.
            if not wanted["endpoints"][0]["conditions"]["ready"]:
                await self._remove(service)
            raise

    async def _apply(self, service: ObjectKey, wanted: Obj) -> None:
        """Apply the slice, in place of one with another address type."""
        try:
            await self._client.apply(ENDPOINT_SLICES, wanted, field_manager=FIELD_MANAGER)
        except Invalid as error:
            # The address type of a slice cannot change: a host that moves between IPv4 and IPv6 needs a new one.
            if all(field != "addressType" for field, _ in error.causes):  # refused for another reason
                raise
            await self._remove(service)
            await self._client.apply(ENDPOINT_SLICES, wanted, field_manager=FIELD_MANAGER)

    async def _remove(self, service: ObjectKey) -> None:
        """Delete the slice of a service, if there is one."""
        namespace, name = service
        try:
            await self._client.delete(ENDPOINT_SLICES, slice_name(name, self._host), namespace)
        except NotFound:
            return
        log.info("endpoint_removed", service=str(service))
