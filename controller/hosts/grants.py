"""Grants of a host: what its identity may publish, as a Role that the policies of hosts ask the authorizer about.

A host states its address itself, and its EndpointSlices lead the requests of services there. So a host is granted the
services and processes that are bound to it, and its address only if nothing else in the cluster has that address.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from controller.hosts.address_check import AddressUse
from controller.reconcile.conditions import condition
from controller.reconcile.plan import child
from crds.meta import ADDRESS_ACCEPTED, GROUP, HOSTS_NAMESPACE
from crds.metalhost import MetalHost
from kube.client import Obj
from kube.resources import METAL_HOSTS, ROLE_BINDINGS, ROLES, Resource

_ADDRESS: Final = "metalhosts/address"
_VERB: Final = "use"
Verdict = Literal["Accepted", "Refused", "Unknown"]


class AddressVerdict(NamedTuple):
    """The decision about the address that a host states."""

    verdict: Verdict
    reason: str
    message: str


class HostGrants(NamedTuple):
    """All that one host may use; names of services and processes are NAMESPACE.NAME, as a namespace has no dot."""

    addresses: tuple[str, ...]
    services: tuple[str, ...]
    processes: tuple[str, ...]


def grants_name(host: str) -> str:
    """Return the name of a host's Role and RoleBinding: no name of a host has a colon."""
    return f"grants:{host}"


def read_granted_addresses(role: Obj | None) -> frozenset[str]:
    """Return the addresses that a Role grants."""
    rules = (role or {}).get("rules") or []
    return frozenset(
        name for rule in rules if _ADDRESS in rule["resources"] for name in rule.get("resourceNames") or []
    )


def judge_address(
    host: MetalHost, claimants: Iterable[MetalHost], roles: Mapping[str, Obj | None], use: AddressUse | None
) -> AddressVerdict:
    """Decide whether a host may publish the address that it states.

    Of several hosts with one address, the one that has it already keeps it, then the oldest has it.

    Args:
        host: the host.
        claimants: all hosts that state the same address, with or without this one.
        roles: the Role of each claimant by the host's name.
        use: what else in the cluster has the address; None if that is not known now.
    """
    address = host.status.address
    if not address:
        return AddressVerdict("Unknown", "NotReported", "the agent of this host has not reported an address yet")

    # 1. Something else in the cluster has the address, such as a node or a pod.
    if use is not None and use.owner:
        message = (
            f"status.address {address} {use.owner}: no EndpointSlice of this host is accepted; start its agent with "
            "--address and an address of its own that the cluster reaches"
        )
        return AddressVerdict("Refused", use.reason, message)

    # 2. Another host has it, or states it, too, and is older.
    def rank_claimant(claimant: MetalHost) -> tuple[bool, str, str]:
        """Return the key by which claimants are sorted: those that have the address already, then the oldest."""
        name = claimant.metadata.name
        is_not_granted = address not in read_granted_addresses(roles.get(name))
        return is_not_granted, claimant.metadata.creation_timestamp, name

    owner = min((host, *claimants), key=rank_claimant).metadata.name
    if owner != host.metadata.name:
        message = (
            f"status.address {address} is the address of MetalHost {owner}: no EndpointSlice of this host is accepted; "
            f"start one of the two agents with another --address, or delete MetalHost {owner} if that host is gone"
        )
        return AddressVerdict("Refused", "AddressOfHost", message)

    # 3. It is not known whether anything has it: a host that has it already keeps it, and any other waits.
    if use is None and address not in read_granted_addresses(roles.get(host.metadata.name)):
        message = f"waiting until the cluster has been searched for another owner of status.address {address}"
        return AddressVerdict("Unknown", "NotChecked", message)
    return AddressVerdict("Accepted", "AddressFree", f"EndpointSlices of this host may name {address}")


def decide_grants(host: MetalHost, verdict: AddressVerdict, bound: Iterable[Obj]) -> HostGrants:
    """Return what a host may use; `bound` are the MetalProcesses that are bound to it, deleted or not."""
    services, processes = set[str](), list[str]()
    for process in bound:
        namespace = process["metadata"]["namespace"]
        services.add(f"{namespace}.{process['spec']['serviceName']}")
        processes.append(f"{namespace}.{process['metadata']['name']}")
    return HostGrants(
        addresses=(host.status.address,) if verdict.verdict == "Accepted" else (),
        services=tuple(sorted(services)),
        processes=tuple(sorted(processes)),
    )


def build_grant_objects(host: MetalHost, grants: HostGrants) -> tuple[tuple[Resource, Obj], ...]:
    """Return the Role and the RoleBinding of a host, which are deleted with its MetalHost."""
    host_name, name = host.metadata.name, grants_name(host.metadata.name)
    # A MetalHost has no namespace; `child` makes objects in that of their owner.
    owner = msgspec.structs.replace(host.metadata, namespace=HOSTS_NAMESPACE)
    # No such resources exist: policies ask the authorizer whether the host may "use" one of these names.
    named = {
        _ADDRESS: grants.addresses,
        "metalhosts/services": grants.services,
        "metalhosts/processes": grants.processes,
    }
    # A rule without resourceNames would grant all names.
    rules = [
        {"apiGroups": [GROUP], "resources": [resource], "resourceNames": [*names], "verbs": [_VERB]}
        for resource, names in named.items()
        if names
    ]

    # The RoleBinding gives the Role to the ServiceAccount of the host.
    role = {"apiGroup": ROLES.group, "kind": ROLES.kind, "name": name}
    subject = {"kind": "ServiceAccount", "name": host_name, "namespace": HOSTS_NAMESPACE}
    return (
        child(ROLES, name, METAL_HOSTS, owner, {}, rules=rules),
        child(ROLE_BINDINGS, name, METAL_HOSTS, owner, {}, roleRef=role, subjects=[subject]),
    )


def build_address_condition(host: MetalHost, verdict: AddressVerdict) -> Obj:
    """Return the condition AddressAccepted."""
    return condition(
        ADDRESS_ACCEPTED,
        true={"Accepted": True, "Refused": False, "Unknown": None}[verdict.verdict],
        reason=verdict.reason,
        message=verdict.message,
        generation=host.metadata.generation,
    )
