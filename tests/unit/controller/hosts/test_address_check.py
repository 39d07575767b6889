"""The search for another owner of a host's address: whom it finds, how often it asks, and what a failure changes."""

import ipaddress
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from controller.hosts import address_check
from controller.hosts.address_check import FREE, AddressCheck, AddressUse, collect_addresses, read_address
from kube.client import Client, Obj, ObjectList
from kube.errors import ApiError, NotFound, Unreachable
from kube.resources import ENDPOINT_SLICES, NODES, PODS, SERVICE_CIDRS, SERVICES, Resource

NODE = {
    "metadata": {"name": "cpu-1"},
    "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:1::/64"]},
    "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "cpu-1"}]},
}
SERVICE = {
    "metadata": {"namespace": "team", "name": "web"},
    "spec": {"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9", "fd00:2::9"], "externalIPs": ["192.0.2.9"]},
    "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.10"}, {"hostname": "lb.example"}]}},
}
HEADLESS = {"metadata": {"namespace": "team", "name": "db"}, "spec": {"clusterIP": "None"}}
CIDR = {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16"]}}
API = {"endpoints": [{"addresses": ["10.0.0.250"]}]}
POD = {"metadata": {"namespace": "team", "name": "web-0"}, "status": {"podIP": "10.50.0.3"}}


@pytest.mark.parametrize(
    ("text", "reason", "owner"),
    [
        ("10.0.0.1", "AddressOfNode", "node cpu-1"),
        ("10.244.1.77", "AddressOfPod", "pods of node cpu-1"),
        ("fd00:1::5", "AddressOfPod", "pods of node cpu-1"),
        ("10.96.0.9", "AddressOfService", "Service team/web"),
        ("fd00:2::9", "AddressOfService", "Service team/web"),
        ("192.0.2.9", "AddressOfService", "Service team/web"),
        ("192.0.2.10", "AddressOfService", "Service team/web"),
        ("10.96.200.1", "AddressOfService", "range of Services"),
        ("10.0.0.250", "AddressOfApiServer", "API server"),
    ],
)
def test_owner_of_an_address_is_found(text: str, reason: str, owner: str) -> None:
    addresses = collect_addresses([NODE], [HEADLESS, SERVICE], [CIDR], API)
    use = addresses.find(ipaddress.ip_address(text))
    assert use.reason == reason
    assert owner in use.owner


def test_address_outside_of_the_cluster_is_free() -> None:
    addresses = collect_addresses([NODE], [SERVICE], [], API)
    assert addresses.find(ipaddress.ip_address("192.168.1.20")) == FREE
    assert addresses.find(ipaddress.ip_address("fd00:9::1")) == FREE


@pytest.mark.parametrize(
    "text",
    [
        *("127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0", "::1", "fe80::1", "::ffff:10.0.0.1", "FD00::0:7"),
        *("64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:a00:1::1", "2001:0:a00:1::1"),
        *("10.0.0.7,status.phase=Running", "10.0.0.07", "", "10.0.0.7\n", "studio"),
    ],
)
def test_text_that_is_no_usable_address_is_refused(text: str) -> None:
    assert isinstance(read_address(text), AddressUse)


class Cluster(Client):
    """An API server that answers lists of four kinds, three of them from its cache; `calls` are the lists."""

    def __init__(self) -> None:
        self.calls: list[Resource] = []
        self.fails: ApiError | Unreachable | None = None

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        read: Callable[[msgspec.Raw], Obj] | None = None,
        part: Callable[[Obj], Obj] | None = None,
        most: int | None = None,
    ) -> ObjectList:
        del namespace, label_selector, field_selector, read, part, most
        assert resource == SERVICE_CIDRS, "all others cost less from the cache"
        if self.fails:
            raise self.fails
        return ObjectList([], "1")

    async def list_cached(self, resource: Resource, *, field_selector: str = "") -> ObjectList:
        self.calls.append(resource)
        if self.fails:
            raise self.fails
        if resource == PODS:
            address = field_selector.removeprefix("status.podIP=")
            return ObjectList([POD] if POD["status"]["podIP"] == address else [], "1")
        objects: dict[Resource, list[Any]] = {NODES: [NODE], SERVICES: [SERVICE]}
        return ObjectList(objects[resource], "1")

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource, name, namespace) == (ENDPOINT_SLICES, "kubernetes", "default")
        return API


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def api() -> Cluster:
    return Cluster()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def check(clock: Clock) -> AddressCheck:
    return AddressCheck(clock)


