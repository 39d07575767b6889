"""InferenceServices on a real control plane: the controller as its own ServiceAccount, real pods, and scripted hosts.

The hosts are `FakeMetalAgent`s, because these tests check the controller's decisions when a host is full, refuses or
falls silent; `test_agent.py` has the real agent.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from controller.reconcile.conditions import find
from crds.inferenceservice import InferenceService
from crds.meta import Condition
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    METAL_PROCESSES,
    MODELS,
    Resource,
)
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.admission_webhook import MUTATING, registered, rewrite, rule, serving, try_deployment
from tests.support.eventually import eventually
from tests.support.fake_metal_agent import FakeMetalAgent
from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf

GIB = 2**30
METAL = {"accelerator": "metal"}
LEASE_SECONDS = 12
"""Duration of the Lease of a host that falls silent: longer than a busy machine may keep its agent from renewing it."""


class ServiceNamespace:
    """One namespace, as a user handles it."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    async def make(self, resource: Resource, name: str, **spec: Any) -> None:
        await self.client.create(resource, {"metadata": {"name": name, "namespace": self.namespace}, "spec": spec})

    async def make_service(self, name: str = "chat", **spec: Any) -> None:
        await self.make(INFERENCE_SERVICES, name, modelRef="tiny", **spec)

    async def make_host_model(self) -> None:
        """A Model that needs no Job, of one GiB."""
        await self.make(MODELS, "tiny", source="file:///models/tiny.gguf", memoryBytes=GIB)

    async def edit(self, name: str, **spec: Any) -> None:
        operations = [{"op": "add", "path": f"/spec/{field}", "value": value} for field, value in spec.items()]
        await self.client.patch_json(INFERENCE_SERVICES, name, self.namespace, operations)

    async def service(self, name: str = "chat") -> InferenceService:
        return msgspec.convert(await self.client.get(INFERENCE_SERVICES, name, self.namespace), InferenceService)

    async def reaches(self, phase: str, name: str = "chat", *, reason: str | None = None) -> InferenceService:
        """Wait until the service is in this phase (and Ready has this reason), decided for its present spec."""

        async def reached() -> InferenceService:
            service = await self.service(name)
            assert service.status.observed_generation == service.metadata.generation
            assert service.status.phase == phase, service.status
            assert reason in {None, ready(service).reason}, service.status
            return service

        return await eventually(reached)

    async def processes(self) -> list[Obj]:
        return (await self.client.list(METAL_PROCESSES, self.namespace)).items

    async def hosts_of(self) -> dict[str, str | None]:
        """Return the host of each process by its name."""
        return {process["metadata"]["name"]: process["spec"].get("hostName") for process in await self.processes()}

    async def exists(self, resource: Resource, name: str) -> bool:
        try:
            await self.client.get(resource, name, self.namespace)
        except NotFound:
            return False
        return True


@pytest.fixture
def cluster(client: Client, namespace: str, controller: Process) -> ServiceNamespace:
    assert controller.running
    return ServiceNamespace(client, namespace)


@pytest_asyncio.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    """A file server with tiny.gguf, where pods reach it."""
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "tiny.gguf")
    async with FileServer(root, address=ADDRESS) as server:
        yield server


def ready(service: InferenceService) -> Condition:
    condition = find(service.status.conditions, "Ready")
    assert condition is not None, service.status
    return condition


