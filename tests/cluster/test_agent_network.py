"""A host that changes its network: its services are reached at the new address, and never again sent to the old."""

import asyncio

import aiohttp

from crds.meta import slice_name
from kube.client import Client
from kube.resources import ENDPOINT_SLICES, METAL_HOSTS, METAL_PROCESSES
from metal_agent.endpoints import Endpoints, Member, desired
from tests.cluster.bound import Serving, answers, http, serving
from tests.controlplane.network import PREFIX_LENGTH, ip
from tests.eventually import eventually

__all__ = ["http", "serving"]

NEW = "10.77.200.1"


async def test_an_address_that_changed_is_followed_and_the_old_one_is_never_ready_again(
    serving: Serving, http: aiohttp.ClientSession
) -> None:
    await serving.bind()
    old_url = await serving.ready()
    old = serving.host.address
    pid = await serving.pid()
    seen: list[tuple[str, bool]] = []
    listed = await serving.client.list(ENDPOINT_SLICES, serving.namespace)

    async def watch() -> None:
        version = listed.resource_version
        async for event in serving.client.watch(ENDPOINT_SLICES, serving.namespace, resource_version=version):
            for endpoint in event.object.get("endpoints") or []:
                seen.extend((address, endpoint["conditions"]["ready"]) for address in endpoint["addresses"])

    watching = asyncio.create_task(watch())
    # The order of a machine that leaves one network for another.
    await ip(
        f"address del {old}/{PREFIX_LENGTH} dev eth0",
        f"address add {NEW}/{PREFIX_LENGTH} dev eth0",
        netns=serving.host.host.netns,
    )
    await eventually(lambda: (NEW, True) in seen, timeout=20)
    watching.cancel()
    assert (old, True) not in seen
    assert old not in [address for address, _ in seen[seen.index((NEW, True)) :]]
    url = await serving.url()
    assert url == old_url.replace(old, NEW)
    assert await answers(http, url)
    assert await serving.pid() == pid, "the engine has nothing to do with it"

    async def told() -> bool:
        status = (await serving.client.get(METAL_HOSTS, serving.host.name))["status"]
        return bool(status["address"] == NEW)

    await eventually(told)


async def test_a_host_that_changes_to_the_other_kind_of_address_gets_a_new_slice(
    client: Client, namespace: str
) -> None:
    address = "10.77.200.2"
    spec = {"serviceName": "chat", "modelName": "tiny", "runtime": "llama.cpp", "memoryBytes": 1, "tokenSecret": "t"}
    spec |= {"artifact": {"source": "file:///tiny.gguf"}}
    # A real one: what has an owner that does not exist is collected as garbage.
    owner = await client.create(METAL_PROCESSES, {"metadata": {"namespace": namespace, "name": "chat-1"}, "spec": spec})
    member = Member(uid=owner["metadata"]["uid"], name="chat-1", ready=True)
    endpoints = Endpoints(client, "studio-9", lambda service: desired(service, "studio-9", address, 18000, [member]))
    await endpoints.publish((namespace, "chat"))
    address = "fd00::2"
    await endpoints.publish((namespace, "chat"))
    found = await client.get(ENDPOINT_SLICES, slice_name("chat", "studio-9"), namespace)
    assert (found["addressType"], found["endpoints"][0]["addresses"]) == ("IPv6", ["fd00::2"])
