"""The EndpointSlice of a service on a host: its content as a pure function, and its repair in the API."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.meta import LABEL_HOST, slice_name, split_slice_name
from kube.client import Client, Obj, ObjectList
from kube.errors import Forbidden, NotFound
from kube.resources import ENDPOINT_SLICES, ObjectKey, Resource
from metal_agent.cluster.endpoint_slices import Endpoints, SliceMember, SliceRefusal, build_slice, find_service

CHAT = ObjectKey("team-a", "chat")


def conditions(*members: SliceMember) -> dict[str, bool]:
    wanted = build_slice(CHAT, "studio-1", "10.77.1.1", 18000, members)
    assert wanted
    flags: dict[str, bool] = wanted["endpoints"][0]["conditions"]
    return flags


def test_slice_belongs_to_its_service_and_is_not_managed_by_kubernetes() -> None:
    wanted = build_slice(CHAT, "studio-1", "10.77.1.1", 18000, [SliceMember("u1", "chat-1", ready=True)])
    assert wanted
    assert wanted["metadata"]["name"] == "chat.studio-1"
    assert wanted["metadata"]["labels"]["kubernetes.io/service-name"] == "chat"
    assert wanted["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] == "metal-agent.pomona.dev"
    assert [owner["uid"] for owner in wanted["metadata"]["ownerReferences"]] == ["u1"]
    assert wanted["addressType"] == "IPv4"
    assert wanted["ports"] == [{"name": "http", "port": 18000, "protocol": "TCP"}]
    assert wanted["endpoints"][0]["addresses"] == ["10.77.1.1"]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([SliceMember("u1", "a", ready=True)], (True, True, False)),
        ([SliceMember("u1", "a", ready=False)], (False, False, False)),
        ([SliceMember("u1", "a", ready=False, stopping=True)], (False, True, True)),
        ([SliceMember("u1", "a", ready=False, stopping=True), SliceMember("u2", "b", ready=True)], (True, True, False)),
        (
            [SliceMember("u1", "a", ready=False, stopping=True), SliceMember("u2", "b", ready=False)],
            (False, True, True),
        ),
    ],
)
def test_conditions_match_the_processes(members: list[SliceMember], expected: tuple[bool, bool, bool]) -> None:
    flags = conditions(*members)
    assert (flags["ready"], flags["serving"], flags["terminating"]) == expected


def test_service_without_process_or_port_has_no_slice() -> None:
    assert build_slice(CHAT, "studio-1", "10.77.1.1", 18000, []) is None
    assert build_slice(CHAT, "studio-1", "10.77.1.1", None, [SliceMember("u1", "a", ready=True)]) is None


def test_certificate_sets_the_app_protocol_of_the_port() -> None:
    wanted = build_slice(CHAT, "studio-1", "10.77.1.1", 18000, [SliceMember("u1", "a", ready=True)], tls=True)
    assert wanted
    assert wanted["ports"] == [{"name": "http", "port": 18000, "protocol": "TCP", "appProtocol": "https"}]


def test_ipv6_hosts_have_ipv6_slices() -> None:
    wanted = build_slice(CHAT, "studio-1", "fd00::7", 18000, [SliceMember("u1", "a", ready=True)])
    assert wanted
    assert wanted["addressType"] == "IPv6"


@given(
    st.from_regex(r"[a-z]([-a-z0-9]{0,10}[a-z0-9])?", fullmatch=True),
    st.from_regex(r"[a-z][a-z0-9.-]{0,20}[a-z]", fullmatch=True),
)
def test_slice_name_contains_service_and_host(service: str, host: str) -> None:
    endpoint_slice = {"metadata": {"namespace": "team-a", "name": slice_name(service, host)}}
    assert split_slice_name(slice_name(service, host)) == (service, host)
    assert find_service(endpoint_slice, host) == ("team-a", service)
    assert find_service(endpoint_slice, f"{host}-2") is None


class Slices(Client):
    """An API server that has only EndpointSlices."""

    def __init__(self) -> None:
        self.there: dict[str, Obj] = {}
        self.applied = 0
        self.listed = 0
        self.grants = True

    async def apply(
        self,
        resource: Resource,
        obj: Mapping[str, Any],
        *,
        field_manager: str,
        subresource: str = "",
        force: bool = True,
    ) -> Obj:
        assert (resource, field_manager, subresource, force) == (ENDPOINT_SLICES, "pomona-metal-agent", "", True)
        if not self.grants:
            raise Forbidden("apply", status=403, message="no process of service team-a/chat is bound")
        self.applied += 1
        self.there[obj["metadata"]["name"]] = dict(obj)
        return dict(obj)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: str = "Background",
    ) -> None:
        del resource, namespace, uid, resource_version, propagation
        if self.there.pop(name, None) is None:
            raise NotFound(name, status=404)

    async def list_metadata(
        self, resource: Resource, namespace: str | None = None, *, label_selector: str = "", field_selector: str = ""
    ) -> ObjectList:
        del resource, namespace, field_selector
        managed, by_host = label_selector.split(",")
        assert managed == "endpointslice.kubernetes.io/managed-by=metal-agent.pomona.dev"
        host = None if by_host == f"!{LABEL_HOST}" else by_host.removeprefix(f"{LABEL_HOST}=")
        slices = [
            endpoint_slice
            for endpoint_slice in self.there.values()
            if endpoint_slice["metadata"]["labels"].get(LABEL_HOST) == host
        ]
        self.listed += len(slices)
        return ObjectList([{"metadata": endpoint_slice["metadata"]} for endpoint_slice in slices], "1")


async def test_deleted_slice_is_found_and_created_again() -> None:
    def wanted(service: ObjectKey) -> Obj | None:
        members = [SliceMember("u1", "chat-1", ready=True)] if service == CHAT else []
        return build_slice(service, "studio-1", "10.77.1.1", 18000, members)

    api = Slices()
    endpoints = Endpoints(api, "studio-1", wanted)
    for service in (CHAT, ObjectKey("team-a", "gone")):
        await endpoints.publish(service)
    assert await endpoints.find_outdated() == set()
    await endpoints.publish(CHAT)
    assert api.applied == 1, "what is there is not written again"
    api.there.clear()
    assert await endpoints.find_outdated() == {CHAT}
    await endpoints.publish(CHAT)
    assert list(api.there) == ["chat.studio-1"]


def build_ready(service: ObjectKey, host: str = "studio-1") -> Obj:
    endpoint_slice = build_slice(service, host, "10.77.1.1", 18000, [SliceMember("u1", "chat-1", ready=True)])
    assert endpoint_slice
    return endpoint_slice


async def test_only_slices_of_the_own_host_are_listed() -> None:
    api = Slices()
    for number in range(50):
        other = build_ready(CHAT, f"other-{number}")
        api.there[other["metadata"]["name"]] = other
    endpoints = Endpoints(api, "studio-1", build_ready)
    await endpoints.publish(CHAT)
    assert await endpoints.list_services() == {CHAT}
    assert await endpoints.find_outdated() == set()
    assert api.listed == 2


async def test_removed_services_are_not_remembered() -> None:
    endpoints = Endpoints(Slices(), "studio-1", lambda _: None)
    for number in range(5):
        await endpoints.publish(ObjectKey("team-a", f"gone-{number}"))
    assert await endpoints.find_outdated() == set()
    assert endpoints._applied == {}


async def test_refused_endpoint_that_is_not_ready_is_removed() -> None:
    ready = True

    def wanted(_service: ObjectKey) -> Obj | None:
        return build_slice(CHAT, "studio-1", "10.77.1.1", 18000, [SliceMember("u1", "chat-1", ready=ready)])

    api = Slices()
    endpoints = Endpoints(api, "studio-1", wanted)
    await endpoints.publish(CHAT)
    api.grants, ready = False, False
    with pytest.raises(Forbidden):
        await endpoints.publish(CHAT)
    assert api.there == {}, "a withdrawal needs no grant"
    with pytest.raises(Forbidden):
        await endpoints.publish(CHAT)
    assert endpoints.refusals[CHAT].message == "no process of service team-a/chat is bound"
    assert endpoints.refusals[CHAT].tries == 2
    api.grants, ready = True, True
    await endpoints.publish(CHAT)
    assert list(api.there) == ["chat.studio-1"]
    assert endpoints.refusals == {}


async def test_ready_endpoint_stays_while_its_change_is_refused() -> None:
    port = 18000

    def wanted(_service: ObjectKey) -> Obj | None:
        return build_slice(CHAT, "studio-1", "10.77.1.1", port, [SliceMember("u1", "chat-1", ready=True)])

    api = Slices()
    endpoints = Endpoints(api, "studio-1", wanted)
    await endpoints.publish(CHAT)
    api.grants, port = False, 18001
    with pytest.raises(Forbidden):
        await endpoints.publish(CHAT)
    assert api.there["chat.studio-1"]["ports"][0]["port"] == 18000, "grants that lag withdraw nothing"


def test_grant_is_awaited_with_short_pauses() -> None:
    pauses = [SliceRefusal("", tries).retry_seconds for tries in range(1, 50)]
    assert pauses[0] < 0.1
    assert max(pauses) < 3
