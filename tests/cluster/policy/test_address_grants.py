"""The controller grants a host its own address, and none that something else in the cluster has."""

import asyncio
import ipaddress
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from controller.hosts.grants import grants_name, read_granted_addresses
from controller.models import source_secret
from crds.meta import HOSTS_NAMESPACE
from kube.client import Client, Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES, NODES, PODS, ROLES, SECRETS, SERVICES
from tests.cluster.policy.objects import build_process
from tests.cluster.shared_controller import SharedController
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually

FREE = "10.77.151.1"
Register = Callable[[str, str], Awaitable[None]]


@pytest.fixture
async def controller(shared_controller: SharedController) -> Process:
    """A new controller: one that has run for a while uses the nodes and Services of a minute ago."""
    return await shared_controller.lend_new()


@pytest.fixture
async def register(client: Client) -> AsyncIterator[Register]:
    """Register a host at an address, as its agent does; its MetalHost is deleted afterwards."""
    names: set[str] = set()

    async def register(name: str, address: str) -> None:
        if name not in names:
            await client.create(METAL_HOSTS, {"metadata": {"name": name}, "spec": {}})
            names.add(name)
        status = {"metadata": {"name": name}, "status": {"address": address}}
        await client.apply(METAL_HOSTS, status, field_manager="pomona-metal-agent", subresource="status")

    yield register
    for name in names:
        await client.delete(METAL_HOSTS, name)


async def reaches(client: Client, host: str, reason: str) -> str:
    """Wait until AddressAccepted has this reason; return its message, which must agree with what is granted."""

    async def decided() -> str:
        metal_host = await client.get(METAL_HOSTS, host)
        accepted = next(
            condition for condition in metal_host["status"]["conditions"] if condition["type"] == "AddressAccepted"
        )
        assert accepted["reason"] == reason, accepted
        address = metal_host["status"]["address"]
        assert address in accepted["message"]
        granted = read_granted_addresses(await client.get(ROLES, grants_name(host), HOSTS_NAMESPACE))
        assert granted == ({address} if accepted["status"] == "True" else set())
        message: str = accepted["message"]
        return message

    return await eventually(decided)


async def test_addresses_of_the_cluster_are_refused(
    client: Client, controller: Process, namespace: str, register: Register
) -> None:
    del controller
    service = await client.create(
        SERVICES, {"metadata": {"namespace": namespace, "name": "web"}, "spec": {"ports": [{"port": 80}]}}
    )
    node = await make_node(client, "elsewhere", "10.77.152.2", "10.78.0.0/24")
    pod = await make_pod(client, namespace, node, "10.77.152.1")
    cluster_ip = ipaddress.ip_address(service["spec"]["clusterIP"])
    try:
        for host, address, reason, owner in (
            ("thief-1", str(cluster_ip), "AddressOfService", f"Service {namespace}/web"),
            ("thief-2", str(cluster_ip + 7), "AddressOfService", "range of Services"),
            ("thief-3", "10.77.152.1", "AddressOfPod", f"pod {namespace}/{pod}"),
            ("thief-4", "10.77.152.2", "AddressOfNode", f"node {node}"),
            ("thief-5", "10.78.0.9", "AddressOfPod", f"pods of node {node}"),
            ("thief-6", ADDRESS, "AddressOfApiServer", "API server"),
            ("thief-7", "169.254.169.254", "AddressNotUsable", "does not route to"),
            ("thief-8", "10.77.152.3,metadata.name=a", "AddressNotUsable", "not an IP address"),
            ("thief-9", "::ffff:10.77.152.1", "AddressNotUsable", "does not route to"),
            ("thief-10", "64:ff9b::a4d:9801", "AddressNotUsable", "does not route to"),
            ("thief-11", "2002:a4d:9801::1", "AddressNotUsable", "does not route to"),
            ("thief-12", "thief.example", "AddressNotUsable", "not an IP address"),
        ):
            await register(host, address)
            assert owner in await reaches(client, host, reason)
    finally:
        await client.delete(NODES, node)


async def test_address_of_another_host_is_refused_until_that_host_is_gone(
    client: Client, controller: Process, register: Register
) -> None:
    del controller
    await register("studio-1", FREE)
    await reaches(client, "studio-1", "AddressFree")
    await register("thief-1", FREE)
    assert "MetalHost studio-1" in await reaches(client, "thief-1", "AddressOfHost")
    await reaches(client, "studio-1", "AddressFree")
    # The owner moves away: the address is free for the next report of the other.
    await register("studio-1", "10.77.151.2")
    await reaches(client, "thief-1", "AddressFree")


async def test_one_of_two_hosts_that_claim_an_address_at_once_has_it(
    client: Client, controller: Process, register: Register
) -> None:
    del controller
    names = ("twin-1", "twin-2")
    await asyncio.gather(*(register(name, FREE) for name in names))

    async def decided() -> bool:
        reasons = []
        for name in names:
            conditions = (await client.get(METAL_HOSTS, name))["status"]["conditions"]
            reasons.append(
                next(condition["reason"] for condition in conditions if condition["type"] == "AddressAccepted")
            )
            role = await client.get(ROLES, grants_name(name), HOSTS_NAMESPACE)
            assert read_granted_addresses(role) == ({FREE} if reasons[-1] == "AddressFree" else set())
        return sorted(reasons) == ["AddressFree", "AddressOfHost"]

    await eventually(decided)


