"""A host that changes its network: its services are reached at the new address, and never again at the old one."""

import asyncio

import aiohttp

from crds.meta import slice_name
from kube.client import Client
from kube.resources import ENDPOINT_SLICES, METAL_HOSTS, METAL_PROCESSES, ObjectKey
from metal_agent.cluster.endpoint_slices import Endpoints, SliceMember, build_slice
from tests.cluster.metal_agent.bound_process import BoundProcess, answers, bound_process, http
from tests.controlplane.network import PREFIX_LENGTH, ip
from tests.support.eventually import eventually

__all__ = ["bound_process", "http"]

NEW = "10.77.200.1"


async def test_an_address_that_changed_is_followed_and_the_old_one_is_never_ready_again(
    bound_process: BoundProcess, http: aiohttp.ClientSession
) -> None:
    bound_process.addresses.append(NEW)
    await bound_process.bind()
    old_url = await bound_process.ready()
    old = bound_process.host.address
    pid = await bound_process.pid()
    seen: list[tuple[str, bool]] = []
    listed = await bound_process.client.list(ENDPOINT_SLICES, bound_process.namespace)

    async def watch() -> None:
        version = listed.resource_version
        async for event in bound_process.client.watch(
            ENDPOINT_SLICES, bound_process.namespace, resource_version=version
        ):
            for endpoint in event.object.get("endpoints") or []:
                seen.extend((address, endpoint["conditions"]["ready"]) for address in endpoint["addresses"])

    watching = asyncio.create_task(watch())
    # A machine that changes its network loses the old address before it gets the new one.
    await ip(
        f"address del {old}/{PREFIX_LENGTH} dev eth0",
        f"address add {NEW}/{PREFIX_LENGTH} dev eth0",
        netns=bound_process.host.host.netns,
    )
    await eventually(lambda: (NEW, True) in seen)
    watching.cancel()
    assert (old, True) not in seen
    assert old not in [address for address, _ in seen[seen.index((NEW, True)) :]]
    url = await bound_process.url()
    assert url == old_url.replace(old, NEW)
    assert await answers(http, url)
    assert await bound_process.pid() == pid, "the engine has nothing to do with it"

    async def told() -> bool:
        status = (await bound_process.client.get(METAL_HOSTS, bound_process.host.name))["status"]
        return bool(status["address"] == NEW)

    await eventually(told)


async def test_host_that_changes_between_ipv4_and_ipv6_gets_a_new_slice(client: Client, namespace: str) -> None:
    address = "10.77.200.2"
    spec = {"serviceName": "chat", "modelName": "tiny", "runtime": "llama.cpp", "memoryBytes": 1, "tokenSecret": "t"}
    spec |= {"artifact": {"source": "file:///tiny.gguf"}}
    # The owner is real: an object whose owner does not exist is collected as garbage.
    owner = await client.create(METAL_PROCESSES, {"metadata": {"namespace": namespace, "name": "chat-1"}, "spec": spec})
    member = SliceMember(uid=owner["metadata"]["uid"], name="chat-1", ready=True)
    endpoints = Endpoints(
        client, "studio-9", lambda service: build_slice(service, "studio-9", address, 18000, [member])
    )
    await endpoints.publish(ObjectKey(namespace, "chat"))
    address = "fd00::2"
    await endpoints.publish(ObjectKey(namespace, "chat"))
    endpoint_slice = await client.get(ENDPOINT_SLICES, slice_name("chat", "studio-9"), namespace)
    assert (endpoint_slice["addressType"], endpoint_slice["endpoints"][0]["addresses"]) == ("IPv6", ["fd00::2"])
