"""MetalProcesses that a test binds to a real agent without a controller, and requests to them."""

from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from crds.meta import HOSTS_NAMESPACE, PROCESS_FINALIZER
from crds.metalprocess import MetalProcessStatus
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import ENDPOINT_SLICES, METAL_PROCESSES, SECRETS
from tests.cluster.conftest import StartMetalHost
from tests.controlplane.members import MetalHost
from tests.support.eventually import eventually
from tests.support.host_grants import grant_host
from tests.support.live_processes import find_processes
from tests.support.tiny_models import tiny_gguf

TOKEN = "test-token"
QUESTION = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
LONG = QUESTION | {"stream": True, "max_tokens": 29000}
GIB = 2**30


class BoundProcess:
    """One MetalProcess `chat-1`, or several, bound by hand to a host and granted to it, as by the controller."""

    def __init__(self, client: Client, namespace: str, host: MetalHost) -> None:
        self.client = client
        self.namespace = namespace
        self.host = host
        self.addresses = [host.address]
        """Addresses that the host is granted with the next process; none: it is granted nothing."""

    async def bind(self, name: str = "chat-1", **changes: object) -> None:
        token = {f"{self.namespace}_chat-token_token": b64encode(TOKEN.encode()).decode()}
        secret = {"metadata": {"namespace": HOSTS_NAMESPACE, "name": self.host.name}, "data": token}
        await self.client.apply(SECRETS, secret, field_manager="pomona-controller")
        metadata = {"namespace": self.namespace, "name": name, "finalizers": [PROCESS_FINALIZER]}
        spec = {
            "hostName": self.host.name,
            "serviceName": "chat",
            "modelName": "tiny",
            "runtime": "llama.cpp",
            "artifact": {"source": f"file://{self.host.file_root}/tiny.gguf"},
            "memoryBytes": GIB,
            "tokenSecret": "chat-token",
            "contextLength": 1024,
            "extraArgs": ["-t", "1"],
        }
        process = {"metadata": metadata, "spec": spec | changes}
        if self.addresses:
            await grant_host(self.client, self.host.name, self.addresses, [process])
        await self.client.create(METAL_PROCESSES, process)

    async def object(self, name: str = "chat-1") -> Obj:
        return await self.client.get(METAL_PROCESSES, name, self.namespace)

    async def status(self, name: str = "chat-1") -> MetalProcessStatus:
        return msgspec.convert((await self.object(name)).get("status", {}), MetalProcessStatus)

    async def phase(self, phase: str, reason: str = "", name: str = "chat-1") -> MetalProcessStatus:
        async def reached() -> MetalProcessStatus:
            status = await self.status(name)
            assert (status.phase, status.reason) == (phase, reason), status
            return status

        return await eventually(reached)

    async def slice(self) -> dict[str, Any]:
        return await self.client.get(ENDPOINT_SLICES, f"chat.{self.host.name}", self.namespace)

    async def url(self) -> str:
        """Address and port of the slice, once its endpoint is ready."""

        async def ready() -> dict[str, Any]:
            found = await self.slice()
            assert found["endpoints"][0]["conditions"]["ready"]
            return found

        endpoint_slice = await eventually(ready)
        return f"http://{endpoint_slice['endpoints'][0]['addresses'][0]}:{endpoint_slice['ports'][0]['port']}"

    async def ready(self) -> str:
        """Wait until the process is served; return its URL."""
        await self.phase("Ready")
        return await self.url()

    async def pid(self) -> int:
        """Return the process id of the engine, whose pid namespace is that of the tests."""
        pid = (await self.phase("Ready")).pid
        assert pid
        return pid

    async def draining(self) -> bool:
        conditions = (await self.slice())["endpoints"][0]["conditions"]
        return bool(conditions == {"ready": False, "serving": True, "terminating": True})

    async def gone(self) -> bool:
        try:
            await self.slice()
        except NotFound:
            return True
        return False


@pytest.fixture
async def bound_process(metal_host: StartMetalHost, client: Client, namespace: str) -> BoundProcess:
    """A host `studio-1` with an agent and the tiny model; nothing is bound yet."""
    host = await metal_host("studio-1")
    tiny_gguf.write(host.file_root / "tiny.gguf", loop=True, n_ctx=65536)
    return BoundProcess(client, namespace, host)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        yield session


async def answers(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.post(f"{url}/v1/chat/completions", json=QUESTION) as response:
        return response.status == 200 and "Hello" in await response.text()


async def answers_if_reachable(http: aiohttp.ClientSession, url: str) -> bool:
    """Return `answers`, or False if the proxy or its engine cannot be reached now."""
    try:
        return await answers(http, url)
    except aiohttp.ClientError:
        return False


def engines(bound_process: BoundProcess) -> list[psutil.Process]:
    return find_processes(f"{bound_process.host.file_root}/tiny.gguf")
