"""Grants of a host: what is bound to it, and its address if nothing else has that address."""

from typing import Any

import msgspec

from controller.hosts.address_check import FREE, AddressUse
from controller.hosts.grants import (
    AddressVerdict,
    HostGrants,
    build_address_condition,
    build_grant_objects,
    decide_grants,
    judge_address,
    read_granted_addresses,
)
from crds.metalhost import MetalHost
from kube.client import Obj
from kube.resources import ROLE_BINDINGS, ROLES
from tests.support.api_objects import NAMESPACE, process

ADDRESS = "10.0.0.7"
ACCEPTED = AddressVerdict("Accepted", "AddressFree", "")


def host(name: str = "studio-1", address: str = ADDRESS, created: str = "2026-11-21T12:00:00Z") -> MetalHost:
    metadata = {"name": name, "uid": f"uid-{name}", "creationTimestamp": created}
    return msgspec.convert({"metadata": metadata, "status": {"address": address}}, MetalHost)


def role(*addresses: str, name: str = "studio-1") -> Obj:
    return build_grant_objects(host(name), HostGrants(addresses, ("team.chat",), ()))[0][1]


def judge(*claimants: MetalHost, use: AddressUse | None = FREE, **roles: Obj) -> AddressVerdict:
    named: dict[str, Any] = {name.replace("_", "-"): role for name, role in roles.items()}
    return judge_address(host(), claimants, named, use)


def test_free_address_is_accepted() -> None:
    assert judge().verdict == "Accepted"
    assert judge(host()).verdict == "Accepted"


def test_address_of_the_cluster_is_refused_with_its_owner_and_the_way_out() -> None:
    verdict = judge(use=AddressUse("AddressOfNode", "is an address of node cpu-1"), studio_1=role(ADDRESS))
    assert (verdict.verdict, verdict.reason) == ("Refused", "AddressOfNode")
    assert "status.address 10.0.0.7 is an address of node cpu-1" in verdict.message
    assert "--address" in verdict.message


def test_address_goes_to_the_host_that_has_it_then_to_the_oldest() -> None:
    older = host("studio-9", created="2026-11-20T12:00:00Z")
    refused = judge(older)
    assert (refused.verdict, refused.reason) == ("Refused", "AddressOfHost")
    assert "MetalHost studio-9" in refused.message
    assert judge(older, studio_1=role(ADDRESS)).verdict == "Accepted", "it serves there already"
    younger = host("studio-9", created="2026-11-22T12:00:00Z")
    assert judge(younger).verdict == "Accepted"
    assert judge(younger, studio_9=role(ADDRESS, name="studio-9")).verdict == "Refused"


def test_of_two_hosts_with_one_address_exactly_one_is_accepted() -> None:
    both = [host("studio-1"), host("studio-2")]
    verdicts = [judge_address(metal_host, both, {}, FREE).verdict for metal_host in both]
    assert sorted(verdicts) == ["Accepted", "Refused"]


def test_address_that_could_not_be_searched_for_stays_as_it_is() -> None:
    assert judge(use=None).reason == "NotChecked"
    assert judge(use=None, studio_1=role(ADDRESS)).verdict == "Accepted", "unknown withdraws nothing"
    assert judge(use=None, studio_1=role("10.0.0.8")).verdict == "Unknown"


def test_host_without_an_address_is_granted_none() -> None:
    verdict = judge_address(host(address=""), [], {}, None)
    assert verdict.reason == "NotReported"
    assert decide_grants(host(address=""), verdict, []).addresses == ()


def test_grants_name_what_is_bound_to_the_host() -> None:
    bound = [process("chat-a-0", host="studio-1"), process("chat-a-1", host="studio-1")]
    grants = decide_grants(host(), ACCEPTED, bound)
    service = bound[0]["spec"]["serviceName"]
    assert grants.services == (f"{NAMESPACE}.{service}",)
    assert grants.processes == (f"{NAMESPACE}.chat-a-0", f"{NAMESPACE}.chat-a-1")


def test_role_grants_exactly_the_names_to_the_account_of_the_host() -> None:
    (_, made), (kind, binding) = build_grant_objects(host(), HostGrants((ADDRESS,), ("team.chat",), ("team.chat-1",)))
    assert [(rule["resources"], rule["resourceNames"], rule["verbs"]) for rule in made["rules"]] == [
        (["metalhosts/address"], [ADDRESS], ["use"]),
        (["metalhosts/services"], ["team.chat"], ["use"]),
        (["metalhosts/processes"], ["team.chat-1"], ["use"]),
    ]
    assert read_granted_addresses(made) == {ADDRESS}
    assert kind == ROLE_BINDINGS
    assert binding["roleRef"] == {"apiGroup": ROLES.group, "kind": "Role", "name": made["metadata"]["name"]}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "studio-1", "namespace": "pomona-metal-hosts"}]
    assert {grant["metadata"]["namespace"] for grant in (made, binding)} == {"pomona-metal-hosts"}
    assert {grant["metadata"]["ownerReferences"][0]["kind"] for grant in (made, binding)} == {"MetalHost"}


def test_nothing_granted_is_no_rule() -> None:
    """A rule without resourceNames grants every name."""
    (_, made), _ = build_grant_objects(host(), HostGrants((), (), ()))
    assert made["rules"] == []
    assert read_granted_addresses(made) == read_granted_addresses(None) == frozenset()


def test_condition_has_the_verdict() -> None:
    assert build_address_condition(host(), ACCEPTED)["status"] == "True"
    assert build_address_condition(host(), judge(use=None))["status"] == "Unknown"
    assert build_address_condition(host(), judge(use=AddressUse("AddressOfPod", "is one")))["status"] == "False"
