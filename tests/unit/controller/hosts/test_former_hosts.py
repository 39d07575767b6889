"""Grants of a former host of the same name say nothing about the host that is registered now."""

from typing import Any

import pytest

from controller.hosts import reconciler
from controller.hosts.address_check import FREE, AddressCheck, AddressUse
from controller.hosts.grants import HostGrants, build_grant_objects, read_granted_addresses
from controller.hosts.liveness import Liveness
from controller.hosts.reachability import AgentPlace, AskAgent, ReachabilityProber
from controller.hosts.reconciler import HostInputs
from controller.reconcile.plan import Plan, Snapshot
from controller.services.tokens import KnownTokens
from kube.client import Client, Obj
from kube.resources import METAL_HOSTS, ROLE_BINDINGS, ROLES, ObjectKey, Resource
from tests.support.api_objects import NOW, as_host, host, planned_condition, store

KEY = ObjectKey("", "studio-1")
ADDRESS = "10.77.0.21"
OWN, FORMER = "uid-studio-1", "uid-former"


def registered(name: str, created: str = "2026-11-24T02:00:00Z", **status: Any) -> Obj:
    made = host(name, address=ADDRESS, **status)
    return made | {"metadata": {**made["metadata"], "creationTimestamp": created}}


def role_of(owner_uid: str) -> Obj:
    """Return the Role by which host studio-1, or a former one of this name, was granted the address."""
    owner = host("studio-1", address=ADDRESS)
    owner["metadata"]["uid"] = owner_uid
    ((_, role), _) = build_grant_objects(as_host(owner), HostGrants((ADDRESS,), (), ()))
    return role | {"metadata": {**role["metadata"], "uid": "uid-role", "resourceVersion": "1"}}


def decide(liveness: Liveness, owner_uid: str, *others: Obj, use: AddressUse | None = None) -> Plan:
    """Decide about studio-1, while a Role of its name grants the address."""
    hosts = [registered("studio-1"), *others]
    stored = store((ROLES, role_of(owner_uid)), *((METAL_HOSTS, host) for host in hosts))
    return reconciler.decide_host(Snapshot(stored, NOW, HostInputs(liveness, None, None, use)), KEY)


def reason(plan: Plan) -> str:
    cause: str = planned_condition(plan, "AddressAccepted")["reason"]
    return cause


def test_grants_of_a_former_host_are_replaced_also_if_the_new_one_is_silent() -> None:
    written = dict(decide("Expired", FORMER).apply)
    assert written.keys() == {ROLES, ROLE_BINDINGS}
    assert read_granted_addresses(written[ROLES]) == frozenset()
    assert written[ROLES]["metadata"]["ownerReferences"][0]["uid"] == OWN
    assert decide("Expired", OWN).apply == (), "an expired host keeps what it was granted itself"


def test_address_of_a_former_host_is_searched_for_first() -> None:
    assert reason(decide("Alive", FORMER)) == "NotChecked"
    assert reason(decide("Alive", OWN)) == "AddressFree"


def test_address_of_a_former_host_goes_to_the_host_that_waited_for_it() -> None:
    """A thief whose MetalHost is deleted registers again before the garbage collector has deleted its grants."""
    waiting = registered("studio-2", created="2026-11-24T01:00:00Z")
    assert reason(decide("Alive", FORMER, waiting, use=FREE)) == "AddressOfHost"
    assert reason(decide("Alive", OWN, waiting, use=FREE)) == "AddressFree"


class NoSecrets(Client):
    """An API server without processes' tokens; the Secret of each host is there."""

    def __init__(self) -> None:
        pass

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        del resource, namespace
        return {"metadata": {"name": name}}


@pytest.mark.parametrize(
    ("owner_uid", "use", "asked"),
    [
        (OWN, FREE, AgentPlace(ADDRESS, 18999, "")),
        (OWN, None, AgentPlace(ADDRESS, 18999, "")),
        (OWN, AddressUse("AddressOfPod", "is the address of pod team/web-0"), None),
        (FORMER, FREE, None),
    ],
    ids=["granted", "granted, and not searched for now", "granted, and a pod's since", "granted to a former host"],
)
async def test_controller_connects_to_what_the_host_was_granted_and_still_has(
    monkeypatch: pytest.MonkeyPatch, owner_uid: str, use: AddressUse | None, asked: AgentPlace | None
) -> None:
    async def find_use(*_: object, **_given: object) -> AddressUse | None:
        return use

    leases = reconciler.LeaseReader()
    monkeypatch.setattr(AddressCheck, "find_use", find_use)
    monkeypatch.setattr(leases, "bindable", lambda _host: True)
    observe = reconciler.host_reconciler(leases, KnownTokens(), ReachabilityProber()).observe
    assert observe is not None
    stored = store((METAL_HOSTS, registered("studio-1", reachabilityPort=18999)), (ROLES, role_of(owner_uid)))
    inputs = await observe(NoSecrets(), Snapshot(stored, NOW), KEY)
    assert reconciler.decide_host(Snapshot(stored, NOW, inputs), KEY).effects == (AskAgent(asked),)
