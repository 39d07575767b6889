"""The calls that a new service costs, counted at the transport of a running controller."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from artifacts.repositories.address_policy import NETWORKS_VARIABLE
from controller.controller_options import ControllerOptions
from controller.pod_settings import PodSettings
from controller.reconcile.conditions import find
from controller.run import Controller
from kube import credentials
from kube.client import Client
from kube.resources import MODELS
from kube.transport import AiohttpTransport, Request
from tests.cluster.controller.test_services import ServiceNamespace
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.support.api_faults import FaultyTransport
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf

SERVICES = 5
MOST_CALLS = 6
SILENCE_SECONDS = 2.0
"""Longer than the controller lets a change wait."""


@pytest.mark.usefixtures("node")
async def test_new_service_costs_six_calls_and_no_read(
    plane: ControlPlane, client: Client, namespace: str, tmp_path: Path
) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    login = credentials.load(await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT))
    transport = FaultyTransport(AiohttpTransport(login))
    image, networks = "ghcr.io/pomona-dev/pomona:test", {NETWORKS_VARIABLE: "10.77.0.0/16"}
    options = ControllerOptions(PodSettings(image, networks), elects=False)
    controller = Controller(Client(transport), lambda: login, options)
    cluster = ServiceNamespace(client, namespace)
    # No node of this session has such a device; other tests leave one with those of NVIDIA.
    gpu = {"hardware": {"accelerator": "intel"}}
    async with running(controller.run()), FileServer(tmp_path, address=ADDRESS) as files:
        await cluster.make(MODELS, "tiny", source=f"{files.url}/tiny.gguf")
        await cluster.make_service("first", **gpu)
        await cluster.reaches("WaitingForGPU", "first", reason="NoSuchHardware")
        await wait_for_silence(transport)
        first = len(transport.sent)
        names = [f"chat-{number}" for number in range(SERVICES)]
        await asyncio.gather(*(cluster.make_service(name, **gpu) for name in names))
        for name in names:
            await cluster.reaches("WaitingForGPU", name, reason="NoSuchHardware")
        await wait_for_silence(transport)
    await transport.close()
    calls = Counter(describe(request) for request in transport.sent[first:] if is_counted(request, namespace))
    assert sum(calls.values()) <= MOST_CALLS * SERVICES, calls
    assert not [call for call in calls if call.startswith("GET")], calls
    for name in names:
        service = await cluster.service(name)
        assert find(service.status.conditions, "ModelReady")


async def wait_for_silence(transport: FaultyTransport) -> None:
    """Wait until the controller has sent nothing but Leases for a while."""
    loop = asyncio.get_running_loop()
    last, since = -1, loop.time()

    def is_silent() -> bool:
        nonlocal last, since
        count = sum("/leases" not in request.path for request in transport.sent)
        if count != last:
            last, since = count, loop.time()
        return loop.time() - since >= SILENCE_SECONDS

    await eventually(is_silent)


def is_counted(request: Request, namespace: str) -> bool:
    parts = request.path.split("/")
    # Calls about the first service and its Model may come late on a busy machine.
    is_earlier = any(part == "tiny" or part.partition("-")[0] == "first" for part in parts)
    return namespace in parts and not is_earlier and "events" not in parts and "watch" not in request.query


def describe(request: Request) -> str:
    resource, *rest = request.path.partition("/namespaces/")[2].split("/")[1:]
    return " ".join((request.method, resource, *rest[1:]))
