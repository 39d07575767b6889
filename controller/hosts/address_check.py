"""The search for another owner of an address that a host states: a node, a pod, a Service or the API server.

An address is searched for when a host states it first, and again every hour. A search lists nodes and Services, once a
minute at most for all hosts, and asks for the pods with this address, a selection that the API server makes. For an
address that is granted already, lists up to ten minutes old will do. The lists come from the API server's cache: an
owner that it does not show yet is found by the next search.
"""

import asyncio
import ipaddress
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import structlog

from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.resources import ENDPOINT_SLICES, NODES, PODS, SERVICE_CIDRS, SERVICES

AGAIN_SECONDS: Final = 3600.0
"""Time for which an address counts as free after a search."""
REFUSED_SECONDS: Final = 60.0
"""Time after which an address that was found is searched for again: its owner may be gone."""
PAUSE_SECONDS: Final = 10.0
"""Shortest time between two searches for one host, which could state a new address at any time."""
LISTS_SECONDS: Final = 60.0
"""Time for which the lists of nodes and Services are used."""
GRANTED_LISTS_SECONDS: Final = 600.0
"""The same for an address that is granted already."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

log = structlog.get_logger()


class AddressUse(NamedTuple):
    """The use of an address in the cluster; without `owner` it is free."""

    reason: str = ""
    owner: str = ""
    """The owner in the words `is ...`."""


FREE: Final = AddressUse()


class ClusterAddresses(NamedTuple):
    """Addresses of a cluster, apart from its pods'."""

    single: dict[IpAddress, AddressUse]
    ranges: tuple[tuple[IpNetwork, AddressUse], ...]

    def find(self, address: IpAddress) -> AddressUse:
        """Return the use of an address."""
        if address in self.single:
            return self.single[address]
        return next((use for network, use in self.ranges if address in network), FREE)


