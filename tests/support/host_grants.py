"""Grants of a host as the controller writes them, for tests that bind processes without a controller."""

from collections.abc import Iterable, Sequence

import msgspec

from controller.hosts.grants import AddressVerdict, build_grant_objects, decide_grants
from controller.reconcile.plan import FIELD_MANAGER
from crds.metalhost import MetalHost
from kube.client import Client, Obj
from kube.errors import Forbidden
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from tests.support.eventually import eventually


async def register_host(host: Client, name: str) -> bool:
    """Create the MetalHost as the host itself; return whether the API server knows already that it may."""
    try:
        await host.create(METAL_HOSTS, {"metadata": {"name": name}, "spec": {}})
    except Forbidden:
        return False
    return True


async def grant_host(client: Client, name: str, addresses: Sequence[str], planned: Iterable[Obj] = ()) -> None:
    """Grant a registered host its addresses, the processes that are bound to it, and those that will be.

    Args:
        client: the API, as cluster administrator.
        name: name of the MetalHost.
        addresses: all addresses that the host may publish.
        planned: MetalProcesses that are about to be created.
    """
    host = msgspec.convert(await eventually(lambda: client.get(METAL_HOSTS, name)), MetalHost)
    bound = await client.list(METAL_PROCESSES, field_selector=f"spec.hostName={name}")
    grants = decide_grants(host, AddressVerdict("Accepted", "Test", ""), [*bound.items, *planned])
    for resource, obj in build_grant_objects(host, grants._replace(addresses=tuple(addresses))):
        await client.apply(resource, obj, field_manager=FIELD_MANAGER)
