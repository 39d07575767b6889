"""The slice of a service on a host, as a pure function of what is there, and what keeps it so."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.meta import slice_name
from kube.client import Client, Obj, ObjectList
from kube.errors import NotFound
from kube.resources import ENDPOINT_SLICES, Resource
from metal_agent.endpoints import Endpoints, Member, Service, desired, service_of

CHAT = ("team-a", "chat")


def conditions(*members: Member) -> dict[str, bool]:
    wanted = desired(CHAT, "studio-1", "10.77.1.1", 18000, members)
    assert wanted
    found: dict[str, bool] = wanted["endpoints"][0]["conditions"]
    return found


def test_it_is_found_by_its_service_and_left_alone_by_kubernetes() -> None:
    wanted = desired(CHAT, "studio-1", "10.77.1.1", 18000, [Member("u1", "chat-1", ready=True)])
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
        ([Member("u1", "a", ready=True)], (True, True, False)),
        ([Member("u1", "a", ready=False)], (False, False, False)),
        ([Member("u1", "a", ready=False, stopping=True)], (False, True, True)),
        ([Member("u1", "a", ready=False, stopping=True), Member("u2", "b", ready=True)], (True, True, False)),
        ([Member("u1", "a", ready=False, stopping=True), Member("u2", "b", ready=False)], (False, True, True)),
    ],
)
def test_conditions_say_what_is_true(members: list[Member], expected: tuple[bool, bool, bool]) -> None:
    found = conditions(*members)
    assert (found["ready"], found["serving"], found["terminating"]) == expected


def test_nothing_here_means_no_slice() -> None:
    assert desired(CHAT, "studio-1", "10.77.1.1", 18000, []) is None
    assert desired(CHAT, "studio-1", "10.77.1.1", None, [Member("u1", "a", ready=True)]) is None


def test_a_certificate_is_told_on_the_port() -> None:
    wanted = desired(CHAT, "studio-1", "10.77.1.1", 18000, [Member("u1", "a", ready=True)], tls=True)
    assert wanted
    assert wanted["ports"] == [{"name": "http", "port": 18000, "protocol": "TCP", "appProtocol": "https"}]


def test_ipv6_hosts_have_ipv6_slices() -> None:
    wanted = desired(CHAT, "studio-1", "fd00::7", 18000, [Member("u1", "a", ready=True)])
    assert wanted
    assert wanted["addressType"] == "IPv6"


@given(
    st.from_regex(r"[a-z]([-a-z0-9]{0,10}[a-z0-9])?", fullmatch=True),
    st.from_regex(r"[a-z][a-z0-9.-]{0,20}[a-z]", fullmatch=True),
)
def test_a_slice_name_tells_service_and_host(service: str, host: str) -> None:
    found = {"metadata": {"namespace": "team-a", "name": slice_name(service, host)}}
    assert service_of(found, host) == ("team-a", service)
    assert service_of(found, f"{host}-2") is None


class Slices(Client):
    """Has EndpointSlices."""

    def __init__(self) -> None:
        self.there: dict[str, Obj] = {}
        self.applied = 0

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

    async def list(
        self, resource: Resource, namespace: str | None = None, *, label_selector: str = "", field_selector: str = ""
    ) -> ObjectList:
        del resource, namespace, field_selector
        assert label_selector == "endpointslice.kubernetes.io/managed-by=metal-agent.pomona.dev"
        return ObjectList(list(self.there.values()), "1")


async def test_a_slice_that_somebody_deleted_is_missed_and_made_again() -> None:
    def wanted(service: Service) -> Obj | None:
        members = [Member("u1", "chat-1", ready=True)] if service == CHAT else []
        return desired(service, "studio-1", "10.77.1.1", 18000, members)

    api = Slices()
    endpoints = Endpoints(api, "studio-1", wanted)
    for service in (CHAT, ("team-a", "gone")):
        await endpoints.publish(service)
    assert await endpoints.missed() == set()
    await endpoints.publish(CHAT)
    assert api.applied == 1, "what is there is not written again"
    api.there.clear()
    assert await endpoints.missed() == {CHAT}
    await endpoints.publish(CHAT)
    assert list(api.there) == ["chat.studio-1"]