async def test_address_of_a_pod_is_found(api: Cluster, check: AddressCheck) -> None:
    use = await check.find_use(api, "studio-1", "10.50.0.3", granted=False)
    assert use
    assert use.owner == "is the address of pod team/web-0"


async def test_one_search_serves_many_reconciles(api: Cluster, check: AddressCheck, clock: Clock) -> None:
    for _ in range(100):
        assert await check.find_use(api, "studio-1", "192.168.1.20", granted=False) == FREE
    assert (api.calls.count(PODS), api.calls.count(NODES)) == (1, 1)
    await check.find_use(api, "studio-2", "192.168.1.21", granted=False)
    assert (api.calls.count(PODS), api.calls.count(NODES)) == (2, 1), "the lists of nodes and Services are shared"
    clock.now += address_check.AGAIN_SECONDS
    await check.find_use(api, "studio-1", "192.168.1.20", granted=True)
    assert (api.calls.count(PODS), api.calls.count(NODES)) == (3, 2)


async def test_new_leader_does_not_search_for_all_addresses_at_once(api: Cluster, check: AddressCheck) -> None:
    for number in range(200):
        assert await check.find_use(api, f"studio-{number}", f"192.168.1.{number}", granted=True) == FREE
    assert api.calls == []


async def test_granted_addresses_of_many_hosts_are_searched_for_in_lists_of_ten_minutes(
    api: Cluster, check: AddressCheck, clock: Clock
) -> None:
    hosts = {f"studio-{number}": f"192.168.1.{number}" for number in range(200)}
    for _ in range(6 * 60 + 1):
        clock.now += 10
        for name, address in hosts.items():
            assert await check.find_use(api, name, address, granted=True) == FREE
    assert api.calls.count(PODS) == 200, "each is searched for once in an hour"
    assert api.calls.count(NODES) <= 6
    clock.now += address_check.LISTS_SECONDS + 1
    before = api.calls.count(NODES)
    await check.find_use(api, "new", "192.168.2.1", granted=False)
    assert api.calls.count(NODES) == before + 1, "a new address is searched for in new lists"


async def test_host_that_states_new_addresses_all_the_time_is_searched_for_rarely(
    api: Cluster, check: AddressCheck, clock: Clock
) -> None:
    assert await check.find_use(api, "studio-1", "192.168.1.20", granted=False) == FREE
    assert await check.find_use(api, "studio-1", "10.50.0.3", granted=False) is None, "not known yet"
    assert api.calls.count(PODS) == 1
    clock.now += address_check.PAUSE_SECONDS
    assert await check.find_use(api, "studio-1", "10.50.0.3", granted=False) != FREE


async def test_refused_address_is_searched_for_again(api: Cluster, check: AddressCheck, clock: Clock) -> None:
    assert await check.find_use(api, "studio-1", "10.50.0.3", granted=False) != FREE
    clock.now += address_check.REFUSED_SECONDS
    await check.find_use(api, "studio-1", "10.50.0.3", granted=False)
    assert api.calls.count(PODS) == 2


async def test_failed_search_changes_nothing(api: Cluster, check: AddressCheck, clock: Clock) -> None:
    api.fails = Unreachable("no answer")
    assert await check.find_use(api, "studio-1", "192.168.1.20", granted=False) is None
    api.fails = None
    clock.now += address_check.PAUSE_SECONDS
    assert await check.find_use(api, "studio-1", "192.168.1.20", granted=False) == FREE
    api.fails = NotFound("list", status=404)
    clock.now += address_check.AGAIN_SECONDS
    assert await check.find_use(api, "studio-1", "192.168.1.20", granted=True) == FREE, "as it was found last"


async def test_host_that_is_gone_is_forgotten(api: Cluster, check: AddressCheck) -> None:
    await check.find_use(api, "studio-1", "192.168.1.20", granted=False)
    check.forget("studio-1")
    await check.find_use(api, "studio-1", "192.168.1.20", granted=False)
    assert api.calls.count(PODS) == 2


def test_address_with_a_zone_is_of_no_use() -> None:
    use = read_address("2001:db8::10%x")
    assert isinstance(use, AddressUse)
    assert use.reason == "AddressNotUsable"