async def test_grants_follow_what_is_bound(
    client: Client, controller: Process, namespace: str, register: Register
) -> None:
    del controller
    await register("studio-1", FREE)
    await client.create(METAL_PROCESSES, build_process(namespace, "chat-1", "studio-1"))
    await client.create(METAL_PROCESSES, build_process(namespace, "mail-1", None))

    async def granted() -> dict[str, Any]:
        role = await client.get(ROLES, grants_name("studio-1"), HOSTS_NAMESPACE)
        return {rule["resources"][0].partition("/")[2]: rule["resourceNames"] for rule in role["rules"] or []}

    async def grants(**wanted: list[str]) -> None:
        async def reached() -> bool:
            current = await granted()
            assert current == wanted
            return True

        await eventually(reached)

    chat, mail = f"{namespace}.chat", f"{namespace}.mail"
    await grants(address=[FREE], services=[chat], processes=[f"{chat}-1"])
    binding = [{"op": "add", "path": "/spec/hostName", "value": "studio-1"}]
    await client.patch_json(METAL_PROCESSES, "mail-1", namespace, binding)
    await grants(address=[FREE], services=[chat, mail], processes=[f"{chat}-1", f"{mail}-1"])
    await client.delete(METAL_PROCESSES, "chat-1", namespace)
    await grants(address=[FREE], services=[mail], processes=[f"{mail}-1"])
    await client.delete(METAL_PROCESSES, "mail-1", namespace)
    await grants(address=[FREE])
    await client.patch_json(ROLES, grants_name("studio-1"), HOSTS_NAMESPACE, [{"op": "remove", "path": "/rules"}])
    await grants(address=[FREE])


async def test_grants_and_tokens_of_a_former_host_are_replaced_before_they_are_collected(
    plane: ControlPlane, client: Client, controller: Process, namespace: str, register: Register
) -> None:
    """The garbage collector may be minutes late: as long as it has not seen the end of a host."""
    del controller
    source = {"metadata": {"namespace": namespace, "name": "hub"}, "type": source_secret.TYPE}
    await client.create(SECRETS, source | {"stringData": {"token": "of-the-former"}})
    process = build_process(namespace, "chat-1", "studio-1")
    await client.create(METAL_PROCESSES, process | {"spec": process["spec"] | {"sourceSecret": "hub"}})
    await register("studio-1", FREE)
    await reaches(client, "studio-1", "AddressFree")

    async def tokens() -> int:
        return len((await client.get(SECRETS, "studio-1", HOSTS_NAMESPACE)).get("data") or {})

    await eventually(tokens)
    os.kill(plane.controller_manager.pid, signal.SIGSTOP)
    try:
        await client.delete(METAL_HOSTS, "studio-1")
        await client.delete(METAL_PROCESSES, "chat-1", namespace)
        await client.create(METAL_HOSTS, {"metadata": {"name": "studio-1"}, "spec": {}})
        await register("studio-1", "10.77.151.2")
        await reaches(client, "studio-1", "AddressFree")
        host = await client.get(METAL_HOSTS, "studio-1")
        for kind, name in ((ROLES, grants_name("studio-1")), (SECRETS, "studio-1")):
            owners = (await client.get(kind, name, HOSTS_NAMESPACE))["metadata"]["ownerReferences"]
            assert [owner["uid"] for owner in owners] == [host["metadata"]["uid"]]
        assert await tokens() == 0
    finally:
        os.kill(plane.controller_manager.pid, signal.SIGCONT)


async def make_pod(client: Client, namespace: str, node: str, address: str) -> str:
    """Make a pod that no kubelet runs, with an address; without its Node it would be collected within a minute."""
    spec = {"containers": [{"name": "web", "image": "web"}], "nodeName": node}
    await client.create(PODS, {"metadata": {"namespace": namespace, "name": "web"}, "spec": spec})
    status = {"podIP": address, "podIPs": [{"ip": address}], "phase": "Running"}
    await set_status(client, "web", namespace, status)
    return "web"


async def set_status(client: Client, name: str, namespace: str, status: Obj) -> None:
    operations = [{"op": "add", "path": f"/status/{key}", "value": value} for key, value in status.items()]
    await client.patch_json(PODS, name, namespace, operations, subresource="status")


async def make_node(client: Client, name: str, address: str, pods: str) -> str:
    """Make a Node with an address and a range of pods."""
    await client.create(NODES, {"metadata": {"name": name}, "spec": {"podCIDR": pods, "podCIDRs": [pods]}})
    addresses = [{"type": "InternalIP", "address": address}]
    operations = [{"op": "add", "path": "/status/addresses", "value": addresses}]
    await client.patch_json(NODES, name, None, operations, subresource="status")
    return name
