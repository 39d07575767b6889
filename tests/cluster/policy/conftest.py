"""Two registered hosts and a tenant, each as a client with its own token, on the real API server with all policies."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import pytest

from crds.meta import HOSTS_NAMESPACE
from kube import credentials
from kube.client import Client, Obj, connect
from kube.errors import Forbidden
from kube.resources import LEASES, METAL_HOSTS, METAL_PROCESSES, ROLE_BINDINGS, ROLES, SECRETS
from tests.cluster.policy.objects import ADDRESSES, build_lease, build_process, build_slice
from tests.controlplane.members import make_host_account
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually
from tests.support.host_grants import grant_host, register_host


@dataclass
class Hosts:
    """Hosts `studio-1` and `studio-2`, each with a process of its own: `chat-1` of `chat`, and `other-1` of `other`.

    Attributes:
        admin: the API, as cluster administrator.
        own: the API, as `studio-1`.
        other: the API, as `studio-2`.
        namespace: the namespace of the processes.
        processes: the processes by name, as they were created.
    """

    admin: Client
    own: Client
    other: Client
    namespace: str
    processes: dict[str, Obj]


@pytest.fixture
async def hosts(plane: ControlPlane, client: Client, namespace: str) -> AsyncIterator[Hosts]:
    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(host_client(plane, name)) for name in ADDRESSES}
        processes = {}
        for name, host in (("chat-1", "studio-1"), ("other-1", "studio-2")):
            processes[name] = await client.create(METAL_PROCESSES, build_process(namespace, name, host))
        for host, address in ADDRESSES.items():
            await eventually(partial(register_host, clients[host], host))
            await grant_host(client, host, [address])
        found = Hosts(client, clients["studio-1"], clients["studio-2"], namespace, processes)
        await eventually(lambda: _is_granted(found))
        yield found
        for host in ADDRESSES:
            await client.delete(METAL_HOSTS, host)


@contextlib.asynccontextmanager
async def host_client(plane: ControlPlane, name: str) -> AsyncIterator[Client]:
    """Connect as the host `name`, whose identity is created as an administrator does it, and deleted afterwards."""
    # The garbage collector may not have taken yet what a controller wrote for a host of this name in an earlier test.
    await _delete_rights(plane, name)
    await make_host_account(plane, name)
    try:
        async with connect(credentials.load(await plane.service_account_kubeconfig(HOSTS_NAMESPACE, name))) as client:
            yield client
    finally:
        await _delete_rights(plane, name)


async def _delete_rights(plane: ControlPlane, name: str) -> None:
    for kind in (LEASES, SECRETS, ROLES, ROLE_BINDINGS):
        for object_name in (name, f"grants:{name}"):
            await plane.request("DELETE", kind.path(HOSTS_NAMESPACE, object_name), accept={404})


async def _is_granted(hosts: Hosts) -> bool:
    """Return whether the authorizer has seen the grants: each host can publish its slice."""
    for client, process in ((hosts.own, "chat-1"), (hosts.other, "other-1")):
        try:
            await client.apply(*build_slice(hosts.processes[process]), field_manager="pomona-metal-agent")
            await client.apply(*build_lease(hosts.processes[process]), field_manager="pomona-metal-agent")
        except Forbidden:
            return False
    return True