def read_address(text: str) -> IpAddress | AddressUse:
    """Return the address that a text states, or the reason why a cluster cannot route to it."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return AddressUse("AddressNotUsable", "is not an IP address")
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        return AddressUse("AddressNotUsable", "has a zone, which no cluster routes to")

    is_unroutable = address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified
    if isinstance(address, ipaddress.IPv6Address):
        # One that stands for an IPv4 address would be searched for in vain.
        is_unroutable |= bool(address.is_reserved or address.sixtofour or address.teredo)
    if is_unroutable:
        return AddressUse("AddressNotUsable", "is an address that a cluster does not route to")

    # One address must not have two forms: it is compared as text, too.
    if str(address) != text:
        return AddressUse("AddressNotUsable", f"is not in its shortest form, {address}")
    return address


def collect_addresses(
    nodes: Iterable[Obj], services: Iterable[Obj], service_cidrs: Iterable[Obj], api_server: Obj
) -> ClusterAddresses:
    """Return the addresses of nodes, Services and the API server, and the ranges of pods and Services."""
    single: dict[IpAddress, AddressUse] = {}
    ranges: list[tuple[IpNetwork, AddressUse]] = []

    def add(addresses: Iterable[Any], use: AddressUse) -> None:
        """Note in `single` the use of each of these addresses to which a cluster routes; other texts are left out."""
        for text in addresses:
            address = read_address(text or "")
            if not isinstance(address, AddressUse):
                single[address] = use

    def add_ranges(texts: Iterable[str], use: AddressUse) -> None:
        """Note in `ranges` the use of each of these networks; empty texts are left out."""
        ranges.extend((ipaddress.ip_network(text, strict=False), use) for text in texts if text)

    # Services: those inside of the cluster, and those by which it is reached from outside.
    for obj in services:
        metadata, spec = obj["metadata"], obj.get("spec", {})
        use = AddressUse("AddressOfService", f"is an address of Service {metadata['namespace']}/{metadata['name']}")
        balancers = obj.get("status", {}).get("loadBalancer", {}).get("ingress") or []
        add([spec.get("clusterIP"), *(spec.get("clusterIPs") or []), *(spec.get("externalIPs") or [])], use)
        add((balancer.get("ip") for balancer in balancers), use)

    # Nodes, and the ranges from which their pods get addresses.
    for obj in nodes:
        name, spec = obj["metadata"]["name"], obj.get("spec", {})
        addresses = obj.get("status", {}).get("addresses") or []
        add((address["address"] for address in addresses), AddressUse("AddressOfNode", f"is an address of node {name}"))
        pods = AddressUse("AddressOfPod", f"is in the range of the pods of node {name}")
        add_ranges({spec.get("podCIDR", ""), *(spec.get("podCIDRs") or [])}, pods)

    # The ranges of Services.
    for obj in service_cidrs:
        use = AddressUse("AddressOfService", "is in the range of Services")
        add_ranges(obj.get("spec", {}).get("cidrs") or [], use)

    # The API server, by the EndpointSlice of Service `kubernetes`.
    api = AddressUse("AddressOfApiServer", "is an address of the API server")
    add((address for endpoint in api_server.get("endpoints") or [] for address in endpoint["addresses"]), api)
    return ClusterAddresses(single, tuple(ranges))


class _Search(NamedTuple):
    address: str
    at: float
    use: AddressUse | None


class AddressCheck:
    """The searches of this replica; `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._searches: dict[str, _Search] = {}
        """By host: the last search for its address."""
        self._addresses: ClusterAddresses | None = None
        """Those of nodes, Services and API server, as they were listed at `_listed_at`; None: not yet."""
        self._listed_at = 0.0
        self._listing = asyncio.Lock()
        """Held while they are listed, so that searches for many hosts share one listing."""

    async def find_use(self, client: Client, host: str, address: str, *, granted: bool) -> AddressUse | None:
        """Return what uses the address that a host states (`FREE`: nothing), as it was found lately or is now.

        None: it is not known, because no search has succeeded, or because the host stated another address within the
        last `PAUSE_SECONDS`. If `granted`, the host may use the address already: then it counts as free until this
        leader searches for it, within the hour.
        """
        # 1. The answer of the last search, if it is recent enough.
        now = self._clock()
        last = self._searches.get(host)
        if last is None and granted:
            # As if it was searched for within the last hour, at a time that the host's name gives: so the addresses of
            # many hosts are not searched for all at once.
            last = self._searches[host] = _Search(address, at=now - hash(host) % AGAIN_SECONDS, use=FREE)
        # The last search says nothing about another address: then last_use is None.
        last_use = last.use if last is not None and last.address == address else None
        if last is not None:
            age_seconds = now - last.at
            # An address that is in use is searched for again sooner than a free one: its owner may be gone.
            valid_seconds = AGAIN_SECONDS if last_use == FREE else REFUSED_SECONDS
            is_valid = last_use is not None and age_seconds < valid_seconds
            is_too_early = age_seconds < PAUSE_SECONDS  # for another search, also if last_use is None
            if is_too_early or is_valid:
                return last_use

        # 2. Else a new search; if it fails, the last answer stays.
        use: AddressUse | None
        try:
            use = await self._search_address(client, address, GRANTED_LISTS_SECONDS if granted else LISTS_SECONDS)
        except (ApiError, Unreachable) as error:
            log.warning("address_not_searched", host=host, address=address, error=str(error))
            use = last_use
        self._searches[host] = _Search(address, now, use)
        return use

    def forget(self, host: str) -> None:
        """Forget a host that is gone."""
        self._searches.pop(host, None)

    async def _search_address(self, client: Client, text: str, lists_seconds: float) -> AddressUse:
        """Return the use of an address in the cluster: by the lists, and then by the pods. Raises as `Client`."""
        address = read_address(text)
        if isinstance(address, AddressUse):
            return address
        use = (await self._read_cluster_addresses(client, lists_seconds)).find(address)
        if use.owner:  # by the lists
            return use
        pods = await client.list_cached(PODS, field_selector=f"status.podIP={address}")
        if pods.items:
            metadata = pods.items[0]["metadata"]
            return AddressUse("AddressOfPod", f"is the address of pod {metadata['namespace']}/{metadata['name']}")
        return FREE

    async def _read_cluster_addresses(self, client: Client, lists_seconds: float) -> ClusterAddresses:
        """Return the addresses of the cluster, by lists that are not older than `lists_seconds`."""
        async with self._listing:
            if self._addresses is None or self._clock() - self._listed_at > lists_seconds:
                nodes = await client.list_cached(NODES)
                services = await client.list_cached(SERVICES)
                cidrs = (await client.list(SERVICE_CIDRS)).items
                api_server = await client.get(ENDPOINT_SLICES, "kubernetes", "default")
                # In a thread, because thousands of nodes and Services take a while.
                self._addresses = await asyncio.to_thread(
                    collect_addresses, nodes.items, services.items, cidrs, api_server
                )
                self._listed_at = self._clock()
            return self._addresses