@pytest.mark.usefixtures("node")
async def test_pods_become_ready_although_a_policy_rewrites_them(
    cluster: ServiceNamespace, files: FileServer, plane: ControlPlane
) -> None:
    grace = "/spec/template/spec/terminationGracePeriodSeconds"
    policy = rewrite({"op": "replace", "path": grace, "value": 7})

    async def rewrites() -> bool:
        tried = await try_deployment(plane, cluster.namespace)
        return bool(tried["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 7)

    async with (
        serving(policy) as url,
        registered(cluster.client, MUTATING, cluster.namespace, url, rule("deployments")),
    ):
        await eventually(rewrites)
        await cluster.make(MODELS, "tiny", source=f"{files.url}/tiny.gguf")
        await cluster.make_service(hardware={"accelerator": "cpu"}, contextLength=512)
        await cluster.reaches("Ready")
        made = await cluster.client.get(DEPLOYMENTS, "chat", cluster.namespace)
        assert made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 7


@pytest.mark.usefixtures("node")
async def test_missing_image_is_reported(cluster: ServiceNamespace, files: FileServer) -> None:
    await cluster.make(MODELS, "tiny", source=f"{files.url}/tiny.gguf")
    await cluster.make_service(image="registry.example/no-such-image:1")
    failed = await cluster.reaches("Failed")
    assert ready(failed).reason in {"ErrImagePull", "ImagePullBackOff"}
    assert "no-such-image" in ready(failed).message


async def _only_one(cluster: ServiceNamespace) -> list[str]:
    names = list(await cluster.hosts_of())
    assert len(names) == 1
    return names


async def _no_processes(cluster: ServiceNamespace) -> bool:
    return not await cluster.processes()


async def test_process_that_never_ran_is_deleted_at_once(cluster: ServiceNamespace) -> None:
    await cluster.make_host_model()
    await cluster.make_service(hardware=METAL)
    await eventually(lambda: _only_one(cluster))
    await cluster.client.delete(INFERENCE_SERVICES, "chat", cluster.namespace)
    await eventually(lambda: _no_processes(cluster))


async def test_services_created_at_once_never_exceed_the_memory_of_a_host(cluster: ServiceNamespace) -> None:
    await cluster.make_host_model()
    async with FakeMetalAgent(cluster.client, "studio-1", 3 * GIB + GIB // 2).running() as agent:
        names = [f"chat-{number}" for number in range(8)]
        await asyncio.gather(*(cluster.make_service(name, hardware=METAL) for name in names))

        async def settled() -> list[InferenceService]:
            services = [await cluster.service(name) for name in names]
            states = sorted((service.status.phase, ready(service).reason) for service in services)
            assert states == [("Ready", "Serving")] * 3 + [("WaitingForGPU", "NoHostFits")] * 5
            return services

        services = await eventually(settled)
        waits = [ready(service) for service in services if service.status.phase == "WaitingForGPU"]
        assert "needs 1.0 GiB" in waits[0].message
        assert "studio-1, has 3.5 GiB for models, of which too little is free now" in waits[0].message
        assert agent.most_reserved_bytes == 3 * GIB

        gone = next(service.metadata.name for service in services if service.status.phase == "Ready")
        await cluster.client.delete(INFERENCE_SERVICES, gone, cluster.namespace)
        names.remove(gone)

        async def taken() -> bool:
            phases = [(await cluster.service(name)).status.phase for name in names]
            return phases.count("Ready") == 3

        assert await eventually(taken)
        assert agent.most_reserved_bytes == 3 * GIB


async def test_a_host_that_refuses_is_avoided(cluster: ServiceNamespace) -> None:
    await cluster.make_host_model()
    async with AsyncExitStack() as hosts:
        large = await hosts.enter_async_context(FakeMetalAgent(cluster.client, "studio-1", 9 * GIB).running())
        await hosts.enter_async_context(FakeMetalAgent(cluster.client, "studio-2", 2 * GIB).running())
        large.refuses = True
        await cluster.make_service(hardware=METAL)
        await cluster.reaches("Ready")
        assert list((await eventually(lambda: _settled_hosts(cluster))).values()) == ["studio-2"]


async def _settled_hosts(cluster: ServiceNamespace) -> dict[str, str | None]:
    hosts = await cluster.hosts_of()
    assert len(hosts) == 1
    return hosts


async def test_a_host_that_comes_back_continues_to_serve(cluster: ServiceNamespace) -> None:
    await cluster.make_host_model()
    async with FakeMetalAgent(cluster.client, "studio-1", 9 * GIB, lease_seconds=LEASE_SECONDS).running() as agent:
        await cluster.make_service(hardware=METAL)
        await cluster.reaches("Ready")
        before = await cluster.hosts_of()
        agent.silent = True
        await cluster.reaches("WaitingForGPU")
        agent.silent = False
        await cluster.reaches("Ready")
        assert await eventually(lambda: _settled_hosts(cluster)) == before
